"""Launch plans of a run file's services: command, environment, port, log. Starts nothing."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hone.config.engine import SERVICE_SEQUENCES, TOKEN_VARIABLE
from hone.config.rules.engines import PORT_WORD
from hone.config.rules.files import find_program, program_path, served_by
from hone.config.run import RunConfig, ServiceSection
from hone.devices import machine_kind
from hone.services.gpus import Split
from hone.services.process import HOST, free_port

HONES_OWN = frozenset({"use", "max_num_seqs", "max_model_len"})
"""Keys of an engine that `hone serve policy` honours; its context is the model's."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Everything needed to start a service."""

    name: str
    """Name of its log and its state."""
    section: str
    """What the run file calls it; a replica has a name of its own."""
    service: ServiceSection
    command: tuple[str, ...]
    folder: Path
    """Where the command runs: the run file's folder."""
    environment: Mapping[str, str] = field(repr=False)
    port: int
    log: Path
    fingerprint: str
    """Hash of what makes two services the same: command, folder, devices and model files; not the port."""
    note: str = ""
    """Notes on its engine, for people."""
    host: str = HOST
    token: str = field(default="", repr=False)
    """Token that requests to it must carry."""

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def health_url(self) -> str:
        return self.url + self.service.health


def plan_launches(
    config: RunConfig, folder: Path, logs: Path, split: Split, without: Collection[str] = (), *, token: str
) -> list[Launch]:
    """One launch for each service, in the order of the run file.

    Args:
        folder: the run file's.
        logs: where each service's `<name>.log` goes.
        without: services that are started elsewhere.
        token: that they accept.
    """
    launches = []
    for name, service in config.services.items():
        if name in without:
            continue
        command, devices = _command(service, folder), split.services[name]
        port = service.port or free_port()
        words, secrets = _accepting(token, service, folder)
        launches.append(
            Launch(
                name,
                name,
                service,
                _on_port(port, [*command, *words]),
                folder.absolute(),
                environment_with(devices) | service.env | secrets,
                port,
                logs.absolute() / f"{name}.log",
                _fingerprint(service, command, folder, devices),
                engine_note(service, folder),
                token=token,
            )
        )
    return launches


def _accepting(token: str, service: ServiceSection, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Words and environment by which a service asks for the token. The program of a `command` may do so itself."""
    if _is_vllm(service, folder):
        return [], {TOKEN_VARIABLE: token, "VLLM_API_KEY": token}
    return [] if service.command else ["--token-env", TOKEN_VARIABLE], {TOKEN_VARIABLE: token}


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """Where one of the equal servers of a model runs, on devices of a cluster."""

    name: str
    """`judge-0`."""
    section: str
    """The service in the run file."""
    sleeps: bool
    """It shares its devices and releases their memory while others work."""
    processes: int
    """Processes that share the machine's cores while it works; for Hone's own engine."""
    token: str = field(repr=False)


def plan_replica(service: ServiceSection, place: ReplicaPlace, folder: Path, logs: Path, host: str) -> Launch:
    """One replica of a service with `policy`. To be called on the machine where it is to run: its port is free there.

    Its environment is only what it has besides that of the process which starts it.

    Args:
        folder: the run file's.
        host: address of that machine, for clients.
    """
    port, command = free_port(host), _command(service, folder, host)
    words, secrets = _accepting(place.token, service, folder)
    environment = service.env | secrets
    words += ["--enable-sleep-mode"] if place.sleeps else []
    if _is_vllm(service, folder):
        environment |= {"VLLM_SERVER_DEV_MODE": "1"} if place.sleeps else {}
    else:
        threads = max(1, len(os.sched_getaffinity(0)) // place.processes)
        words += ["--host", host, "--threads", str(threads)]
    return Launch(
        place.name,
        place.section,
        service,
        _on_port(port, [*command, *words]),
        folder.absolute(),
        environment,
        port,
        logs.absolute() / f"{place.name}.log",
        _fingerprint(service, command, folder, ""),
        engine_note(service, folder),
        host,
        place.token,
    )


def _command(service: ServiceSection, folder: Path, host: str = HOST) -> list[str]:
    if service.command is not None:
        program, *words = service.command
        return [find_program(program, folder) or program, *words]
    hone = [sys.executable, "-m", "hone.cli.main", "serve"]
    if service.reward is not None:
        return [*hone, "reward", str(folder.absolute() / Path(service.reward).expanduser()), "--port", PORT_WORD]
    place = folder.absolute() / Path(str(service.policy)).expanduser()
    model = str(place if place.is_dir() else service.policy)
    engine = service.engine
    if engine is None:
        return [*hone, "policy", model, "--port", PORT_WORD]
    if not _is_vllm(service, folder):
        return [
            *hone,
            "policy",
            model,
            "--port",
            PORT_WORD,
            "--max-concurrent",
            str(engine.max_num_seqs or SERVICE_SEQUENCES),
        ]
    vllm = [str(find_program("vllm", folder)), "serve", model, "--host", host, "--port", PORT_WORD]
    return [*vllm, *engine.command_words(_replicas(service))]


def _is_vllm(service: ServiceSection, folder: Path) -> bool:
    return service.engine is not None and served_by(service.engine, folder) == "vllm"


def _replicas(service: ServiceSection) -> int:
    """GPUs // tensor_parallel_size; 1 on a service without GPUs."""
    return max(1, len(service.devices) // service.engine.tensor_parallel_size) if service.engine else 1


def engine_note(service: ServiceSection, folder: Path, replicas_in_pool: int = 1) -> str:
    """How a service's `engine` section is applied, for people; empty without one."""
    engine = service.engine
    if engine is None:
        return ""
    sequences = engine.max_num_seqs or SERVICE_SEQUENCES
    if _is_vllm(service, folder):
        size, gpus, replicas = engine.tensor_parallel_size, len(service.devices), _replicas(service)
        arithmetic = f"{gpus} GPUs // tensor_parallel_size {size} = {replicas} replicas" if gpus else "1 replica"
        arithmetic = f"{replicas_in_pool} replicas" if replicas_in_pool > 1 else arithmetic
        return f"vLLM, {arithmetic}, of {sequences} sequences each"
    unused = ", ".join(sorted(engine.model_fields_set - HONES_OWN))
    said = f"Hone's own engine, {sequences} sequences"
    return f"{said}; without vLLM these do nothing: {unused}" if unused else said


def _on_port(port: int, words: Sequence[str]) -> tuple[str, ...]:
    return tuple(word.replace(PORT_WORD, str(port)) for word in words)


def environment_with(devices: str) -> dict[str, str]:
    """This process's, with the service's GPUs, and this Python's programs first on the PATH."""
    # Without a terminal Python keeps its output back, and with it the last lines before a crash.
    return {**os.environ, machine_kind().variable: devices, "PATH": program_path(), "PYTHONUNBUFFERED": "1"}


def _fingerprint(service: ServiceSection, command: list[str], folder: Path, devices: str) -> str:
    model = folder / Path(service.policy).expanduser() if service.policy else None
    files = [file for file in sorted(model.iterdir()) if file.is_file()] if model and model.is_dir() else []
    stamps = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    what = json.dumps([command, str(folder.resolve()), devices, service.env, stamps])
    return hashlib.sha256(what.encode()).hexdigest()[:16]
