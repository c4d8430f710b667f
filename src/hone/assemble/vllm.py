"""The policy's engine as vLLM, from what the run file says of it."""

from __future__ import annotations

from pathlib import Path

from hone.assemble.models import Source, named_model, weights_before
from hone.config.derived import longest_tokens
from hone.data.chat import resolve_model
from hone.model.load import model_folder, save_hf
from hone.rollout.vllm import VllmEngine
from hone.rollout.vllm_args import VllmPlace


def starting_folder(source: Source) -> Path:
    """The Hugging Face directory of the model that the RL stage begins with. Random weights are first written to one,
    in the run's folder, so this is for one process to ask before the engines start."""
    loaded, model = source.loaded, source.loaded.config.model
    if (folder := weights_before("rl", loaded.config, source.folder)) is not None:
        return folder
    if model.init is None:
        path = resolve_model(model.path or "", loaded.run_file.parent)
        return model_folder(path, trust_remote_code=model.trust_remote_code)
    folder = source.folder.path / "hf-start"
    random = named_model(loaded.config, source.tokenizer, loaded.run_file.parent, source.device)
    tokenizer = source.tokenizer
    save_hf(folder, random.hf_config, random.named_weights(), tokenizer.hf, eos_ids=tokenizer.eos_ids)
    return folder


async def start_vllm(source: Source, folder: Path, *, takes_turns: bool) -> VllmEngine:
    """An engine that waits for weights.

    Args:
        folder: `starting_folder`.
        takes_turns: whether its devices are the trainer's while it sleeps.
    """
    config = source.loaded.config
    rollout, engines = config.rollout, config.cluster.engines
    # Ranks in processes of their own may get weights without the engine's: `weights.receiving.DividedEngine`.
    transfer = (
        {"worker_extension": "hone.weights.vllm_transfer.TransferExtension", "weight_transfer": "hone"}
        if engines.tensor_parallel_size > 1
        else {}
    )
    place = VllmPlace(
        folder=folder,
        precision=config.run.precision,
        longest_tokens=longest_tokens(config),
        max_concurrent=rollout.max_concurrent_samples,
        prefill_tokens=rollout.prefill_tokens,
        takes_turns=takes_turns,
        trust_remote_code=config.model.trust_remote_code,
        **transfer,
    )
    return await VllmEngine.start(
        place,
        engines,
        decode=source.tokenizer.decode,
        eos_ids=source.tokenizer.eos_ids,
        timeout_s=rollout.timeout_s,
        start_timeout_s=config.cluster.start_timeout_s,
    )
