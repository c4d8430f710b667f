"""Rules of engines and services: `cluster.engines`, `services.NAME` and `services.NAME.engine`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pkgutil import resolve_name

from pydantic import ValidationError

from hone.config.derived import longest_tokens, service_uses
from hone.config.engine import (
    ENGINES,
    LEAST_TEMPERATURE,
    MAX_SHARED_FRAC,
    ROLE_TOKENS,
    SERVICE_GPU_FRAC,
    SERVICE_SEQUENCES,
    SERVICE_STEP_TOKENS,
    TOKEN_VARIABLE,
    EngineSection,
)
from hone.config.rules import Breach
from hone.config.run import RunConfig
from hone.config.topology import judge_services, judges_pool
from hone.devices import KINDS
from hone.errors import ConfigError, nearest

# ---- the policy's engines


def engines_can_do_it(config: RunConfig) -> Iterator[Breach]:
    """The engine exists, uses what is set, and keeps its own rules."""
    engines, use = config.cluster.engines, config.cluster.engines.name
    if config.cluster.backend != "ray":
        return
    try:
        kind = engines.kind
    except ConfigError as error:
        yield Breach(("cluster.engines.use",), error.problems[0].partition(": ")[2])
        return
    if use != "hone" and config.rollout.compile:
        yield Breach(
            ("rollout.compile", "cluster.engines.use"),
            f"= true compiles Hone's own engine; {use} compiles its own model. Set it to false",
        )
    for name in engines.changed():
        if name not in kind.keys and not (name == "args" and kind.args):
            users = " or ".join(name_of for name_of, known in ENGINES.items() if name in known.keys) or "other engines"
            yield Breach(
                (f"cluster.engines.{name}", "cluster.engines.use"),
                f"is only used by use = {users} (got use = {use}). Leave it out, or set use to {users}",
            )
    try:
        if kind.args is not None:
            kind.args.model_validate(dict(engines.args))
    except ValidationError as error:
        for found in error.errors():
            where = ".".join(map(str, ("cluster.engines.args", *found["loc"])))
            yield Breach((where, "cluster.engines.args"), f"{found['msg']} (got {found['input']!r})")
    for rule in resolve_name(kind.rules) if kind.rules else ():
        yield from rule(config)


def vllm_lengths_fit(config: RunConfig) -> Iterator[Breach]:
    engines, longest = config.cluster.engines, longest_tokens(config)
    max_len = engines.max_model_len or longest
    if max_len < longest:
        yield Breach(
            ("cluster.engines.max_model_len", "data.max_prompt_tokens", "rollout.max_response_tokens"),
            f"= {max_len} cuts responses: a prompt and its response may have {longest} tokens. Nearest: {longest}, or "
            "leave it out",
        )
    budget, sequences = engines.max_num_batched_tokens, engines.max_num_seqs or config.rollout.max_concurrent_samples
    is_whole = engines.enable_chunked_prefill is False and max_len > sequences
    least = max_len if is_whole else sequences
    if budget is not None and budget < least:
        why = f"{sequences} sequences take a token each in every step"
        if is_whole:
            why = f"a prompt of {max_len} tokens is computed at once without enable_chunked_prefill"
        yield Breach(
            (
                "cluster.engines.max_num_batched_tokens",
                "cluster.engines.max_num_seqs",
                "rollout.max_concurrent_samples",
            ),
            f"must be at least {least}: {why} (got {budget})",
        )


def vllm_samples_as_hone_does(config: RunConfig) -> Iterator[Breach]:
    rollout = config.rollout
    if rollout.top_p < 1 and rollout.min_p > 0:
        yield Breach(
            ("rollout.min_p", "rollout.top_p", "cluster.engines.use"),
            f"= {rollout.min_p} with rollout.top_p = {rollout.top_p}: vLLM applies min_p first and Hone top_p first, "
            "which is another distribution. Use one of them, or cluster.engines.use = hone",
        )
    if rollout.temperature < LEAST_TEMPERATURE:
        yield Breach(
            ("rollout.temperature", "cluster.engines.use"),
            f"must be at least {LEAST_TEMPERATURE}, below which vLLM raises it (got {rollout.temperature})",
        )


VLLM_RULES = (vllm_lengths_fit, vllm_samples_as_hone_does)
"""Of a run whose engines are vLLM's; see `engine.ENGINES`."""

# ---- engines of services


def engines_of(config: RunConfig) -> list[tuple[str, EngineSection]]:
    """Services that describe their engine."""
    return [(name, service.engine) for name, service in config.services.items() if service.engine is not None]


def engines_fit_their_services(config: RunConfig) -> Iterator[Breach]:
    """Token budgets of an engine, and GPUs that its replicas divide."""
    for name, engine in engines_of(config):
        service, where = config.services[name], f"services.{name}.engine"
        if service.policy is None:
            yield Breach((where, f"services.{name}.policy"), "is for a service with `policy`. Leave it out")
        yield from _steps_hold_what_they_must(engine, where)
        for key in {"sleep_level", "args"}.intersection(engine.changed()):
            yield Breach((f"{where}.{key}",), "is for the policy's engines. Leave it out")
        if engine.use not in ("auto", "hone", "vllm"):
            yield Breach((f"{where}.use",), f"must be hone or vllm for a service (got {engine.use})")
        gpus, size = len(service.devices), engine.tensor_parallel_size
        if name in judge_services(config) and judges_pool(config):
            continue  # its GPUs are the pool's, whose rules are in `placement.py` and `division.py`
        if max(1, gpus) % size:
            nearest = max(size, gpus - gpus % size)
            yield Breach(
                (f"{where}.tensor_parallel_size", f"services.{name}.devices"),
                f"= {size} must divide the service's GPUs (got {gpus}). Nearest: give it {nearest} GPUs",
            )
        if engine.use == "hone" and (gpus > 1 or size > 1):
            yield Breach(
                (f"{where}.use", f"services.{name}.devices"),
                f"= hone is an engine on one device (got {gpus} GPUs). Give it one, or use vLLM",
            )


def _steps_hold_what_they_must(engine: EngineSection, where: str) -> Iterator[Breach]:
    key, batch = f"{where}.max_num_batched_tokens", engine.max_num_batched_tokens or SERVICE_STEP_TOKENS
    length, sequences = engine.max_model_len, engine.max_num_seqs or SERVICE_SEQUENCES
    if engine.enable_chunked_prefill is False and (length is None or batch < length):
        got = f"{batch} < {length}" if length else f"{batch}, and max_model_len is not set"
        yield Breach(
            (key, f"{where}.enable_chunked_prefill", f"{where}.max_model_len"),
            f"must be at least max_model_len (got {got}): without enable_chunked_prefill a prompt is computed at once. "
            f"Nearest: {length or 'set max_model_len'}",
        )
    elif batch < sequences:
        yield Breach(
            (key, f"{where}.max_num_seqs"),
            f"= {batch} < max_num_seqs = {sequences}: each sequence needs a token of a step",
        )


def engines_share_memory(config: RunConfig) -> Iterator[Breach]:
    """Engines on the same GPU take at most 0.9 of it together."""
    shares: dict[int, dict[str, float]] = {}
    for name, engine in engines_of(config):
        for number in config.services[name].devices:
            shares.setdefault(number, {})[name] = engine.gpu_memory_utilization or SERVICE_GPU_FRAC
    reported: set[tuple[str, ...]] = set()
    for number, found in shares.items():
        names, total = tuple(found), sum(found.values())
        if len(found) > 1 and total > MAX_SHARED_FRAC + 1e-9 and names not in reported:
            reported.add(names)
            terms = " + ".join(f"{name} {share:g}" for name, share in found.items())
            yield Breach(
                tuple(f"services.{name}.engine.gpu_memory_utilization" for name in names),
                f"on GPU {number}: {terms} = {total:g} > {MAX_SHARED_FRAC:g}. Lower them, or give each service GPUs of "
                "its own",
            )


def judges_fit_their_engines(config: RunConfig) -> Iterator[Breach]:
    """A judge's prompt and response fit into the context of the engine that it names."""
    engines = dict(engines_of(config))
    for number, component in enumerate(config.reward.components):
        engine = engines.get(str(component.args.get("service"))) if component.use == "judge" else None
        if engine is None or engine.max_model_len is None:
            continue
        prompt, answer, length = (component.args.get(k) for k in ("prompt_length", "response_length", "max_model_len"))
        keys = (f"reward.components.{number}.args", f"services.{component.args['service']}.engine.max_model_len")
        if isinstance(length, int) and length > engine.max_model_len:
            yield Breach(keys, f"max_model_len = {length} > its engine's max_model_len {engine.max_model_len}")
        elif isinstance(prompt, int) and isinstance(answer, int):
            total = prompt + answer + ROLE_TOKENS
            if total > engine.max_model_len:
                yield Breach(
                    keys,
                    f"prompt_length {prompt} + response_length {answer} + {ROLE_TOKENS} for the chat template = "
                    f"{total} tokens > its engine's max_model_len {engine.max_model_len}",
                )


# ---- services


PORT_WORD = "{port}"
"""Placeholder of the port in a command."""
TAKEN_NAMES = ("training",)
"""A service's log has its name, and logs/training.log is the run's own."""


def services_are_named_and_of_one_kind(config: RunConfig) -> Iterator[Breach]:
    for name, service in config.services.items():
        if not re.fullmatch(r"[A-Za-z][\w-]{0,39}", name) or name in TAKEN_NAMES:
            yield Breach(
                (f"services.{name}", "services"),
                f"must be named with at most 40 letters, digits, _ and -, a letter first, and not {TAKEN_NAMES[0]!r}: "
                f"its log is logs/NAME.log (got {name!r})",
            )
        kinds = {"reward": service.reward, "policy": service.policy, "command": service.command}
        given = [kind for kind, value in kinds.items() if value is not None]
        if len(given) != 1:
            got = f"got {' and '.join(given)}" if given else "got none of them"
            message = f"needs exactly one of reward, policy and command ({got}). Set the others to null"
            keys = (f"services.{name}", *(f"services.{name}.{kind}" for kind in given))
            yield Breach(keys, message if given else message.partition(". ")[0])


def variables_can_be_set(config: RunConfig) -> Iterator[Breach]:
    """Keys of `env` are valid names, and none that Hone or Ray sets itself."""
    sections = {"cluster.env": config.cluster.env}
    sections |= {f"services.{name}.env": service.env for name, service in config.services.items()}
    for where, names in ((where, name) for where, env in sections.items() for name in env):
        key = f"{where}.{names}"
        if not re.fullmatch(r"[A-Za-z_]\w*", names, re.ASCII):
            yield Breach((key,), "is not an environment variable's name: letters, digits and _, no digit first")
        elif names.startswith("RAY_") or names in (*(kind.variable for kind in KINDS), TOKEN_VARIABLE):
            yield Breach((key,), "is set by Hone or Ray for each process. Leave it out; devices are cluster.pools'")


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


ENGINE_RULES = (
    variables_can_be_set,
    engines_can_do_it,
    engines_fit_their_services,
    engines_share_memory,
    judges_fit_their_engines,
    services_are_named_and_of_one_kind,
    commands_know_their_port,
    ports_are_their_own,
    devices_are_their_own,
    named_services_exist,
)
