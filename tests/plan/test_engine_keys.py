"""Every key of an engine section, and of a cluster's trainer, moves the plan, or a table says why it does not."""

from pathlib import Path

import pytest
from test_memory_keys import others

from hone.config.cluster import ShardingSection
from hone.config.engine import EngineSection
from hone.config.load import load_config
from hone.config.render import inline
from hone.errors import ConfigError
from hone.plan.hardware import find_hardware
from hone.plan.planner import plan
from hone.rollout.vllm_args import VllmPlace, engine_arguments

RUN = """
model: {path: qwen3-8b}
data: {train: a/b, answer_column: answer, max_prompt_tokens: 512}
rollout: {group_size: 8, max_response_tokens: 2048}
train: {prompts_per_step: 64, tokens_per_microbatch: 8192}
services: {grm: {policy: qwen2.5-7b, engine: {use: vllm}}}
reward: {components: [{use: judge, args: {service: grm, prompt_length: 4096, response_length: 1024}}]}
cluster:
  backend: ray
  engines: {use: vllm}
  pools: {train: {devices: 4, roles: [policy, rollout]}, score: {devices: 4, roles: [judge]}}
"""
NOT_MEMORY = {
    "attention_backend": "a kernel's choice; its workspace is within the estimate",
    "disable_custom_all_reduce": "its buffers of 8 MiB are within the estimate",
    "disable_log_stats": "statistics",
    "distributed_executor_backend": "what starts the ranks",
    "enable_prefix_caching": "what fills the cache, whose size is given",
    "block_size": "the cache is planned by tokens; vLLM rounds to blocks",
    "max_cudagraph_capture_size": "memory of CUDA graphs is an estimate for any number of them",
    "max_model_len": "of a service: the longest prompt and answer are the reward's; of the policy those of the run",
    "compile": "compiled passes take no more than eager ones",
}
"""Keys that leave the plan as it is, and why."""


@pytest.fixture(scope="module")
def run_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("engine-keys") / "run.yaml"
    file.write_text(RUN)
    return file


def planned(run_file, *words):
    loaded = load_config(run_file, words, needs_programs=False)
    found = plan(loaded.config, find_hardware("8xH100-80G"), folder=run_file.parent).as_dict()
    return loaded.config, {name: found[name] for name in ("ledgers", "time", "verdict")}


def arguments(config):
    """What vLLM gets, for the policy and for the judge."""
    place = VllmPlace(Path("/nowhere"), "bfloat16", longest_tokens=2560, max_concurrent=64, prefill_tokens=8192)
    judge = config.services["grm"].engine.command_words(1)
    return engine_arguments(config.cluster.engines, place, on_gpu=True), judge


def walked(run_file, place, section):
    """(keys of which some value is accepted and moves the plan, those that reach vLLM or the trainer and do not)."""
    config, before = planned(run_file)
    moves, still = set(), set()
    for name, field in section.model_fields.items():
        here = config
        for part in place.split("."):
            here = here[part] if isinstance(here, dict) else getattr(here, part)
        for value in [*others(getattr(here, name), field.annotation), *MORE.get(name, ())]:
            try:
                other, found = planned(run_file, f"{place}.{name}={inline(value)}")
            except ConfigError:  # rules refuse the value
                continue
            if found != before:
                moves.add(name)
            elif section is ShardingSection or arguments(other) != arguments(config):
                still.add(name)
    return moves, still - moves


MORE = {
    "tensor_parallel_size": (2,),
    "sequence_parallel": (2,),
    "tensor_parallel": (2,),
    "shard": (2,),
    "offload": (["optimizer"], ["parameters"]),
    "kv_cache_memory_bytes": (10**10,),
    "max_num_seqs": (16,),
    "max_num_batched_tokens": (65536,),
    "max_model_len": (8192,),
    "cpu_offload_gb": (4.0,),
    "max_cudagraph_capture_size": (8,),
    "attention_backend": ("FLASHINFER",),
}
"""Values that the rules accept, of keys for which no other value follows from the type."""
MEMORY = {
    "cpu_offload_gb",
    "dtype",
    "enforce_eager",
    "gpu_memory_utilization",
    "kv_cache_dtype",
    "kv_cache_memory_bytes",
    "max_num_batched_tokens",
    "max_num_seqs",
    "tensor_parallel_size",
}
SHARDING = {"shard", "tensor_parallel", "sequence_parallel", "offload"}
"""Keys that must be found to move the plan: else the walk sees nothing."""


def test_every_key_of_engines_and_trainer_moves_the_plan(run_file):
    places = {
        "cluster.engines": EngineSection,
        "services.grm.engine": EngineSection,
        "cluster.trainer": ShardingSection,
    }
    found = {place: walked(run_file, place, section) for place, section in places.items()}
    for place, (moves, _) in found.items():
        assert moves >= (SHARDING if place == "cluster.trainer" else MEMORY), place
    assert set().union(*(still for _, still in found.values())) == set(NOT_MEMORY)


def test_the_size_of_buckets_moves_the_plan(run_file):
    assert planned(run_file, "cluster.bucket_mib=2048")[1] != planned(run_file)[1]
