"""docs/cluster.md: its tables and figures are the planner's, its messages what is really said, its files there."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from hone.config.load import load_config
from hone.config.topology import topology_lines, topology_of
from hone.errors import ConfigError
from hone.plan.hardware import find_hardware, in_cluster
from hone.plan.ledger import percent
from hone.plan.planner import Plan, plan
from hone.sizes import GIB

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cluster.md").read_text("utf-8")
SIZES = (
    ("cluster/grpo-8b.yaml", "H100-80G"),
    ("judge/grm-16b.yaml", "A100-80G"),
    ("cluster/ppo-70b-hybrid.yaml", "A100-80G"),
    ("cluster/ppo-70b-thirds.yaml", "A100-80G"),
    ("cluster/ppo-70b-separate.yaml", "A100-80G"),
    ("cluster/grpo-70b.yaml", "H100-80G"),
)


def planned(name: str, hardware: str, overrides: Sequence[str] = ()) -> Plan:
    loaded = load_config(ROOT / "examples" / name, overrides)
    machine = in_cluster(find_hardware(hardware), hardware, loaded.config)
    return plan(loaded.config, machine, folder=loaded.run_file.parent)


def row(name: str, hardware: str) -> str:
    """A row of the page's table."""
    found = planned(name, hardware)
    names = {ledger: re.sub(r".*\((.*)\)", r"\1", ledger.device) for ledger in found.ledgers}
    peaks = ", ".join(f"{names[ledger]} {ledger.peak.bytes / GIB:,.0f}" for ledger in found.ledgers)
    fullest = max(found.ledgers, key=lambda ledger: ledger.peak.bytes / ledger.capacity_bytes)
    share = percent(fullest.peak.bytes / fullest.capacity_bytes)
    term = fullest.peak.largest.name
    phase = max(found.time.phases, key=lambda name: found.time.phases[name])
    cells = (
        f"[{Path(name).stem}](../examples/{name})",
        found.inputs.hardware.title,
        peaks,
        f"{share} of {names[fullest]}, {fullest.peak.phase}: {term}",
        f"{found.time.step_s:,.0f}",
        f"{phase} {found.time.phases[phase]:,.0f}",
    )
    return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize(("name", "hardware"), SIZES)
def test_the_table_is_the_planners(name, hardware):
    assert row(name, hardware) in PAGE


LAYOUTS = ("hybrid", "thirds", "separate")


def test_what_one_learns_from_it_is_so():
    hybrid, thirds, separate = (planned(f"cluster/ppo-70b-{name}.yaml", "A100-80G") for name in LAYOUTS)
    assert f"takes {hybrid.time.step_s:.0f} s with all models on all of them and {thirds.time.step_s:.0f} s" in PAGE
    assert separate.time.step_s > 0.99 * thirds.time.step_s
    on_gpus = planned("cluster/ppo-70b-hybrid.yaml", "A100-80G", ["cluster.trainer.offload=[]"])
    assert on_gpus.verdict.level == "does not fit"
    today = planned("cluster/grpo-70b.yaml", "H100-80G")
    pools = "cluster.pools={train: {devices: 256, roles: [policy]}, sample: {devices: 512, roles: [rollout]}}"
    more = planned("cluster/grpo-70b.yaml", "H100-80G", [pools, "cluster.nodes=96"])
    larger = planned("cluster/grpo-70b.yaml", "H100-80G", ["cluster.engines.tensor_parallel_size=8"])
    assert f"shorten a step by {percent(1 - more.time.step_s / today.time.step_s)}, because" in PAGE
    assert f"instead of 4 shorten it by {percent(1 - larger.time.step_s / today.time.step_s)}." in PAGE.replace(
        "\n  ", " "
    )


LAYOUTS = ("hybrid", "thirds", "separate")


def test_the_placement_shown_is_that_of_the_example():
    config = load_config(ROOT / "examples/cluster/arithmetic-ray.yaml").config
    assert "\n".join(topology_lines(topology_of(config))) in PAGE


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("separate", ["cluster.nodes=6"]),
        (
            "hybrid",
            [
                "cluster.nodes=1",
                "cluster.pools={all: {devices: 8, roles: [policy, rollout, reference, critic, reward_model]}, "
                "besides: {devices: 8, roles: [critic, reward_model]}}",
            ],
        ),
    ],
)
def test_messages_shown_are_really_said(name, overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(ROOT / f"examples/cluster/ppo-70b-{name}.yaml", overrides)
    said = [problem for problem in caught.value.problems if "devices; there are" in problem]
    assert said[0].partition("  ")[2].strip() in PAGE.replace("\n", " ")


def test_every_layout_is_shown():
    runs = {path.name for path in (ROOT / "examples" / "cluster").glob("*.yaml")} - {"ppo-70b.yaml", "kuberay.yaml"}
    assert runs == {name for name in runs if name in PAGE}


if __name__ == "__main__":
    print("\n".join(row(*size) for size in SIZES))
