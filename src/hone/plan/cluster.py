"""Memory ledgers of pools: trainers sharded with FSDP2 and vLLM engines, colocated or on separate devices.

The closed form of the update agrees with operator-level traces within 5 % (docs/memory-verification.md): the largest of
its moments (backward of the loss, of a layer and of the root; the optimizer step).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from hone.plan import local, towers
from hone.plan.activations import (
    Pass,
    backward_per_token,
    forward_per_token,
    kept_by_last,
    kept_by_layers,
    logits_backward_bytes,
    logits_backward_bytes_each,
    logits_forward_bytes,
    made_again_per_token,
    output_gradient_bytes,
    recomputes_last,
    saved_per_token,
)
from hone.plan.architecture import Architecture, adapter_parameters, padding_parameters
from hone.plan.embedded import Embedded, EmbeddedJudge, Reader
from hone.plan.engine import CONTEXT_BYTES, EnginePlan
from hone.plan.ledger import Moment, Term, moment, term
from hone.plan.workload import Workload
from hone.sizes import GIB, KEPT_FEATURES_BYTES

COLLECTIVES_BYTES = 3 * GIB
"""Buffers of NCCL's communicators on one device; reports range from 1 to 6 GB, so an estimate to be measured."""
PROCESS_BYTES = 3 * GIB
"""Host memory of one process with torch and a CUDA context; an estimate."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A model that learns, sharded."""

    name: str
    work: Pass
    shard: int
    """Devices that states are divided over, tensor parallelism included."""
    accumulates: bool
    """Several microbatches make one optimizer step: the sharded gradient stays between them."""
    adapter: int = 0
    """Trained parameters of an adapter; 0 trains every weight."""
    is_sharded: bool = True
    """False: one rank with flat buffers, as in a run of one process (`config.topology.is_sharded`)."""
    offload: bool = False
    """States are on the host."""
    moments_on_host: bool = False
    """Only the moments are, and are copied to the device for the optimizer step."""
    tower_learns: bool = False
    """Whether a vision tower is trained."""
    has_pictures: bool = False

    @property
    def architecture(self) -> Architecture:
        return self.work.architecture

    @property
    def trained(self) -> int:
        """Parameters that learn."""
        tower = self.architecture.tower
        in_tower = tower.parameters if tower and self.tower_learns else 0
        return self.adapter or self.weights + in_tower

    @property
    def weights(self) -> int:
        """Parameters of the language model, with what FSDP2 fills up."""
        arch = self.architecture
        missing = padding_parameters(arch, self.shard) if self.is_sharded else 0
        return arch.total_parameters + arch.expert_layers * missing

    @property
    def root_bytes(self) -> float:
        """Weights that are in no layer, on one device while gathered."""
        return self._gathered(self.architecture.root_parameters)

    @property
    def layer_bytes(self) -> float:
        return self._gathered(self.layer_parameters)

    @property
    def layer_parameters(self) -> int:
        """Parameters of the largest layer as it is gathered, or reduced."""
        return self.architecture.layer_parameters + padding_parameters(self.architecture, self.shard)

    def _gathered(self, count: int) -> float:
        return self.work.bytes_each * count / self.work.tensor_parallel if self.is_sharded else 0

    def states(self) -> Iterator[Term]:
        """Idle: master weights and moments, this device's share; unsharded also gradient and compute copy. And a frozen
        vision tower's weights, which stay float32 on a single rank, and what it made of pictures."""
        if self.adapter:
            frozen = self.weights
            p = self.work.bytes_each
            share = f"{p} B x {frozen:,} parameters / {self.shard}"
            yield term(self.label("frozen weights"), p * frozen / self.shard, share)
        if not self.is_sharded:
            yield from local.states(self.label(""), self.trained, self.work.bytes_each)
        elif not self.offload:
            share = f"x {self.trained:,} parameters / {self.shard}"
            yield term(
                self.label("master weights"), 4 * self.trained / self.shard, f"4 B {share}", "cluster.trainer.shard"
            )
            knob = "cluster.trainer.offload"
            if not self.moments_on_host:
                yield term(self.label("AdamW moments"), 8 * self.trained / self.shard, f"8 B {share}", knob)
        if self.architecture.tower and not self.tower_learns:
            p, count = self.work.bytes_each if self.is_sharded else 4, self.architecture.tower.parameters
            share = f"{p} B x {count:,} parameters / {self.shard}, frozen"
            yield term(self.label("vision tower"), p * count / self.shard, share, "model.freeze")
            if self.has_pictures:
                yield term(self.label("features of pictures"), KEPT_FEATURES_BYTES, "at most")

    def seen(self) -> list[Term]:
        """What a trained vision tower keeps for its backward pass."""
        tower, work = self.architecture.tower, self.work
        if tower is None or not self.tower_learns or not self.has_pictures:
            return []
        return [towers.kept(tower, towers.patches(tower, work), work.bytes_each, work.checkpointing)]

    def gradient(self) -> Term:
        size = 4 * self.trained / self.shard if self.is_sharded and not self.offload else 0
        return term(self.label("gradient"), size, f"4 B x {self.trained:,} parameters / {self.shard}")

    def label(self, name: str) -> str:
        return f"{self.name}: {name}" if self.name else name


def update_moments(model: Trained, held: list[Term]) -> Iterator[Moment]:
    """What one device holds while the model learns; `held` is there besides."""
    work, arch, p = model.work, model.architecture, model.work.bytes_each
    prefix = f"{model.name}'s " if model.name else ""
    seen = model.seen()
    if seen and (tower := arch.tower):
        working = towers.backward(tower, towers.patches(tower, work), p, work.checkpointing)
        yield moment("update", f"{prefix}tower backward", held, model.states(), model.gradient(), seen, working)
    if not model.is_sharded:
        held = [*held, *model.states()]
        yield from local.update_moments(prefix, work, [*held, *seen], trained=not model.adapter)
        yield moment("optimizer", f"{prefix}step", held)
        return
    tokens, knob = work.tokens, "train.tokens_per_microbatch"
    states, optimizing = [*model.states(), *seen], [*model.states()]
    saved = term("activations", *kept_by_layers(work), knob)
    masks = local.of_attention(work, backward=True)
    root = _root(model)
    numbers = model.layer_parameters
    layers = term("gathered layers", 2 * model.layer_bytes, f"2 x {p} B x {numbers:,} parameters")
    hidden = term("hidden states", 4 * p * arch.hidden * tokens, f"{4 * p} B x {arch.hidden} x {tokens:,} tokens", knob)
    piled = [model.gradient()] if model.accumulates else []
    trains_root = model.adapter == 0
    logits = [*_logits(work, trained=trains_root)] if work.has_logits else []
    yield moment(
        "update", f"{prefix}loss backward", held, states, piled, saved, masks, root, _one(layers), hidden, logits
    )
    again = made_again_per_token(work)
    recomputed = [term("one layer again", again * tokens, f"{again:,.0f} B x {tokens:,} tokens", knob)]
    inside = term("gradients of one layer", backward_per_token(work) * tokens, f"x {tokens:,} tokens", knob)
    of_output = p * arch.vocab * arch.hidden / work.tensor_parallel * work.has_logits
    root_grad = term("gradient of root", of_output * trains_root, "bfloat16, until it is reduced")
    working = [inside, root, root_grad]
    by_last = recomputed if recomputes_last(work) else []
    # Going backward activations are freed layer by layer, sharded gradients come, and the layer before is reduced while
    # the next one is gathered: the first, the second or the last but one is worst.
    first = moment("update", f"{prefix}layer backward", held, states, piled, saved, masks, layers, by_last, working)
    reduced = term("reduced gradient", 4 / p * model.layer_bytes * trains_root, f"4 B x {numbers:,} parameters")
    moe = arch.experts  # of a feed-forward block, or of all experts, the gradient of the last matrix is there first
    matrix = moe.count * moe.inner * (moe.latent or arch.hidden) if moe else arch.hidden * arch.inner
    down = term("gradient of one matrix", p * matrix / work.tensor_parallel * trains_root, f"{p} B x {matrix:,}")
    fewer = replace(saved, bytes=max(0, round(saved.bytes - kept_by_last(work) * tokens)))
    second = moment(
        "update", f"{prefix}layer backward", held, states, piled, fewer, masks, layers, by_last, reduced, down, working
    )
    each = saved_per_token(work)
    two_saved = term("activations", 2 * each * tokens, f"2 x {each:,.0f} B x {tokens:,} tokens", knob)
    by_first = recomputed if work.checkpointing != "none" else []
    # Without an earlier microbatch, gradients of the root and of two layers are not sharded yet.
    comes = trains_root and not model.offload and not model.accumulates
    missing = 4 * arch.root_parameters / model.shard * comes
    others = replace(model.gradient(), bytes=round(model.gradient().bytes - missing))
    missing = 2 * 4 * numbers / model.shard * comes
    without_two = replace(others, bytes=max(0, round(others.bytes - missing)))
    kept = [held, states, without_two, two_saved]
    last = moment("update", f"{prefix}layer backward", *kept, masks, layers, reduced, down, by_first, working)
    yield max(first, second, last, key=lambda one: one.bytes)
    whole = term("gradient of one layer", model.layer_bytes * trains_root, f"{p} B x {numbers:,} parameters")
    by_layer = moment("update", f"{prefix}root backward", held, states, others, root, root_grad, whole, reduced)
    # The root's weights go away as the float32 copy of its gradient is made for the reduction.
    of_root = term("gradient of root", 2 * model.root_bytes * trains_root, "bfloat16, and float32 to be reduced")
    by_root = moment("update", f"{prefix}root backward", held, states, others, root, of_root, _one(layers))
    yield max(by_layer, by_root, key=lambda one: one.bytes)
    yield moment("optimizer", f"{prefix}step", held, optimizing, model.gradient())


def _root(model: Trained) -> Term:
    formula = f"{model.work.bytes_each} B x {model.architecture.root_parameters:,} parameters"
    return term("gathered root", model.root_bytes, formula)


def _one(layers: Term) -> Term:
    """While the loss goes backward only one layer is gathered."""
    return replace(layers, bytes=layers.bytes // 2, formula=layers.formula.removeprefix("2 x "))


def _logits(work: Pass, *, trained: bool) -> Iterator[Term]:
    arch, tp = work.architecture, work.tensor_parallel
    knob = "train.logprob_chunk_tokens"
    each, divided = logits_backward_bytes_each(work), f" / {tp}" if tp > 1 else ""
    formula = f"{each} B x {work.chunk:,} tokens x {arch.vocab:,} vocabulary{divided}"
    yield term("logits", logits_backward_bytes(work), formula, knob)
    if work.loss == "chunked" and trained:
        formula = f"4 to 6 B x {arch.vocab:,} x {arch.hidden}{divided}"
        yield term("gradient of output layer", output_gradient_bytes(work), formula)


def forward_moment(model: Trained, held: list[Term]) -> Moment:
    """What one device holds in a pass of a sharded model without gradients; `held` is there besides."""
    work, arch, p = model.work, model.architecture, model.work.bytes_each
    each, knob = forward_per_token(work), "train.tokens_per_microbatch"
    parts = [
        term("one layer", each * work.tokens, f"{each:,.0f} B x {work.tokens:,} tokens", knob),
        local.of_attention(work, backward=False),
        _root(model),
        term("gathered layers", 2 * model.layer_bytes, f"2 x {p} B x {model.layer_parameters:,} parameters"),
    ]
    if work.has_logits:
        size = logits_forward_bytes(work)
        formula = f"{size / max(work.chunk * arch.vocab, 1):.0f} B x {work.chunk:,} tokens x {arch.vocab:,} vocabulary"
        parts.append(term("logits", size, formula, "train.logprob_chunk_tokens"))
    return moment("logprobs", "forward", held, parts)


def adapter_of(architecture: Architecture, workload: Workload) -> int:
    """Trained parameters of the run's adapter; 0 without one."""
    if not workload.adapter_rank:
        return 0
    return adapter_parameters(architecture, workload.adapter_rank, workload.adapter_targets)


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """Devices that do the same things, and what they do."""

    name: str
    devices: int
    policy: Trained | None = None
    critic: Trained | None = None
    reference: Trained | None = None
    """The frozen copy of the policy; None where there is none, or an adapter switched off is one."""
    reference_on_host: bool = False
    engine: EnginePlan | Embedded | None = None
    judge: EnginePlan | EmbeddedJudge | Reader | None = None
    engine_sleeps: int = 2
    judge_sleeps: bool = True
    is_gpu: bool = True
    bucket_bytes: int = 0
    """Size limit of the buckets in which weights are published."""
    sent_bytes: int = 0
    """Bytes of the largest published weight; one above the bucket size gets a bucket of its own."""
    by_host: bool = False
    """Weights are published through host memory (Ray's object store), not from device to device."""


def pool_moments(pool: PoolPlan, workload: Workload) -> list[Moment]:
    """Every moment of one device of a pool."""
    idle = [*_states_of(pool.policy), *_reference(pool), *_states_of(pool.critic)]
    base = [*_base(pool)]
    engine_awake = pool.engine.terms() if pool.engine else []
    engine_asleep = pool.engine.asleep_terms(pool.engine_sleeps) if pool.engine else []
    judge_awake = pool.judge.terms() if pool.judge else []
    judge_asleep = pool.judge.asleep_terms(2 if pool.judge_sleeps else 0) if pool.judge else []
    found: list[Moment] = []
    if pool.engine or (pool.policy and pool.bucket_bytes):
        woken = [one for one in engine_awake if "KV cache" not in one.name]
        found.append(moment("publish", "weights loaded", base, idle, woken, judge_asleep, _under_way(pool)))
    if pool.engine:
        found.append(moment("rollout", "sampling", base, idle, engine_awake, judge_awake))
    elif pool.judge:
        found.append(moment("reward", "judging", base, idle, judge_awake))
    held = [*base, *engine_asleep, *judge_asleep]
    reads = pool.reference
    if pool.policy and (workload.has_old_logprobs_pass or (workload.has_reference and pool.policy.adapter)):
        reads = pool.policy
    if reads:
        found.append(forward_moment(reads, [*held, *idle]))
    if pool.policy:
        beside = [*held, *_states_of(pool.critic), *_reference(pool)]
        found += update_moments(pool.policy, beside)
        found.append(moment("checkpoint", "saving", held, idle))
        found.append(moment("checkpoint", "exporting", held, idle, local.exported(pool.policy.architecture, copies=1)))
    if pool.critic:
        found += update_moments(pool.critic, [*held, *_states_of(pool.policy), *_reference(pool)])
    return found


def _under_way(pool: PoolPlan) -> Iterator[Term]:
    """What one device holds of a version that is published (docs/publishing.md, "Memory")."""
    knob, largest = "cluster.bucket_mib", max(pool.bucket_bytes, pool.sent_bytes)
    if pool.policy and pool.policy.is_sharded:
        yield term("gathered weight", pool.sent_bytes, "the largest, from all ranks")
    if pool.by_host and pool.is_gpu:
        return
    if pool.policy:
        yield term("weights under way", largest + pool.bucket_bytes, "two buckets of the sender", knob)
    if pool.engine:
        waiting = 0
        if isinstance(pool.engine, EnginePlan):  # what has come waits for the rest of its layer
            settings = pool.engine.settings
            waiting = settings.weight_bytes * settings.architecture.layer_parameters
        yield term("weights under way", largest + waiting, "the engine's bucket, and what waits for its layer", knob)


def _under_way_on_host(pools: Sequence[tuple[PoolPlan, int]]) -> int:
    """Of buckets in a machine's object store, in the memory of its sender, and in files for workers of one engine."""
    here = [(pool, devices) for pool, devices in pools if devices and pool.by_host and (pool.policy or pool.engine)]
    if not here:
        return 0
    first, _ = here[0]
    largest = max(first.bucket_bytes, first.sent_bytes)
    two, files = largest + first.bucket_bytes, 0
    for pool, devices in here:
        if isinstance(pool.engine, EnginePlan) and (ways := pool.engine.settings.tensor_parallel_size) > 1:
            files += largest * (devices // ways)
    return two + two * any(pool.policy for pool, _ in here) + files


def _base(pool: PoolPlan) -> Iterator[Term]:
    if not pool.is_gpu:
        yield term("process", local.PROCESS_BYTES, "Python, torch, Transformers and Hone, measured")
        return
    if pool.policy or pool.critic or pool.reference:
        yield term("CUDA context", CONTEXT_BYTES, "the trainer's process (estimate)")
    if pool.devices > 1:
        yield term("NCCL buffers", COLLECTIVES_BYTES, "communicators of one device (estimate)")


def _states_of(model: Trained | None) -> list[Term]:
    return [*model.states()] if model else []


def _reference(pool: PoolPlan) -> list[Term]:
    """The frozen reference's share of a device."""
    model = pool.reference
    if model is None or pool.reference_on_host:
        return []
    tower = model.architecture.tower
    count, p = model.architecture.total_parameters + (tower.parameters if tower else 0), model.work.bytes_each
    formula = f"{p} B x {count:,} parameters / {model.shard}"
    return [term("reference", p * count / model.shard, formula, "cluster.trainer.offload")]


def host_moments(pools: list[PoolPlan], *, per_node: int, records: Sequence[Term] = ()) -> list[Moment]:
    """What the memory of the fullest machine holds; pools take devices in their order, machine by machine.

    Args:
        records: of routing, which stay on the machines of the engines that made them; see `cluster/stored.py`.
    """
    ends = [*accumulate(pool.devices for pool in pools)]
    machines = range(-(-ends[-1] // per_node))
    found = []
    for first in (machine * per_node for machine in machines):
        here = [
            max(0, min(end, first + per_node) - max(end - pool.devices, first))
            for pool, end in zip(pools, ends, strict=True)
        ]
        found.append([*_machine(list(zip(pools, here, strict=True)), records)])
    return max(found, key=lambda moments: max(one.bytes for one in moments))


def share_of_records(pools: list[tuple[PoolPlan, int]]) -> float:
    """Of all records of routing, those that a machine holds: its engines', and what its ranks fetch from others, their
    share of one update's, which are at most half of all."""
    engines = sum(devices / pool.devices for pool, devices in pools if pool.engine)
    ranks = sum(devices / pool.devices for pool, devices in pools if pool.policy)
    return engines + ranks * (1 - engines) / 2


def _machine(pools: list[tuple[PoolPlan, int]], records: Sequence[Term]) -> Iterator[Moment]:
    """Memory of a machine, given the number of its devices in each pool."""
    count = sum(devices for _, devices in pools)
    processes = term("processes", count * PROCESS_BYTES, f"{count} x 3 GiB (estimate)")
    share = share_of_records(pools)
    held = [term(one.name, one.bytes * share, one.formula, one.knob) for one in records]
    asleep: list[Term] = []
    staged: list[Term] = []
    for pool, devices in pools:
        share = devices / pool.devices
        for model in (one for one in (pool.policy, pool.critic) if one):
            count = model.trained
            if model.offload:
                held.append(term(model.label("states"), 16 * count * share, f"16 B x {count:,} parameters"))
            elif model.moments_on_host:
                held.append(term(model.label("AdamW moments"), 8 * count * share, f"8 B x {count:,} parameters"))
            staged.append(term(model.label("checkpoint"), 12 * count * share, f"12 B x {count:,} parameters"))
        if pool.reference and pool.reference_on_host:
            count, p = pool.reference.architecture.total_parameters, pool.reference.work.bytes_each
            held.append(term("reference", p * count * share, f"{p} B x {count:,} parameters"))
        for engine in (one for one in (pool.engine, pool.judge) if isinstance(one, EnginePlan)):
            if size := engine.offloaded_bytes * devices:
                key = f"{engine.settings.section}.cpu_offload_gb"
                held.append(term(f"{engine.settings.prefix}weights on the host", size, "read in every step", key))
        if pool.engine and pool.engine_sleeps == 1:
            beside = pool.engine.adapter_bytes if isinstance(pool.engine, EnginePlan) else 0
            size = (pool.engine.weights_bytes + beside) * devices
            held.append(term("sleeping engines' weights", size, "sleep level 1", "cluster.engines.sleep_level"))
        if pool.judge and pool.judge_sleeps:
            asleep.append(term("sleeping judges' weights", pool.judge.weights_bytes * devices, "sleep level 1"))
    if size := _under_way_on_host(pools):
        under_way = term(
            "weights under way", size, "buckets in Ray's object store, sent and read", "cluster.bucket_mib"
        )
        yield moment("publish", "weights loaded", processes, held, asleep, under_way)
    yield moment("rollout", "sampling", processes, held)
    yield moment("update", "training", processes, held, asleep)
    if any(one.bytes for one in staged):
        yield moment("checkpoint", "saving", processes, held, staged)
    policies = [pool.policy.architecture for pool, _ in pools if pool.policy]
    if policies:
        # Every rank of a machine gathers on its device; one of them, rank 0, writes.
        yield moment("checkpoint", "exporting", processes, held, local.exported(policies[0], copies=2))
