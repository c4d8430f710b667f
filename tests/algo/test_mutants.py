"""Ten bugs that trainers like this one have had, each planted in the real function and caught by a named test.

A mutant is the function's own source with some words exchanged, compiled and put in the function's place, so that
every importer runs it. The check named beside it must pass on the source as it is, and fail on the mutant.
"""

import __future__

import importlib
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType

import pytest

from hone.algo import algorithm, correction, loss, returns
from hone.data import pack
from hone.rollout import sampling
from hone.train import policy, trainer
from hone.types import Progress

TESTS = Path(__file__).parents[1]


@dataclass(frozen=True)
class Mutant:
    """A bug: in `function`, each first text of `changes` is replaced by the second; `check` is who notices."""

    function: Callable
    changes: dict[str, str]
    check: str
    """As pytest names it: area/file.py::function."""
    arguments: tuple = ()


MUTANTS = {
    "mean ratio computed after clipping": Mutant(
        algorithm._measure,
        {" ratio_T,\n": " bounded_T,\n"},
        "algo/test_loss.py::test_measures_by_hand",
    ),
    "sum for mean in the sequence ratio": Mutant(
        loss.sequence_ratio,
        {
            "segment_mean(log_ratio_T.detach(), tokens.loss_mask_T, tokens.sample_T": (
                "segment_sum(log_ratio_T.detach() * tokens.loss_mask_T, tokens.sample_T"
            )
        },
        "algo/test_loss.py::test_sequence_ratio_is_the_geometric_mean_over_the_policys_own_tokens",
    ),
    "normaliser per microbatch": Mutant(
        policy.PolicyTrainer.accumulate,
        {" totals,\n": " count_totals(batch.shape.length_S[part]),\n"},
        "train/test_trainer.py::test_gradient_ignores_microbatch_split",
        ("dapo",),
    ),
    "tool tokens as time steps": Mutant(
        returns.gae,
        {"own = mask_T.nonzero()[:, 0]": "own = torch.arange(len(mask_T))"},
        "algo/test_returns.py::test_two_hundred_tool_tokens_are_no_steps",
    ),
    "unclamped sequence mask giving 0 x inf": Mutant(
        correction.sequence_mask,
        {
            "torch.where(kept_S[tokens.sample_T], _weight(tokens).clamp(max=high), 0.0)": (
                "kept_S[tokens.sample_T] * (tokens.old_logprobs_T - tokens.sampler_logprobs_T).exp()"
            )
        },
        "algo/test_loss.py::test_corrections_are_finite_where_the_weight_is_not",
        (correction.sequence_mask,),
    ),
    "reward clip after the baseline": Mutant(
        algorithm.Algorithm.assign,
        {
            "reward_S, metrics = self._shaping.of_samples(batch)": (
                "reward_S, metrics = batch.reward_S, self._shaping.of_samples(batch)[1]"
            ),
            "self._credit.function(outcomes)": "self._credit.function(outcomes).clamp(*self.section.reward_clip)",
        },
        "algo/test_shaping.py::test_the_clip_acts_on_the_raw_reward_and_so_bounds_it",
    ),
    "shuffle that misaligns": Mutant(  # samples are picked, their advantages and masks are the batch's first
        trainer.train_microbatch,
        {"batch.columns_CT.index_select(1, index_T)": "batch.columns_CT[:, : len(index_T)]"},
        "train/test_trainer.py::test_gradient_ignores_microbatch_split",
        ("dapo",),
    ),
    "dropped final token": Mutant(
        pack.collate,
        {
            "mask_T = np.repeat((~np.isnan(reward_S)).astype(np.float32), lengths)": (
                "mask_T = np.repeat((~np.isnan(reward_S)).astype(np.float32), lengths)\n"
                "    mask_T[np.cumsum(lengths)[lengths > 0] - 1] = 0"
            )
        },
        "train/test_pack.py::test_collate_flattens_in_order",
    ),
    "truncated sampling with full-softmax logprobs": Mutant(
        sampling.sample,
        {
            "    truncated_B =": "    full_BV = logits_BV.log_softmax(-1)\n    truncated_B =",
            "(probs_BV.gather(1, token_B[:, None]) / mass_B1).log_()": "full_BV.gather(1, token_B[:, None])",
        },
        "rollout/test_engine_numbers.py::test_logprobs_are_of_the_distribution_really_sampled_from",
        ("qwen3", {"temperature": 1.3, "top_k": 20, "top_p": 0.8, "min_p": 0.05}),
    ),
    "KL coefficient not restored": Mutant(
        Progress.from_dict,
        {'Control(**values.get("control", {}))': "Control()"},
        "train/test_critic.py::test_critic_reference_and_controllers_go_on_bit_for_bit",
        ("float32",),
    ),
}


def plain_function(function: Callable) -> FunctionType:
    """The function beneath a class method."""
    return getattr(function, "__func__", function)


def code_of(function: FunctionType, changes: dict[str, str]) -> CodeType:
    """The code of a function whose source was changed; each text must stand there exactly once."""
    source = textwrap.dedent(inspect.getsource(function))
    for right, wrong in changes.items():
        assert source.count(right) == 1, f"{function.__qualname__} has changed: plant the bug anew"
        source = source.replace(right, wrong)
    scope = dict(function.__globals__)
    exec(compile(source, "mutant", "exec", __future__.annotations.compiler_flag, dont_inherit=True), scope)
    return plain_function(scope[function.__name__]).__code__


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_planted_bug_is_caught(mutant, monkeypatch):
    path, _, name = mutant.check.partition("::")
    monkeypatch.syspath_prepend(TESTS / Path(path).parent)
    check = getattr(importlib.import_module(Path(path).stem), name)
    function = plain_function(mutant.function)
    same, wrong = code_of(function, {}), code_of(function, mutant.changes)
    check(*mutant.arguments)
    monkeypatch.setattr(function, "__code__", same)
    check(*mutant.arguments)  # planting by itself changes nothing
    monkeypatch.setattr(function, "__code__", wrong)
    with pytest.raises(AssertionError):
        check(*mutant.arguments)
