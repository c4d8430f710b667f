"""Rows that have sampled the same tokens are computed once, and what they cost to store moves as they part and end."""

import numpy as np
import pytest
import torch
from tiny_engines import VOCAB, generate, request, tiny_model

from hone.plan.kv_cache import columns_for
from hone.rollout.cache import KeyValueStore
from hone.rollout.decoding import DecoderStepper
from hone.rollout.local import whole_room
from hone.rollout.rows import RowJob, Rows
from hone.sizes import round_size
from hone.types import version_spans


def test_rows_give_what_each_has_drawn_under_which_versions():
    rows = Rows(3)
    rows.add(RowJob(request([5], samples=3, max_tokens=9), 9, ()), 2)
    tokens, versions = np.arange(12).reshape(4, 3), (4, 4, 4, 6)
    for step, version in enumerate(versions):
        if step == 2:
            rows.add(RowJob(request([5], samples=1, max_tokens=9), 9, ()), 1)
        rows.append(tokens[step, : rows.count], -tokens[step, : rows.count] / 4, version)
    for row, first in ((2, 2), (0, 0)):
        [(token_ids, logprobs, spans)] = rows.drawn(np.array([row]))
        assert token_ids.tolist() == tokens[first:, row].tolist()
        assert (logprobs == -token_ids / 4).all() and logprobs.dtype == np.float32
        assert spans == version_spans(versions[first:])
    together = list(rows.drawn(np.array([2, 1])))
    assert [token_ids.tolist() for token_ids, _, _ in together] == [[8, 11], [1, 4, 7, 10]]
    assert [spans for _, _, spans in together] == [((4, 1), (6, 1)), ((4, 3), (6, 1))]
    assert not together[0][0].flags.writeable and not together[0][1].flags.writeable


def counting(model):
    """The number of tokens of each of the model's forward passes, as they come."""
    counts = []
    model.register_forward_pre_hook(lambda _, arguments: counts.append(len(arguments[0])))
    return counts


def test_samples_that_agree_are_computed_once():
    model = tiny_model()
    counts = counting(model)
    greedy = request([5, 9, 17], samples=8, temperature=0.0, max_tokens=6)
    [samples] = generate(model, [greedy], eos_ids=())
    assert len({sample.token_ids.tobytes() for sample in samples}) == 1
    assert counts == [3, 1, 1, 1, 1, 1]  # the prompt, then one token for all eight; the last token is not read


def test_each_step_computes_as_many_tokens_as_there_are_different_beginnings():
    model = tiny_model()
    counts = counting(model)
    groups = generate(model, [request([5, 9], index=i, samples=16, temperature=0.4, max_tokens=5) for i in range(3)])
    beginnings = [
        {(i, s.token_ids[:n].tobytes()) for i, group in enumerate(groups) for s in group if len(s.token_ids) > n}
        for n in range(1, 5)
    ]
    assert counts == [6, *(round_size(len(found)) for found in beginnings if found)]
    assert counts[1] < counts[2] < 48  # the samples parted, step by step


def test_stepping_with_shared_beginnings_gives_the_logits_of_each_row_alone():
    """Random forks, deaths and arrivals, against one row at a time in a stepper of its own."""
    model, chance = tiny_model(), np.random.default_rng(0)
    prompts = [tuple(chance.integers(1, VOCAB, length).tolist()) for length in (3, 7, 5)]
    stepper = stepper_of(model, 24)
    rows: list[tuple[int, list[int]]] = []
    with torch.no_grad():
        for _ in range(3):
            ids = stepper.add_prompts(prompts)
            arriving = [prompt for prompt in range(3) for _ in range(4)]
            logits = stepper.add_rows([ids[prompt] for prompt in arriving], [()] * len(arriving))
            assert close(logits, [alone(model, prompts[prompt], []) for prompt in arriving])
            rows += [(prompt, []) for prompt in arriving]
            for prompt_id in ids:
                stepper.release_prompt(prompt_id)
            for step in range(7):
                tokens = chance.integers(1, 4, len(rows))
                logits = stepper.advance(tokens)
                for (_, taken), token in zip(rows, tokens.tolist(), strict=True):
                    taken.append(token)
                if step in (0, 3, 6):
                    assert close(logits, [alone(model, prompts[prompt], taken) for prompt, taken in rows])
            keep = chance.permutation(len(rows))[:6]
            stepper.move_rows(np.arange(6), keep, 6)
            rows = [(rows[row][0], list(rows[row][1])) for row in keep]


def stepper_of(model, max_rows):
    return DecoderStepper(model, max_rows, room=whole_room(model, max_rows))


def alone(model, prompt, taken):
    stepper = stepper_of(model, 1)
    logits = stepper.add_rows(stepper.add_prompts([prompt]), [()])
    for token in taken:
        logits = stepper.advance(np.array([token]))
    return logits[0]


def close(logits_BV, expected):
    return torch.allclose(logits_BV, torch.stack(expected), atol=1e-4)


def test_prompts_whose_rows_have_ended_make_room_for_the_next():
    """Also where the last rows ended all at once, so that nothing was advanced after them."""
    stepper = stepper_of(tiny_model(), 24)
    with torch.no_grad():
        for _ in range(3):
            ids = stepper.add_prompts([(5, 9, 17)] * 8)
            stepper.add_rows(ids, [()] * 8)
            for prompt_id in ids:
                stepper.release_prompt(prompt_id)
            stepper.advance(np.arange(8))
            stepper.move_rows(np.arange(0), np.arange(0), 0)
            assert stepper._store.prompts.slots == 8


def filled_store(room_tokens=200):
    """Two layers of three heads of four, with numbers in both regions."""
    store = KeyValueStore(2, 3, 4, torch.empty(0))
    store.free(room_tokens)
    for region, slots, columns in ((store.prompts, 3, 7), (store.responses, 5, 6)):
        region.lay_out(slots, columns, live=0)
        assert not region.data.any()
        region.data.copy_(torch.randn(region.data.shape))
    return store


@pytest.mark.parametrize("which", ["prompts", "responses"])
@pytest.mark.parametrize(("slots", "columns"), [(5, 4), (5, 7), (5, 16), (9, 2), (3, 6), (2, 20)])
def test_a_new_layout_keeps_what_fits_and_leaves_the_other_alone(which, slots, columns):
    store = filled_store()
    region, other = (store.prompts, store.responses)[:: 1 if which == "prompts" else -1]
    before, beside = region.data.clone(), other.data.clone()
    region.lay_out(slots, columns, live=4)
    live, kept = min(4, slots, before.shape[2]), min(columns, before.shape[4])
    assert (region.slots, region.columns) == (slots, columns)
    assert torch.equal(region.data[:, :, :live, :, :kept], before[:, :, :live, :, :kept])
    assert torch.equal(other.data, beside)
    assert region.data.isfinite().all()
    keys, _ = region.read(1, 1, slots)
    assert keys.is_contiguous()


def test_a_layout_beyond_the_room_is_an_error():
    store = filled_store()
    store.responses.lay_out(25, 7, live=5)
    with pytest.raises(AssertionError, match="room"):
        store.prompts.lay_out(4, 7, live=3)


def test_a_store_takes_all_of_its_room_and_gives_it_back():
    store = filled_store(room_tokens=300)
    assert store.num_bytes == 2 * 2 * 3 * 300 * 4 * 4
    store.free(100)
    assert (store.num_bytes, store.responses.tokens, store.prompts.tokens) == (0, 0, 0)
    store.responses.lay_out(5, 6, live=0)
    assert store.num_bytes == 2 * 2 * 3 * 100 * 4 * 4


def test_columns_grow_in_steps_of_a_quarter_at_most():
    assert [columns_for(n) for n in (1, 16, 17, 64, 65, 129, 300, 5000)] == [16, 16, 32, 64, 80, 160, 320, 5120]
    for tokens in range(1, 5000):
        assert tokens <= columns_for(tokens) <= max(tokens + 16, tokens * 1.25)
