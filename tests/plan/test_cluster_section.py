"""Plans of run files with a `cluster` section: its pools, divisions and engines, without a word on the command line."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from hone.config.derived import longest_tokens
from hone.config.load import load_config
from hone.plan.cluster import PoolPlan, host_moments, share_of_records
from hone.plan.embedded import Embedded, Reader
from hone.plan.engine import EnginePlan
from hone.plan.hardware import find_hardware, in_cluster
from hone.plan.kv_cache import columns_for
from hone.plan.planner import Plan, plan
from hone.plan.pools import pools_of
from hone.plan.search import propose
from hone.plan.time import GPU
from hone.rollout.vllm_args import VllmPlace, engine_arguments
from hone.sizes import GIB

EXAMPLES = Path(__file__).parents[2] / "examples"
ON_EIGHT = ("cluster.backend=ray", "cluster.devices_per_node=8", "cluster.engines.use=vllm")


def apart(train: int, sample: int, *roles: str) -> str:
    return (
        f"cluster.pools={{train: {{devices: {train}, roles: [{', '.join(('policy', *roles))}]}}, "
        f"sample: {{devices: {sample}, roles: [rollout]}}}}"
    )


@pytest.fixture
def planned(configured):
    """A function: overrides of Qwen3-8B's run file -> its plan."""

    def of(*overrides: str, hardware: str = "H100-80G") -> Plan:
        config = configured(*overrides)
        return plan(config, in_cluster(find_hardware(hardware), hardware, config))

    return of


def test_pools_are_what_the_file_says(planned):
    found = planned("cluster.backend=ray", apart(6, 2, "critic"), "algorithm.credit=gae", "cluster.engines.use=vllm")
    assert [(pool.name, pool.devices, pool.critic is not None) for pool in pools_of(found.inputs)] == [
        ("train", 6, True),
        ("sample", 2, False),
    ]
    assert [ledger.device for ledger in found.ledgers] == ["H100-80G (train)", "H100-80G (sample)", "host"]
    assert found.as_dict()["topology"]["pools"][1]["roles"] == ("rollout",)


@pytest.mark.parametrize(
    ("setting", "key", "value"),
    [
        ("cluster.trainer={tensor_parallel: 2, shard: 2}", "shard", 4),  # tensor parallelism included
        ("cluster.trainer.offload=[parameters]", "offload", True),
        ("cluster.trainer.offload=[optimizer]", "moments_on_host", True),
    ],
)
def test_every_division_is_read(planned, setting, key, value):
    def policy(*words):
        return pools_of(planned(*ON_EIGHT, *words).inputs)[0].policy

    assert getattr(policy(setting), key) == value
    assert getattr(policy(), key) != value


def test_vllms_arguments_are_read(planned):
    args = "{max_num_seqs: 33, max_num_batched_tokens: 4000, enforce_eager: true, sleep_level: 1, dtype: float32, "
    args += "use: vllm}"
    (pool,) = pools_of(
        planned(*ON_EIGHT, f"cluster.engines={args}", "cluster.engines.gpu_memory_utilization=0.7").inputs
    )
    engine = pool.engine.settings
    assert (engine.max_num_seqs, engine.max_num_batched_tokens, engine.graphs, pool.engine_sleeps) == (
        33,
        4000,
        False,
        1,
    )
    assert (engine.gpu_memory_utilization, engine.weight_bytes, engine.kv_bytes) == (0.7, 4, 4)


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("rollout.prefill_tokens=100", "data.max_prompt_tokens=50"),
        ("cluster.engines={use: vllm, max_num_seqs: 9, enable_chunked_prefill: false}", "rollout.prefill_tokens=2000"),
        ("cluster.engines={use: vllm, max_model_len: 9000, max_num_batched_tokens: 9999}",),
    ],
)
def test_an_engine_is_planned_with_the_arguments_that_it_gets(planned, words):
    inputs = planned(*ON_EIGHT, *words).inputs
    config, engine = inputs.config, pools_of(inputs)[0].engine.settings
    place = VllmPlace(
        folder=Path(),
        precision=config.run.precision,
        longest_tokens=longest_tokens(config),
        max_concurrent=config.rollout.max_concurrent_samples,
        prefill_tokens=config.rollout.prefill_tokens,
    )
    given = engine_arguments(config.cluster.engines, place, on_gpu=True)
    names = ("max_num_seqs", "max_num_batched_tokens", "max_model_len")
    assert [given[name] for name in names] == [engine.max_num_seqs, engine.max_num_batched_tokens, engine.max_model_len]


def test_one_rank_is_planned_unsharded_as_it_is_trained(planned, configured):
    words = ("cluster.backend=ray", apart(1, 1), "model.path=Qwen/Qwen3-0.6B")
    policy = pools_of(planned(*words).inputs)[0].policy
    local = plan(configured("model.path=Qwen/Qwen3-0.6B"), find_hardware("H100-80G")).ledgers[0]
    names = ("master weights", "gradient", "AdamW moments", "compute copy")
    mine, theirs = (
        {one.name: one.bytes for one in terms if one.name in names}
        for terms in (policy.states(), local.moments[0].terms)
    )
    assert mine == theirs and len(mine) == 4
    sharded = pools_of(planned(*words, "cluster.trainer.offload=[optimizer]").inputs)[0].policy
    assert sharded.is_sharded and not policy.is_sharded


def test_more_devices_than_are_planned_for(planned):
    found = planned("cluster.backend=ray", apart(12, 4), hardware="8xH100-80G")
    assert found.verdict.level == "does not fit"
    assert "the pools of the run file have 16 devices, and 8 x H100-80G are planned for" in found.verdict.problems[0]
    found = planned("cluster.backend=ray", apart(4, 2), hardware="8xH100-80G")
    assert "2 of 8 devices would idle: they are in no pool" in found.notes


def test_hardware_is_counted_by_the_file_unless_it_is_counted_already(configured):
    config = configured("cluster.backend=ray", "cluster.nodes=6", "cluster.devices_per_node=4", "cluster.address=auto")
    hardware = in_cluster(find_hardware("H100-80G"), "H100-80G", config)
    assert (hardware.devices, hardware.per_node, hardware.nodes) == (24, 4, 6)
    assert in_cluster(find_hardware("2xH100-80G"), "2xH100-80G", config).devices == 2
    cpu = find_hardware("this")
    shared = in_cluster(cpu, "this", configured("cluster.backend=ray", apart(2, 2)))
    if cpu.kind == "cpu":
        assert (shared.devices, shared.memory_bytes) == (4, cpu.memory_bytes // 4)


def test_hones_own_engine_has_weights_and_a_cache_of_what_is_in_flight(planned):
    found = planned("cluster.backend=ray", apart(4, 4))
    engine = pools_of(found.inputs)[1].engine
    assert isinstance(engine, Embedded)
    terms = {term.name: term.bytes for term in engine.terms()}
    assert terms["engine: weights"] == 2 * found.inputs.architecture.total_parameters
    # 64 prompts at most are in work of 512 samples at a time, and four engines share them: 32 x 8 samples / 4
    lengths = found.inputs.workload.lengths
    tokens = 8 * lengths.max_prompt + 64 * columns_for(lengths.max_response - 1)
    assert terms["engine: KV cache"] == tokens * 147_456
    asleep = {term.name for term in engine.asleep_terms(2)}
    assert asleep == {"engine: weights", "engine: KV cache", "engine: CUDA graphs"}
    assert terms["engine: CUDA graphs"] == (3 * 4 + 2) * 64 * 32 * lengths.longest + GIB
    eager = planned("cluster.backend=ray", "cluster.engines.enforce_eager=true", apart(4, 4))
    assert "engine: CUDA graphs" not in {term.name for term in pools_of(eager.inputs)[1].engine.terms()}
    assert found.time.efficiency == GPU != eager.time.efficiency


def test_a_reference_and_a_reward_model_of_their_own(planned):
    pools = (
        "cluster.pools={a: {devices: 4, roles: [policy, rollout]}, b: {devices: 2, roles: [reference]}, "
        "c: {devices: 2, roles: [reward_model]}}"
    )
    scored = "reward.components=[{use: reward_model, args: {path: Qwen/Qwen3-1.7B}}]"
    found = planned("cluster.backend=ray", pools, scored, "algorithm.kl_loss_coef=0.1")
    policy, reference, reward = pools_of(found.inputs)
    assert policy.reference is None and reference.reference is not None and isinstance(reward.judge, Reader)
    of_reference = found.ledgers[1].moments
    assert [moment.phase for moment in of_reference] == ["logprobs"]
    assert any(term.name == "reference" for term in of_reference[0].terms)
    assert found.ledgers[2].peak.phase == "reward"
    together = planned("cluster.backend=ray", "cluster.devices_per_node=8", scored, "algorithm.kl_loss_coef=0.1")
    assert [len(together.ledgers), len(found.ledgers)] == [2, 4]
    (rollout,) = (moment for moment in together.ledgers[0].moments if moment.phase == "rollout")
    assert {"reference", "reward model: weights"} <= {term.name for term in rollout.terms}, "it scores meanwhile"
    (update, *_) = (moment for moment in together.ledgers[0].moments if moment.phase == "update")
    assert "reward model: weights" not in {term.name for term in update.terms}, "it sleeps"


def test_beside_its_adapter_a_reference_is_nothing_and_elsewhere_a_model(planned):
    lora = ("lora={rank: 8, stages: [rl]}", "algorithm.kl_loss_coef=0.1", "cluster.backend=ray")
    elsewhere = planned(
        *lora,
        "cluster.pools={a: {devices: 4, roles: [policy]}, b: {devices: 2, roles: [reference]}, "
        "c: {devices: 2, roles: [rollout]}}",
    )
    policy, reference, _ = pools_of(elsewhere.inputs)
    assert policy.reference is None and reference.reference is not None and reference.reference.adapter == 0
    (held,) = (term for term in elsewhere.ledgers[1].peak.terms if term.name == "reference")
    assert held.bytes == 2 * elsewhere.inputs.architecture.total_parameters / 2, "2 B a parameter, on two devices"
    beside = planned(*lora, apart(4, 2, "reference"))
    assert pools_of(beside.inputs)[0].reference is None


def test_pools_of_their_own_measure_at_the_same_time(planned):
    ppo = ("cluster.backend=ray", "cluster.engines.use=vllm", "algorithm.credit=gae", "algorithm.kl_loss_coef=0.1")
    sizes = {"train": (4, "policy"), "values": (4, "critic"), "frozen": (2, "reference"), "sample": (2, "rollout")}

    def logprobs(**roles: str) -> float:
        pools = (f"{name}: {{devices: {n}, roles: [{roles.get(name, at)}]}}" for name, (n, at) in sizes.items())
        kept = [pool for pool in pools if "[]" not in pool]
        return planned(*ppo, f"cluster.pools={{{', '.join(kept)}}}").time.phases["logprobs"]

    beside = logprobs(train="policy, critic, reference", values="", frozen="")
    critic_apart = logprobs(train="policy, reference", frozen="")
    reference_apart = logprobs(train="policy, critic", values="")
    assert critic_apart < beside, "values of the critic are measured meanwhile"
    assert logprobs() == reference_apart, "the reference's two devices take longer than all others"
    assert reference_apart == pytest.approx(2 * critic_apart), "half the devices, twice the time"


def test_host_memory_is_that_of_the_fullest_machine(planned):
    two = "cluster={backend: ray, nodes: 2, devices_per_node: 8, address: auto, trainer: {offload: [parameters]}}"
    found = planned(two, apart(8, 8))
    states = 16 * found.inputs.architecture.total_parameters
    peak = next(moment for moment in found.ledgers[-1].moments if moment.name == "training")
    assert peak.bytes == pytest.approx(states + 8 * 3 * GIB)
    both = host_moments([PoolPlan("a", 4), PoolPlan("b", 4)], per_node=2)
    assert both[0].bytes == 2 * 3 * GIB


def test_moments_alone_may_wait_on_the_host(planned):
    here, away = planned(*ON_EIGHT), planned(*ON_EIGHT, "cluster.trainer.offload=[optimizer]")
    count = here.inputs.architecture.total_parameters
    freed = here.ledgers[0].peak.bytes - away.ledgers[0].peak.bytes
    assert freed == pytest.approx(count, rel=1e-6), "8 bytes a parameter, over 8 devices"
    assert away.time.phases["optimizer"] > here.time.phases["optimizer"]
    tight = planned(*ON_EIGHT, "train.tokens_per_microbatch=12288", "train.activation_checkpointing=full")
    assert "cluster.trainer.offload=" in tight.verdict.sentence


@pytest.mark.slow("searches for a preset")
def test_a_preset_changes_keys_of_the_section(planned):
    today, key = planned(*ON_EIGHT, "train.tokens_per_microbatch=4096"), "cluster.engines.tensor_parallel_size"
    assert key in [change.key for change in propose(today, "recommended").changes]
    pinned = propose(today, "recommended", pinned=frozenset({key}))
    assert pinned.plan.inputs.config.cluster.engines.tensor_parallel_size == 1


def test_a_trainer_has_each_key_value_head_once(planned):
    found = planned(*ON_EIGHT, "cluster.trainer={tensor_parallel: 4, sequence_parallel: 2}")
    assert found.verdict.problems == (), "8 key-value heads"
    config = "cluster.trainer={tensor_parallel: 4, sequence_parallel: 4}"
    on_sixteen = [*ON_EIGHT[:1], "cluster.devices_per_node=16", ON_EIGHT[2], config]
    assert planned(*on_sixteen).verdict.problems == (), "chunks go round in a ring"
    (problem,) = planned(*on_sixteen, "model.implementation=transformers").verdict.problems
    assert "must divide the model's key-value heads / tensor_parallel = 2 (got 4). Nearest: 2" in problem


@pytest.mark.parametrize(
    ("name", "hardware", "devices", "level"),
    [
        ("cluster/arithmetic-ray", "this", 4, "fits"),
        ("cluster/arithmetic-async", "this", 4, "fits"),
        ("cluster/arithmetic-colocated", "this", 2, "fits"),
        ("cluster/arithmetic-ppo", "this", 3, "fits"),
        ("cluster/grpo-8b", "H100-80G", 8, "fits"),
        ("cluster/grpo-70b", "H100-80G", 512, "fits"),
        ("cluster/ppo-70b-hybrid", "A100-80G", 48, "fits"),
        ("cluster/ppo-70b-thirds", "A100-80G", 48, "fits"),
        ("cluster/ppo-70b-separate", "A100-80G", 64, "fits"),
        ("judge/grm-16b", "A100-80G", 8, "fits"),
        ("judge/grm-16b-apart", "A100-80G", 8, "fits"),
    ],
)
def test_run_files_of_layouts_are_right_and_fit(name, hardware, devices, level):
    loaded = load_config(EXAMPLES / f"{name}.yaml")
    found = plan(
        loaded.config,
        in_cluster(find_hardware(hardware), hardware, loaded.config),
        folder=loaded.run_file.parent,
    )
    assert found.inputs.topology.num_devices == devices
    assert (found.verdict.level, found.verdict.problems) == (level, ())


def test_practice_as_judge_cannot_load_as_its_guide_has_it():
    """16 billion parameters on one GPU with 0.3 of its memory; on two, or with 0.41, they do."""
    loaded = load_config(
        EXAMPLES / "judge/grm-16b.yaml",
        ["services.grm.engine={tensor_parallel_size: 1, gpu_memory_utilization: 0.3}"],
    )
    found = plan(loaded.config, in_cluster(find_hardware("A100-80G"), "A100-80G", loaded.config))
    (problem,) = found.verdict.problems
    assert "services.grm.engine.gpu_memory_utilization = 0.3 of 79.1 GiB is 23.7 GiB: weights (29.3 GiB)" in problem
    assert "At least 0.41 is needed, or a larger services.grm.engine.tensor_parallel_size" in problem
    judges = pools_of(found.inputs)[0].judge
    assert isinstance(judges, EnginePlan) and judges.settings.max_num_seqs == 128


def test_records_of_routing_are_on_the_host(planned):
    words = (*ON_EIGHT, "model.path=Qwen/Qwen3-30B-A3B", "cluster.engines.use=hone", "train.prompts_per_step=2")
    words += ("rollout.group_size=4", "rollout.max_response_tokens=1000", "data.max_prompt_tokens=500")

    def records(*more):
        host = next(ledger for ledger in planned(*words, *more).ledgers if ledger.device == "host")
        return [{one.name: one.bytes for one in moment.terms}.get("routing records", 0) for moment in host.moments]

    assert set(records()) == {0}
    tokens, layers, active = 2 * 500 + 8 * 1000, 48, 8
    assert set(records("algorithm.replay_routing=true")) == {2 * tokens * layers * active}


def test_records_of_routing_are_where_engines_are_and_where_ranks_need_them():
    """A machine with half of the ranks fetches half of one update's records; those of two are with the engines."""
    ranks, engines = (SimpleNamespace(engine=e, policy=not e, devices=n) for e, n in ((False, 16), (True, 8)))
    pools = [ranks, engines]
    assert share_of_records(list(zip(pools, (8, 0), strict=True))) == 1 / 4
    assert share_of_records(list(zip(pools, (0, 8), strict=True))) == 1
    both = [SimpleNamespace(engine=True, policy=True, devices=16)]
    assert share_of_records([(both[0], 16)]) == 1
    assert share_of_records([(both[0], 8)]) == 1 / 2 + 1 / 8


def test_where_memory_bounds_the_cache_the_cure_is_a_smaller_one():
    """Fewer sequences would leave it as large: half of the device."""
    words = ["run.precision=bfloat16", "cluster.backend=local", "train.activation_checkpointing=full"]
    words += ["model.path=Qwen/Qwen3-0.6B", "rollout.max_response_tokens=8192", "train.logprob_chunk_tokens=256"]
    loaded = load_config(EXAMPLES / "gsm8k" / "run.yaml", words)
    found = plan(loaded.config, find_hardware("1xH100-80G"), folder=loaded.run_file.parent)
    assert "rollout.kv_cache_tokens=" in found.verdict.sentence
