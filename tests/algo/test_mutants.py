"""Ten bugs that trainers like this one have had, each planted in place of the real function and caught by a named test.

The check named beside a bug must pass without it and fail with it.
"""

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from hone.algo import advantage, algorithm, correction, loss
from hone.algo.segments import segment_mean, segment_sum
from hone.data import pack
from hone.rollout import sampling, scheduler
from hone.train import policy, trainer
from hone.types import Control, Progress

TESTS = Path(__file__).parents[1]


@dataclass(frozen=True)
class Mutant:
    """A bug: `wrong` in place of the function called `name` in `owner`; `check` is the test that fails."""

    name: str
    wrong: Any
    check: str
    """As pytest names it: area/file.py::function."""
    arguments: tuple = ()
    owner: Any = None
    """Module or class; None is the check's own module."""

    def planted(self, check_module) -> AbstractContextManager:
        return mock.patch.object(self.owner or check_module, self.name, self.wrong)


def ratio_after_clipping(*measured):
    found_M = algorithm_measure(*measured).clone()
    found_M[algorithm.MEASURES.index("ratio")] = found_M[algorithm.MEASURES.index("ratio_clipped")]
    return found_M


def sum_for_mean(values_T, mask_T, segment_T, num_segments):
    return segment_sum(values_T * mask_T, segment_T, num_segments)


def normaliser_per_microbatch(model, batch, samples, algorithm, totals, **options):
    return train_microbatch(
        model, batch, samples, algorithm, pack.count_totals(batch.shape.length_S[samples]), **options
    )


def tool_tokens_as_steps(reward_T, value_T, sample_T, mask_T, **options):
    return advantage.gae(reward_T, value_T, sample_T, torch.ones_like(mask_T), **options)


def unclamped_mask(tokens, low, high):
    log_weight_T = tokens.old_logprobs_T - tokens.sampler_logprobs_T
    mean_S = segment_mean(log_weight_T, tokens.loss_mask_T, tokens.sample_T, tokens.num_samples).exp()
    return ((mean_S >= low) & (mean_S <= high))[tokens.sample_T] * log_weight_T.exp()


def clip_after_the_baseline(self, batch):
    bounds, without = self.section.reward_clip, self.section.model_copy(update={"reward_clip": None})
    assigned, metrics = assign(algorithm.Algorithm(without), batch)
    return assigned.with_column("advantages_T", assigned.columns["advantages_T"].clamp(*bounds)), metrics


def misaligned(*arguments, **options):
    """Samples are picked; their advantages and masks are the batch's first."""
    logprobs_T, entropy_T, index_T = forward_samples(*arguments, **options)
    return logprobs_T, entropy_T, torch.arange(len(index_T))


def drops_the_final_token(groups):
    batch = pack.collate(groups)
    length_S = batch.length_S.numpy()
    batch.loss_mask_T[np.cumsum(length_S)[length_S > 0] - 1] = 0
    return batch


def full_softmax_logprobs(logits_BV, controls, uniform_B):
    scale_B1 = torch.from_numpy(controls.temperature_B.astype(np.float32))[:, None]
    full_BV = (logits_BV.float() / scale_B1).log_softmax(-1)
    token_B, _ = sampling.sample(logits_BV, controls, uniform_B)
    return token_B, full_BV.gather(1, token_B[:, None]).squeeze(1)


def forgets_the_controller(values):
    return replace(progress_from_dict(values), control=Control())


algorithm_measure, assign = algorithm.measure, algorithm.Algorithm.assign
train_microbatch, forward_samples = trainer.train_microbatch, trainer.forward_samples
progress_from_dict: Callable = Progress.from_dict

MUTANTS = {
    "mean ratio computed after clipping": Mutant(
        "measure", ratio_after_clipping, "algo/test_loss.py::test_measures_by_hand", owner=algorithm
    ),
    "sum for mean in the sequence ratio": Mutant(
        "segment_mean",
        sum_for_mean,
        "algo/test_loss.py::test_sequence_ratio_is_the_geometric_mean_over_the_policys_own_tokens",
        owner=loss,
    ),
    "normaliser per microbatch": Mutant(
        "train_microbatch",
        normaliser_per_microbatch,
        "train/test_trainer.py::test_gradient_ignores_microbatch_split",
        ("dapo",),
        owner=policy,
    ),
    "tool tokens as time steps": Mutant(
        "gae", tool_tokens_as_steps, "algo/test_returns.py::test_two_hundred_tool_tokens_are_no_steps"
    ),
    "unclamped sequence mask giving 0 x inf": Mutant(
        "sequence_mask",
        unclamped_mask,
        "algo/test_loss.py::test_corrections_are_finite_where_the_weight_is_not",
        (lambda *arguments: correction.sequence_mask(*arguments),),
        owner=correction,
    ),
    "reward clip after the baseline": Mutant(
        "assign",
        clip_after_the_baseline,
        "algo/test_shaping.py::test_the_clip_acts_on_the_raw_reward_and_so_bounds_it",
        owner=algorithm.Algorithm,
    ),
    "shuffle that misaligns": Mutant(
        "forward_samples",
        misaligned,
        "train/test_trainer.py::test_gradient_ignores_microbatch_split",
        ("dapo",),
        owner=trainer,
    ),
    "dropped final token": Mutant(
        "collate", drops_the_final_token, "train/test_pack.py::test_collate_flattens_in_order"
    ),
    "truncated sampling with full-softmax logprobs": Mutant(
        "sample",
        full_softmax_logprobs,
        "rollout/test_engine_numbers.py::test_logprobs_are_of_the_distribution_really_sampled_from",
        ("qwen3", {"temperature": 1.3, "top_k": 20, "top_p": 0.8, "min_p": 0.05}),
        owner=scheduler,
    ),
    "KL coefficient not restored": Mutant(
        "from_dict",
        forgets_the_controller,
        "train/test_critic.py::test_critic_reference_and_controllers_continue_bit_for_bit",
        ("float32",),
        owner=Progress,
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_planted_bug_is_caught(mutant, monkeypatch):
    path, _, name = mutant.check.partition("::")
    monkeypatch.syspath_prepend(TESTS / Path(path).parent)
    module = importlib.import_module(Path(path).stem)
    check = getattr(module, name)
    check(*mutant.arguments)
    with mutant.planted(module), pytest.raises(AssertionError):
        check(*mutant.arguments)
