"""The policy's engine as vLLM, from what the run file says of it."""

from __future__ import annotations

from collections.abc import Mapping

from hone.assemble.processes import ActorContext
from hone.config.derived import longest_tokens
from hone.config.run import DataSection
from hone.data.picture_processors import PictureProcessor, QwenProcessor, family_of
from hone.rollout.vllm import VllmEngine
from hone.rollout.vllm_args import VllmPlace


async def start_vllm(context: ActorContext) -> VllmEngine:
    """vLLM, with the weights of a folder until new ones are loaded."""
    assert context.model_folder is not None
    config = context.loaded.config
    rollout, engines = config.rollout, config.cluster.engines
    place = VllmPlace(
        folder=context.model_folder,
        precision=config.run.compute_dtype,
        longest_tokens=longest_tokens(config),
        max_concurrent=rollout.max_concurrent_samples,
        prefill_tokens=rollout.prefill_tokens,
        takes_turns=context.takes_turns,
        trust_remote_code=config.model.trust_remote_code,
        picture_pixels=picture_pixels(config.data, context.tokenizer.processor),
        records_routing=config.algorithm.replay_routing and "rl" in config.stages,
        adapter=config.lora if config.lora.publish == "adapter" else None,
    )
    return await VllmEngine.start(
        place,
        engines,
        decode=context.tokenizer.decode,
        eos_ids=context.tokenizer.eos_ids,
        timeout_s=rollout.timeout_s,
        start_timeout_s=config.cluster.start_timeout_s,
    )


def picture_pixels(data: DataSection, files: Mapping[str, str]) -> tuple[int, int] | None:
    """Of the smallest and the largest picture of prompts, as the model sees it, for a processor that bounds them; None:
    another family's, or none. Without `image_columns` the largest is the smallest.

    Args:
        files: of the model's processor, by name.
    """
    if family_of(files) is not QwenProcessor:
        return None
    processor = PictureProcessor.of(files, most_pixels=data.max_image_pixels if data.image_columns else 1)
    assert isinstance(processor, QwenProcessor)
    return processor.least_pixels, max(processor.least_pixels, processor.most_pixels)
