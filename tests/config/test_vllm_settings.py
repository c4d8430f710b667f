"""vLLM's arguments and the rules of its engines, without vLLM."""

import json
from pathlib import Path

import pytest

from hone.config.load import load_config
from hone.config.vllm import ELSEWHERE, VllmSettings, settings_problems
from hone.errors import ConfigError

HEAD = """
model: {path: some/model}
data: {train: x/y, answer_column: answer, max_prompt_tokens: 100}
reward: {components: [{use: exact}]}
rollout: {max_response_tokens: 28, max_concurrent_samples: 64}
"""


def test_settings_are_vllms_own_defaults_checked_and_frozen():
    settings = VllmSettings.of({"max_num_seqs": 8, "enforce_eager": True, "kv_cache_dtype": "fp8"})
    assert (settings.max_num_seqs, settings.enforce_eager, settings.enable_prefix_caching) == (8, True, True)
    with pytest.raises(ValueError):
        settings.max_num_seqs = 9
    assert all(field.description for field in VllmSettings.model_fields.values())


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"max_num_seq": 8}, "max_num_seq: is no argument of vLLM that Hone knows. Did you mean max_num_seqs?"),
        ({"max_num_seqs": 0}, "max_num_seqs: must be greater than or equal to 1 (got 0)"),
        ({"dtype": "fp8"}, "dtype: must be 'auto', 'float32', 'bfloat16' or 'float16' (got \"fp8\")"),
        ({"temperature": 1.0}, "temperature: is rollout.temperature. Leave it out here"),
        ({"gpu_memory_utilisation": 0.4}, "gpu_memory_utilization is memory_frac, beside args"),
        ({"something": 1}, "something: is no argument of vLLM that Hone knows. There are: max_num_seqs, "),
        ({"logprobs_mode": "raw_logprobs"}, "logprobs_mode: is set by Hone, which relies on it"),
    ],
)
def test_what_is_wrong_with_an_argument_is_said_with_the_nearest_that_is_right(args, said):
    with pytest.raises(ConfigError) as error:
        VllmSettings.of(args)
    assert said in str(error.value)


def test_every_problem_is_told_at_once_and_no_name_is_both_a_knob_and_elsewhere():
    assert set(settings_problems({"max_num_seqs": 0, "block_size": 0, "seed": 1, "dtype": "auto"})) == {
        "max_num_seqs",
        "block_size",
        "seed",
    }
    assert not set(ELSEWHERE) & set(VllmSettings.model_fields)


def vllm(**args: object) -> dict:
    return {"cluster": {"backend": "ray", "engines": {"use": "vllm", "args": args}}}


BROKEN = [
    (vllm(max_num_seqs=0), "cluster.engines.args.max_num_seqs: must be greater than or equal to 1"),
    (vllm(block_sise=16), "cluster.engines.args.block_sise: is no argument of vLLM that Hone knows. Did you mean"),
    (
        {"cluster": {"backend": "ray", "engines": {"use": "vllm", "args": {"top_k": 4}}}},
        "cluster.engines.args.top_k: is rollout.top_k",
    ),
    (vllm(max_model_len=127), "cluster.engines.args.max_model_len: = 127 cuts responses"),
    (vllm(max_num_batched_tokens=63), "cluster.engines.args.max_num_batched_tokens: must be at least 64: 64 sequences"),
    (
        vllm(max_num_batched_tokens=127, enable_chunked_prefill=False),
        "cluster.engines.args.max_num_batched_tokens: must be at least 128: a prompt of 128 tokens",
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
        if isinstance(child, dict) and name != "args":
            yield from _leaves(child, below)
        else:
            yield below, child


@pytest.mark.parametrize(("change", "said"), BROKEN)
def test_a_rule_says_what_is_wrong(tmp_path, change, said):
    assert any(said in problem for problem in problems(tmp_path, change)), problems(tmp_path, change)


@pytest.mark.parametrize("change", SOUND)
def test_what_vllm_can_do_is_let_through(tmp_path, change):
    found = problems(tmp_path, change)
    assert not [one for one in found if "vLLM" in one or "engines.args" in one], found


def page_rows():
    """The rows of the tables in docs/vllm.md."""
    for name, field in VllmSettings.model_fields.items():
        unit = field.json_schema_extra["unit"]
        default = json.dumps(field.default)
        yield f"| `{name}` | {unit} | {default} | {' '.join(field.description.split())} |"
    for name, said in ELSEWHERE.items():
        yield f"| `{name}` | {said} |"


def test_the_page_has_every_knob_as_it_is():
    page = (Path(__file__).parents[2] / "docs/vllm.md").read_text()
    missing = [row for row in page_rows() if row not in page]
    assert not missing, "put these into docs/vllm.md:\n" + "\n".join(missing)
