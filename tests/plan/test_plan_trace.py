"""The trace against torch's own CPU allocator, the closed form against the trace, and `hone plan --trace`."""

import gc
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from measuring import allocated

from hone.algo.algorithm import Algorithm
from hone.assemble.trace import full_microbatch, over_depth, trace_plan
from hone.cli.main import main
from hone.config.derived import needs_critic, needs_reference, trains_adapter
from hone.errors import DataError
from hone.model.heads import ScalarModel
from hone.model.load import init_model
from hone.model.lora import AdapterOff, add_adapter
from hone.plan.activations import Pass
from hone.plan.families import architecture_from
from hone.plan.hardware import find_hardware
from hone.plan.planner import plan
from hone.train.critic import Critic
from hone.train.learner import Passes
from hone.train.policy import PolicyTrainer
from hone.train.roles import Reference, Roles
from hone.train.tracing.local import trace_local, with_layers
from hone.train.tracing.memory import LiveMemory, fake_tensors

TINY = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "vocab_size": 2000,
    "tie_word_embeddings": True,
}
LLAMA = {**TINY, "model_type": "llama", "hidden_size": 192, "num_attention_heads": 6, "tie_word_embeddings": False}
QWEN2 = {**TINY, "model_type": "qwen2", "vocab_size": 8000, "hidden_size": 64, "intermediate_size": 192}
MISTRAL = {**TINY, "model_type": "mistral", "num_hidden_layers": 6, "vocab_size": 500}
HALF, AGAIN, OTHERS = (
    "run.precision=bfloat16",
    "train.activation_checkpointing=full",
    "model.implementation=transformers",
)
SMALL_CHUNK = "train.logprob_chunk_tokens=64"
REAL = {
    "qwen3": (TINY, ["run.precision=float32"]),
    "qwen3 in bfloat16": (TINY, [HALF]),
    "qwen3 checkpointed": (TINY, [HALF, AGAIN]),
    "qwen3 chunked": (TINY, ["run.precision=float32", SMALL_CHUNK]),
    "llama": (LLAMA, ["run.precision=float32"]),
    "llama checkpointed": (LLAMA, ["run.precision=float32", AGAIN, SMALL_CHUNK]),
    "qwen2": (QWEN2, ["run.precision=float32", SMALL_CHUNK]),
    "qwen2 in bfloat16": (QWEN2, [HALF, SMALL_CHUNK]),
    "mistral": (MISTRAL, [HALF, AGAIN]),
    "entropy bonus": (TINY, ["run.precision=float32", "algorithm.entropy_coef=0.01"]),
    "critic": (TINY, ["run.precision=float32", "algorithm.credit=gae"]),
    "adapter": (TINY, ["run.precision=float32", "lora.rank=8"]),
    "transformers": (TINY, ["run.precision=float32", OTHERS]),
    "transformers checkpointed": (LLAMA, [HALF, OTHERS, AGAIN, SMALL_CHUNK]),
}
QUICK = ("qwen3",)
ON_CPU = Pass(architecture_from(TINY), "hone", 4, tokens=900, response_tokens=1, longest=129)
"""By kernels of a CPU; the rest is not asked for."""
LEAST = {"qwen2 in bfloat16": -0.02}
"""What loses: the CPU's bfloat16 products copy the output weight, inside a kernel."""


def real_trainer(config, architecture):
    model = init_model(
        architecture,
        vocab_size=None,
        seed=0,
        dtype=torch.float32,
        device="cpu",
        implementation=config.model.implementation,
    )
    train = config.train
    passes = Passes(config.run.precision, train.tokens_per_microbatch, train.logprob_chunk_tokens, temperature=1.0)
    critic = None
    if needs_critic(config):
        body = init_model(architecture, vocab_size=None, seed=1, dtype=torch.float32, device="cpu")
        critic = Critic(
            ScalarModel(body), passes, optimizer=config.critic.optimizer, total_optimizer_steps=9, value_clip=None
        )
    if trains_adapter(config, "rl"):
        add_adapter(model, config.lora, seed=0, dtype=getattr(torch, config.run.precision))
    model.checkpointing = train.activation_checkpointing
    policy = PolicyTrainer(model, passes, optimizer=train.optimizer, total_optimizer_steps=9)
    reference = Reference(AdapterOff(model), passes) if needs_reference(config) else None
    return Roles(policy=policy, critic=critic, reference=reference)


def resident(trainer):
    """Bytes of every tensor that lives between updates."""
    gc.collect()
    learners = [trainer.policy, *([trainer.critic] if trainer.critic else [])]
    tensors = []
    for one in learners:
        flat = one.held
        tensors += [flat.master, flat.grad, flat.compute, *one.optimizer.moments.values()]
        tensors += [*one.model.parameters(), *one.model.buffers()]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def slow_unless(quick, cases):
    return [
        case if case in quick else pytest.param(case, marks=pytest.mark.slow("traces several deep models"))
        for case in cases
    ]


@pytest.mark.parametrize("name", slow_unless(QUICK, REAL))
def test_a_trace_is_what_the_allocator_hands_out(name, configured):
    """Never more than 1 % below it, at most 8 % above."""
    architecture, words = REAL[name]
    config = configured(*words)
    batch = full_microbatch(900, max_prompt=64, max_response=65, group=4)
    traced = trace_local(config, architecture, None, batch, ON_CPU)
    trainer = real_trainer(config, architecture)
    algorithm = Algorithm(config.algorithm, correction="none", max_response_tokens=65)
    trainer.update(batch, algorithm)
    real = resident(trainer) + allocated(lambda: trainer.update(batch, algorithm))
    peak = max(size for (phase, _), size in traced.items() if phase in ("update", "optimizer"))
    assert LEAST.get(name, -0.01) < peak / real - 1 < 0.08


def test_live_memory_by_hand():
    """4 kB, and 8 kB more while its double is there; a view is nothing."""
    memory = LiveMemory()
    with fake_tensors(memory):
        x = torch.zeros(1000)
        assert memory.now == 4000
        memory.at("update", "more")
        y = torch.cat([x, x])
        assert y[:10].sum().item() == 1.0  # nobody knows
        del y
        assert memory.now == 4000
    assert memory.peaks["start", "states made"] == 4000
    assert 12_000 <= memory.peaks["update", "more"] <= 12_100


def test_code_that_reads_values_of_a_fake_tensor_is_refused():
    with fake_tensors(LiveMemory()), pytest.raises(TypeError, match="reads values"):
        torch.arange(3).numpy()


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 100, 900, 1000])
def test_a_microbatch_is_full(tokens):
    batch = full_microbatch(tokens, max_prompt=64, max_response=65, group=4)
    assert sum(map(len, batch.prompts)) + int((batch.length_S - 1).sum()) == tokens
    assert max(map(len, batch.prompts)) <= 64
    assert int(batch.length_S.max()) <= 65


@pytest.mark.slow("traces models of several depths")
@pytest.mark.parametrize(
    "words", [[HALF], pytest.param([HALF, AGAIN, SMALL_CHUNK], marks=pytest.mark.slow("traces several deep models"))]
)
def test_a_deep_model_lies_on_the_line_through_shallow_ones(words, configured):
    config, batch = configured(*words), full_microbatch(900, max_prompt=64, max_response=65, group=4)

    def trace(layers):
        return trace_local(config, with_layers(TINY, layers), None, batch, ON_CPU)

    whole, line = trace(8), over_depth(trace, 8)
    assert whole.keys() == line.keys()
    assert all(line[key] == pytest.approx(whole[key], rel=0.01) for key in whole)


# ---- the closed form


def _lattice():
    """benchmarks/plan_trace.py; the benchmarks are no package."""
    path = Path(__file__).parents[2] / "benchmarks" / "plan_trace.py"
    spec = importlib.util.spec_from_file_location("plan_trace", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


LATTICE = _lattice()
CASES = {case.name: case for case in LATTICE.lattice()}
SOME_CASES = [*CASES][::4]


def test_there_are_a_hundred_points_of_five_families():
    assert len(CASES) >= 100
    assert len({case.model.partition("-")[0] for case in CASES.values()}) >= 5


@pytest.mark.slow("traces several deep models")
@pytest.mark.parametrize("name", SOME_CASES)
def test_the_closed_form_meets_the_trace(name):
    case = CASES[name]
    planned, traced = LATTICE.measure(case)
    assert planned / traced == pytest.approx(1, abs=LATTICE.BOUND)


# ---- hone plan --trace


@pytest.mark.slow("two deep traces of three models")
def test_phases_of_one_process_with_all_its_models(configured):
    config = configured(
        "model.path=Qwen/Qwen3-0.6B",
        "algorithm.credit=gae",
        "algorithm.kl_loss_coef=0.1",
        "train.tokens_per_microbatch=2048",
    )
    said = []
    found = trace_plan(plan(config, find_hardware("H100-80G")), Path(), said.append)
    named = {(point.phase, point.moment) for point in found.points}
    assert {("logprobs", "logits"), ("update", "loss backward"), ("update", "critic's layer backward")} <= named
    assert said == ["tracing the trainer with 3 layers", "tracing the trainer with 5 layers"]
    peaks = {point.phase: point.error for point in found.points if point.moment == "peak"}
    assert abs(peaks["update"]) < 0.05


def test_what_cannot_be_traced_is_said(configured):
    words = ("algorithm.credit=gae", "cluster.backend=ray", "cluster.trainer.sequence_parallel=2")
    found = plan(configured(*words), find_hardware("8xH100-80G"))
    with pytest.raises(DataError, match="sequence_parallel > 1"):
        trace_plan(found, Path(), print)


@pytest.mark.slow("two traces")
def test_one_gpu_in_a_cluster_is_traced_as_one_process_is(configured):
    words = ("cluster.backend=ray", "run.precision=bfloat16", "algorithm.credit=gae", "algorithm.kl_loss_coef=0.1")
    found = trace_plan(plan(configured(*words), find_hardware("H100-80G")), Path(), print)
    peaks = {point.phase: point.error for point in found.points if point.moment == "peak"}
    assert abs(peaks["update"]) < 0.05
    assert abs(peaks["logprobs"]) < 0.10


@pytest.mark.slow("two traces")
def test_the_command_prints_json(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    keys = json.dumps({**TINY, "max_position_embeddings": 4096})
    file.write_text(
        f"model: {{init: {keys}, characters: abc}}\ndata: {{train: a/b, answer_column: answer}}\n"
        "reward: {components: [{use: exact}]}\n"
    )
    assert main(["plan", str(file), "--hardware", "H100-80G", "--trace", "--json"]) == 0
    printed = capsys.readouterr()
    trace = json.loads(printed.out)["trace"]
    assert {point["phase"] for point in trace["points"]} >= {"update", "optimizer"}
    assert "tracing the trainer" in printed.err
