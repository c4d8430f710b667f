"""Low-rank adapters (LoRA): frozen weights, and a trained low-rank product beside chosen linear layers.

A layer that computed W x then computes W x + alpha / rank * B A x, with A (rank, in) and B (out, rank) (LoRA,
arXiv:2106.09685). B starts at zero, so an adapter starts as nothing. In Hone's own decoder the adapter sits in the
fused projections, each part with a pair of its own; elsewhere it is peft's. On disk it is peft's format in both.

A model with an adapter samples and trains as it is, unmerged, so that an engine may share it with the trainer. Its
`named_weights` are merged: what an engine of its own is sent, and what is exported. `AdapterOff` is the model
without the adapter, in the same memory. No dropout: the trainer must see the distribution that was sampled from.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig

from hone.config.run import LoraSection
from hone.errors import DataError
from hone.model.base import Adapter, CausalModel
from hone.model.decoder import Decoder
from hone.model.fingerprint import weights_fingerprint
from hone.model.hf import TransformersModel, auto_class, has_tower
from hone.model.layout import Layout
from hone.model.load import Implementation, is_ours, replaced_when_whole
from hone.model.low_rank import FusedLinear
from hone.model.routing import LoadBalance
from hone.model.sequence import SequenceGroup
from hone.model.weights import copy_by_name

FUSED = {
    "qkv_proj": ("self_attn", ("q_proj", "k_proj", "v_proj")),
    "o_proj": ("self_attn", ("o_proj",)),
    "gate_up_proj": ("mlp", ("gate_proj", "up_proj")),
    "down_proj": ("mlp", ("down_proj",)),
}
"""The linear layers of one of the decoder's layers: where Hugging Face has their parts, and the parts' names."""

PEFT_NAME = "default"
"""What peft calls the one adapter of a model."""


class DecoderAdapter(Adapter):
    """In Hone's own decoder, whose linear layers it replaces by `FusedLinear`."""

    def __init__(self, model: Decoder, settings: LoraSection) -> None:
        wanted = wanted_layers(settings, DECODER_LAYERS)
        self._places: dict[str, tuple[FusedLinear, int]] = {}
        base = _fingerprint(model)
        for number, layer in enumerate(model.layers):
            for fused, (block, parts) in FUSED.items():
                adapted = [part in wanted for part in parts]
                if not any(adapted):
                    continue
                linear = FusedLinear(getattr(layer, fused), self._sizes(model, layer, fused), adapted, settings)
                setattr(layer, fused, linear)
                names = [f"model.layers.{number}.{block}.{part}" for part in parts if part in wanted]
                self._places |= {name: (linear, part) for part, name in enumerate(names)}
        super().__init__(settings, base, tuple(self._places))

    @staticmethod
    def _sizes(model: Decoder, layer: nn.Module, fused: str) -> list[int]:
        outputs = getattr(layer, fused).out_features
        if fused == "qkv_proj":
            kv_size = model.num_kv_heads * model.head_dim
            return [outputs - 2 * kv_size, kv_size, kv_size]
        return [outputs // len(FUSED[fused][1])] * len(FUSED[fused][1])

    def factors(self, name: str) -> tuple[Tensor, Tensor]:
        linear, part = self._places[name]
        return linear.factors(part)

    def replace(self, old: FusedLinear, parts: Sequence[nn.Module]) -> None:
        """A layer has been split into these."""
        adapted = [part for part in parts if isinstance(part, FusedLinear)]
        for name, (linear, part) in self._places.items():
            if linear is old:
                self._places[name] = adapted[part], 0

    def switch(self, on: bool) -> None:
        for linear, _ in self._places.values():
            linear.is_on = on


class PeftAdapter(Adapter):
    """In a model of Transformers' own class, as peft puts it there."""

    def __init__(self, model: TransformersModel, settings: LoraSection) -> None:
        try:
            from peft import LoraConfig, inject_adapter_in_model
            from peft.tuners.lora import LoraLayer
        except ImportError as error:
            raise DataError(NO_PEFT) from error
        wanted = wanted_layers(settings, linear_layers(model.hf))
        # In a shell: where peft sees a config it takes names of layers for names of fused experts.
        shell = nn.ModuleDict({"hf": model.hf})
        named = [f"hf.{name}" for name, _ in _linear_modules(model.hf) if name.rpartition(".")[2] in wanted]
        base = _fingerprint(model)
        whole = {id(weight): name for name, weight in model.whole_weights()}
        renamed = {name: whole.get(id(module.weight)) for name, module in _linear_modules(model.hf)}
        config = LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=named, lora_dropout=0.0)  # type: ignore[arg-type]
        config.fan_in_fan_out = any(type(module).__name__ == "Conv1D" for module in model.hf.modules())
        with torch.random.fork_rng(devices=[]):
            inject_adapter_in_model(config, shell, adapter_name=PEFT_NAME)
        self._layers: dict[str, Any] = {
            name: module for name, module in model.hf.named_modules() if isinstance(module, LoraLayer)
        }
        parts = [name for name in self._layers if renamed[name] is None]
        if parts:
            raise DataError(
                f"lora.targets: {parts[0]} of {model.hf_config.model_type} has several names or another shape in the "
                "model's repository, so an adapter of it cannot be merged. Take it out of lora.targets."
            )
        self.transposed = config.fan_in_fan_out
        super().__init__(settings, base, tuple(self._layers), [str(renamed[name]) for name in self._layers])

    def factors(self, name: str) -> tuple[Tensor, Tensor]:
        layer = self._layers[name]
        return layer.lora_A[PEFT_NAME].weight.detach(), layer.lora_B[PEFT_NAME].weight.detach()

    def switch(self, on: bool) -> None:
        for layer in self._layers.values():
            layer.enable_adapters(on)


def _fingerprint(model: CausalModel) -> str:
    return weights_fingerprint(model.own_weights()) if model.contents is None else ""


DECODER_LAYERS = tuple(part for _, parts in FUSED.values() for part in parts)
NO_PEFT = (
    "lora.rank > 0: this model runs in Transformers' own class, for which adapters need peft, which is not installed. "
    "Install hone-rl[lora]."
)


class AdapterOff(CausalModel):
    """The base model of an adapter, in the same memory: the frozen reference of a policy that trains an adapter.

    Not for use while the policy computes in another thread.
    """

    def __init__(self, policy: CausalModel) -> None:
        super().__init__()
        assert policy.adapter is not None
        self._policy = (policy,)  # in a tuple: the policy's parameters are not this one's
        self.hf_config = policy.hf_config
        self.vocab_size, self.hidden_size = policy.vocab_size, policy.hidden_size
        self.max_positions, self.logit_map = policy.max_positions, policy.logit_map

    @property
    def policy(self) -> CausalModel:
        """The model that has the adapter."""
        return self._policy[0]

    @property
    def sequences(self) -> SequenceGroup:  # type: ignore[override]
        return self.policy.sequences

    @property
    def output_weight(self) -> Tensor:
        return self.policy.output_weight

    def hidden(self, layout: Layout, balance: LoadBalance | None = None) -> Tensor:
        assert self.policy.adapter is not None
        with self.policy.adapter.off():
            return self.policy.hidden(layout, balance)

    def own_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self.policy.own_weights()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.policy.load_weights(weights)


def add_adapter(
    model: CausalModel, settings: LoraSection, *, seed: int, dtype: torch.dtype, start: Path | None = None
) -> None:
    """Freeze a model, turn its weights into `dtype`, and put an adapter into it: a new one, or that of a directory.

    Of a new one A is uniform in +-1/sqrt(in), as peft starts it, a function of `seed`, and B is 0. The adapter keeps
    the dtype that the model had.

    Args:
        start: a directory in peft's format.
    Raises:
        DataError: targets that the model does not have, no peft where it is needed, or another kind of adapter in
            `start` than `settings` says.
    """
    model.requires_grad_(False)
    if isinstance(model, Decoder):
        adapter: Adapter = DecoderAdapter(model, settings)
    elif isinstance(model, TransformersModel):
        adapter = PeftAdapter(model, settings)
    else:
        raise TypeError(f"an adapter cannot be added to a {type(model).__name__}")
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    shapes = {name: factor.shape for name, factor in adapter.weights()}
    if start is not None:
        refuse_other_adapter(start, settings, shapes)
    first = partial(_first_factors, shapes, seed) if start is None else partial(_saved_factors, start)
    if model.contents is None:
        copy_by_name(dict(adapter.weights()), first())
    else:
        model.contents = model.contents.with_more(first)
    model.adapter = adapter


def _first_factors(shapes: Mapping[str, torch.Size], seed: int) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for name, shape in shapes.items():
        if name.endswith(".lora_A.weight"):
            bound = 1 / math.sqrt(shape[1])
            yield name, torch.empty(shape).uniform_(-bound, bound, generator=generator)
        else:
            yield name, torch.zeros(shape)


def _saved_factors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 (not a mapping)
            yield name, tensors.get_tensor(name)


def refuse_other_adapter(folder: Path, settings: LoraSection, shapes: Mapping[str, torch.Size] | None = None) -> None:
    """Raises DataError when the adapter in a directory is not of these settings, or not beside these layers.

    Args:
        shapes: of its factors, by peft's names; None: not compared.
    """
    try:
        found = json.loads((folder / ADAPTER_CONFIG).read_text("utf-8"))
        with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as tensors:
            saved = {name: torch.Size(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(
            f"lora.start: {folder} cannot be read as an adapter of peft: {error}. It needs {ADAPTER_CONFIG} and "
            f"{ADAPTER_WEIGHTS}."
        ) from error
    for key, theirs, ours in (
        ("rank", found.get("r"), settings.rank),
        ("alpha", found.get("lora_alpha"), settings.alpha),
    ):
        if theirs != ours:
            raise DataError(
                f"lora.{key} = {ours:g}, but the adapter in lora.start has {theirs}. Set lora.{key}={theirs}."
            )
    more = [name for name in OTHER_KINDS if found.get(name)] + (["bias"] if found.get("bias", "none") != "none" else [])
    if found.get("peft_type") != "LORA" or more:
        raise DataError(
            f"lora.start: {folder} is an adapter of another kind ({', '.join(more) or found.get('peft_type')}); plain "
            "LoRA can be continued. Merge it into its model, and name that in model.path."
        )
    if shapes is None or saved == dict(shapes):
        return
    differs = sorted(name for name in saved.keys() | shapes.keys() if saved.get(name) != shapes.get(name))
    raise DataError(
        f"lora.start: the adapter in {folder} is not beside the layers that this run adapts: {differs[0]} has shape "
        f"{tuple(saved.get(differs[0], ())) or 'none'} there and {tuple(shapes.get(differs[0], ())) or 'none'} here "
        f"({len(differs)} differ). Set lora.targets to its target_modules, and model.path to its model."
    )


OTHER_KINDS = ("use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern", "layers_to_transform")
"""Keys of an adapter_config.json that change what an adapter computes."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def merged_copy(model: CausalModel) -> CausalModel:
    """A model of its own without an adapter that computes the same, for an engine that is sent merged weights."""
    merged = copy.deepcopy(model)
    for path, module in list(merged.named_modules()):
        plain = getattr(module, "base_layer", None)  # what both kinds of adapter call the layer that they replaced
        if isinstance(plain, nn.Module):
            merged.set_submodule(path, plain)
    merged.adapter = None
    merged.load_weights(model.named_weights())
    return merged


def wanted_layers(settings: LoraSection, layers: Sequence[str]) -> list[str]:
    """The names among `layers` that get an adapter. Raises DataError for targets that are not among them."""
    if settings.targets is None:
        return list(layers)
    unknown = [name for name in settings.targets if name not in layers]
    if unknown:
        raise DataError(
            f"lora.targets: this model has no linear layer {', '.join(unknown)}. It has: {', '.join(layers)}."
        )
    return list(settings.targets)


def check_targets(
    config: PreTrainedConfig, settings: LoraSection, implementation: Implementation, *, trust_remote_code: bool = False
) -> list[str]:
    """The names of the layers that would get an adapter, without the model's weights.

    Raises:
        DataError: as `add_adapter` would.
    """
    if is_ours(config, implementation):
        return wanted_layers(settings, DECODER_LAYERS)
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise DataError(NO_PEFT) from error
    with torch.device("meta"):
        hf = auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
    return wanted_layers(settings, linear_layers(hf))


def linear_layers(hf: Any) -> list[str]:
    """Last parts of the names of a Transformers model's linear layers, without those of the output layer and of a
    vision tower."""
    return list(dict.fromkeys(name.rpartition(".")[2] for name, _ in _linear_modules(hf)))


def _linear_modules(hf: Any) -> Iterator[tuple[str, nn.Module]]:
    output = hf.get_output_embeddings()
    reads = set(hf.get_decoder().modules() if has_tower(hf.config) else hf.modules())
    for name, module in hf.named_modules():
        if module not in reads:
            continue
        is_linear = type(module).__name__ in ("Linear", "Conv1D") and module is not output
        if is_linear and hf.config.model_type not in NEVER_CALLED.get(name.rpartition(".")[2], ()):
            yield name, module


NEVER_CALLED = {
    "dt_proj": ("mamba", "falcon_mamba", "jamba"),
    "out_proj": ("mamba", "falcon_mamba", "mamba2", "falcon_h1", "nemotron_h"),
}
"""Layers of state spaces whose weights some kernel reads past them, so that an adapter beside one would not count."""


def save_adapter(folder: Path, model: CausalModel, base: str) -> None:
    """Writes adapter_config.json and adapter_model.safetensors, which `peft.PeftModel.from_pretrained` reads.

    Args:
        base: directory or hub name of the base model, for programs that load the adapter.
    """
    adapter = model.adapter
    assert adapter is not None
    targets = list(dict.fromkeys(name.rpartition(".")[2] for name in adapter.names))
    if has_tower(model.hf_config):  # whose layers may have the same last names
        targets = list(adapter.names)
    with replaced_when_whole(folder) as aside:
        tensors = {name: weight.cpu() for name, weight in adapter.weights()}
        write_adapter(aside, adapter.settings, tensors, base=base, targets=targets, transposed=adapter.transposed)


def write_adapter(
    folder: Path,
    settings: LoraSection,
    tensors: Mapping[str, Tensor],
    *,
    base: str,
    targets: Sequence[str],
    transposed: bool = False,
) -> None:
    """Writes the two files of `save_adapter` into a folder.

    Args:
        tensors: under peft's names, on the host.
        targets: names of the layers, or their last parts.
    """
    keys = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(targets),
        "fan_in_fan_out": transposed,
        "bias": "none",
        "inference_mode": True,
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(keys, indent=2) + "\n")
    whole = {name: weight.contiguous() for name, weight in tensors.items()}
    save_file(whole, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
