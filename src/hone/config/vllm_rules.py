"""What must hold where an engine is vLLM: its arguments are known, its lengths fit, and it samples as Hone's would."""

from __future__ import annotations

from collections.abc import Iterator

from hone.config.breach import Breach
from hone.config.derived import longest_tokens
from hone.config.run import RunConfig
from hone.config.vllm import VllmSettings, settings_problems

LEAST_TEMPERATURE = 0.01
"""vLLM samples with this temperature where a lower one is asked for."""


def vllm_arguments_are_known(config: RunConfig) -> Iterator[Breach]:
    engines, path = config.cluster.engines, "cluster.engines.args"
    if engines.use == "vllm":
        for argument, message in settings_problems(engines.args).items():
            yield Breach((f"{path}.{argument}", path), message)


def vllm_lengths_fit(config: RunConfig) -> Iterator[Breach]:
    settings = _policy_settings(config)
    if settings is None:
        return
    path, longest = "cluster.engines.args", longest_tokens(config)
    max_len = settings.max_model_len or longest
    if max_len < longest:
        yield Breach(
            (f"{path}.max_model_len", path, "data.max_prompt_tokens", "rollout.max_response_tokens"),
            f"= {max_len} cuts responses: a prompt and its response may have {longest} tokens. Nearest: {longest}, or "
            "leave it out",
        )
    budget, sequences = settings.max_num_batched_tokens, settings.max_num_seqs or config.rollout.max_concurrent_samples
    if budget is None:
        return
    least = max(sequences, max_len) if settings.enable_chunked_prefill is False else sequences
    if budget < least:
        why = f"{sequences} sequences take a token each in every step"
        if least > sequences:
            why = f"a prompt of {max_len} tokens is computed at once without enable_chunked_prefill"
        yield Breach(
            (f"{path}.max_num_batched_tokens", path, "rollout.max_concurrent_samples"),
            f"must be at least {least}: {why} (got {budget})",
        )


def vllm_samples_as_hone_does(config: RunConfig) -> Iterator[Breach]:
    if config.cluster.backend != "ray" or config.cluster.engines.use != "vllm":
        return
    rollout = config.rollout
    if rollout.top_p < 1 and rollout.min_p > 0:
        yield Breach(
            ("rollout.min_p", "rollout.top_p", "cluster.engines.use"),
            f"= {rollout.min_p} with rollout.top_p = {rollout.top_p}: vLLM applies min_p first and Hone top_p first, "
            "which is not the same distribution. Use one of them, or cluster.engines.use = embedded",
        )
    if rollout.temperature < LEAST_TEMPERATURE:
        yield Breach(
            ("rollout.temperature", "cluster.engines.use"),
            f"must be at least {LEAST_TEMPERATURE}, below which vLLM raises it (got {rollout.temperature})",
        )


def _policy_settings(config: RunConfig) -> VllmSettings | None:
    """Of the policy's engines, if they are vLLM's and nothing is wrong with them alone."""
    engines = config.cluster.engines
    if config.cluster.backend != "ray" or engines.use != "vllm" or settings_problems(engines.args):
        return None
    return VllmSettings.of(engines.args)


VLLM_RULES = (vllm_arguments_are_known, vllm_lengths_fit, vllm_samples_as_hone_does)
