"""vLLM's arguments and the rules of its engines, without vLLM."""

import json
from pathlib import Path

import pytest

from hone.config.engine import ELSEWHERE, EngineSection
from hone.config.load import load_config
from hone.errors import ConfigError

HEAD = """
model: {path: some/model}
data: {train: x/y, answer_column: answer, max_prompt_tokens: 100}
reward: {components: [{use: exact}]}
rollout: {max_response_tokens: 28, max_concurrent_samples: 64}
"""


def test_settings_are_checked_frozen_and_documented():
    settings = EngineSection.model_validate({"max_num_seqs": 8, "enforce_eager": True, "kv_cache_dtype": "fp8"})
    assert (settings.max_num_seqs, settings.enforce_eager, settings.enable_prefix_caching) == (8, True, True)
    assert settings.changed() == ["max_num_seqs", "enforce_eager", "kv_cache_dtype"]
    with pytest.raises(ValueError):
        settings.max_num_seqs = 9
    assert all(field.description for field in EngineSection.model_fields.values())
    assert not set(ELSEWHERE) & set(EngineSection.model_fields)


def test_every_problem_is_reported_at_once(tmp_path):
    found = problems(tmp_path, vllm(max_num_seqs=0, block_size=0, seed=1, dtype="auto"))
    named = {
        name for name in EngineSection.model_fields | ELSEWHERE if any(f"engines.{name}: " in one for one in found)
    }
    assert named == {"max_num_seqs", "block_size", "seed"}


def vllm(**args: object) -> dict:
    return {"cluster": {"backend": "ray", "engines": {"use": "vllm", **args}}}


BROKEN = [
    (vllm(max_num_seqs=0), "cluster.engines.max_num_seqs: must be at least 1 (got 0)"),
    (vllm(block_sise=16), "cluster.engines.block_sise: unknown key. Did you mean cluster.engines.block_size?"),
    (vllm(max_num_seq=8), "cluster.engines.max_num_seq: unknown key. Did you mean cluster.engines.max_num_seqs?"),
    (vllm(dtype="fp8"), 'must be one of auto, float32, bfloat16, float16 (got "fp8")'),
    (vllm(top_k=4), "cluster.engines.top_k: is rollout.top_k"),
    (vllm(logprobs_mode="raw_logprobs"), "cluster.engines.logprobs_mode: is set by Hone, which relies on it"),
    (
        vllm(gpu_memory_utilisation=0.4),
        "cluster.engines.gpu_memory_utilisation: unknown key. Did you mean cluster.engines.gpu_memory_utilization?",
    ),
    (vllm(something=1), "cluster.engines has: use, tensor_parallel_size, gpu_memory_utilization, max_num_seqs"),
    (vllm(max_model_len=127), "cluster.engines.max_model_len: = 127 cuts responses"),
    (vllm(max_num_batched_tokens=63), "cluster.engines.max_num_batched_tokens: must be at least 64: 64 sequences"),
    (
        vllm(max_num_batched_tokens=127, enable_chunked_prefill=False),
        "cluster.engines.max_num_batched_tokens: must be at least 128: a prompt of 128 tokens",
    ),
    (vllm() | {"rollout": {"top_p": 0.9, "min_p": 0.1}}, "rollout.min_p: = 0.1 with rollout.top_p = 0.9: vLLM applies"),
    (vllm() | {"rollout": {"temperature": 0.001}}, "rollout.temperature: must be at least 0.01"),
]
SOUND = [
    vllm(max_model_len=128, max_num_batched_tokens=64),
    vllm(max_num_seqs=8, max_num_batched_tokens=128, enable_chunked_prefill=False),
    vllm() | {"rollout": {"top_p": 0.9, "top_k": 10}},
    {"rollout": {"top_p": 0.9, "min_p": 0.1}},
]


ALONE = {"lora": {"rank": 8, "publish": "adapter"}}
APART = {"pools": {"train": {"devices": 1, "roles": ["policy"]}, "sample": {"devices": 1, "roles": ["rollout"]}}}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (ALONE, "lora.publish: = adapter is for cluster.engines.use = vllm"),
        (ALONE | vllm(), "cluster.engines.sleep_level: = 2 discards the weights of the model"),
        (ALONE | vllm(sleep_level=1), None),
        (
            {"lora": {"rank": 600, "publish": "adapter"}} | vllm(sleep_level=1),
            "lora.rank: = 600, and vLLM takes adapters",
        ),
        (
            {"lora": {"rank": 0, "publish": "adapter"}} | vllm(sleep_level=1),
            "lora.publish: = adapter, and the rl stage",
        ),
    ],
)
def test_an_adapter_is_published_alone_to_vllm_which_keeps_the_base_model(tmp_path, change, says):
    found = problems(tmp_path, change)
    assert found == [] if says is None else any(says in one for one in found), found


def test_engines_apart_may_discard_nothing_and_take_an_adapter_alone(tmp_path):
    change = ALONE | {"cluster": {"backend": "ray", "engines": {"use": "vllm"}, **APART}}
    assert problems(tmp_path, change) == []


def problems(tmp_path, change):
    run_file = tmp_path / "run.yaml"
    run_file.write_text(HEAD)
    keys = [f"{path}={json.dumps(value)}" for path, value in _leaves(change)]
    try:
        load_config(run_file, keys)
    except ConfigError as error:
        return error.problems
    return []


def _leaves(value, path=""):
    for name, child in value.items():
        below = f"{path}.{name}" if path else name
        if isinstance(child, dict):
            yield from _leaves(child, below)
        else:
            yield below, child


@pytest.mark.parametrize(("change", "said"), BROKEN)
def test_a_rule_says_what_is_wrong(tmp_path, change, said):
    assert any(said in problem for problem in problems(tmp_path, change)), problems(tmp_path, change)


@pytest.mark.parametrize("change", SOUND)
def test_what_vllm_can_do_is_let_through(tmp_path, change):
    found = problems(tmp_path, change)
    assert not [one for one in found if "vLLM" in one or "cluster.engines" in one], found


def test_the_page_has_every_name_that_is_no_key():
    page = (Path(__file__).parents[2] / "docs/vllm.md").read_text()
    missing = [row for name, said in ELSEWHERE.items() if (row := f"| `{name}` | {said} |") not in page]
    assert not missing, "put these into docs/vllm.md:\n" + "\n".join(missing)
