"""The policy's engine as vLLM, from what the run file says of it."""

from __future__ import annotations

from hone.assemble.processes import ActorContext
from hone.config.derived import longest_tokens
from hone.rollout.vllm import VllmEngine
from hone.rollout.vllm_args import VllmPlace


async def start_vllm(context: ActorContext) -> VllmEngine:
    """vLLM, with the weights of a folder until it gets others."""
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
