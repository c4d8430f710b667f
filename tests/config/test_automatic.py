"""What `auto` stands for on devices, and that plan, check and run agree on it."""

import pytest

from hone.config.automatic import settled
from hone.config.run import RunConfig
from hone.devices import FoundDevices

H100, V100 = FoundDevices("cuda", "GPU", 8, True), FoundDevices("cuda", "GPU", 8, False)
ONE, NPU, CPU = (
    FoundDevices("cuda", "GPU", 1, True),
    FoundDevices("npu", "NPU", 16, True),
    FoundDevices("cpu", "CPU", 2),
)
ALL, RAY = frozenset(["ray", "vllm", "triton", "cc"]), frozenset(["ray", "triton"])


def run(**sections) -> RunConfig:
    whole = {
        "model": {"path": "a/b"},
        "data": {"train": "a/b"},
        "reward": {"components": [{"use": "exact"}]},
        **sections,
    }
    return RunConfig.model_validate(whole)


def chosen(found, installed=ALL, shape=None, **sections) -> tuple[str, str, str]:
    cluster = settled(run(**sections), found, installed=installed, shape=shape).config
    return cluster.run.precision, cluster.cluster.backend, cluster.cluster.engines.use


AHEAD = {"rollout": {"max_staleness": 1}}


@pytest.mark.parametrize(
    ("found", "installed", "sections", "expected"),
    [
        (CPU, ALL, {}, ("float32", "local", "hone")),
        (CPU, ALL, {"cluster": {"backend": "ray"}}, ("float32", "ray", "hone")),
        (H100, ALL, {}, ("bfloat16", "ray", "vllm")),
        (V100, ALL, {}, ("float32", "ray", "vllm")),
        (ONE, ALL, {}, ("bfloat16", "ray", "vllm")),
        (H100, RAY, {}, ("bfloat16", "ray", "hone")),
        (ONE, RAY, {}, ("bfloat16", "local", "hone")),
        (H100, frozenset(), {}, ("bfloat16", "local", "hone")),
        (NPU, ALL, {}, ("bfloat16", "ray", "hone")),
        # what the run file says stays
        (H100, ALL, {"cluster": {"backend": "local"}, "run": {"precision": "float32"}}, ("float32", "local", "hone")),
        (H100, ALL, {"cluster": {"backend": "ray", "engines": {"use": "hone"}}}, ("bfloat16", "ray", "hone")),
        (H100, ALL, {"cluster": {"backend": "ray"}}, ("bfloat16", "ray", "vllm")),
        # what a rule refuses is not chosen: one GPU cannot sample ahead of itself; vLLM truncates in another order
        (ONE, ALL, AHEAD, ("bfloat16", "local", "hone")),
        (H100, ALL, AHEAD, ("bfloat16", "ray", "vllm")),
        (H100, ALL, {"rollout": {"min_p": 0.1, "top_p": 0.9}}, ("bfloat16", "ray", "hone")),
        (H100, ALL, {"run": {"devices": [0]}}, ("bfloat16", "local", "hone")),
    ],
)
def test_the_best_that_is_there_and_that_the_rules_allow(found, installed, sections, expected):
    assert chosen(found, installed, **sections) == expected


def test_a_model_with_a_vision_tower_is_sampled_by_hones_engine_unless_vllm_agrees():
    assert chosen(H100, shape={"vision_config": {}}) == ("bfloat16", "ray", "hone")
    assert chosen(ONE, shape={"vision_config": {}}) == ("bfloat16", "local", "hone")
    seen = {"vision_config": {}, "model_type": "qwen2_5_vl"}
    assert chosen(H100, shape=seen) == ("bfloat16", "ray", "vllm"), "vLLM was seen to agree with the trainer"


def test_kernels_are_fused_where_triton_is_and_the_run_file_does_not_say():
    def fuses(found, installed=ALL, **keys):
        return settled(run(run=keys), found, installed=installed).config.run.fused_kernels

    assert [fuses(found) for found in (CPU, NPU, V100, H100)] == [False, False, True, True]
    assert not fuses(H100, RAY) and fuses(CPU, fused_kernels=True) and not fuses(H100, fused_kernels=False)


def test_sampling_ahead_has_devices_of_its_own():
    pools = settled(run(**AHEAD), H100, installed=ALL).config.cluster.pools
    assert {name: (pool.devices, "rollout" in pool.roles) for name, pool in pools.items()} == {
        "train": (4, False),
        "sample": (4, True),
    }


def test_the_reason_is_said():
    def told(found, installed=ALL, **sections):
        return [str(choice) for choice in settled(run(**sections), found, installed=installed).choices]

    assert told(CPU) == ["run.precision: float32; the CPU is best at it"]
    assert told(H100) == [
        "run.precision: bfloat16; the devices compute in it",
        "run.fused_kernels: true; norms, rotations, SwiGLU and passes over logits are compiled in the first step",
        "cluster.backend: ray; all 8 GPUs of each machine, trainer and engines take turns",
        "cluster.engines.use: vllm; vLLM is installed",
    ]
    without = told(ONE, RAY)
    assert "run.fused_kernels: false; no C compiler to compile norms" in without[1]
    assert without[2] == "cluster.backend: local; one process on one of 1 GPU"
    assert "vLLM is not installed, which samples several times as fast" in without[3] and "hone-rl[gpu]" in without[3]
    assert "because rollout.max_staleness = 1 samples on devices of its own" in told(ONE, **AHEAD)[2]
    assert any(line.startswith("float32 on GPUs: TF32") for line in told(H100, run={"precision": "float32"}))


@pytest.mark.parametrize("found", [CPU, ONE, H100, NPU], ids=lambda found: f"{found.per_node} {found.resource}")
def test_settling_twice_is_settling_once(found):
    once = settled(run(), found, installed=ALL)
    assert settled(once.config, found, installed=ALL).config == once.config
    assert "auto" not in (once.config.run.precision, once.config.cluster.backend, once.config.cluster.engines.use)
