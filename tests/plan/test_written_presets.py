"""A run file that a preset writes is accepted and planned as the preset promised, for any model and hardware."""

import contextlib
import io
import json

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from random_search import examples

from hone.cli.main import main
from hone.cli.plan import write_run_file
from hone.config.load import load_config
from hone.devices import FoundDevices
from hone.plan.hardware import find_hardware, in_cluster
from hone.plan.knobs import scoring
from hone.plan.planner import plan
from hone.plan.search import GOALS, propose

RUN = """
data: {{train: a/b, answer_column: answer}}
run: {{precision: bfloat16}}
model: {{path: {model}}}
rollout: {{max_staleness: {staleness}}}
train: {{prompts_per_step: 64}}
"""
POOLS = """
cluster:
  backend: ray
  engines: {{use: vllm}}
  pools: {{all: {{devices: 4, roles: [policy]}}, sample: {{devices: 2, roles: [rollout]}},
    score: {{devices: 2, roles: [{}]}}}}
"""
REWARDS = {
    "exact": "reward: {components: [{use: exact}]}",
    "judge beside the run": """
services: {grm: {policy: qwen2.5-7b, devices: [0], engine: {}}}
reward: {components: [{use: judge, args: {service: grm}}]}
""",
    "judge in a pool": POOLS.format("judge")
    + """
services: {grm: {policy: qwen2.5-7b, engine: {}}}
reward: {components: [{use: judge, args: {service: grm, prompt_length: 2048, response_length: 512, votes: 2}}]}
""",
    "reward model in a pool": POOLS.format("reward_model")
    + """
reward: {components: [{use: reward_model, args: {path: qwen2.5-0.5b}}]}
""",
}
MODELS = ("qwen2.5-0.5b", "qwen3-8b", "llama-3.1-8b", "gemma-2-2b", "qwen2.5-32b", "mixtral-8x7b-v0.1")


@examples(2)
@given(
    model=st.sampled_from(MODELS),
    hardware=st.sampled_from(("RTX4090", "2xA100-40G", "8xH100-80G", "16xH100-80G")),
    preset=st.sampled_from([*GOALS]),
    staleness=st.integers(0, 1),
    reward=st.sampled_from([*REWARDS]),
    has_vllm=st.booleans(),
)
@example(model="qwen3-8b", hardware="8xH100-80G", preset="memory", staleness=1, reward="judge in a pool", has_vllm=True)
@example(
    model="qwen3-8b",
    hardware="8xH100-80G",
    preset="latency",
    staleness=0,
    reward="judge beside the run",
    has_vllm=False,
)
def test_what_a_preset_writes_is_planned_as_promised(
    tmp_path_factory, vllm_program, model, hardware, preset, staleness, reward, has_vllm
):
    assume(GOALS[preset].blocks is not scoring or reward != "exact")
    assume(reward in ("exact", "judge beside the run") or find_hardware(hardware).devices >= 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(vllm_program) if has_vllm else "")
        file = tmp_path_factory.mktemp("preset") / "run.yaml"
        file.write_text(RUN.format(model=model, staleness=staleness) + REWARDS[reward])

        def planned(path):
            loaded = load_config(path)
            return loaded, plan(loaded.config, in_cluster(find_hardware(hardware), hardware, loaded.config))

        loaded, today = planned(file)
        promised = propose(today, preset)
        better = file.with_name("better.yaml")
        write_run_file(better, loaded, [], promised)
        _, found = planned(better)
        assert found.ledgers == promised.plan.ledgers
        assert found.verdict.level == promised.plan.verdict.level
        assert found.verdict.problems == promised.plan.verdict.problems
        assert found.inputs.workload == today.inputs.workload
        assert found.impossible(GOALS[preset].headroom) <= today.impossible(GOALS[preset].headroom)
        if found.verdict.level != "does not fit":
            assert is_accepted(better, hardware)


def is_accepted(run_file, hardware):
    """Whether `hone check` accepts it on a machine with these devices."""
    with pytest.MonkeyPatch.context() as patch:
        devices = FoundDevices("cuda", "GPU", find_hardware(hardware).per_node, True)
        patch.setattr("hone.run.check.assumed_devices", lambda config: devices)
        patch.setattr("hone.services.gpus.find_spec", lambda name: object())
        return main(["check", str(run_file)]) == 0


def command(*words):
    """Exit code and JSON of `hone plan`."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main(["plan", *map(str, words), "--json"])
    return code, json.loads(printed.getvalue())


@pytest.mark.slow("plans every preset")
@examples(2)
@given(
    model=st.sampled_from(MODELS),
    hardware=st.sampled_from(("RTX4090", "2xA100-40G", "8xH100-80G")),
    preset=st.sampled_from(("safe", "recommended", "aggressive")),
    staleness=st.integers(0, 1),
)
@example(model="qwen2.5-0.5b", hardware="RTX4090", preset="safe", staleness=0)  # writes cluster.trainer.offload
@example(model="qwen3-8b", hardware="8xH100-80G", preset="recommended", staleness=1)  # writes the pools of auto
@example(model="qwen2.5-32b", hardware="RTX4090", preset="recommended", staleness=0)  # writes nothing: none fits
def test_without_a_cluster_section_too_plan_fits_and_check_accepts_on_such_devices(
    tmp_path_factory, model, hardware, preset, staleness
):
    """The whole commands, with the devices that `auto` finds."""
    folder = tmp_path_factory.mktemp("written")
    file, better = folder / "run.yaml", folder / "better.yaml"
    file.write_text(RUN.format(model=model, staleness=staleness) + REWARDS["exact"])
    code, found = command(file, "--hardware", hardware, "--preset", preset, "--write", better)
    promised = next(one["plan"] for one in found["proposals"] if one["preset"] == preset)
    assert better.exists() == (promised["verdict"]["level"] != "does not fit")
    if not better.exists():
        assert code == 4
        return
    again_code, again = command(better, "--hardware", hardware)
    assert (again_code, again["ledgers"]) == (code, promised["ledgers"])
    assert all(again["verdict"][name] == promised["verdict"][name] for name in ("level", "problems"))
    assert again["topology"] == promised["topology"] and again["workload"] == found["workload"]
    assert is_accepted(better, hardware)
