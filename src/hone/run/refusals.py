"""Models that a run refuses by their config, names of weights or tokenizer alone, before one is tried (`trial.py`)."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.constants import ENDPOINT
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
)

from hone.config.run import ModelSection, RunConfig
from hone.config.topology import divided_tower
from hone.data.chat import Tokenizer, can_resolve, resolve_model
from hone.data.picture_processors import family_of
from hone.errors import DataError
from hone.model.hf import has_tower, no_pictures
from hone.model.load import init_config, read_config
from hone.model.towers import TOWERS
from hone.rollout.vllm_weights import publishing_problem

INSTEAD = "Take a decoder-only text model; docs/models.md lists the architectures that are tested"


def starting_architecture(model: ModelSection, folder: Path, *, vocab_size: int | None) -> PreTrainedConfig:
    """The config of the run file's model; of a hub's model its config.json is fetched, where there is a network.

    Args:
        folder: of the run file.
        vocab_size: of the tokenizer, for `model.init`.
    Raises:
        DataError: there is no such model, or none that Transformers knows.
    """
    if model.init is not None:
        return init_config(model.init, vocab_size=vocab_size)
    place = resolve_model(str(model.path), folder)
    if not Path(place).is_dir():
        try:
            place = Path(hf_hub_download(place, "config.json", local_files_only=not can_resolve(ENDPOINT))).parent
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
            raise DataError(f"model.path: {model.path}: no config.json ({type(error).__name__}: {error})") from error
    return read_config(Path(place), trust_remote_code=model.trust_remote_code, override=model.override)


def refused_by_config(architecture: PreTrainedConfig) -> str:
    """Why no model of this config can be trained, as far as the config alone shows; "" if it can."""
    kind = architecture.model_type
    if getattr(architecture, "quantization_config", None):
        return (
            f"model: {kind} with quantization_config: quantized weights have no gradient that an optimizer could "
            "apply. Take the model that was quantized; engines may quantize their own copy."
        )
    if architecture.is_encoder_decoder:
        return (
            f"model: {kind} is an encoder-decoder: its responses do not continue its prompts, so engine, trainer and "
            f"rewards have no common sequence. {INSTEAD}."
        )
    if type(architecture) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(architecture, "is_decoder", False):
        return f"model: {kind} is an encoder: each of its tokens sees those that follow it. {INSTEAD}."
    if getattr(architecture, "audio_config", None) is not None:
        return (
            f"model: {kind} has audio_config: Hone reads no sound and would not keep the weights for it. {INSTEAD}, "
            "such as the text model of the same family."
        )
    mapping = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if has_tower(architecture) else MODEL_FOR_CAUSAL_LM_MAPPING
    if type(architecture) in mapping:
        return ""
    return f"model: Transformers has no causal language model of model_type {kind}. {INSTEAD}."


def refused_by_run(config: RunConfig, architecture: PreTrainedConfig) -> str:
    """Why this run cannot train a model of this config that others could; "" if it can."""
    if not has_tower(architecture):
        return no_pictures(architecture.model_type) if config.data.image_columns else ""
    kind = architecture.model_type
    if config.data.image_columns and kind not in TOWERS:
        return no_pictures(kind)
    cluster = config.cluster
    if "rl" in config.stages and (unseen := cluster.engines.vision_problem(kind)):
        return f"model: {unseen}"
    if "rl" in config.stages and cluster.engines.name == "vllm":
        if kind == "qwen3_vl" and not architecture.get_text_config().rope_parameters.get("mrope_interleaved"):
            return (
                "model: text_config.rope_parameters of config.json has no mrope_interleaved = true, without which vLLM "
                "computes positions of pictures otherwise than Transformers does. Set it, as the published Qwen3-VL "
                "models have it, or set cluster.engines.use=hone."
            )
        if config.lora.rank and config.lora.publish == "adapter":
            return (
                f"model: {kind} has a vision tower, and with one an adapter alone was not tried in vLLM (got "
                "lora.publish = adapter). Set lora.publish=merged."
            )
    divided = divided_tower(kind, cluster)
    return f"model: {divided}" if divided else ""


def refused_by_names(config: RunConfig, architecture: PreTrainedConfig, folder: Path) -> str:
    """Why vLLM, which starts from the model's directory, would refuse the weights that the trainer publishes; "" if it
    would not. Reads names and shapes alone.

    Args:
        folder: of the model, with its weights.
    """
    starts_here = "rl" in config.stages and "sft" not in config.stages  # else from an export of Hone's own
    if not starts_here or config.cluster.engines.name != "vllm" or config.lora.publish == "adapter":
        return ""
    model = config.model
    problem = publishing_problem(
        folder, architecture, implementation=model.implementation, trust_remote_code=model.trust_remote_code
    )
    return f"model.path: {problem}" if problem else ""


def refused_by_tokenizer(architecture: PreTrainedConfig, tokenizer: Tokenizer) -> str:
    """That config.json and tokenizer mean different tokens by a picture's; "" if they agree."""
    kind, wanted = architecture.model_type, getattr(architecture, "image_token_id", None)
    family = family_of(tokenizer.processor)
    if kind not in TOWERS or family is None:
        return ""
    token = family.marks.token
    own = tokenizer.hf.get_vocab().get(token)
    if own in (None, wanted):
        return ""
    return (
        f"model: image_token_id of {kind} is {wanted}, but the tokenizer's {token} is {own}, so other programs "
        f"would look for pictures elsewhere. Set image_token_id to {own}."
    )
