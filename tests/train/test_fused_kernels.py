"""Fused kernels against the steps that they replace: numbers, passes over memory, and no compilation per length."""

import re
import shutil
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from cases import algorithm_of, gradient, make_batch, make_groups, make_model, make_trainer
from needs import needs
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from hone.config.run import LoraSection
from hone.model import kernels
from hone.model.fused import rms_norm, swiglu
from hone.model.kernels import use_fused_kernels
from hone.model.logprobs import PLAIN, LogitMap, token_logprobs
from hone.model.lora import add_adapter
from hone.train.trainer import PreparedBatch, forward_samples

compiles = [
    pytest.mark.slow("compiles kernels with a C++ compiler"),
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch.compile's own
    needs("a C++ compiler", any(map(shutil.which, ("c++", "g++", "clang++")))),
]


@pytest.fixture
def fused():
    """Turns fused kernels on and off; afterwards they are off, and nothing is known of the compiler."""
    yield use_fused_kernels
    use_fused_kernels(None)
    kernels._switch.is_tried = False


@pytest.fixture
def uncompiled(fused, monkeypatch):
    """Fused kernels, on, as the formulas that would be compiled."""
    monkeypatch.setattr(kernels, "_compiled", lambda function: function)
    fused("cpu")


def vocabulary(tokens, logit_map=PLAIN, *, entropy_grad=False, dtype=torch.float64, vocab=17, chunk_tokens=5):
    """Logprobs and entropies of random tokens, and the gradients of a sum of both."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(rows, 6, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for rows in (tokens, vocab)
    )
    target = torch.randint(vocab, (tokens,), generator=generator)
    options = {"temperature": 0.7, "entropy_grad": entropy_grad, "logit_map": logit_map}
    logprob, entropy = token_logprobs(hidden, weight, target, chunk_tokens=chunk_tokens, **options)
    direction = torch.linspace(-1, 2, tokens, dtype=logprob.dtype)
    loss = (direction * logprob).sum() + entropy_grad * (direction.flip(0) * entropy).sum()
    return logprob.detach(), entropy.detach(), *torch.autograd.grad(loss, (hidden, weight))


@pytest.mark.parametrize("logit_map", [PLAIN, LogitMap(0.5), LogitMap(2.0, 3.0)], ids=str)
@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("chunk_tokens", [5, 100])
def test_the_vocabulary_s_formulas(uncompiled, logit_map, entropy_grad, chunk_tokens):
    options = {"logit_map": logit_map, "entropy_grad": entropy_grad, "chunk_tokens": chunk_tokens}
    ours = vocabulary(13, **options)
    use_fused_kernels(None)
    torch.testing.assert_close(ours, vocabulary(13, **options), rtol=1e-12, atol=1e-12)


def test_a_compiler_that_fails_is_said_once_and_replaced(fused, monkeypatch):
    def broken(function):
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(kernels, "_compiled", broken)
    fused("cpu")
    with pytest.warns(RuntimeWarning, match=r"run\.fused_kernels is off .*: Failed to find C compiler\. Results"):
        ours = vocabulary(7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(ours, vocabulary(7), atol=0, rtol=0)


class OfSize(TorchDispatchMode):
    """Counts operators with a tensor of this number of elements, besides those that are compiled."""

    def __init__(self, size):
        super().__init__()
        self.size, self.names = size, Counter()

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in (*args, result) if isinstance(x, torch.Tensor)]
        self.names[func._schema.name.removeprefix("aten::")] += any(x.numel() == self.size for x in tensors)
        return result


class TestCompiled:
    pytestmark = compiles

    def test_an_update_is_the_same(self, fused):
        """Logprobs and gradients, with activation checkpointing and without, and with an adapter."""
        algorithm = algorithm_of("kl_and_entropy")
        batch = make_batch(make_groups(), algorithm)

        def computed(device_type, checkpointing="none", lora=False):
            fused(device_type)
            model = make_model()
            if lora:
                add_adapter(model, LoraSection(rank=2), seed=0, dtype=torch.float64)
            model.checkpointing = checkpointing
            trainer = make_trainer(model)
            return trainer.logprobs(batch), gradient(trainer, batch, algorithm)

        plain = computed(None)
        assert plain[1].norm() > 0.1
        before = counters["stats"]["unique_graphs"]
        for checkpointing in ("none", "selective", "full"):
            ours = computed("cpu", checkpointing)
            torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-11, msg=checkpointing)
        assert counters["stats"]["unique_graphs"] > before, "something was compiled"
        torch.testing.assert_close(computed("cpu", lora=True), computed(None, lora=True), rtol=1e-11, atol=1e-11)

    def test_logprobs_are_the_same_to_the_bit_with_gradients_and_without(self, fused):
        """So that the ratio of a first optimizer step is 1."""
        fused("cpu")
        trainer, batch = make_trainer(), make_batch(make_groups(), algorithm_of("dr_grpo"))
        prepared = PreparedBatch.of(batch, (), torch.float64, torch.device("cpu"))
        every = np.arange(len(batch.length_S))
        logprobs_T, _, index = forward_samples(trainer.policy.model, prepared, every, temperature=1.0, chunk_tokens=64)
        assert logprobs_T.requires_grad and torch.equal(logprobs_T.detach(), trainer.logprobs(batch)[index])

    def test_new_lengths_compile_nothing(self, fused):
        fused("cpu")
        trainer, algorithm = make_trainer(), algorithm_of("dr_grpo")
        trainer.update(make_batch(make_groups(), algorithm), algorithm)
        before = counters["stats"]["unique_graphs"]
        for groups in (1, 2, 4, 7):
            trainer.update(make_batch(make_groups(groups, num_groups=groups), algorithm), algorithm)
        assert counters["stats"]["unique_graphs"] == before

    @pytest.mark.parametrize("order", [(8, 3), (3, 8)])
    def test_few_and_many_rows_in_float32(self, fused, order):
        """Sums over rows are split in another way on CPUs when there are many."""
        generator = torch.Generator().manual_seed(0)
        weight = torch.rand(16, generator=generator).requires_grad_()
        for thousands in order:
            x = torch.randn(1000 * thousands, 16, generator=generator).requires_grad_()
            computed = []
            for device_type in (None, "cpu"):
                fused(device_type)
                y = rms_norm(x, weight, 1e-6)
                computed.append((y.detach(), *torch.autograd.grad(y.square().sum(), (x, weight))))
            torch.testing.assert_close(computed[1], computed[0], rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("entropy_grad", [False, True])
    def test_three_passes_over_a_chunk_of_logits(self, fused, entropy_grad):
        """One for the largest; then one kernel that reads the chunk once, and one that reads it once and writes its
        gradient, each in one loop over the vocabulary."""
        from torch._inductor.utils import run_and_get_code  # imports the compiler

        fused("cpu")
        vocab = 4096
        options = {"entropy_grad": entropy_grad, "vocab": vocab, "dtype": torch.float32}
        with OfSize(5 * vocab) as others:
            _, sources = run_and_get_code(lambda: vocabulary(10, LogitMap(2.0, 3.0), **options))
        eager = {name: count for name, count in others.names.items() if count and name not in ("detach", "permute")}
        assert eager == {"mm": 6, "addmm_": 2, "amax": 2}, "besides products, no other operator has a chunk"
        kernels = [source for source in sources if f"{vocab}L*x0" in source]
        assert len(kernels) == 2, "one forward, one backward"
        reads = [len(re.findall(rf"in_ptr\d+ \+ [^;]*{vocab}L\*x0", source)) for source in kernels]
        writes = [len(re.findall(rf"out_ptr\d+ \+ [^;]*{vocab}L\*x0", source)) for source in kernels]
        loops = [len(re.findall(rf"for\(int64_t \w+=[^;]*; \w+<static_cast<int64_t>\({vocab}L\)", s)) for s in kernels]
        assert (reads, writes, loops) == ([1, 1], [0, 1], [1, 1])

    def test_what_is_compiled_does_not_depend_on_the_first_length(self, fused, monkeypatch):
        """A resumed run begins with another microbatch, and must compute the same bits."""
        hints = []

        def compiled(function):
            def backend(graph, inputs):
                hints.append([size.node.hint for size in inputs if isinstance(size, torch.SymInt)])
                return graph.forward

            return torch.compile(function, fullgraph=True, backend=backend)

        monkeypatch.setattr(kernels, "_compiled", compiled)
        fused("cpu")
        for tokens in (7, 300):
            torch._dynamo.reset()
            swiglu(torch.ones(tokens, 4))
        assert hints[1:] == [[kernels.USUAL_ROWS]] * 2  # the first is of the compiler's trial
