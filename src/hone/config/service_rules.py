"""Rules of `services`: one kind each, ports and GPUs of their own, names that resolve."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hone.config.breach import Breach
from hone.config.derived import service_uses
from hone.config.messages import nearest
from hone.config.run import RunConfig

PORT_WORD = "{port}"
"""What stands for the port in a command."""
TAKEN_NAMES = ("training",)
"""A service's log has its name, and logs/training.log is the run's own."""


def service_names_are_plain(config: RunConfig) -> Iterator[Breach]:
    for name in config.services:
        if not re.fullmatch(r"[A-Za-z][\w-]{0,39}", name) or name in TAKEN_NAMES:
            yield Breach(
                (f"services.{name}", "services"),
                f"must be named with at most 40 letters, digits, _ and -, a letter first, and not {TAKEN_NAMES[0]!r}: "
                f"its log is logs/NAME.log (got {name!r})",
            )


def services_are_of_one_kind(config: RunConfig) -> Iterator[Breach]:
    for name, service in config.services.items():
        kinds = {"reward": service.reward, "policy": service.policy, "command": service.command}
        given = [kind for kind, value in kinds.items() if value is not None]
        if len(given) != 1:
            got = f"got {' and '.join(given)}" if given else "got none of them"
            message = f"needs exactly one of reward, policy and command ({got}). Set the others to null"
            keys = (f"services.{name}", *(f"services.{name}.{kind}" for kind in given))
            yield Breach(keys, message if given else message.partition(". ")[0])


def commands_know_their_port(config: RunConfig) -> Iterator[Breach]:
    for name, service in config.services.items():
        if service.command is not None and service.port == 0 and PORT_WORD not in " ".join(service.command):
            yield Breach(
                (f"services.{name}.command", f"services.{name}.port"),
                f"must have {PORT_WORD} in one of its words, where the free port goes that it gets; "
                "or set port to the one that it listens on",
            )
        if not service.health.startswith("/"):
            yield Breach(
                (f"services.{name}.health",), f"must begin with / (got {service.health!r}). Nearest: /{service.health}"
            )


def ports_are_their_own(config: RunConfig) -> Iterator[Breach]:
    owners: dict[int, str] = {}
    for name, service in config.services.items():
        if service.port and service.port in owners:
            other = owners[service.port]
            yield Breach(
                (f"services.{name}.port", f"services.{other}.port"),
                f"{service.port} is also {other}'s. Set one of them to 0, which takes a free one",
            )
        owners.setdefault(service.port, name)


def devices_are_their_own(config: RunConfig) -> Iterator[Breach]:
    owners: dict[int, str] = {}
    with_engine = {f"services.{name}.devices" for name, service in config.services.items() if service.engine}

    def share(key: str, other: str) -> bool:
        return {key, other} <= with_engine  # their shares of its memory are added up elsewhere

    wanted = {"run.devices": config.run.devices or ()}
    wanted |= {f"services.{name}.devices": service.devices for name, service in config.services.items()}
    for key, devices in wanted.items():
        if any(number < 0 for number in devices):
            yield Breach((key,), f"must be at least 0 each (got {min(devices)})")
        if len(set(devices)) < len(devices):
            yield Breach((key,), f"must name each GPU once (got {list(devices)})")
        taken = [number for number in dict.fromkeys(devices) if number in owners and not share(key, owners[number])]
        if taken:
            other = owners[taken[0]]
            yield Breach(
                (key, other),
                f"GPU {', '.join(map(str, taken))} is also in {other}. A GPU belongs to training or to one service, or "
                "to services which say in `engine` how much of it they take",
            )
        for number in devices:
            owners.setdefault(number, key)


def named_services_exist(config: RunConfig) -> Iterator[Breach]:
    for key, name in service_uses(config):
        if name not in config.services:
            close = nearest(name, config.services)
            known = (
                f"Services: {', '.join(config.services)}"
                if config.services
                else "This file has none; add it there, or give its url"
            )
            yield Breach(
                (key, "services"), f"no service is called {name!r}. {f'Did you mean {close}?' if close else known}"
            )


SERVICE_RULES = (
    service_names_are_plain,
    services_are_of_one_kind,
    commands_know_their_port,
    ports_are_their_own,
    devices_are_their_own,
    named_services_exist,
)
