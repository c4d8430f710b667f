"""`hone check` makes every reward from its args, also those that ask a service and those that one serves."""

import asyncio

import pytest

from hone.config.load import load_config
from hone.run import check as preflight

RUN = """\
model: {characters: "0123456789", init: {model_type: llama}}
data: {train: rows.jsonl}
reward: {components: [{use: service, args: {service: sums}}]}
services: {sums: {reward: served.yaml}}
"""
SERVED = "reward: {components: [{use: exact}]}\n"


def problems(folder, *overrides, served=SERVED):
    (folder / "run.yaml").write_text(RUN)
    (folder / "served.yaml").write_text(served)
    (folder / "rows.jsonl").write_text('{"prompt": "1"}\n')
    loaded = load_config(folder / "run.yaml", overrides)
    return [problem for problem in asyncio.run(preflight.check(loaded)).problems if "reward" in problem]


def test_args_of_a_reward_whose_service_does_not_run_yet(tmp_path, monkeypatch):
    monkeypatch.delenv("NO_SUCH_TOKEN", raising=False)
    assert problems(tmp_path) == []
    (problem,) = problems(tmp_path, "reward.components.0.args.mod=groupwise")
    assert "reward.components.0.use: args.mod: Extra inputs are not permitted" in problem
    (problem,) = problems(tmp_path, "reward.components.0.args.token_env=NO_SUCH_TOKEN")
    assert "NO_SUCH_TOKEN is not set" in problem


@pytest.mark.parametrize(
    ("served", "said"),
    [
        ("reward: {components: [{use: exat}]}\n", "Did you mean exact?"),
        ("reward: {componets: [{use: exact}]}\n", "Did you mean reward.components?"),
        (
            "reward: {components: [{use: service, args: {service: sums}}]}\n",
            "This file has none; add it there, or give",
        ),
    ],
)
def test_what_a_service_would_serve(tmp_path, served, said):
    problem, *_ = problems(tmp_path, served=served)
    assert "run.yaml:4  services.sums.reward: " in problem and said in problem


def test_a_slow_reward_is_seen_to_be_waited_for(tmp_path, capsys):
    slow = "import time\ndef score(group):\n    time.sleep(3)\n    return [0.0 for _ in group.samples]\n"
    (tmp_path / "slow.py").write_text(slow)
    (tmp_path / "run.yaml").write_text(RUN.partition("reward:")[0] + "reward: {components: [{use: 'slow.py:score'}]}\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1"}\n')
    asyncio.run(preflight.check(load_config(tmp_path / "run.yaml")))
    assert "scoring with score: 0 of 1 rows (0%), " in capsys.readouterr().err
