"""The `reward_model` reward: the scores of Transformers' own class, normalised as stored, failures as typed faults."""

import asyncio
import json
import math
import time
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from hone.data.chat import character_tokenizer
from hone.errors import ConfigError
from hone.model.heads import ScalarModel, reward_config
from hone.model.load import init_model, save_hf
from hone.types import Fault, Group, Prompt, Sample, VersionSpan

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 24,
}
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ m.role[0] }}:{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture
def save_model(tmp_path):
    """A reward model of random weights in tmp_path/rm; returns its tokenizer."""

    def save(*, mean=None, std=None, form="text", template=None, pad=True, foreign=False, scale=0.3):
        tokenizer = character_tokenizer("0123456789+-*/= :ua")
        tokenizer.chat_template = template
        torch.manual_seed(0)
        if foreign:
            config = AutoConfig.for_model(
                "gpt2", vocab_size=len(tokenizer), n_embd=16, n_layer=2, n_head=2, n_positions=24, num_labels=1
            )
            config.pad_token_id = tokenizer.pad_token_id if pad else None
            model = AutoModelForSequenceClassification.from_config(config)
            weights = model.state_dict().items()
            config.architectures = ["GPT2ForSequenceClassification"]
        else:
            keys = {"model_type": "qwen3", "tie_word_embeddings": False, **SIZES}
            body = init_model(keys, vocab_size=len(tokenizer), seed=0, dtype=torch.float32, device="cpu")
            model = ScalarModel(body)
            with torch.no_grad():
                for weight in (p for p in model.parameters() if p.dim() == 2):
                    weight.copy_(torch.randn(weight.shape) * scale)
            config = reward_config(model.hf_config, pad_id=tokenizer.pad_token_id if pad else None, form=form)
            weights = model.named_weights()
        if mean is not None:
            config.hone_reward_mean, config.hone_reward_std = mean, std
        save_hf(tmp_path / "rm", config, weights, tokenizer)
        return tokenizer

    return save


def score(make_rewards, group, *, timeout_s=10.0, **args):
    async def run():
        component = {"use": "reward_model", "args": {"path": "rm", "device": "cpu", **args}, "timeout_s": timeout_s}
        async with make_rewards(component, max_unscored_frac=1.0) as rewards:
            return await rewards.score(group)

    return asyncio.run(run())


def reference(tmp_path, tokenizer, texts):
    """What Transformers says of each text alone."""
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm")
    with torch.no_grad():
        return [float(model(torch.tensor([tokenizer(text)["input_ids"]])).logits[0, 0]) for text in texts]


@pytest.mark.parametrize("foreign", [False, True])
@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("batch_tokens", [1, 12, 1000])
def test_scores_are_those_of_transformers_however_batched(
    save_model, make_rewards, make_group, tmp_path, foreign, pad, batch_tokens
):
    tokenizer = save_model(foreign=foreign, pad=pad)
    group = score(make_rewards, make_group("24", "7", "24", "", "2400"), batch_tokens=batch_tokens)
    answers = ["24", "7", "24", "", "2400"]
    wanted = reference(tmp_path, tokenizer, [f"48/2={answer}<eos>" for answer in answers])
    assert group.rewards == pytest.approx(wanted, abs=1e-5)
    assert len(set(wanted)) == 4, "the model tells them apart"


def test_text_is_scored_never_the_policys_tokens(save_model, make_rewards, make_group):
    save_model()
    one, other = make_group("24", "7"), make_group("24", "7")
    samples = tuple(
        Sample("p1", i, (9, 9, 9), (0.0,) * 3, (VersionSpan(0, 3),), "length", sample.text)
        for i, sample in enumerate(one.samples)
    )
    assert score(make_rewards, one).rewards == score(make_rewards, Group(other.prompt, samples)).rewards


def test_a_chat_goes_through_the_models_own_template(save_model, make_rewards, make_group, tmp_path):
    tokenizer = save_model(form="chat", template=TEMPLATE)
    plain = make_group("24")
    messages = ({"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"})
    chat = Group(Prompt("p", 0, "the policy's own rendering", (1,), messages=messages), plain.samples)
    found = [*score(make_rewards, plain).rewards, *score(make_rewards, chat).rewards]
    assert found == pytest.approx(
        reference(tmp_path, tokenizer, ["u:48/2=<eos>a:24<eos>", "u:1+1=<eos>a:2<eos>a:24<eos>"]), abs=1e-5
    )


def test_without_a_stored_form_a_chat_template_decides(save_model, make_rewards, make_group, tmp_path):
    tokenizer = save_model(foreign=True, template=TEMPLATE)
    (found,) = score(make_rewards, make_group("24")).rewards
    assert found == pytest.approx(reference(tmp_path, tokenizer, ["u:48/2=<eos>a:24<eos>"])[0], abs=1e-5)


def test_normalised_is_score_minus_mean_over_std(save_model, make_rewards, make_group):
    save_model(mean=0.5, std=4.0)
    raw = score(make_rewards, make_group("24", "7")).rewards
    normalised = score(make_rewards, make_group("24", "7"), normalize=True).rewards
    assert normalised == pytest.approx([(value - 0.5) / 4 for value in raw])


def test_the_scale_that_openrlhf_stored_is_read(save_model, make_rewards, make_group, tmp_path):
    save_model()
    raw = score(make_rewards, make_group("24", "7")).rewards
    file = next(tmp_path.rglob("config.json"))
    file.write_text(json.dumps(json.loads(file.read_text()) | {"mean": 0.5, "std": 4.0}))
    normalised = score(make_rewards, make_group("24", "7"), normalize=True).rewards
    assert normalised == pytest.approx([(value - 0.5) / 4 for value in raw])


@pytest.mark.parametrize(
    ("stored", "problem"),
    [
        ({}, "normalize: true, but the model's config.json has no hone_reward_mean"),
        ({"mean": 0.0, "std": 0.0}, "hone_reward_std = 0.0; both must be finite"),
    ],
)
def test_normalising_by_nothing_is_an_error(save_model, make_rewards, make_group, stored, problem):
    save_model(**stored)
    with pytest.raises(ConfigError, match=problem):
        score(make_rewards, make_group("24"), normalize=True)
    assert score(make_rewards, make_group("24")).rewards[0] is not None


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({"path": "nothing/like/this"}, "reward_model: model nothing/like/this: no directory at"),
        ({"normalise": True}, "args.normalise: Extra inputs are not permitted"),
        ({"batch_tokens": 0}, "args.batch_tokens"),
    ],
)
def test_wrong_args_are_named_before_anything_starts(save_model, make_rewards, make_group, args, problem):
    save_model()
    with pytest.raises(ConfigError, match=problem):
        score(make_rewards, make_group("24"), **args)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"id2label": {"0": "bad", "1": "good"}, "label2id": {"bad": 0, "good": 1}}, "has 2 labels"),
        ({"hone_reward_form": "chat"}, "no chat template"),
    ],
)
def test_what_is_no_reward_model_is_refused(save_model, make_rewards, make_group, tmp_path, change, problem):
    save_model()
    file = tmp_path / "rm" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ConfigError, match=problem):
        score(make_rewards, make_group("24"))


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("x", "character 'x'"),
        ("1" * 30, "36 tokens are more than the 24"),
        ("1<eos>a:right", "spells '<eos>', a special token of the reward model"),
    ],
)
def test_a_response_that_cannot_be_read_earns_the_least_of_its_group_or_the_declared_minimum(
    save_model, make_rewards, make_group, text, detail
):
    save_model()
    alone = score(make_rewards, make_group("24", "7", "2400"))
    least = min(alone.rewards)
    group = score(make_rewards, make_group("24", text, "7", text, "2400"))
    assert group.rewards == (alone.rewards[0], least, alone.rewards[1], least, alone.rewards[2])
    bad = group.scores["reward_model"][1]
    assert bad.fault is Fault.MODEL and detail in bad.detail
    (unknown,) = score(make_rewards, make_group(text)).scores["reward_model"]
    assert (unknown.value, unknown.fault) == (None, Fault.DATA)
    middle = sorted(alone.rewards)[1]
    declared = score(make_rewards, make_group("24", text, "7", "2400"), minimum=middle)
    assert declared.rewards[1] == middle and min(declared.rewards) == middle
    assert score(make_rewards, make_group(text), minimum=-3).rewards == (-3.0,)


def test_a_prompt_that_cannot_be_read_is_the_datas_fault(save_model, make_rewards, make_group):
    save_model()
    group = make_group("24", "x")
    for text in ("x", "1" * 30):
        long = replace(group, prompt=replace(group.prompt, text=text))
        assert [s.fault for s in score(make_rewards, long, minimum=-1).scores["reward_model"]] == [Fault.DATA] * 2


def test_messages_for_a_model_of_plain_text_are_the_datas_fault(save_model, make_rewards, make_group):
    save_model()
    plain = make_group("24")
    chat = Group(Prompt("p", 0, "", (1,), messages=({"role": "user", "content": "1+1="},)), plain.samples)
    (found,) = score(make_rewards, chat).scores["reward_model"]
    assert found.fault is Fault.DATA and "reads plain text" in found.detail


def test_a_score_that_is_no_number_is_our_fault(save_model, make_rewards, make_group):
    save_model(scale=math.inf)
    (found,) = score(make_rewards, make_group("24")).scores["reward_model"]
    assert found.value is None and found.fault is Fault.INFRA and "not a finite number" in found.detail


def test_a_slow_model_is_given_up_and_the_event_loop_stays_free(save_model, make_rewards, make_group, monkeypatch):
    from hone.reward.reward_model import OwnModel

    save_model()
    scores = OwnModel.scores
    calls = []

    def slow(self, conversations, batch_tokens):
        calls.append(len(conversations))
        if len(calls) == 1:
            time.sleep(1.2)
        yield from scores(self, conversations, batch_tokens)

    monkeypatch.setattr(OwnModel, "scores", slow)

    async def run():
        component = {"use": "reward_model", "args": {"path": "rm", "device": "cpu"}, "timeout_s": 0.5}
        async with make_rewards(component, max_unscored_frac=1.0) as rewards:
            scoring = asyncio.create_task(rewards.score(make_group("24")))
            ticks = 0
            while not scoring.done():
                await asyncio.sleep(0.01)
                ticks += 1
            await asyncio.sleep(1)
            return ticks, scoring.result(), await rewards.score(make_group("24"))

    ticks, late, next_one = asyncio.run(run())
    (fault,) = late.scores["reward_model"]
    assert fault.fault is Fault.INFRA and fault.detail == "not done within 0.5 s (timeout_s)"
    assert ticks >= 5 and next_one.rewards[0] is not None


def test_a_model_that_raises_is_our_fault(save_model, make_rewards, make_group, monkeypatch):
    from hone.reward.reward_model import OwnModel

    def raises(self, conversations, batch_tokens):
        raise torch.OutOfMemoryError("no memory left")

    save_model()
    monkeypatch.setattr(OwnModel, "scores", raises)
    (found,) = score(make_rewards, make_group("24")).scores["reward_model"]
    assert found.fault is Fault.INFRA and "no memory left" in found.detail
