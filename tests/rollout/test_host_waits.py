"""Where the host waits for its device: the embedded engine once for each token, to learn what was drawn, the trainer a
few times in an update, however many microbatches that has."""

from collections import Counter

import pytest
import torch
from model_zoo import architecture
from tiny_engines import letters, random_prompts, request, tiny_model
from torch.overrides import TorchFunctionMode

from hone.model.hf import TransformersModel
from hone.model.load import init_model
from hone.plan.kv_cache import CacheRoom
from hone.rollout.local import make_stepper, whole_room
from hone.rollout.rows import RowJob
from hone.rollout.scheduler import Scheduler
from hone.tools.acceptance.setting import make_algorithm, make_trainer, random_batch, update

WAITING = {
    "cpu",
    "item",
    "tolist",
    "nonzero",
    "unique",
    "masked_select",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
}


class Waits(TorchFunctionMode):
    """Counts what would wait for a GPU, or copy to it and wait. Works on a CPU: it looks at calls, not at devices.

    Args:
        moves: whether calls of `to` with a device count; a library makes them of tensors that are there already.
    """

    def __init__(self, *, moves=True):
        super().__init__()
        self.counts, self.moves = Counter(), moves

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        moves = name == "to" and any(isinstance(one, torch.device | str) for one in (*args[1:], kwargs.get("device")))
        makes = name in ("tensor", "as_tensor") and "device" in kwargs
        if name in WAITING or makes or (self.moves and moves and not kwargs.get("non_blocking")):
            self.counts[name] += 1
        return func(*args, **kwargs)


def counted(model, requests, room=None, *, moves=True):
    """(waits of each step, rows of each step)."""
    room = room or whole_room(model, 32)
    scheduler, steps = Scheduler(make_stepper(model, 32, 64, room), letters, 32), []
    for one in requests:
        scheduler.add(RowJob(one, one.sampling.max_tokens, (0,)))
    with torch.no_grad():
        while not scheduler.idle:
            with Waits(moves=moves) as waits:
                scheduler.step(0)
                scheduler.cache_use()  # as the engine does after each step
            steps.append(waits.counts)
    return steps, scheduler


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.01}, {"stop": ("QQ",)}],
)
def test_a_step_waits_for_its_device_once(sampling):
    """Steps in which rows fork, end, and others come; a step may draw nothing, and then waits not at all."""
    asked = [request(p, index=i, samples=8, max_tokens=9 + i, **sampling) for i, p in enumerate(random_prompts(6))]
    steps, _ = counted(tiny_model(), asked)
    assert len(steps) > 20
    assert {tuple(step.items()) for step in steps} == {(("cpu", 1),)}


@pytest.mark.slow("decodes long samples in a small cache")
def test_samples_that_leave_and_come_back_wait_for_nothing_more():
    asked = [request(p, index=i, samples=6, max_tokens=60) for i, p in enumerate(random_prompts(4))]
    steps, scheduler = counted(tiny_model(), asked, CacheRoom(20, 60, prompts=8, samples=32, most_tokens=250))
    assert scheduler.preempted
    assert {tuple(step.items()) for step in steps} == {(("cpu", 1),)}


EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CLASSES = {
    "gpt_neox": {},
    "qwen3_moe": EXPERTS,
    "gemma3_text": {"sliding_window": 8},
    "gpt_oss": {**EXPERTS, "sliding_window": 8},
}


IN_ROWS = ["gemma2", "qwen3_5_text", "lfm2", "falcon_h1", "nemotron_h", "mamba", "llama4_text", "doge"]
"""Classes that compute padded rows in training: capped scores, states, chunks, masks of their own."""
MORE = pytest.mark.slow("builds many architectures")
PADDED = pytest.mark.parametrize("padded", [True, False], ids=["padded", "alike"])


@pytest.mark.parametrize("model_type", CLASSES)
@PADDED
def test_transformers_classes_wait_no_more(model_type, padded):
    """Whether rows have padding is known on the host, so no mask is looked at. A wave begins with its prompts."""
    model = tiny_model("llama", model_type=model_type, head_dim=16, **CLASSES[model_type])
    assert isinstance(model, TransformersModel) and model.why_rows is None
    assert_waits_once(model, padded)


@pytest.mark.parametrize("model_type", [*IN_ROWS[:3], *(pytest.param(name, marks=MORE) for name in IN_ROWS[3:])])
@PADDED
def test_classes_that_train_in_padded_rows_wait_no_more(model_type, padded):
    model = init_model(architecture(model_type), vocab_size=None, seed=0, dtype=torch.float32, device="cpu")
    assert isinstance(model, TransformersModel) and model.why_rows is not None
    assert_waits_once(model, padded)


def assert_waits_once(model, padded):
    prompts = random_prompts(4)
    prompts = prompts if padded else [(prompts[0] * 9)[:7]] * 4
    asked = [request(p, index=i, samples=4, max_tokens=9 + i) for i, p in enumerate(prompts)]
    (_, *steps), _ = counted(model, asked, moves=False)
    assert len(steps) > 8
    assert {tuple(step.items()) for step in steps} == {(("cpu", 1),)}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_further_microbatches_wait_for_nothing(precision):
    """An update waits to send the batch's columns, to read two norms, and to read what the loss measured."""
    algorithm = make_algorithm()
    batch = random_batch([40] * 8, 4, vocab=32, prompt_tokens=8)
    for tokens, microbatches in ((200, 2), (100, 4), (50, 8)):
        trainer = make_trainer(tiny_model(), precision, tokens)
        update(trainer, batch, algorithm)
        with Waits() as waits:
            metrics = update(trainer, batch, algorithm)
        waits.counts.pop("cpu")  # of the batch's tensors, which are there already
        assert metrics["train/microbatches"] == microbatches
        assert waits.counts == {"to": 3, "__float__": 2, "tolist": 1}
