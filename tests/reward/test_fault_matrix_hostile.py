"""Responses that attack what scores them, among good ones: they earn the minimum, the others exactly what they earn
without them, and the batch that is trained on holds no other number. (Expressions and patterns that stall a worker are
in test_math_answers.py and test_rule_rewards.py, programs in test_sandbox_hostile.py.)"""

import asyncio
import json
from pathlib import Path

import psutil
import pytest
import torch

from hone.data.pack import collate
from hone.reward.aggregate import component_metrics
from hone.types import Fault

SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "pattern": "^(a+)+$"}}, "required": ["name"]}
BOX = {"type": "title", "x": 100, "y": 50, "width": 800, "height": 100, "text": "Hello"}


def poster(**changes):
    return json.dumps({"layers": [BOX | changes]})


DEEP = '{"layers": ' + "[" * 100_000 + "]" * 100_000 + "}"
MATRIX = {
    # component, answer, good responses, hostile responses
    "regex bomb in a schema": (
        {"use": "json_schema", "args": {"schema": SCHEMA}, "timeout_s": 1.0},
        None,
        ['{"name": "aaa"}', '{"name": 3}', "[]"],
        [json.dumps({"name": "a" * 60 + "!"})],
    ),
    "deep JSON": (
        {"use": "json_schema", "args": {"schema": {"type": "object"}}},
        None,
        ["{}", "[1]", '{"a": [1]}'],
        ['{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "[" * 1_000_000],
    ),
    "lone surrogates": (
        {"use": "math"},
        "4",
        [r"\boxed{4}", r"\boxed{5}", r"\boxed{2^2}"],
        ["\\boxed{\ud800}", "\udfff\ud800", "\x00\x1b[2J"],
    ),
    "posters without end": (
        {"use": "poster"},
        json.loads(poster()) | {"canvas_size": [1000, 1000]},
        [poster(), poster(x=300), poster(text="Help")],
        [
            DEEP,
            json.dumps({"layers": [BOX] * 10_000}),
            poster(text="\ud800" * 300_000),
            '{"layers": [{"x": 1e999}]}',
        ],
    ),
}


def memory_peak_mib(pid):
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def scorers():
    """Processes that score for this one; other tests of the same process may have left it servers of their own."""
    children = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in children if "hone.reward.pool" in " ".join(child.cmdline())]


@pytest.mark.parametrize("name", MATRIX)
def test_a_hostile_response_earns_the_minimum_and_costs_no_other_sample(make_rewards, make_group, name):
    component, answer, good, hostile = MATRIX[name]

    async def run(texts):
        async with make_rewards(component) as rewards:
            return await rewards.score(make_group(*texts, answer=answer))

    clean = asyncio.run(run(good))
    attacked = asyncio.run(run([good[0], *hostile, *good[1:]]))
    last = 1 + len(hostile)
    assert len(set(clean.rewards)) > 1 and None not in clean.rewards
    assert attacked.rewards == (clean.rewards[0], *[0.0] * len(hostile), *clean.rewards[1:])
    batch = collate([attacked])
    assert torch.equal(batch.reward_S, torch.tensor(attacked.rewards)) and batch.loss_mask_T.eq(1).all()
    (scores,) = attacked.scores.values()
    if name != "lone surrogates":  # those are only wrong answers
        assert {score.fault for score in scores[1:last]} == {Fault.MODEL}  # the witness: it did break its scorer
    assert component_metrics([attacked])
    assert not scorers()


def test_a_canvas_of_a_thousand_million_pixels_draws_no_more_than_any_other(make_rewards, make_group):
    """What is drawn is bounded by the settings, whatever the ground truth and the response say of their canvas."""
    sizes = [1000, 31_623, 10**9]
    layers = [{"type": "title", "x": 0, "y": 0, "width": s, "height": s / 10, "text": "Hello"} for s in sizes]

    posters = [{"canvas_size": [size, size], "layers": [layer]} for size, layer in zip(sizes, layers, strict=True)]

    async def run():
        async with make_rewards({"use": "poster"}, max_unscored_frac=1.0) as rewards:
            groups = [await rewards.score(make_group(json.dumps(poster), answer=poster)) for poster in posters]
            return groups, [memory_peak_mib(worker.pid) for worker in scorers()]

    (small, large, huge), peaks_mib = asyncio.run(run())
    assert small.rewards[0] is not None
    assert peaks_mib and max(peaks_mib) < 1000  # 10^9 pixels of three bytes would be 3,000
    for group in (large, huge):
        (score,) = group.scores["poster"]
        assert score.fault in (None, Fault.DATA), score
        assert score.value is None or 0.0 <= score.value <= 1.0
