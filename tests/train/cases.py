"""A small model in float64, a ragged batch, and the rows that the trainer's tests run over."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from ruamel.yaml import YAML

import hone.config
from hone.algo.algorithm import Algorithm
from hone.config.algorithm import AlgorithmSection
from hone.config.run import OptimizerSection
from hone.data.pack import collate
from hone.model.load import init_model
from hone.train.learner import Learner, Passes
from hone.train.policy import PolicyTrainer
from hone.train.roles import Reference, Roles
from hone.types import Batch, Group, Prompt, Sample, VersionSpan

VOCAB, MAX_TOKENS = 13, 6
ARCHITECTURE = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}

PRESET_FILES = sorted((Path(hone.config.__file__).parent / "presets" / "algorithm").glob("*.yaml"))
ROWS = {path.stem: AlgorithmSection(**YAML(typ="safe").load(path)["algorithm"]) for path in PRESET_FILES}
ROWS["kl_and_entropy"] = AlgorithmSection(
    aggregate="token_mean", kl_loss_coef=0.2, kl_estimator="k2", entropy_coef=0.05
)
ROWS["kl_cov"] = AlgorithmSection(clip="kl_cov", kl_cov=(0.1, 0.5), aggregate="token_mean")
ROWS["dppo"] = AlgorithmSection(clip="tv_mask", clip_low=0.15, clip_high=0.15, dual_clip=20.0, aggregate="token_mean")
ROWS["chosen_tokens"] = AlgorithmSection(top_entropy_frac=0.5, rejection="sample_mean_k2", rejection_high=1.0)


def algorithm_of(name: str) -> Algorithm:
    return Algorithm(ROWS[name], max_response_tokens=MAX_TOKENS)


def make_model(
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    implementation: Literal["hone", "transformers"] = "hone",
    vocab_size: int = VOCAB,
):
    model = init_model(
        ARCHITECTURE, vocab_size=vocab_size, seed=seed, dtype=dtype, device="cpu", implementation=implementation
    )
    with torch.no_grad():
        for weight in model.parameters():  # at the usual 0.02 every token would be as likely as the next
            if weight.dim() == 2:
                weight.mul_(10)
    return model


def make_passes(precision="float64", **changes) -> Passes:
    options = {"temperature": 1.0, "tokens_per_microbatch": 10_000, "logprob_chunk_tokens": 64} | changes
    return Passes(precision=precision, **options)


def make_trainer(model=None, *, precision="float64", steps=10, optimizer=None, reference=None, **changes):
    of_passes = {name: changes.pop(name) for name in list(changes) if name in Passes.__dataclass_fields__}
    passes = make_passes(precision, **of_passes)
    policy = PolicyTrainer(
        model or make_model(dtype=getattr(torch, precision)),
        passes,
        optimizer=optimizer or OptimizerSection(lr=1e-2, weight_decay=0.1),
        total_optimizer_steps=steps,
    )
    return Roles(policy=policy, reference=Reference(reference, passes) if reference else None, **changes)


def make_groups(seed: int = 0, *, num_groups: int = 5, group_size: int = 4) -> list[Group]:
    """Prompts of 2 to 6 tokens, responses of 1 to 6; identical samples, an unscored one, a group of equal rewards."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    groups = []
    for n in range(num_groups):
        prompt = Prompt(f"p{n}", n, "", tuple(draw(0, VOCAB - 1) for _ in range(draw(2, 6))))
        samples = []
        for g in range(group_size):
            tokens = tuple(draw(0, VOCAB - 1) for _ in range(draw(1, MAX_TOKENS)))
            if g == group_size - 1:
                tokens = samples[0].token_ids
            logprobs = tuple(-0.5 - 0.1 * draw(0, 30) for _ in tokens)
            mask = None if draw(0, 3) else tuple(i != 1 for i in range(len(tokens)))
            samples.append(Sample(prompt.id, g, tokens, logprobs, (VersionSpan(0, len(tokens)),), "stop", "", mask))
        rewards = [float(draw(0, 3)) for _ in samples]
        if n == 1:
            rewards[1] = None
        if n == 2:
            rewards = [1.0] * group_size
        groups.append(Group(prompt, tuple(samples), {}, tuple(rewards)))
    return groups


def make_batch(groups: list[Group], algorithm: Algorithm, *, moved: bool = True) -> Batch:
    """Collated, with advantages; where `moved`, old and reference logprobs that differ from the policy's."""
    batch = collate(groups)
    # Functions of the token alone, so that reordered groups bring the same columns.
    base = -2.0 + 0.1 * batch.token_ids_T.double()
    columns = {"old_logprobs_T": base, "ref_logprobs_T": base - 0.3}
    extra = {
        "value_T": 0.1 * batch.token_ids_T.double(),
        "greedy_reward_N": torch.ones(len(groups)),
        "greedy_truncated_N": torch.zeros(len(groups)),
        "greedy_length_N": torch.ones(len(groups)),
    }
    batch, _ = algorithm.assign(replace(batch, columns={**batch.columns, **columns, **extra}))
    kept = {name: column for name, column in batch.columns.items() if moved or name not in columns}
    return replace(batch, columns=kept)


def caught_gradient(learner: Learner, update: Callable[[], dict[str, float]]) -> tuple[dict[str, float], torch.Tensor]:
    """What an update of one optimizer step measured, and the gradient that it applied, caught before it was."""
    caught = []
    step = learner.optimizer.step
    learner.optimizer.step = lambda *agree: (caught.append(learner.held.grad.clone()), step(*agree))[1]
    try:
        metrics = update()
    finally:
        learner.optimizer.step = step
    assert len(caught) == 1
    return metrics, caught[0]


def gradient(trainer: Roles, batch: Batch, algorithm: Algorithm) -> torch.Tensor:
    """The gradient of one policy update."""
    return caught_gradient(trainer.policy, lambda: trainer.update(batch, algorithm))[1]


def assert_same_state(first: Roles, second: Roles) -> None:
    """Every tensor that a checkpoint would hold, and every number beside them."""
    (ours, rest), (theirs, other) = first.state(), second.state()
    assert rest == other
    assert set(ours) == set(theirs)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
