"""The keys that imported files need: each does what its line of meaning says."""

import asyncio
import json
from types import SimpleNamespace

import pytest
import torch

from hone.algo.algorithm import Algorithm
from hone.assemble.sampling import evaluation_sampling
from hone.assemble.stages import with_length
from hone.config.algorithm import AlgorithmSection
from hone.config.load import load_config
from hone.config.run import DataSection, EvalSection, OptimizerSection
from hone.data.chat import load_tokenizer
from hone.data.prompts import load_prompts, shortened
from hone.errors import ConfigError
from hone.loop.policy import evaluate_if_due
from hone.train.optim import learning_rate
from hone.types import Batch, Control


@pytest.fixture
def run_file(tmp_path):
    """A run on two files of 5 and 2 rows."""
    for name, count in (("a", 5), ("b", 2)):
        rows = [{"prompt": f"{number}+{number}=", "answer": str(2 * number)} for number in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.yaml").write_text(
        "model: {init: {model_type: qwen3}, characters: '0123456789+='}\n"
        "data: {train: [a.jsonl, b.jsonl, b.jsonl], answer_column: answer}\n"
        "reward: {components: [{use: exact}]}\nrollout: {group_size: 2, top_k: 3}\ngate: {enabled: false}\n"
        "algorithm: {ratio: none, clip: none}\ntrain: {prompts_per_step: 4}\nrun: {epochs: 2.5}\n"
    )
    return tmp_path / "run.yaml"


def test_several_sources_are_read_one_after_the_other(run_file):
    config = load_config(run_file).config
    tokenizer = load_tokenizer(config.model, run_file.parent)
    stream = load_prompts(config.data, tokenizer, run_file.parent, seed=0)
    assert [row.answer for row in stream.rows()] == ["0", "2", "4", "6", "8", "0", "2", "0", "2"]
    assert "a.jsonl, b.jsonl" in str(stream.report)


def test_a_missing_source_of_several_is_named(run_file):
    with pytest.raises(ConfigError, match=r"'c\.jsonl' does not exist"):
        load_config(run_file, ["data.train=[a.jsonl, c.jsonl]"])


def test_epochs_give_the_number_of_updates(run_file):
    loaded = load_config(run_file)
    tokenizer = load_tokenizer(loaded.config.model, run_file.parent)
    assert with_length(loaded, tokenizer).config.run.steps == 6, "2.5 x 9 rows / 4 = 5.6"
    plain = load_config(run_file, ["run.epochs=null", "run.steps=3"])
    assert with_length(plain, tokenizer) is plain


def test_evaluation_samples_as_eval_says(run_file):
    config = load_config(run_file).config
    assert (evaluation_sampling(config).top_k, evaluation_sampling(config).top_p) == (3, 1.0)
    own = config.model_copy(update={"eval": EvalSection(top_k=0, top_p=0.7, temperature=0.6)})
    found = evaluation_sampling(own)
    assert (found.top_k, found.top_p, found.temperature) == (0, 0.7, 0.6)


@pytest.mark.parametrize(("before", "step", "evaluates"), [(True, 0, True), (False, 0, False), (False, 10, True)])
def test_before_training(before, step, evaluates):
    calls = []

    async def evaluate():
        calls.append(step)
        return {}

    class Observer:
        def event(self, *args, **kwargs): ...

        def log(self, *args): ...

        def work(self, *args):
            from contextlib import nullcontext

            return nullcontext()

    run = SimpleNamespace(
        progress=SimpleNamespace(step=step, evaluated_step=None),
        config=SimpleNamespace(run=SimpleNamespace(steps=10), eval=EvalSection(before_training=before)),
        evaluate=evaluate,
        observer=Observer(),
        stop=asyncio.Event(),
        is_best_so_far=lambda metrics: False,
    )
    asyncio.run(evaluate_if_due(run))  # type: ignore[arg-type]
    assert bool(calls) == evaluates


@pytest.mark.parametrize(("side", "cut"), [("drop", [1, 2, 3, 4, 5, 6]), ("left", [4, 5, 6]), ("middle", [1, 2, 6])])
def test_too_long(side, cut):
    data = DataSection(train="x", max_prompt_tokens=3, too_long=side)
    assert list(shortened([1, 2, 3, 4, 5, 6], data)) == cut
    assert list(shortened([1, 2, 3], data)) == [1, 2, 3]


def test_warm_up_as_a_fraction():
    settings = OptimizerSection(lr=1.0, warmup_frac=0.25)
    assert [learning_rate(settings, step, 8) for step in range(4)] == [0.5, 1.0, 1.0, 1.0]
    assert learning_rate(OptimizerSection(lr=1.0, warmup_frac=0.25, warmup_steps=4), 0, 8) == 0.25


def test_truncated_responses_leave_the_loss_but_not_the_baseline():
    batch = Batch(
        prompts=((1,),),
        prompt_S=torch.tensor([0, 0]),
        length_S=torch.tensor([2, 1]),
        token_ids_T=torch.tensor([1, 2, 3]),
        loss_mask_T=torch.ones(3),
        sampler_logprobs_T=torch.zeros(3),
        reward_S=torch.tensor([0.0, 1.0]),
        columns={"truncated_S": torch.tensor([1.0, 0.0])},
    )
    section = AlgorithmSection(credit="group_mean", mask_truncated=True)
    found, _ = Algorithm(section, max_response_tokens=2, correction="none", control=Control()).assign(batch)
    assert found.loss_mask_T.tolist() == [0, 0, 1]
    assert found.columns["advantages_T"].tolist() == [0, 0, 0.5]
