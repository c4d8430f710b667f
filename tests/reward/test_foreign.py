"""Reward functions as users of TRL, OpenRLHF and verl have them, in the pool where they run."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import pytest

from hone.errors import ConfigError
from hone.reward.aggregate import component_metrics
from hone.reward.foreign import Unfit, adapted
from hone.reward.resolve import Unusable, load, resolve
from hone.reward.rewards import first_fault
from hone.reward.signature import check_scores, declared_range, overrun_score
from hone.types import Fault, Group, Prompt, Sample, Score, VersionSpan, version_spans

SOURCE = """
import asyncio, sys
from hone.reward import reward

# TRL

def lengths(completions, **kwargs):
    return [float(len(completion)) for completion in completions]

def right(prompts, completions, completion_ids, answer, level, log_metric, log_extra, **kwargs):
    assert prompts == ["2+2="] * len(completions) and set(kwargs) == {"source"}, kwargs
    log_metric("level", level[0])
    log_extra("tokens", [len(ids) for ids in completion_ids])
    return [float(text == gold) for text, gold in zip(completions, answer, strict=True)]

async def some_none(prompts, completions, **kwargs):
    await asyncio.sleep(0.001)
    return [None if text == "5" else 1.0 for text in completions]

def sums(completions, source, answer, **kwargs):
    return [float(text == gold) if task == "sums" else None for text, gold, task in zip(completions, answer, source)]

def chatty(completions, prompts):
    assert prompts[0][-1] == {"role": "user", "content": "2+2="}
    return [float(len(completion[0]["content"])) + (completion[0]["role"] != "assistant") for completion in completions]

def needs_a_column(completions, colour):
    return [1.0] * len(completions)

def weighted(completions, *, bonus, **kwargs):
    return [bonus] * len(completions)

def too_few(completions, **kwargs):
    return [1.0]

class Overlong:
    # as TRL's own are: an object, which looks at token ids alone
    def __init__(self, most, room):
        self.most, self.room = most, room
    def __call__(self, completion_ids, **kwargs):
        assert kwargs["answer"] == ["4"] * len(completion_ids)
        return [-min(1.0, max(0, len(ids) - self.most + self.room) / self.room) for ids in completion_ids]

overlong = Overlong(most=4, room=2)

def blocks_on_a_loop_of_its_own(completions, **kwargs):
    async def one(text):
        return float(len(text))
    async def all_of_them():
        return await asyncio.gather(*map(one, completions))
    return asyncio.run(all_of_them())

# OpenRLHF

def reward_func(queries, prompts, labels, **kwargs):
    assert all(query.startswith(prompt) for query, prompt in zip(queries, prompts))
    return [float(query == prompt + label) for query, prompt, label in zip(queries, prompts, labels)]

def with_tensors(queries, prompts, labels):
    import torch
    rewards = torch.tensor([[1.0], [0.5]])
    return {"rewards": rewards, "scores": rewards.squeeze() / 2, "extra_logs": {"n": torch.tensor([3, 4]), "all": 7}}

def without_rewards(queries, prompts, labels):
    return {"scores": [1.0]}

# verl

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    assert data_source == "sums" and extra_info["level"] == 3
    return solution_str == ground_truth

async def graded(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0.001)
    if solution_str == "break":
        raise KeyError("no such answer")
    return {"score": len(solution_str), "acc": solution_str == ground_truth, "pred": solution_str, "depth": 2}

@reward(minimum=0.0, maximum=1.0)
def bounded(data_source, solution_str, ground_truth, extra_info):
    return 2.0 if solution_str == "5" else 1.0

def without_score(data_source, solution_str, ground_truth, extra_info):
    return {"reward": 1.0}

def loaded(data_source, solution_str, ground_truth, extra_info):
    return float("torch" in sys.modules)
"""
COLUMNS = {"answer": "4", "level": 3, "source": "sums"}


def make_group(*texts: str, messages: tuple[Mapping[str, str], ...] | None = None, columns=COLUMNS) -> Group:
    samples = tuple(
        Sample("p", i, (5,) * len(t), (-0.5,) * len(t), (VersionSpan(0, len(t)),), "stop", t)
        for i, t in enumerate(texts)
    )
    return Group(Prompt("p", 0, "2+2=", (6, 10), answer="4", columns=columns, messages=messages), samples)


@pytest.fixture
def score(make_rewards):
    def score(function, group, **args):
        async def run():
            async with make_rewards(
                {"use": f"mine.py:{function}", "args": args, "name": "it"}, source=SOURCE, max_unscored_frac=1.0
            ) as rewards:
                return await rewards.score(group)

        return asyncio.run(run())

    return score


def test_trl(score):
    assert score("lengths", make_group("4", "55")).rewards == (1.0, 2.0)


def test_trl_gets_columns_ids_and_may_log(score):
    group = score("right", make_group("4", "55"))
    assert group.rewards == (1.0, 0.0)
    assert [s.metrics for s in group.scores["it"]] == [{"level": 3.0, "tokens": 1.0}, {"level": 3.0, "tokens": 2.0}]


def test_trl_s_rewards_of_token_ids_alone(score):
    assert score("overlong", make_group("4", "444", "55555")).rewards == (0.0, -0.5, -1.0)


def test_token_ids_that_did_not_come_are_not_made_up(score):
    group = make_group("4", "55")
    for ids in ((), (-1, -1)):  # a service was sent the text alone, or the number of its tokens
        columns = {"token_ids": ids, "sampler_logprobs": ids, "versions": version_spans([0] * len(ids))}
        without = replace(group, samples=(group.samples[0], replace(group.samples[1], **columns)))
        found = score("overlong", without)
        assert found.rewards == (None, None)
        assert first_fault(found) == (
            "it: data fault: the responses came without 'completion_ids', which the reward asks for"
        )
        assert score("lengths", without).rewards == (1.0, 2.0)


def test_trl_none_for_some_responses_of_a_prompt_is_no_score(score):
    group = score("some_none", make_group("4", "5"))
    assert group.rewards == (1.0, None)
    assert first_fault(group).startswith("it: infra fault: returned None for this response and a score for others")


@pytest.fixture
def score_two(make_rewards):
    """Lengths, of which the reward `sums` is twice to be added: it knows the rows whose source is `sums`."""

    def score(group):
        both = [{"use": "mine.py:lengths"}, {"use": "mine.py:sums", "weight": 2.0}]

        async def run():
            async with make_rewards(*both, source=SOURCE, max_unscored_frac=1.0) as rewards:
                return await rewards.score(group)

        return asyncio.run(run())

    return score


def test_trl_none_for_a_whole_prompt_leaves_the_component_out(score_two):
    """As TRL does it: the rows of another task are rewarded by the other components alone, and nothing is a fault."""
    assert score_two(make_group("4", "55")).rewards == (3.0, 2.0)
    group = score_two(make_group("4", "55", columns=COLUMNS | {"source": "poems"}))
    assert group.rewards == (1.0, 2.0) and first_fault(group) == ""
    assert not any(score.applies for score in group.scores["sums"])
    metrics = component_metrics([group], {"lengths": 1.0, "sums": 2.0})
    assert (metrics["reward/sums_not_applied_frac"], metrics["reward/sums_fault_frac"]) == (1.0, 0.0)
    assert "reward/sums_mean" not in metrics and metrics["reward/lengths_variance_share"] == 1.0


def test_a_row_that_no_component_applies_to_has_no_reward(score):
    group = score("sums", make_group("4", "5", columns=COLUMNS | {"source": "poems"}))
    assert group.rewards == (None, None)
    assert first_fault(group) == "it: data fault: no component of the reward applies to this row"


def test_trl_of_a_chat_gets_messages(score):
    assert score("chatty", make_group("4", "55", messages=({"role": "user", "content": "2+2="},))).rewards == (1.0, 2.0)


def test_a_column_that_the_row_lacks_is_a_fault_of_the_data(score):
    group = score("needs_a_column", make_group("4"))
    assert first_fault(group) == "it: data fault: the row has no column 'colour', which the reward asks for"
    assert score("needs_a_column", make_group("4"), colour="red").rewards == (1.0,)


def test_args_of_the_run_file_are_keyword_arguments(score):
    assert score("weighted", make_group("4"), bonus=0.25).rewards == (0.25,)


def test_a_wrong_length_is_reported(score):
    assert "returned 1 scores for 2 samples" in first_fault(score("too_few", make_group("4", "5")))


def test_a_plain_function_may_run_an_event_loop_of_its_own(score):
    assert score("blocks_on_a_loop_of_its_own", make_group("4", "55")).rewards == (1.0, 2.0)


def test_openrlhf(score):
    assert score("reward_func", make_group("4", "55")).rewards == (1.0, 0.0)


@pytest.mark.slow("imports torch in each worker")
def test_openrlhf_with_tensors_and_logs(score):
    group = score("with_tensors", make_group("4", "55"))
    assert group.rewards == (1.0, 0.5)
    assert [dict(s.metrics) for s in group.scores["it"]] == [
        {"scores": 0.5, "n": 3.0, "all": 7.0},
        {"scores": 0.25, "n": 4.0, "all": 7.0},
    ]


def test_openrlhf_without_rewards_is_reported(score):
    assert first_fault(score("without_rewards", make_group("4"))).endswith("without 'rewards': scores")


def test_verl(score):
    group = make_group("4", "55", columns={"data_source": "sums", "extra_info": {"level": 3}})
    assert score("compute_score", group).rewards == (1.0, 0.0)


def test_verl_takes_what_its_files_call_the_truth(score):
    columns = {"data_source": "sums", "extra_info": {"level": 3}, "reward_model": {"ground_truth": "55"}}
    group = make_group("4", "55", columns=columns)
    unmapped = Group(Prompt("p", 0, "2+2=", (6,), columns=columns), group.samples)
    assert score("compute_score", unmapped).rewards == (0.0, 1.0)


def test_verl_dictionaries_give_metrics_and_one_sample_s_error_is_its_own(score):
    group = score("graded", make_group("4", "break", "55"))
    assert group.rewards == (1.0, None, 2.0)
    assert [dict(s.metrics) for s in group.scores["it"]] == [{"acc": 1.0, "depth": 2.0}, {}, {"acc": 0.0, "depth": 2.0}]
    assert group.scores["it"][1].detail.startswith("raised KeyError: 'no such answer' (mine.py:")


def test_a_declared_range_holds_for_foreign_forms_too(score):
    group = score("bounded", make_group("4", "5"))
    assert group.rewards == (1.0, None)
    assert first_fault(group) == "it: infra fault: gave 2, above its declared maximum 1"


def test_verl_without_score_is_reported(score):
    assert first_fault(score("without_score", make_group("4"))).endswith("without 'score': reward")


def test_nothing_heavy_is_imported_for_them(score):
    assert score("loaded", make_group("4")).rewards == (0.0,)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("def f(completions, queries): pass", r"several forms, completions and queries\. A reward is one of"),
        ("def f(prompts, completions, solution_str): pass", "several forms, completions and solution_str"),
        ("def f(prompts, labels): pass", r"f\(prompts, labels\) has no known form\. A reward is one of"),
        ("def f(prompt, completion, answer): pass", "no known form"),
        ("def f(data_sources, solution_strs): pass", "no known form"),
        ("f = max", "names no parameters that Python can read"),
        ("def f(): pass", r"f\(\) has no known form"),
        ("def f(**kwargs): pass", "no known form"),
        ("def f(*, group): pass", "no known form"),
        ("def f(completions, /): pass", "cannot be given by name"),
        ("def f(completions, trainer_state): pass", "missing a required argument: 'trainer_state'"),
        (
            "def f(data_source, solution_str, ground_truth, reward_router_address): pass",
            "missing a required argument: 'reward_router_address'",
        ),
    ],
)
def test_what_fits_no_form_or_several_cannot_be_had(source, problem, tmp_path):
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(Unusable, match=problem):
        load(resolve("mine.py:f", tmp_path), {})


def test_an_unknown_argument_is_a_problem_of_the_run_file_with_a_hint(make_rewards):
    async def run():
        source = "def f(data_source, solution_str, ground_truth, extra_info, tolerance=0.1): pass"
        async with make_rewards({"use": "mine.py:f", "args": {"tolerence": 1}}, source=source):
            pass

    with pytest.raises(ConfigError, match=r"^reward\.components\.0\.use: .*does not fit.*Did you mean 'tolerance'\?"):
        asyncio.run(run())


def test_what_was_declared_survives():
    def f(completions, *args, **kwargs):
        return [Score(0.0)] * len(completions)

    f.hone_range, f.hone_overrun = declared_range(f), Fault.INFRA  # type: ignore[attr-defined]
    assert overrun_score(adapted(f, "f")) is None
    assert check_scores(adapted(f, "f")(make_group("a")), make_group("a"), declared_range(f)) == (Score(0.0),)


def test_our_own_form_is_left_alone():
    def f(group, limit=3):
        return []

    assert adapted(f, "f") is f
    with pytest.raises(Unfit):
        adapted(lambda response: [], "f")
