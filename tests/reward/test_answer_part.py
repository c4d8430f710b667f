"""`sample.reasoning` and `sample.answer_text`, and rewards that read the answer alone."""

import asyncio

import pytest

from hone.config.run import RewardComponent, RewardSection
from hone.reward.rewards import Rewards
from hone.types import Group, Prompt, Sample, VersionSpan


def sample(text: str, index: int = 0) -> Sample:
    return Sample("p", index, (1,), (0.0,), (VersionSpan(0, 1),), "stop", text)


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("<think>\n2+2\n</think>\n\n4", "2+2", "4"),
        ("2+2 is\n</think>4", "2+2 is", "4"),
        ("<think>\n\n</think>\n\n4", "", "4"),
        ("<think>2+2 and", "2+2 and", ""),
        ("[THINK]a[/THINK]b", "a", "b"),
        ("a < b, so 4", "", "a < b, so 4"),
    ],
)
def test_parts_of_a_response(text, reasoning, answer):
    assert (sample(text).reasoning, sample(text).answer_text) == (reasoning, answer)


@pytest.mark.parametrize(("reads", "scores"), [("response", (0.0, 1.0)), ("answer", (1.0, 1.0))])
def test_a_component_reads_the_answer_where_it_says_so(tmp_path, reads, scores):
    settings = RewardSection(components=(RewardComponent(use="exact", reads=reads),))
    group = Group(Prompt("p", 0, "2+2=", (1,), answer="4"), (sample("<think>a</think>4"), sample("4", 1)))

    async def scored() -> Group:
        async with Rewards.from_config(settings, tmp_path, window_samples=10) as rewards:
            return await rewards.score(group)

    found = asyncio.run(scored())
    assert found.rewards == scores
    assert found.samples == group.samples  # what is trained on and recorded is the whole response
