"""What attention takes besides activations, and weights under way: the plan's terms against what the code holds."""

import math

import pytest
import torch

from hone.config.load import load_config
from hone.model import ring
from hone.model.attention import _Workspace
from hone.model.layout import Layout
from hone.model.ring import RingPlan
from hone.model.sequence import _with_filler
from hone.model.varlen_attention import FLASH, _operators
from hone.plan import activations
from hone.plan.activations import Pass, attention_bytes, ring_per_token
from hone.plan.families import architecture_from
from hone.plan.hardware import find_hardware
from hone.plan.planner import plan
from hone.sizes import BLOCK_SCORES
from hone.train.tracing.memory import LiveMemory, fake_tensors

SHAPE = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 65536,
    "vocab_size": 100,
    "tie_word_embeddings": True,
}
ARCHITECTURE = architecture_from(SHAPE)


def layout_of(prompts, prompt_tokens, samples, response_tokens):
    words = [[n] * prompt_tokens for n in range(prompts)]
    responses = [[n, s] + [1] * (response_tokens - 2) for n in range(prompts) for s in range(samples)]
    return Layout.build(words, [n for n in range(prompts) for _ in range(samples)], responses)


def work_of(layout, longest, **more):
    options = {"bytes_each": 4, "tokens": layout.num_tokens, "response_tokens": 1, "longest": longest} | more
    return Pass(ARCHITECTURE, "hone", **options)


@pytest.mark.parametrize(
    ("shape", "longest"),
    [((1, 10, 1, 8000), 8009), ((2, 500, 1, 3000), 3499), ((1, 2000, 4, 700), 2699), ((2, 200, 8, 400), 599)],
)
def test_masks_and_indices_of_blocks_are_counted(shape, longest):
    layout, heads, kv_heads = layout_of(*shape), 4, 2
    q, k = (torch.zeros(len(layout.token_ids_X), count, 16) for count in (heads, kv_heads))
    blocks, output_rows = _Workspace(layout).plan(q, k, k, None)
    held = [output_rows, layout.query_slot_3X]
    for rows in blocks:
        held += [rows.block.query_BQ, rows.block.key_BK, rows.block.bias_BQK]
        held += [rows.queries, rows.keys, rows.values, rows.outputs, rows.sums]
    measured = sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}.values())
    prompts, prompt, samples, response = shape
    work = work_of(layout, longest, prompt=prompt, response_tokens=prompts * samples * response)
    scores = min(BLOCK_SCORES, layout.num_tokens * longest)
    planned = attention_bytes(work, backward=False) - 4 * scores * heads
    assert 0.85 < planned / measured < 1.15


def test_flash_attention_has_places_alone():
    layout = layout_of(1, 100, 1, 30_000)
    on_gpu = work_of(layout, 30_099, bytes_each=2, on_cuda=True)
    assert on_gpu.is_flash and attention_bytes(on_gpu, backward=True) == 8 * layout.num_tokens
    for others in ({"on_cuda": False}, {"bytes_each": 4}):
        by_blocks = work_of(layout, 30_099, **{"bytes_each": 2, "on_cuda": True, **others})
        assert not by_blocks.is_flash and attention_bytes(by_blocks, backward=True) > 2**30
    wide = architecture_from(SHAPE | {"head_dim": 512})
    assert not Pass(wide, "hone", 2, 10, 1, 10, on_cuda=True).is_flash


class Shift:
    """Stands for what comes from another rank."""

    def __init__(self, x, by, group):
        self.sent, self.out = x.contiguous(), torch.empty_like(x)

    def arrived(self):
        return self.out


def peak_of(memory, work):
    """Most bytes beyond those before, and what `work` returns."""
    before, memory.peaks = memory.now, {}
    found = work()
    return max(memory.peaks.values()) - before, found


@pytest.mark.parametrize("ranks", [3, 4])
def test_chunks_of_a_ring_are_counted(monkeypatch, ranks):
    """Operators of GPUs on tensors without numbers, of one rank."""
    layout = _with_filler(layout_of(1, 40, 1, 960), 2 * ranks)
    monkeypatch.setattr(ring, "_Shift", Shift)
    ring_plan, each = RingPlan(layout, ranks, ranks - 1), len(layout.token_ids_X) // ranks
    memory = LiveMemory()
    with fake_tensors(memory):
        q = torch.empty(each, 4, 16, dtype=torch.bfloat16, requires_grad=True)
        k, v = (torch.empty(each, 2, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        forward, out = peak_of(memory, lambda: ring._RingAttention.apply(q, k, v, ring_plan, FLASH, None))
        grad = torch.empty_like(out)
        backward, _ = peak_of(memory, lambda: torch.autograd.grad(out, (q, k, v), grad))
    one_head = replace_heads(kv_heads=1)
    work = Pass(one_head, "hone", 2, each, 1, 1000, sequence_parallel=ranks, on_cuda=True)
    assert work.ring == ranks and not work.exchanges
    work = Pass(ARCHITECTURE, "hone", 2, each, 1, 1000, sequence_parallel=ranks, on_cuda=True)
    assert ring_per_token(work, backward=False) * each == pytest.approx(forward, rel=0.08)
    rel = 0.08 if _operators().groups_queries else 0.15  # before torch 2.13 heads of keys and values are repeated
    assert ring_per_token(work, backward=True) * each == pytest.approx(backward, rel=rel)


def replace_heads(kv_heads):
    return architecture_from(SHAPE | {"num_key_value_heads": kv_heads})


def test_ranks_that_divide_heads_need_no_ring():
    eight = replace_heads(4)
    sizes = {ways: Pass(eight, "hone", 2, 10, 1, 10, sequence_parallel=ways) for ways in (1, 2, 4, 8, 6)}
    assert {ways: (work.ring, work.exchanges) for ways, work in sizes.items()} == {
        1: (1, False),
        2: (1, True),
        4: (1, True),
        8: (2, True),
        6: (3, True),
    }
    assert math.isclose(activations.saved_per_token(sizes[8]), activations.saved_per_token(sizes[2]))


@pytest.fixture
def planned(tmp_path):
    def make(*words, hardware="8xH100-80G"):
        file = tmp_path / "run.yaml"
        file.write_text("data: {train: a/b, answer_column: answer}\nreward: {components: [{use: exact}]}\n")
        words = ("model.path=Qwen/Qwen3-8B", "cluster.backend=ray", "run.precision=bfloat16", *words)
        return plan(load_config(file, list(words)).config, find_hardware(hardware))

    return make


def published(found):
    """Terms of the moment in which weights are published, of the first kind of device and of the host."""
    ledgers = found.ledgers[0], found.ledgers[-1]
    moments = [[one for one in ledger.moments if one.phase == "publish"] for ledger in ledgers]
    return [{term.name: term.bytes for one in of_one for term in one.terms} for of_one in moments]


def test_weights_under_way_are_where_the_transport_has_them(planned):
    """The embedding, 1.2 GB in bfloat16, has a bucket of its own size."""
    together = ("cluster.devices_per_node=8", "cluster.engines.use=vllm")
    embedding, layer = 2 * 151936 * 4096, 2 * 192_946_432
    device, host = published(planned(*together))
    assert device["gathered weight"] == embedding
    assert device["weights under way"] == pytest.approx(2 * embedding + 2**28 + layer, rel=0.01)
    assert not host, "from device to device"
    device, host = published(planned(*together, "cluster.transport=ray"))
    assert "weights under way" not in device and device["gathered weight"] == embedding
    assert host["weights under way"] == 2 * (embedding + 2**28), "in the object store, and at the sender"
    _, host = published(planned(*together, "cluster.transport=ray", "cluster.engines.tensor_parallel_size=2"))
    assert host["weights under way"] == 2 * (embedding + 2**28) + 4 * embedding, "and a file for each engine's workers"
