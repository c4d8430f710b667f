"""Keys and values of Transformers' classes in the embedded engine: as its own cache has them, and written in place."""

import pytest
import torch
from model_zoo import architecture
from tiny_engines import letters, random_prompts, request, tiny_model
from transformers import DynamicCache
from transformers.cache_utils import DynamicIndexedLayer, LinearAttentionAndSlidingWindowAttentionLayer

from hone.model.load import init_model
from hone.plan.kv_cache import CacheRoom
from hone.rollout import transformers_decoding
from hone.rollout.local import make_stepper
from hone.rollout.rows import RowJob
from hone.rollout.scheduler import Scheduler
from hone.rollout.transformers_decoding import KINDS, TransformersStepper, held_by, with_room

PROMPT, MOST = 5, 90
WINDOW = 7


def theirs_and_ours(kind):
    named = {"sliding_window": WINDOW, "number_of_states": 1}
    return kind(**named), KINDS[kind](MOST, **named)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_holds_what_transformers_own_holds(kind):
    """Prompts, rows that fork from them and end, tokens one by one: to the last number, and so are the masks' sizes."""
    theirs, ours = theirs_and_ours(kind)
    chance, rows = torch.Generator().manual_seed(0), 3
    for step in range(MOST - PROMPT + 1):
        shape = (rows, 2, 1 if step else PROMPT, 4)
        new = torch.randn(shape, generator=chance), torch.randn(shape, generator=chance)
        assert ours.get_mask_sizes(shape[2]) == theirs.get_mask_sizes(shape[2])
        found, expected = ours.update(*new), theirs.update(*new)
        for held, other in zip((*found, ours.keys, ours.values), (*expected, theirs.keys, theirs.values), strict=True):
            assert torch.equal(held, other)
        assert ours.get_seq_length() == theirs.get_seq_length()
        for at, order in ((0, [0, 0, 1, 2, 2]), (30, [4, 1, 2]), (31, [2, 1])):
            if step == at:
                rows = len(order)
                ours.reorder_cache(torch.tensor(order))
                theirs.reorder_cache(torch.tensor(order))


def test_every_kind_of_layer_with_keys_is_made_with_room():
    """Those that Transformers' own file defines; two architectures bring kinds of their own, which stay as they are."""
    for name, kinds in {"gemma3_text": 1, "gpt_oss": 2, "falcon_h1": 1, "lfm2": 2, "mamba": 1}.items():
        model = init_model(architecture(name), vocab_size=None, seed=0, dtype=torch.float32, device="cpu")
        own, roomy = DynamicCache(config=model.hf_config), with_room(model.hf_config, MOST)
        assert len({type(layer) for layer in own.layers}) == kinds
        assert [KINDS.get(type(layer), type(layer)) for layer in own.layers] == [type(layer) for layer in roomy.layers]
    assert {DynamicIndexedLayer, LinearAttentionAndSlidingWindowAttentionLayer} < set(KINDS)


def test_a_wave_copies_a_layer_at_a_time_and_takes_what_was_admitted(monkeypatch):
    """What a token copies is one tensor of one layer, and that rarely; there are never more columns than tokens."""
    sizes, after = [], transformers_decoding.GrowingTokens.after

    def watched(self, kept, new):
        before = self._memory
        out = after(self, kept, new)
        sizes.append(self._memory.nbytes if self._memory is not before else 0)
        return out

    monkeypatch.setattr(transformers_decoding.GrowingTokens, "after", watched)
    model, prompts, samples, tokens = tiny_model("gpt_neox"), random_prompts(3, longest=9), 4, 80
    room = CacheRoom(9, tokens, prompts=3, samples=12, shares_prompts=False)
    stepper = make_stepper(model, 12, 64, room)
    assert isinstance(stepper, TransformersStepper)
    scheduler = Scheduler(stepper, letters, 12)
    for i, prompt in enumerate(prompts):
        scheduler.add(RowJob(request(prompt, index=i, samples=samples, max_tokens=tokens), tokens, ()))
    most = 0
    with torch.no_grad():
        while not scheduler.idle:
            scheduler.step(0)
            most = max(most, scheduler.cache_use().room_bytes)
    copies, width = [size for size in sizes if size], max(map(len, prompts))
    assert len(copies) < len(sizes) / 10
    tensors = 2 * model.hf_config.num_hidden_layers
    assert most == tensors * max(copies)
    of_a_token = most / (12 * (width + tokens))
    assert of_a_token == 2 * model.hf_config.num_hidden_layers * model.hf_config.hidden_size * 4
    assert not list(held_by(stepper._cache))
