"""Loading and saving models as Hugging Face directories.

Weights are read from safetensors only: a pickle can run code. Nothing is downloaded unless the path is a hub name, and
then through huggingface_hub, which honours HF_HUB_OFFLINE.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from hone.config.derived import overridden
from hone.errors import DataError, misspelled
from hone.model.base import CausalModel
from hone.model.decoder import Decoder, unsupported
from hone.model.fingerprint import weights_fingerprint
from hone.model.hf import TransformersModel, as_computed, auto_class, has_tower
from hone.model.shards import write_weights
from hone.model.weights import Contents
from hone.runtime.files import make_folder, sync

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["describe_model", "hf_folder", "init_model", "load_model", "model_folder", "save_hf", "weights_fingerprint"]

Implementation = Literal["auto", "hone", "transformers"]

HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    implementation: Implementation = "auto",
    trust_remote_code: bool = False,
    override: Mapping[str, Any] = MappingProxyType({}),
) -> CausalModel:
    """The model in a local directory, or under a hub name.

    On device `meta` nothing is read: the model's `contents` read its weights later, and raise what would be raised
    here.

    Args:
        override: keys of its config.json that are replaced.
    Raises:
        DataError: no such model, no safetensors, a shard is missing or corrupt, or names and shapes do not fit.
    """
    folder = model_folder(path, trust_remote_code=trust_remote_code)
    config = read_config(folder, trust_remote_code=trust_remote_code, override=override)
    weight_files(folder)  # so that a missing file is reported by Hone, not by its reader
    if is_ours(config, implementation):
        model = Decoder(config, dtype=dtype, device=device)
        return _filled(model, Contents(partial(read_weights, folder)))
    make = partial(_load_transformers, folder, config, dtype, trust_remote_code)
    return _transformers_model(make, config, dtype, device, trust_remote_code)


def init_model(
    architecture: Mapping[str, Any],
    *,
    vocab_size: int | None,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str,
    implementation: Implementation = "auto",
) -> CausalModel:
    """A randomly initialised model, a function of its arguments alone (not of torch's global random state).

    Args:
        architecture: the keys of a config.json, `model_type` among them.
        vocab_size: tokens of the tokenizer in use; replaces the architecture's own. None leaves it.
    """
    config = init_config(architecture, vocab_size=vocab_size)
    return random_model(config, seed=seed, dtype=dtype, device=device, implementation=implementation)


def random_model(
    config: PreTrainedConfig,
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str,
    implementation: Implementation = "auto",
) -> CausalModel:
    """A randomly initialised model of a config; otherwise as `init_model`."""
    if is_ours(config, implementation):
        model = Decoder(config, dtype=dtype, device=device)
        shapes = {name: weight.shape for name, weight in model.own_weights()}
        return _filled(model, Contents(partial(_random_weights, shapes, seed, config.initializer_range)))
    return _transformers_model(partial(_init_transformers, config, dtype, seed), config, dtype, device)


def init_config(architecture: Mapping[str, Any], *, vocab_size: int | None) -> PreTrainedConfig:
    """The config of a model that `init_model` would make; arguments as there."""
    keys = dict(architecture)
    model_type = keys.pop("model_type", None)
    if model_type is None:
        raise DataError("model.init: no model_type. Name the architecture, for example model_type: qwen3.")
    if vocab_size is not None:
        text = keys.get("text_config")
        keys |= {"vocab_size": vocab_size} if text is None else {"text_config": {**text, "vocab_size": vocab_size}}
    try:
        config = AutoConfig.for_model(model_type, **keys)
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise DataError(f"model.init: {error}") from error
    if problem := _misspelled(config, keys):
        raise DataError(f"model.init: {problem}")
    if (layers := getattr(config.get_text_config(), "num_hidden_layers", 1)) < 1:
        raise DataError(f"model.init: num_hidden_layers: must be at least 1 (got {layers})")
    named = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if has_tower(config) else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if config.architectures is None and model_type in named:
        config.architectures = [named[model_type]]  # vLLM reads it
    return config


def _misspelled(config: PreTrainedConfig, keys: Mapping[str, Any]) -> str:
    """What to say of a key that misspells one that the architecture's class has; "" if there is none.

    Transformers takes any key, and keeps those that nothing reads, such as another family's.
    """
    own = type(config)
    named = {*own().to_dict(), *own.attribute_map, *signature(own.__init__).parameters}
    known = {name for name in named if not name.startswith("_")}
    for name in keys:
        if name not in known and (close := misspelled(name, sorted(known))):
            return f"{name}: unknown key of {config.model_type}. Did you mean {close}?"
    return ""


def save_hf(
    folder: Path,
    hf_config: PreTrainedConfig,
    weights: Iterable[tuple[str, Tensor]],
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    eos_ids: Sequence[int] = (),
    processor: Mapping[str, str] = MappingProxyType({}),
    dtype: torch.dtype | None = None,
) -> None:
    """Writes a Hugging Face directory with these weights, which are read one after another.

    Args:
        eos_ids, processor: see `hf_folder`.
        dtype: of the files; None keeps that of the weights.
    """
    stream = iter(weights)
    first = [next(stream)]
    precision = dtype or first[0][1].dtype
    with hf_folder(folder, hf_config, tokenizer, dtype=precision, eos_ids=eos_ids, processor=processor) as aside:
        write_weights(aside, _after(first, stream), dtype=dtype)


def _after(first: list[tuple[str, Tensor]], others: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """All of these; what is in the list is not kept, as `itertools.chain` would."""
    yield first.pop()
    yield from others


@contextmanager
def hf_folder(
    folder: Path,
    hf_config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    dtype: torch.dtype,
    eos_ids: Sequence[int] = (),
    processor: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Path]:
    """A Hugging Face directory without weights, to write them into (`shards.write_weights`, in this process or in
    another); an existing `folder` is replaced when all is written.

    Args:
        dtype: of the weights.
        eos_ids: of a policy, the tokens that end a response: written to config.json and generation_config.json, with
            the tokenizer's padding token, so that Transformers and vLLM stop there too.
        processor: names and contents of the files that describe how pictures become input (`data/pictures.py`).
    """
    with replaced_when_whole(folder) as aside:
        config = type(hf_config).from_dict(hf_config.to_dict())
        config.dtype = dtype
        if eos_ids:
            pad_id = tokenizer.pad_token_id if tokenizer is not None else None
            ids: dict[str, Any] = {
                "eos_token_id": eos_ids[0] if len(eos_ids) == 1 else list(eos_ids),
                "pad_token_id": eos_ids[0] if pad_id is None else pad_id,
            }
            config.update(ids)
            GenerationConfig(**ids).save_pretrained(aside)
        config.save_pretrained(aside)
        if tokenizer is not None:
            tokenizer.save_pretrained(aside)
        for name, content in processor.items():
            (aside / name).write_text(content, encoding="utf-8")
        yield aside


@contextmanager
def replaced_when_whole(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder` to write into, which takes its place at the end, once it is on the disk; it is gone
    if that fails."""
    make_folder(folder.parent)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    replaced = aside.with_name(f"{aside.name}.replaced")
    try:
        yield aside
        aside.chmod(0o755)  # mkdtemp makes it private
        for path in (*aside.rglob("*"), aside):
            sync(path)
        if folder.exists():
            folder.rename(replaced)
        aside.rename(folder)
        sync(folder.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def describe_model(
    folder: Path, *, trust_remote_code: bool = False, override: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, str | int]:
    """What a model directory holds, without loading its weights.

    Raises:
        DataError: as `load_model`, as far as the headers of the files show.
    """
    config = read_config(folder, trust_remote_code=trust_remote_code, override=override)
    parameters = sum(math.prod(shape) for shape in weight_shapes(folder).values())
    return {
        "model type": config.model_type,
        "parameters stored": parameters,
        "implementation": "hone" if unsupported(config) is None else "transformers",
    }


def model_folder(path: str | Path, *, trust_remote_code: bool = False) -> Path:
    """The local directory of a model: the path itself, or the hub's snapshot of that name."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or str(path).startswith((".", "/", "~")) or str(path).count("/") > 1:
        raise DataError(f"model.path: {path} is not a directory. Give a model directory or a hub name.")
    patterns = [*HUB_FILES, *(("*.py",) if trust_remote_code else ())]
    try:
        return Path(snapshot_download(str(path), allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise DataError(
            f"model.path: {path} is neither a local directory nor available from the hub ({type(error).__name__}: "
            f"{error}). Check the spelling and the network, or give a local directory."
        ) from error


def read_config(
    folder: Path, *, trust_remote_code: bool = False, override: Mapping[str, Any] = MappingProxyType({})
) -> PreTrainedConfig:
    """The config.json of a model directory, with the keys of `override` replaced.

    Raises:
        DataError: there is none that Transformers understands, or its class has no such key.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise DataError(f"{folder}: no config.json. Is this a Hugging Face model directory?")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        if not override:
            return config
        keys = json.loads(file.read_text("utf-8"))
        unknown = [name for name in override if name not in keys and not hasattr(config, name)]
        if unknown:
            raise DataError(f"model.override: {config.model_type} has no key {', '.join(unknown)} in its config.json.")
        return type(config).from_dict(overridden(keys, override))
    except (ValueError, OSError, KeyError, TypeError, StrictDataclassError) as error:
        raise DataError(f"{file}: {error}") from error


def link_with_config(folder: Path, to: Path, config: PreTrainedConfig) -> None:
    """A model directory `to` with another config.json than `folder`, whose other files are linked to."""
    with replaced_when_whole(to) as aside:
        for file in folder.iterdir():
            if file.is_file() and file.name != "config.json":
                (aside / file.name).symlink_to(file.resolve())
        config.save_pretrained(aside)


def is_ours(config: PreTrainedConfig, implementation: Implementation) -> bool:
    return implementation == "hone" or (implementation == "auto" and unsupported(config) is None)


def _filled(model: CausalModel, contents: Contents) -> CausalModel:
    """The model with its weights, or on device `meta` with their source."""
    if model.output_weight.is_meta:
        model.contents = contents
    else:
        model.load_weights(contents.read())
    return model


def _transformers_model(
    make: Callable[[], PreTrainedModel],
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    trust_remote_code: bool = False,
) -> TransformersModel:
    """What `make` makes on the CPU, on some device. Its class alone knows how to read its files: it is made whole."""
    if torch.device(device).type != "meta":
        hf: Any = make()
        return TransformersModel(hf.to(device), config)
    with torch.device("meta"):
        hf = auto_class(config).from_config(as_computed(config), dtype=dtype, trust_remote_code=trust_remote_code)
    model = TransformersModel(hf, config)
    model.contents = Contents(partial(_made_whole, make, config), is_made_whole=True)
    return model


def _made_whole(make: Callable[[], PreTrainedModel], config: PreTrainedConfig) -> Iterator[tuple[str, Tensor]]:
    """Weights and buffers of a Transformers model."""
    model = TransformersModel(make(), config)
    yield from {**model.buffers_by_name(), **dict(model.own_weights())}.items()


def _init_transformers(config: PreTrainedConfig, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return auto_class(config).from_config(as_computed(config), dtype=dtype)


def _load_transformers(
    folder: Path, config: PreTrainedConfig, dtype: torch.dtype, trust_remote_code: bool
) -> PreTrainedModel:
    loaded: Any = auto_class(config).from_pretrained(
        folder,
        config=as_computed(config),
        dtype=dtype,
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
    )
    hf, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:  # Transformers would leave these random
        raise DataError(
            f"{folder}: {len(missing)} weights are missing, {missing[0]} among them. Fetch the model again."
        )
    return hf


def _random_weights(shapes: Mapping[str, torch.Size], seed: int, std: float) -> Iterator[tuple[str, Tensor]]:
    """Normal matrices, zero biases, unit norms; drawn in float32 on the CPU, so every dtype and device starts alike."""
    generator = torch.Generator().manual_seed(seed)
    for name, shape in shapes.items():
        if name.endswith("bias"):
            yield name, torch.zeros(shape)
        elif len(shape) == 1:
            yield name, torch.ones(shape)
        else:
            yield name, torch.empty(shape).normal_(0.0, std, generator=generator)


def exported_shapes(
    config: PreTrainedConfig, *, implementation: Implementation = "auto", trust_remote_code: bool = False
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights that a model of this config publishes and exports, without its weights."""
    model: CausalModel
    if is_ours(config, implementation):
        model = Decoder(config, dtype=torch.float32, device="meta")
    else:
        with torch.device("meta"):
            hf = auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
        model = TransformersModel(hf, config)
    return {name: tuple(weight.shape) for name, weight in model.own_weights()}


def weight_files(folder: Path) -> list[Path]:
    """The folder's weight files, each present and whole (the header of a safetensors file gives its length)."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (json.JSONDecodeError, KeyError) as error:
            raise DataError(f"{index}: not a safetensors index ({error!r}). Fetch the model again.") from error
    else:
        names = ["model.safetensors"]
    files = [folder / name for name in names]
    absent = [file.name for file in files if not file.is_file()]
    if absent and index.is_file():
        raise DataError(
            f"{folder}: {len(absent)} of {len(files)} shards are missing ({', '.join(absent[:3])}), though "
            f"{index.name} names them. Fetch the model again."
        )
    if absent:
        pickles = sorted(file.name for file in folder.glob("*.bin"))
        hint = f"; it has {pickles[0]}, a pickle, which could run code. Convert it to safetensors" if pickles else ""
        raise DataError(f"{folder}: no model.safetensors and no {index.name}{hint}.")
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise DataError(f"{file}: corrupt or cut short ({error}). Fetch the model again.") from error
    return files


def weight_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model directory's weights, without reading them. Raises DataError as `load_model`."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return shapes


def read_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Names and weights of a model directory, one at a time. Raises DataError when files are missing or corrupt."""
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                yield name, tensors.get_tensor(name)
