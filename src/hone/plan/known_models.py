"""Architecture lookup: the run file's `model.init`, a directory's config.json, or a shipped one by name.

Nothing is downloaded. A hub name is looked for in the local cache of the hub first, then among the config.json files
in `models/`, which are those of the models they are named after, reduced to the keys that count.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from hone.config.derived import overridden
from hone.config.run import ModelSection
from hone.errors import DataError, nearest
from hone.plan.architecture import Architecture
from hone.plan.families import architecture_from
from hone.sizes import CHARACTER_SPECIALS

MODELS = Path(__file__).parent / "models"
VARIANTS = ("-instruct", "-base", "-chat", "-it", "-hf", "-thinking", "-instruct-2507", "-thinking-2507")
"""What is added to a model's name for other weights of the same shape."""
SAME_SHAPE = {
    "deepseek-grm-16b": "deepseek-v2-lite",
    "skywork-reward-llama-3.1-8b-v0.2": "llama-3.1-8b",
}
"""Judges and reward models that were made of a shipped shape."""


@cache
def known_models() -> tuple[str, ...]:
    """Names of the shipped architectures."""
    return tuple(sorted(path.stem for path in MODELS.glob("*.json")))


def _known_config(name: str) -> Mapping[str, Any] | None:
    short = name.rpartition("/")[2].lower()
    short = SAME_SHAPE.get(short, short)
    endings = [""] + [ending for ending in VARIANTS if short.endswith(ending)]
    for ending in sorted(endings, key=len, reverse=True):
        stem = short.removesuffix(ending)
        if stem in known_models():
            return _read(MODELS / f"{stem}.json")
    return None


def policy_config(model: ModelSection, folder: Path) -> Mapping[str, Any]:
    """The keys of the policy's config.json; of `model.init` with the vocabulary that its tokenizer gives it.

    Args:
        folder: the run file's, for relative paths.
    Raises:
        DataError: they cannot be known from here.
    """
    if model.init is not None:
        if model.characters is not None:
            vocab: int | None = len(model.characters) + len(CHARACTER_SPECIALS)
        else:
            vocab = None if model.tokenizer is None else _tokens_of(folder / Path(model.tokenizer).expanduser())
        if vocab is None:
            return model.init
        text = model.init.get("text_config")
        named = {"vocab_size": vocab}
        return {**model.init, **(named if text is None else {"text_config": {**text, **named}})}
    return overridden(named_config(model.path or "", folder, "model.path"), model.override)


def named_architecture(name: str, folder: Path, *, key: str) -> Architecture:
    """The architecture of a directory, of a config.json, or of a hub name.

    Args:
        key: what named it, for messages.
    """
    return architecture_from(named_config(name, folder, key), source=name)


def named_config(name: str, folder: Path, key: str) -> Mapping[str, Any]:
    """The keys of its config.json; arguments as `named_architecture`."""
    path = folder / Path(name).expanduser()
    file = path if path.suffix == ".json" else path / "config.json"
    if not file.is_file() and name.count("/") == 1:  # a hub name, which may have been downloaded before
        home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
        hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser()
        snapshots = hub / f"models--{name.replace('/', '--')}" / "snapshots"
        file = max(snapshots.glob("*/config.json"), default=file)
    found = _read(file) if file.is_file() else _known_config(name)
    if found is not None:
        return found
    close = nearest(name.rpartition("/")[2].lower(), known_models(), cutoff=60)
    hint = f" Did you mean {close}?" if close else ""
    raise DataError(
        f"{key}: the shape of {name} is not known here.{hint} Give a directory with its config.json, or one of: "
        f"{', '.join(known_models())}."
    )


def _read(file: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read as JSON ({error}).") from error
    if not isinstance(config, dict):
        raise DataError(f"{file}: must be a JSON object, as a model's config.json is.")
    return config


def _tokens_of(folder: Path) -> int | None:
    """Tokens of a tokenizer directory, added ones included; None where it is not known."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    tokenizer = _read(file)
    vocabulary = tokenizer.get("model", {}).get("vocab", ())
    added = {token["content"] for token in tokenizer.get("added_tokens", ())}
    own = set(vocabulary) if isinstance(vocabulary, dict) else {piece[0] for piece in vocabulary}
    return len(own | added)
