"""Inputs of a run, where it comes from, and hashes of data, tokenizer, model, user code and Hone itself.

The hashes stand in each checkpoint, and what differs when the run is resumed is named. Files are hashed byte by byte,
weights by samples: size, header, and the first, middle and last 4 KiB of every tensor. Another training, another dtype
or a replaced tensor changes them; single values edited between those places do not. Of a model on the hub it is the
commit.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from huggingface_hub import hf_hub_download
from huggingface_hub.constants import ENDPOINT

import hone
from hone.config.derived import section_of
from hone.config.load import Loaded
from hone.config.messages import is_secret_key, is_secret_value
from hone.config.source import SourceSection
from hone.data.cache import DEFAULT_CACHE
from hone.data.chat import Tokenizer, can_resolve, resolve_model
from hone.data.render import Renderer
from hone.data.report import LoadProgress
from hone.data.rows import rows_digest
from hone.data.sources import SourceRow, read_rows
from hone.devices import nvidia_smi
from hone.errors import DataError
from hone.model.load import weight_files
from hone.model.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from hone.reward.fingerprint import code_files, digest, named_files
from hone.reward.resolve import Unusable

FULL_BYTES = 16 << 20
"""Weight files up to this size are hashed byte by byte too."""
_SAMPLE_BYTES = 4096
GIT_TIMEOUT_S = 10.0


def input_hashes(loaded: Loaded, tokenizer: Tokenizer) -> dict[str, str]:
    """Input -> its hash.

    Raises:
        DataError: the weights are not there.
    """
    config, folder = loaded.config, loaded.run_file.parent.resolve()
    hashes = {"hone": hone.__version__, "tokenizer": tokenizer.digest()}
    data = config.data
    parts = {
        "data.train": (data.train, data.train_split),
        "data.eval": (data.eval, data.eval_split),
        "sft.data": (config.sft.data, data.train_split),
    }
    hashes |= {key: _sources(sources, folder, split) for key, (sources, split) in parts.items() if sources is not None}
    if tokenizer.processor:
        sft_columns = [config.sft.messages_column] if config.sft.messages_column is not None else []
        for key, (sources, split) in parts.items():
            renderers = [(source, Renderer(section_of(data, source), tokenizer, folder)) for source in sources or ()]
            hashes |= _pictures(key, renderers, sft_columns, folder, split)
    for key, place in (("model.path", config.model.path), ("critic.path", config.critic.path)):
        if place is not None:
            hashes |= {f"{key} {name}": found for name, found in _model(place, folder).items()}
    # Of a judge's directory; its engine may read weights in other forms, and one of the hub may be elsewhere only.
    for name, place in ((name, one.policy) for name, one in config.services.items() if one.policy is not None):
        for file in sorted((folder / Path(place).expanduser()).glob("*")):
            if file.suffix in (".safetensors", ".json", ".py"):
                hashes[f"services.{name}.policy {file.name}"] = file_hash(file)
    if config.lora.start is not None:
        hashes |= {f"lora.start {name}": found for name, found in _adapter(config.lora.start, folder).items()}
    environment = config.rollout.environment
    uses = [component.use for component in config.reward.components]
    uses += [environment.use] if environment.use is not None else []
    args = [component.args for component in config.reward.components] + [environment.args]
    code: list[Path] = []
    for use in uses:
        with suppress(Unusable):  # reported when it is started
            code += code_files([use], folder)
    hashes |= _files("code", code, folder)
    return hashes | _files("args", named_files(args, folder), folder)


def provenance(folder: Path, words: Sequence[str] | None = None) -> dict[str, str]:
    """`command` and `hardware`, and `git_commit` where the folder is of a repository.

    Args:
        folder: of the run file.
        words: of the command line; None: this process's.
    """
    found = {"command": shlex.join(_shown(word) for word in (sys.argv if words is None else words))}
    parts = [f"{len(os.sched_getaffinity(0))} CPU cores", f"{psutil.virtual_memory().total / 2**30:.0f} GiB"]
    with suppress(OSError, subprocess.SubprocessError):  # no such GPU, or its driver does not answer
        parts += [f"{count} x {name}" for name, count in Counter(nvidia_smi("name").splitlines()).items()]
    found["hardware"] = ", ".join(parts)
    try:
        command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return found
    return found | ({"git_commit": done.stdout.strip()} if done.returncode == 0 else {})


def _shown(word: str) -> str:
    key, equals, value = word.partition("=")
    if equals and (is_secret_key(key.rpartition(".")[2]) or is_secret_value(value)):
        return f"{key}=[hidden]"
    return "[hidden]" if is_secret_value(word) else word


def changed_inputs(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """`input: old -> new` for each that differs; hashes by their first digits."""
    return [
        f"{name}: {old.get(name, 'none')[:12]} -> {new.get(name, 'none')[:12]}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]


def _sources(sources: Sequence[SourceSection], folder: Path, split: str) -> str:
    """Hash of the content of each source: of a file's bytes, of a dataset's rows."""
    hashes: list[str] = []
    for source in sources:
        path = folder / Path(source.path).expanduser()
        if path.is_file():
            hashes.append(DEFAULT_CACHE.digest(path))
            continue
        try:
            hashes.append(rows_digest(source.path, folder, split=source.split or split, cache=DEFAULT_CACHE))
        except DataError:  # reported by the stage that reads it
            hashes.append("unreadable")
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def _pictures(
    key: str, sources: Sequence[tuple[SourceSection, Renderer]], sft_columns: Sequence[str], folder: Path, split: str
) -> dict[str, str]:
    """Of the files of all pictures that rows name, in their order; nothing where they name none."""
    hashed, count = hashlib.sha256(), 0
    progress = LoadProgress(f"hashing the pictures of {key}", DEFAULT_CACHE.say, unit="pictures")
    with suppress(DataError):  # reported by the stage that reads the rows
        for source, renderer in sources:
            for row in read_rows(source.path, folder, split=source.split or split):
                for path in renderer.picture_files(row.values, *sft_columns) if isinstance(row, SourceRow) else ():
                    with suppress(OSError):
                        hashed.update(DEFAULT_CACHE.digest(path).encode())
                    count += 1
                    progress.at(count)
    return {f"{key} pictures": hashed.hexdigest()} if count else {}


def _model(place: str, folder: Path) -> dict[str, str]:
    path = Path(resolve_model(place, folder))
    if not path.is_dir():
        return _commit(place, "config.json")
    files = [path / "config.json", *sorted(path.glob("*.py")), *weight_files(path)]
    return {file.name: file_hash(file) for file in files if file.is_file()}


def _adapter(place: str, folder: Path) -> dict[str, str]:
    path = Path(resolve_model(place, folder))
    if not path.is_dir():
        return _commit(place, ADAPTER_CONFIG)
    return {name: file_hash(path / name) for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if (path / name).is_file()}


def _commit(place: str, name: str) -> dict[str, str]:
    """The commit of a hub's model, from one of its files."""
    return {"commit": Path(hf_hub_download(place, name, local_files_only=not can_resolve(ENDPOINT))).parent.name}


def _files(kind: str, paths: Iterable[Path], folder: Path) -> dict[str, str]:
    """Files outside the run file's folder may share a name: then one hash is of all of them."""
    hashes: dict[str, list[str]] = {}
    for path in dict.fromkeys(paths):
        # Named within the run file's folder, so that it may be moved.
        name = str(path.relative_to(folder)) if path.is_relative_to(folder) else path.name
        hashes.setdefault(f"{kind} {name}", []).append(file_hash(path))
    return {
        name: found[0] if len(found) == 1 else hashlib.sha256("".join(found).encode()).hexdigest()
        for name, found in hashes.items()
    }


def file_hash(path: Path, *, full_bytes: int = FULL_BYTES) -> str:
    """SHA-256 of a file; of a safetensors file above `full_bytes`, of its header and three places in every tensor."""
    if path.suffix != ".safetensors" or path.stat().st_size <= full_bytes:
        return digest(path)
    hashed = hashlib.sha256(str(path.stat().st_size).encode())
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length)
        hashed.update(header)
        for name, tensor in json.loads(header).items():
            if name != "__metadata__":
                first, end = tensor["data_offsets"]
                for place in (first, (first + end) // 2, end - _SAMPLE_BYTES):
                    file.seek(8 + length + max(first, place))
                    hashed.update(file.read(min(_SAMPLE_BYTES, end - first)))
    return hashed.hexdigest()
