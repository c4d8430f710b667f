"""Decoding steps as CUDA graphs, on a CPU: a recording is replayed operator by operator."""

import logging
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from captures import CheckedGraphs
from tiny_engines import letters, random_prompts, request, tiny_model

from hone.plan.kv_cache import CacheRoom
from hone.rollout.decoding import DecoderStepper
from hone.rollout.graphs import CudaCapture, StepGraphs
from hone.rollout.local import LocalEngine, graphs_on, make_stepper, whole_room
from hone.rollout.rows import RowJob
from hone.rollout.scheduler import Scheduler
from hone.sizes import round_size
from hone.train.optim import FlatWeights


def asked(count=7, samples=6, longest=32):
    return [
        request(p, index=i, samples=samples, max_tokens=longest - 9 * (i % 3))
        for i, p in enumerate(random_prompts(count))
    ]


def sampled(model, requests, graphs=None, room=None, max_rows=32):
    """Samples of all requests, by prompt, and their scheduler."""
    found = {}
    stepper = make_stepper(model, max_rows, 64, room or whole_room(model, max_rows), graphs=graphs)
    scheduler = Scheduler(stepper, letters, max_rows)
    for one in requests:
        scheduler.add(RowJob(one, one.sampling.max_tokens, (0,)))
    with torch.no_grad():
        while not scheduler.idle:
            found |= {job.request.prompt.id: job.samples for job in scheduler.step(0)}
    return found, scheduler


def checked(model, **settings):
    """Graphs that are compared with running each step; `stepper` must be set to theirs."""

    def kept():
        return [*model.parameters(), *model.buffers(), graphs.stepper._store.memory]

    graphs = CheckedGraphs(kept, **settings)
    return graphs


@pytest.fixture
def watched(monkeypatch):
    """Steppers know their graphs, and the other way round."""
    init = DecoderStepper.__init__

    def watching(self, *args, graphs=None, **settings):
        if graphs is not None:
            graphs.stepper = self
        init(self, *args, graphs=graphs, **settings)

    monkeypatch.setattr(DecoderStepper, "__init__", watching)


def same(found, expected):
    assert found.keys() == expected.keys()
    for prompt, samples in expected.items():
        for a, b in zip(found[prompt], samples, strict=True):
            assert (a.index, a.finish_reason, a.token_ids.tolist()) == (b.index, b.finish_reason, b.token_ids.tolist())
            assert a.sampler_logprobs == pytest.approx(b.sampler_logprobs, abs=1e-5)


@pytest.mark.parametrize(
    "architecture", ["qwen3", pytest.param("qwen2", marks=pytest.mark.slow("the same with biases"))]
)
def test_samples_are_the_same_with_graphs(architecture, watched):
    """Rows fork, end, and others come; every replay is compared with the step that it stands for."""
    model = tiny_model(architecture)
    expected, _ = sampled(model, asked())
    graphs = checked(model)
    found, _ = sampled(model, asked(), graphs)
    same(found, expected)
    assert graphs.counts["replayed"] > 10 and graphs.counts["recorded"] > 5


@pytest.mark.slow("decodes the same samples in two caches")
def test_samples_are_the_same_where_the_cache_runs_out(watched):
    """Then sizes are not rounded up, and rows leave and come back."""
    model, room = tiny_model(), CacheRoom(20, 50, prompts=8, samples=32, most_tokens=150)
    requests, graphs = asked(2, 5, longest=50), checked(model)
    expected, without = sampled(model, requests, room=room)
    found, scheduler = sampled(model, requests, graphs, room)
    same(found, expected)
    assert graphs.counts["replayed"]
    assert scheduler.preempted == without.preempted > 0


def test_sizes_of_one_bucket_have_one_graph(watched):
    """33 to 36 prompts of 41 to 44 tokens, of which one has 17 or 18 rows, one after another."""
    model, chance = tiny_model(), np.random.default_rng(0)
    graphs = checked(model)
    stepper = DecoderStepper(model, 512, room=whole_room(model, 512), graphs=graphs)
    with torch.no_grad():
        for prompts, width, rows in ((33, 44, 18), (36, 41, 17), (35, 42, 17), (34, 43, 18)):
            ids = stepper.add_prompts([tuple(chance.integers(1, 40, width).tolist()) for _ in range(prompts)])
            each = [prompt for n, prompt in enumerate(ids) for _ in range(rows if n == 3 else 1)]
            stepper.add_rows(each, [()] * len(each))
            for prompt in ids:
                stepper.release_prompt(prompt)
            many = np.arange(len(each)) % 40
            for _ in range(3):
                stepper.advance(many)
            stepper.move_rows(np.arange(0), np.arange(0), 0)
    assert {name: graphs.counts[name] for name in ("eager", "recorded", "replayed")} == {
        "eager": 1,
        "recorded": 1,
        "replayed": 10,
    }
    assert (stepper._store.prompts.slots, stepper._store.prompts.columns) == (round_size(36), round_size(43))


def test_graphs_end_with_the_memory_that_they_read(watched):
    model = tiny_model()
    graphs = checked(model)
    stepper = DecoderStepper(model, 8, room=whole_room(model, 8), graphs=graphs)

    def decode():
        [prompt] = stepper.add_prompts([(5, 9)])
        stepper.add_rows([prompt], [()])
        for token in range(3):
            stepper.advance(np.array([token]))
        stepper.move_rows(np.arange(0), np.arange(0), 0)
        stepper.release_prompt(prompt)

    with torch.no_grad():
        decode()
        assert len(graphs.captures) == 1 and graphs.counts["replayed"] == 1
        decode()
        assert len(graphs.captures) == 1 and graphs.counts["replayed"] == 4, (
            "the second time there is nothing to record"
        )
        stepper.clear()
        decode()
        assert len(graphs.captures) == 2
        weight = next(model.parameters())
        weight.data = weight.data.clone()
        decode()
        assert len(graphs.captures) == 3, "a weight has moved"
        model.rope_table = model.rope_table.clone()
        decode()
        assert len(graphs.captures) == 4, "what rotates queries and keys has moved"


def test_publishing_and_training_leave_weights_where_they_are():
    model = tiny_model()
    flat = FlatWeights(model, torch.bfloat16)
    where = [weight.data_ptr() for weight in (*model.parameters(), *model.buffers())]
    with torch.no_grad():
        model.load_weights([(name, weight.clone() + 1) for name, weight in model.named_weights()])
        flat.master += 1
        flat.refresh()
        with flat._showing_master():
            pass
    assert [weight.data_ptr() for weight in (*model.parameters(), *model.buffers())] == where


def test_only_so_many_graphs_are_kept(watched):
    model = tiny_model()
    graphs = checked(model, most=2)
    found, _ = sampled(model, asked(), graphs)
    assert len(graphs._graphs) == 2
    same(found, sampled(model, asked())[0])


def test_a_step_that_cannot_be_recorded_is_said_once(caplog):
    def fails(step, inputs):
        raise torch.AcceleratorError("operation not permitted when stream is capturing\nmore of it")

    model, graphs = tiny_model(), StepGraphs(lambda: fails)
    with caplog.at_level(logging.WARNING, "hone"):
        found, _ = sampled(model, asked(), graphs)
    same(found, sampled(model, asked())[0])
    assert [record.getMessage() for record in caplog.records] == [
        "decoding runs without CUDA graphs, more slowly: recording a step failed with AcceleratorError: operation not "
        "permitted when stream is capturing. Set cluster.engines.enforce_eager=true to not try."
    ]


def test_memory_that_runs_out_while_a_step_is_recorded_is_reported_and_recording_is_tried_again():
    tried = []

    def full(step, inputs):
        tried.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    graphs, x = StepGraphs(lambda: full), torch.arange(4.0)
    for _ in range(2):
        assert torch.equal(graphs.run("here", lambda x: x + 1, (x,)), x + 1)
        with pytest.raises(torch.OutOfMemoryError):
            graphs.run("here", lambda x: x + 1, (x,))
    assert len(tried) == 2


def faulty(step):
    """Graphs of a step that a stepper must not have, run three times with another number from the host each time."""
    held = torch.zeros(4)
    graphs = CheckedGraphs(lambda: [held])
    for number in range(3):
        graphs.run("here", lambda x, number=number: step(x, number), (torch.arange(4.0),))


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (lambda x, n: x + n, "not what would be run"),
        (lambda x, n: x[: n + 1] * 2, "not what would be run"),
        (lambda x, n: x * 2 if x.sum().item() else x, "waits"),
        (lambda x, n: x.nonzero()[:, 0].float(), "waits"),
        (lambda x, n: x.double().float(), "waits"),  # as `.to` of another device is
        (lambda x, n: x + torch.from_numpy(np.full(4, n, np.float32)), "does not own"),
    ],
)
def test_the_check_finds_what_a_graph_must_not_do(step, why):
    with pytest.raises(AssertionError, match=why):
        faulty(step)
    faulty(lambda x, n: (x + 1) * 2)


def test_cpus_have_no_graphs():
    assert graphs_on(torch.device("cpu")) is None
    assert isinstance(graphs_on(torch.device("cuda")), StepGraphs)


def test_enforce_eager_means_no_graphs(monkeypatch):
    monkeypatch.setattr("hone.rollout.local.graphs_on", lambda device: StepGraphs(lambda: None))
    settings = {"decode": letters, "eos_ids": (), "max_concurrent": 4, "timeout_s": 9.0}
    for eager in (False, True):
        engine = LocalEngine(tiny_model(), **settings, enforce_eager=eager)
        assert (engine._scheduler._stepper._graphs is None) is eager


def test_a_cuda_capture_is_on_a_stream_of_its_own_and_says_why_it_failed(monkeypatch):
    """Order of calls against a fake of CUDA; what they do there, only a GPU can tell."""
    calls = []

    class Stream:
        def __init__(self, device):
            self.device = device

        def wait_stream(self, other):
            calls.append(f"{self.device} waits for {other.device}")

    class Graph:
        def capture_begin(self, **settings):
            calls.append(settings)

        def capture_end(self):
            calls.append("end")
            if "failing" in calls:
                raise RuntimeError("a previous error")

        def replay(self):
            calls.append("replay")

    def fails(x):
        calls.append("failing")
        raise torch.AcceleratorError("synchronises")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("outer"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    capture, begin = CudaCapture("side"), {"pool": "pool", "capture_error_mode": "thread_local"}
    replay, out = capture(lambda x: x + 1, [torch.zeros(1)])
    replay()
    assert calls == ["side waits for outer", begin, "end", "outer waits for side", "replay"] and out == 1
    calls.clear()
    with pytest.raises(torch.AcceleratorError, match="synchronises"):
        capture(fails, [torch.zeros(1)])
    assert calls == ["side waits for outer", begin, "failing", "end"]
