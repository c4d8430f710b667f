"""The shared-prompt layout: who stands where, who predicts what, who may look at whom."""

import random

import pytest
import torch

from hone.model.layout import Layout
from hone.sizes import BLOCK_SCORES


def ragged_groups(seed: int, prompt_sizes=(1, 5, 90, 300), response_sizes=(0, 4, 40, 270), vocab: int = 3):
    """Prompts, the prompt of each sample in random order, and responses; some groups small enough to be one square."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(vocab) for _ in range(n)] for n in prompt_sizes]
    samples = [
        (i, [rng.randrange(vocab) for _ in range(rng.randint(0, rng.choice(response_sizes)))])
        for i in range(len(prompts))
        for _ in range(4)
    ]
    samples += samples[:3]
    rng.shuffle(samples)
    return prompts, [prompt for prompt, _ in samples], [response for _, response in samples]


def seen_pairs(layout: Layout) -> set[tuple[int, int]]:
    """(query, key) pairs of X that attention allows, from the blocks; none may appear twice."""
    pairs = []
    for block in layout.blocks:
        seen = (block.bias_BQK == 0) & block.real_BQ[:, :, None]
        b, q, k = seen.nonzero(as_tuple=True)
        pairs += zip(block.query_BQ[b, q].tolist(), block.key_BK[b, k].tolist(), strict=True)
    assert len(pairs) == len(set(pairs))
    return set(pairs)


def test_worked_example():
    a, b, c, d, e, eos = range(6)
    layout = Layout.build([[a, b]], [0, 0, 0], [[c, d, eos], [c, e], [c, d, eos]])
    assert layout.token_ids_X.tolist() == [a, b, c, d, c]
    assert layout.position_X.tolist() == [0, 1, 2, 3, 2]
    assert layout.predict_U.tolist() == [1, 2, 3, 1, 4]
    assert layout.target_U.tolist() == [c, d, eos, c, e]
    assert layout.expand_T is not None and layout.expand_T.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    causal = {(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (3, 0), (3, 1), (3, 2), (3, 3)}
    assert seen_pairs(layout) == causal | {(4, 0), (4, 1), (4, 4)}


def test_nothing_to_merge_needs_no_expansion():
    layout = Layout.build([[1], [1]], [0, 1], [[2, 3], [2, 3]])
    assert layout.expand_T is None
    assert layout.target_U.tolist() == [2, 3, 2, 3]


def test_empty_responses_and_unanswered_prompts_cost_nothing():
    layout = Layout.build([[1, 2], [7, 8, 9], [3]], [2, 0, 2], [[], [5], []])
    assert layout.token_ids_X.tolist() == [1, 2, 3]
    assert layout.target_U.tolist() == [5]
    assert layout.expand_T is not None and layout.expand_T.tolist() == [0]
    nothing = Layout.build([[1]], [0], [[]])
    assert nothing.target_U.tolist() == [] and nothing.token_ids_X.tolist() == [1]


def test_prompt_without_tokens_is_refused():
    with pytest.raises(ValueError, match="prompt 1 has no tokens"):
        Layout.build([[1], []], [0, 1], [[2], [3]])


@pytest.mark.parametrize("seed", range(5))
def test_every_sample_finds_its_own_causal_prefix(seed):
    prompts, prompt_S, responses = ragged_groups(seed)
    layout = Layout.build(prompts, prompt_S, responses)
    ids, position, pairs = layout.token_ids_X.tolist(), layout.position_X.tolist(), seen_pairs(layout)
    keys_of: dict[int, list[int]] = {x: [] for x in range(len(ids))}
    for query, key in pairs:
        keys_of[query].append(key)
    flat = [token for response in responses for token in response]
    expand = range(len(flat)) if layout.expand_T is None else layout.expand_T.tolist()
    assert [layout.target_U.tolist()[u] for u in expand] == flat
    expected = (
        (prompts[prompt] + response)[: len(prompts[prompt]) + t]
        for prompt, response in zip(prompt_S, responses, strict=True)
        for t in range(len(response))
    )
    for u, prefix in zip(expand, expected, strict=True):
        keys = sorted(keys_of[int(layout.predict_U[u])])
        assert [ids[key] for key in keys] == prefix
        assert [position[key] for key in keys] == list(range(len(prefix)))


@pytest.mark.parametrize("seed", range(3))
def test_rows_are_the_same_tokens_padded(seed):
    prompts, prompt_S, responses = ragged_groups(seed)
    layout = Layout.build(prompts, prompt_S, responses)
    rows = layout.rows()
    found = sorted(layout.token_ids_X[i[real]].tolist() for i, real in zip(rows.index_RL, rows.real_RL, strict=True))
    distinct = {(prompt, tuple(response)) for prompt, response in zip(prompt_S, responses, strict=True)}
    assert found == sorted(prompts[prompt] + list(response[:-1]) for prompt, response in distinct)
    assert torch.equal(rows.index_RL.flatten()[rows.predict_U], layout.predict_U)


def test_padding_and_block_size_are_bounded():
    """Three-token and 256-token responses together: the short ones are not padded to the long ones."""
    rng = random.Random(0)
    prompts = [[rng.randrange(100) for _ in range(100)] for _ in range(32)]
    responses = [[rng.randrange(100) for _ in range(rng.choice((3, 256)))] for _ in range(256)]
    layout = Layout.build(prompts, [i // 8 for i in range(256)], responses)
    useful = sum(int(((b.bias_BQK == 0) & b.real_BQ[:, :, None]).sum()) for b in layout.blocks)
    padded = sum(block.bias_BQK.numel() for block in layout.blocks)
    assert padded < 2.5 * useful  # a causal square alone is twice its useful half
    assert max(block.bias_BQK.numel() for block in layout.blocks) <= 1.3 * BLOCK_SCORES  # sizes are rounded up
    assert len(layout.blocks) < 60


def test_long_sequences_are_cut_so_that_blocks_stay_bounded():
    layout = Layout.build([list(range(6000))], [0], [list(range(3000))])
    assert max(block.bias_BQK.numel() for block in layout.blocks) <= 1.3 * BLOCK_SCORES  # sizes are rounded up
    assert layout.num_tokens == 8999 and len(layout.token_ids_X) == 9024


def test_flat_arrays_give_the_same_layout():
    prompts, prompt_S, responses = ragged_groups(7)
    lists = Layout.build(prompts, prompt_S, responses)
    lengths = torch.tensor([len(response) for response in responses])
    flat = torch.tensor([token for response in responses for token in response])
    arrays = Layout.from_flat(prompts, torch.tensor(prompt_S), lengths, flat)
    assert torch.equal(lists.token_ids_X, arrays.token_ids_X)
    assert torch.equal(lists.query_slot_3X, arrays.query_slot_3X)
