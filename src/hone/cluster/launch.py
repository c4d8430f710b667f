"""What is started for each service of a run file: command, environment, port, log. Starts nothing."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hone.cluster.devices import VARIABLE, Split
from hone.cluster.ports import HOST, free_port
from hone.config.files import find_program, served_by
from hone.config.run import RunConfig, ServiceSection
from hone.config.service_engine import engine_of
from hone.config.service_rules import PORT_WORD


@dataclass(frozen=True, slots=True)
class Launch:
    """A service that is ready to be started."""

    name: str
    service: ServiceSection
    command: tuple[str, ...]
    folder: Path
    """Where the command runs: the run file's folder."""
    environment: Mapping[str, str]
    port: int
    log: Path
    fingerprint: str
    """Hash of what makes two services the same: command, folder and devices; not the port."""
    note: str = ""
    """On the engine in it, for people."""

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def health_url(self) -> str:
        return self.url + self.service.health


def plan_launches(config: RunConfig, folder: Path, logs: Path, split: Split) -> list[Launch]:
    """One launch for each service, in the order of the run file.

    Args:
        folder: the run file's.
        logs: where each service's `<name>.log` goes.
    """
    launches = []
    for name, service in config.services.items():
        command, devices = _command(service, folder), split.services[name]
        port = service.port or free_port()
        launches.append(
            Launch(
                name,
                service,
                tuple(word.replace(PORT_WORD, str(port)) for word in command),
                folder.absolute(),
                _environment(devices),
                port,
                logs.absolute() / f"{name}.log",
                _fingerprint(command, folder, devices),
                engine_note(service, folder),
            )
        )
    return launches


def _command(service: ServiceSection, folder: Path) -> list[str]:
    if service.command is not None:
        program, *words = service.command
        return [find_program(program, folder) or program, *words]
    hone = [sys.executable, "-m", "hone.cli.main", "serve"]
    if service.reward is not None:
        return [*hone, "reward", str(folder.absolute() / Path(service.reward).expanduser()), "--port", PORT_WORD]
    place = folder.absolute() / Path(str(service.policy)).expanduser()
    model = str(place if place.is_dir() else service.policy)
    engine = engine_of(service)
    if engine is None:
        return [*hone, "policy", model, "--port", PORT_WORD]
    if served_by(engine, folder) == "hone":
        return [*hone, "policy", model, "--port", PORT_WORD, "--max-concurrent", str(engine.sequences)]
    vllm = [str(find_program("vllm", folder)), "serve", model, "--host", HOST, "--port", PORT_WORD]
    return [*vllm, *engine.vllm_words(service)]


def engine_note(service: ServiceSection, folder: Path) -> str:
    """What becomes of the engine that a service describes, for people; empty if it describes none."""
    engine = engine_of(service)
    if engine is None:
        return ""
    if served_by(engine, folder) == "vllm":
        size, gpus, replicas = engine.tensor_model_parallel_size, len(service.devices), engine.replicas(service)
        arithmetic = f"{gpus} GPUs // tensor_model_parallel_size {size} = {replicas} replicas" if gpus else "1 replica"
        return f"vLLM, {arithmetic}, of {engine.sequences} sequences each"
    unused = ", ".join(engine.unused_by_hone())
    said = f"Hone's own engine, {engine.sequences} sequences"
    return f"{said}; without vLLM these do nothing: {unused}" if unused else said


def _environment(devices: str) -> dict[str, str]:
    """This process's, with the service's GPUs, and this Python's programs first on the PATH."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    # Without a terminal Python keeps its output back, and with it the last lines before a crash.
    return {**os.environ, VARIABLE: devices, "PATH": path, "PYTHONUNBUFFERED": "1"}


def _fingerprint(command: list[str], folder: Path, devices: str) -> str:
    what = json.dumps([command, str(folder.resolve()), devices])
    return hashlib.sha256(what.encode()).hexdigest()[:16]
