"""A run file that a preset writes is accepted and planned as the preset promised, for any model and hardware."""

from hypothesis import given
from hypothesis import strategies as st
from random_search import examples

from hone.cli.plan import write_run_file
from hone.config.load import load_config
from hone.plan.hardware import find_hardware, in_cluster
from hone.plan.planner import plan
from hone.plan.search import MARGINS, propose

RUN = """
data: {{train: a/b, answer_column: answer}}
run: {{precision: bfloat16}}
model: {{path: {model}}}
rollout: {{max_staleness: {staleness}}}
train: {{prompts_per_step: 64}}
"""
JUDGED = """
services: {grm: {policy: qwen2.5-7b, devices: [0]}}
reward: {components: [{use: judge, args: {service: grm}}]}
"""
MODELS = ("qwen2.5-0.5b", "qwen3-8b", "llama-3.1-8b", "gemma-2-2b", "qwen2.5-32b", "mixtral-8x7b-v0.1")


@examples(4)
@given(
    model=st.sampled_from(MODELS),
    hardware=st.sampled_from(("RTX4090", "2xA100-40G", "8xH100-80G", "16xH100-80G")),
    preset=st.sampled_from([*MARGINS]),
    staleness=st.integers(0, 1),
    is_judged=st.booleans(),
)
def test_what_a_preset_writes_is_planned_as_promised(tmp_path_factory, model, hardware, preset, staleness, is_judged):
    file = tmp_path_factory.mktemp("preset") / "run.yaml"
    reward = JUDGED if is_judged else "reward: {components: [{use: exact}]}\n"
    file.write_text(RUN.format(model=model, staleness=staleness) + reward)

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
    assert found.impossible(MARGINS[preset]) <= today.impossible(MARGINS[preset])
