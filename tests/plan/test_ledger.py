"""Ledgers: the closed form of planner.md against its traces, and states that can be counted by hand."""

from dataclasses import replace
from pathlib import Path

import pytest
from shapes import shape

from hone.config.load import load_config
from hone.config.run import Checkpointing
from hone.plan.activations import Loss, Pass, saved_per_token
from hone.plan.cluster import Trained, update_moments
from hone.plan.hardware import find_hardware
from hone.plan.ledger import PHASES, moment, term
from hone.plan.planner import plan
from hone.sizes import GIB

EIGHT = find_hardware("8xH100-80G")
QWEN_8B = 8_190_735_360
RAY = ("cluster.backend=ray", "cluster.engines.use=vllm")
APART = "cluster.pools={a: {devices: 4, roles: [policy]}, b: {devices: 4, roles: [rollout]}}"


def eager_pass(name, *, tokens, longest=4096, checkpointing: Checkpointing = "none", loss: Loss = "naive"):
    arch = shape(name)
    return Pass(arch, "transformers", 2, tokens, tokens, longest, checkpointing=checkpointing, loss=loss)


@pytest.mark.parametrize(
    ("name", "sequences", "longest", "shard", "checkpointing", "traced_gib", "error"),
    [
        ("qwen3-8b", 1, 4096, 8, "none", 50.773, 0.002),
        ("qwen3-8b", 1, 4096, 8, "full", 22.326, 0.002),
        ("qwen3-8b", 4, 4096, 8, "full", 46.936, 0.002),
        ("qwen3-8b", 8, 4096, 8, "full", 79.750, 0.002),
        ("qwen3-4b", 4, 4096, 4, "full", 42.904, 0.01),
        ("meta-llama-3-8b", 1, 2048, 16, "none", 22.822, 0.03),
        ("qwen3-0.6b", 2, 1024, 8, "none", 8.450, 0.01),
        ("qwen3-32b", 1, 4096, 16, "full", 40.1, 0.02),
    ],
)
def test_closed_form_of_an_update_meets_its_trace(name, sequences, longest, shard, checkpointing, traced_gib, error):
    """Traces of Transformers' classes under FSDP2, operator by operator (planner.md 3.5)."""
    work = eager_pass(name, tokens=sequences * longest, longest=longest, checkpointing=checkpointing)
    peak = max(moment.bytes for moment in update_moments(Trained("", work, shard, accumulates=False), []))
    assert peak / GIB == pytest.approx(traced_gib, rel=error)


def test_saved_activations_of_qwen3_8b():
    """Transformers' code keeps 215.3 kB per token and layer, Hone's decoder 137.6 kB, a checkpoint 8 kB."""
    eager = eager_pass("qwen3-8b", tokens=4096)
    own = Pass(eager.architecture, "hone", 2, 4096, 4096, 4096)
    assert saved_per_token(eager) == pytest.approx(215_304, abs=300)
    assert saved_per_token(own) == 137_640
    assert saved_per_token(replace(own, checkpointing="full")) == 8192


def states(ledger, name):
    return next(term.bytes for term in ledger.peak.terms if term.name == name)


def test_states_are_sharded_and_12_bytes_a_parameter(configured):
    found = plan(configured(*RAY), EIGHT)
    ledger = found.ledgers[0]
    assert states(ledger, "master weights") + states(ledger, "AdamW moments") == pytest.approx(12 * QWEN_8B / 8, abs=2)


def test_one_process_holds_18_bytes_a_parameter_in_bfloat16_and_16_in_float32(configured):
    names = ("master weights", "gradient", "AdamW moments", "compute copy")
    for precision, each in (("bfloat16", 18), ("float32", 16)):
        found = plan(configured(f"run.precision={precision}"), find_hardware("H100-80G"))
        held = [term for term in found.ledgers[0].moments[0].terms if term.name in names]
        assert sum(term.bytes for term in held) == each * QWEN_8B


def test_peak_is_the_largest_moment_and_never_a_sum_over_phases(configured):
    ledger = plan(configured(*RAY), EIGHT).ledgers[0]
    assert ledger.peak.bytes == max(moment.bytes for moment in ledger.moments)
    assert [moment.phase for moment in ledger.phase_peaks()] == [
        phase for phase in PHASES if any(moment.phase == phase for moment in ledger.moments)
    ]


def test_terms_of_one_name_are_one_and_empty_ones_none():
    found = moment("update", "x", term("a", 1, "1"), [term("a", 2, "2"), term("b", 0, "0")])
    assert [(one.name, one.bytes, one.formula) for one in found.terms] == [("a", 3, "1 + 2")]


@pytest.mark.parametrize(
    "bigger",
    ["train.tokens_per_microbatch=65536", "train.logprob_chunk_tokens=4096", "rollout.kv_cache_tokens=60000"],
)
def test_memory_knobs_move_the_peak_up(configured, bigger):
    """On one device, where nothing divides them; each in the moment that it is about."""
    small = plan(configured("rollout.kv_cache_tokens=20000"), find_hardware("H200-141G"))
    large = plan(configured("rollout.kv_cache_tokens=20000", bigger), find_hardware("H200-141G"))
    pairs = zip(small.ledgers[0].moments, large.ledgers[0].moments, strict=True)
    assert any(big.bytes > little.bytes for little, big in pairs)
    assert all(
        big.bytes >= little.bytes
        for little, big in zip(small.ledgers[0].moments, large.ledgers[0].moments, strict=True)
    )


def test_numbers_of_the_algorithm_do_not(configured):
    """More prompts and larger groups make more microbatches, not larger ones (practice E believed otherwise)."""
    small = plan(configured(*RAY, "train.prompts_per_step=64"), EIGHT)
    large = plan(configured(*RAY, "train.prompts_per_step=128", "rollout.group_size=16"), EIGHT)
    assert large.ledgers[0].peak.bytes == pytest.approx(small.ledgers[0].peak.bytes, rel=0.002)


def test_more_devices_never_need_more_each(configured):
    sizes = [(f"cluster.devices_per_node={n}", find_hardware(f"{n}xH100-80G")) for n in (2, 4, 8, 16)]
    peaks = [plan(configured(*RAY, each), hardware).ledgers[0].peak.bytes for each, hardware in sizes]
    assert peaks == sorted(peaks, reverse=True)


def test_a_reference_and_a_critic_are_counted(configured):
    bare = plan(configured(*RAY), EIGHT)
    grpo = plan(configured(*RAY, "algorithm.kl_loss_coef=0.1"), EIGHT)
    ppo = plan(configured(*RAY, "algorithm.credit=gae"), EIGHT)
    names = {term.name for moment in ppo.ledgers[0].moments for term in moment.terms}
    assert states(grpo.ledgers[0], "reference") == pytest.approx(2 * QWEN_8B / 8, abs=1)
    assert {"critic: master weights", "critic: AdamW moments"} <= names
    assert ppo.ledgers[0].peak.bytes > bare.ledgers[0].peak.bytes


def test_an_adapter_trains_little_and_needs_no_copy_for_the_reference(configured):
    found = plan(configured("lora.rank=16", "algorithm.kl_loss_coef=0.1"), find_hardware("H100-80G"))
    terms = {term.name: term.bytes for term in found.ledgers[0].moments[0].terms}
    trained = 36 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 12288))
    assert terms["master weights"] == 4 * trained
    assert terms["frozen weights"] == 2 * QWEN_8B
    assert "reference" not in terms


def test_offload_moves_states_to_the_host(configured):
    moved = plan(configured(*RAY, "cluster.trainer.offload=[parameters]"), EIGHT)
    assert not any(term.name == "AdamW moments" for moment in moved.ledgers[0].moments for term in moment.terms)
    host = moved.ledgers[-1]
    assert states(host, "states") == 16 * QWEN_8B


def test_json_is_plain_and_complete(configured):
    import json

    found = json.loads(json.dumps(plan(configured(*RAY), EIGHT).as_dict()))
    assert set(found) == {
        *("format", "hardware", "topology", "model", "workload", "verdict", "ledgers", "time", "notes")
    }
    assert found["model"]["parameters"] == QWEN_8B
    assert found["ledgers"][0]["peak"]["bytes"] == max(one["bytes"] for one in found["ledgers"][0]["moments"])


def test_prompts_are_counted_once_and_a_last_token_never(configured):
    """Two prompts of 3 tokens with 2 samples of 4: 2 x 3 + 4 x 3 = 18 tokens are computed."""
    sizes = ("prompts_per_step=2", "tokens_per_microbatch=100")
    config = configured(
        *(f"train.{size}" for size in sizes),
        "rollout.group_size=2",
        "data.max_prompt_tokens=3",
        "rollout.max_response_tokens=4",
    )
    assert plan(config, EIGHT).inputs.workload.step_tokens() == 18


def test_a_budget_is_the_capacity_of_one_process(configured):
    found = plan(configured("plan.memory_budget_gib=2"), find_hardware("H100-80G"))
    assert found.ledgers[0].capacity_bytes == 2 * GIB
    assert found.verdict.level == "does not fit"


def test_an_adapter_has_no_gradient_of_the_output_layer(configured):
    found = plan(configured(*RAY, "lora.rank=16"), EIGHT)
    names = {term.name for moment in found.ledgers[0].moments for term in moment.terms}
    assert not names & {"gradient of output layer", "gradient of root"}
    assert "frozen weights" in names


def test_an_adapter_in_vllm_has_room_beside_its_weights(configured):
    """Of Qwen3-8B with rank 24, for which vLLM makes room for 32: as vLLM 0.32 allocates, on two devices each."""
    words = (*RAY, "cluster.engines.tensor_parallel_size=2", "cluster.engines.sleep_level=1", "lora.rank=24")
    merged, alone = (plan(configured(*words, f"lora.publish={how}"), EIGHT) for how in ("merged", "adapter"))

    def terms(found):
        (sampling,) = (moment for moment in found.ledgers[0].moments if moment.name == "sampling")
        return {term.name: term.bytes for term in sampling.terms}

    q, kv, hidden, inner, vocab = 4096, 1024, 4096, 12288, 151_936
    columns = (hidden + q // 2) + 2 * (hidden + kv // 2) + 2 * (hidden + inner // 2)
    room = 2 * 32 * (36 * (columns + (q // 2 + hidden) + (inner // 2 + hidden)) + 2 * (vocab + hidden))
    assert terms(alone)["engine: adapter"] == room and "engine: adapter" not in terms(merged)
    assert terms(merged)["engine: KV cache"] - terms(alone)["engine: KV cache"] == room


@pytest.mark.parametrize("layout", [(), RAY, (*RAY, APART)], ids=["local", "colocated", "apart"])
def test_an_export_holds_one_weight_in_every_layout(configured, layout):
    """Of Qwen3-8B the embedding: 151,936 x 4,096 numbers; all weights are 30.5 GiB."""
    found = plan(configured(*layout), EIGHT if layout else find_hardware("H200-141G"))
    exported = [
        term
        for ledger in found.ledgers
        for moment in ledger.moments
        for term in moment.terms
        if moment.name == "exporting" and term.name == "exported weight"
    ]
    embedding = 4 * 151_936 * 4096
    assert [term.bytes for term in exported] == [embedding, 2 * embedding]  # gathered there; on the host converted too


@pytest.mark.parametrize("prefill_tokens", [16384, 262144])
def test_on_a_cpu_sampling_and_training_each_keep_what_they_freed(prefill_tokens):
    """In blocks up to 32 MiB: 16,384 prompt tokens x 384 x 4 B are 24 MiB, 65,536 are 96 MiB. A GPU's memory is its
    allocator's."""
    file = Path(__file__).parents[2] / "examples/quickstart/run.yaml"
    words = [f"rollout.prefill_tokens={prefill_tokens}", "rollout.max_concurrent_samples=4096"]
    config, gpu = load_config(file, words).config, find_hardware("H100-80G")
    on_gpu, on_cpu = (plan(config, hardware).ledgers[0] for hardware in (gpu, replace(gpu, kind="cpu")))
    assert "freed memory" not in {term.name for moment in on_gpu.moments for term in moment.terms}
    found = {moment.name: {term.name: term.bytes for term in moment.terms} for moment in on_cpu.moments}
    keeps = prefill_tokens == 16384
    sampled = found["prompts computed"]["one layer"]
    trained = found["prompts computed"]["freed memory"]
    assert found["layer backward"].get("freed memory", 0) == (sampled if keeps else 0)
    assert found["step"]["freed memory"] == trained + (sampled if keeps else 0)
    assert trained > found["layer backward"]["activations"]
