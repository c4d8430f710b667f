"""Ledger of a run in one process on one device, as Hone trains today: flat buffers, and an engine beside them.

Follows `train/optim.py` (master, gradient, moments, compute copy), `train/policy.py` and `assemble/stages.py`
(reference, critic, what exists together at the start), `rollout/cache.py` and `decoding.py` (a cache that keeps the
largest size it ever had), `train/checkpoint.py` and `model/load.py` (what saving copies).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hone.plan import towers
from hone.plan.activations import (
    LAST_NORM_BYTES,
    Pass,
    attention_bytes,
    backward_per_token,
    forward_per_token,
    kept_by_layers,
    logits_backward_bytes,
    logits_backward_bytes_each,
    logits_forward_bytes,
    logits_forward_bytes_each,
    made_again_per_token,
    output_gradient_bytes,
    recomputes_last,
)
from hone.plan.architecture import Architecture, adapter_parameters
from hone.plan.engine import CONTEXT_BYTES, GRAPH_BYTES
from hone.plan.kv_cache import CacheRoom
from hone.plan.ledger import Moment, Term, moment, term
from hone.plan.workload import Workload
from hone.sizes import KEPT_FEATURES_BYTES, KEPT_PIXELS_BYTES, ONE_BYTE_EXPERTS, PATCHES_PER_PASS

PROCESS_BYTES = 490 << 20
"""Python with torch, Transformers and Hone loaded. Measured: 450 to 490 MiB."""
KEPT_BYTES = 160 << 20
"""What a process on a CPU does not give back once it has computed: kernels compiled for the shapes it met, rows of the
data. Measured: 130 to 210 MiB over small runs."""
LARGEST_KEPT_BLOCK = 32 << 20
"""glibc maps larger blocks, and gives them back when they are freed; smaller ones stay in the process."""


@dataclass(frozen=True, slots=True)
class ScoringModel:
    """A reward `reward_model`."""

    name: str
    architecture: Architecture
    batch_tokens: int
    """Tokens of one forward pass."""


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """What of the run file decides memory here, and nothing else."""

    critic: Architecture | None
    reward_models: tuple[ScoringModel, ...]
    work: Pass
    """The largest microbatch of the model."""
    room: CacheRoom
    """Room of the engine's cache."""
    max_concurrent: int
    prefill_tokens: int
    is_gpu: bool
    has_computed: bool
    """A stage came before in the same process."""
    graphs: bool = False
    """Decoding steps are CUDA graphs."""
    tower_learns: bool = False
    """Whether a vision tower is trained."""
    picture_pixels: int = 0
    """Pixels of the largest picture of a prompt; 0: prompts have none."""

    @property
    def architecture(self) -> Architecture:
        return self.work.architecture


def local_moments(settings: LocalSettings, workload: Workload) -> tuple[list[Moment], list[Moment]]:
    """Moments of the device that computes, and of the host where that is another one."""
    if not settings.is_gpu:
        return _with_heaps([*_device_moments(settings, workload)], settings, workload), []
    device = [*_device_moments(settings, workload)]
    total = settings.architecture.total_parameters
    process = term("process", PROCESS_BYTES, "Python, torch, Transformers and Hone, measured")
    staged = term("largest tensor", 4 * _trained(settings, workload), "one flat float32 buffer at a time")
    return device, [
        moment("start", "weights read", process, term("weights", 4 * total, f"4 B x {total:,} parameters")),
        moment("rollout", "sampling", process, routing_records(settings.architecture, workload)),
        moment("checkpoint", "saving", process, staged),
        moment("checkpoint", "exporting", process, exported(settings.architecture, copies=2)),
    ]


def _trained(settings: LocalSettings, workload: Workload) -> int:
    """Parameters with master weights and moments."""
    if workload.adapter_rank:
        return adapter_parameters(settings.architecture, workload.adapter_rank, workload.adapter_targets)
    return settings.architecture.total_parameters


def _device_moments(settings: LocalSettings, workload: Workload) -> Iterator[Moment]:
    states = [*_resident(settings, workload)]
    kept = (
        []
        if settings.is_gpu
        else [
            term("kept by process", KEPT_BYTES, "kernels, rows, pages not given back, measured"),
            *routing_records(settings.architecture, workload),
        ]
    )
    resident = [*states, *kept]
    if settings.has_computed:
        states = resident
    cache = [*_cache(settings, workload)]
    work, p = settings.work, settings.work.bytes_each
    total = settings.architecture.total_parameters
    if workload.has_reference and p == 2 and not workload.adapter_rank:
        yield moment("start", "states made", states, term("reference", 2 * total, "still float32: 2 B more"))
    else:
        yield moment("start", "states made", states)
    yield moment("rollout", "sampling", resident, cache, _sampling(settings, workload))
    yield moment("rollout", "cache grows", resident, cache, _growth(settings, workload))
    yield moment("rollout", "prompts computed", resident, cache, _prefill(settings, workload))
    if seeing := seeing_terms(settings):
        yield moment("rollout", "pictures seen", resident, cache, seeing)
    if settings.reward_models:
        yield moment("reward", "reward model reads", resident, cache, reading_terms(work, settings.reward_models))
    if workload.has_reference or workload.has_old_logprobs_pass:
        yield from forward_moments(work, [*resident, *cache])
    if settings.critic and workload.has_critic:
        critic = replace(work, architecture=settings.critic, has_logits=False)
        yield from update_moments("critic's ", critic, [*resident, *cache], trained=True)
    seen, tower = [], settings.architecture.tower
    if tower and settings.tower_learns and settings.picture_pixels:  # as if all tokens of prompts were of pictures
        seen = [towers.kept(tower, towers.patches(tower, work), work.bytes_each, work.checkpointing)]
    yield from update_moments("", work, [*resident, *cache, *seen], trained=not workload.adapter_rank)
    if seen and tower:
        working = towers.backward(tower, towers.patches(tower, work), work.bytes_each, work.checkpointing)
        yield moment("update", "tower backward", resident, cache, seen, working)
    yield moment("optimizer", "step", resident, cache)
    copies = 1 if settings.is_gpu else 2
    yield moment("checkpoint", "exporting", resident, cache, exported(settings.architecture, copies))


def _with_heaps(moments: list[Moment], settings: LocalSettings, workload: Workload) -> list[Moment]:
    """Moments of a CPU with what the heaps of the engine's and the trainer's thread keep.

    Measured, peaks of sampling and training add up: neither uses what the other has freed (docs/memory.md).
    """
    always = next(one for one in moments if one.phase == "optimizer").bytes
    sampling = max((one for one in moments if one.phase == "rollout"), key=lambda one: one.bytes)
    training = max((one for one in moments if one.phase not in ("start", "rollout")), key=lambda one: one.bytes)
    engine = _kept(settings, sampling.bytes - always, _prefill_tokens(settings, workload))
    trainer = _kept(settings, training.bytes - always, settings.work.tokens)

    def with_heaps(one: Moment) -> Moment:
        size = trainer if one.phase == "rollout" else engine
        if one.phase not in (sampling.phase, training.phase):  # below the peak of its own thread
            size += max(trainer - (one.bytes - always), 0)
        heaps = term("freed memory", size, "kept in heaps: blocks up to 32 MiB, by sampling and training, measured")
        return one if one.phase == "start" else moment(one.phase, one.name, one.terms, heaps)

    return [with_heaps(one) for one in moments]


def _kept(settings: LocalSettings, freed: int, tokens: int) -> int:
    """Of what a pass over `tokens` tokens has freed, what its thread's heap keeps."""
    largest = settings.work.bytes_each * tokens * settings.architecture.active_inner
    return freed if largest <= LARGEST_KEPT_BLOCK else 0


def _resident(settings: LocalSettings, workload: Workload) -> Iterator[Term]:
    """What is there all the time."""
    p, arch = settings.work.bytes_each, settings.architecture
    total, trained = arch.total_parameters, _trained(settings, workload)
    if settings.is_gpu:
        yield term("CUDA context", CONTEXT_BYTES, "one process (estimate)")
    else:
        yield term("process", PROCESS_BYTES, "Python, torch, Transformers and Hone, measured")
    yield from states("", trained, p)
    if workload.adapter_rank:
        yield term("frozen weights", p * total, f"{p} B x {total:,} parameters", "run.precision")
    if workload.has_reference and not workload.adapter_rank:
        yield term("reference", p * total, f"{p} B x {total:,} parameters", "algorithm.kl_loss_coef")
    if settings.critic and workload.has_critic:
        yield from states("critic: ", settings.critic.total_parameters, p)
    if workload.max_staleness:
        yield term("engine's weights", p * total, f"{p} B x {total:,} parameters", "rollout.max_staleness")
    for model in settings.reward_models:
        count = model.architecture.total_parameters
        yield term("reward models", p * count, f"{model.name}: {p} B x {count:,} parameters")
    yield from _tower_resident(settings, workload)
    if settings.work.implementation == "hone":
        copies = 1 + bool(workload.max_staleness) + (workload.has_reference and not workload.adapter_rank)
        table = 4 * arch.max_positions * arch.head_dim * (copies + workload.has_critic)
        yield term("rotary tables", table, f"4 B x {arch.max_positions:,} positions x {arch.head_dim}")


def _tower_resident(settings: LocalSettings, workload: Workload) -> Iterator[Term]:
    """A vision tower's weights, which stay float32 where they are frozen, and what it made of pictures."""
    tower = settings.architecture.tower
    if tower is None:
        return
    count, has_reference = tower.parameters, workload.has_reference and not workload.adapter_rank
    if settings.tower_learns:
        yield from states("vision tower: ", count, settings.work.bytes_each)
    else:
        yield term("vision tower", 4 * count, f"4 B x {count:,} parameters, frozen", "model.freeze")
    if copies := has_reference + workload.has_critic + bool(workload.max_staleness):
        yield term("vision tower, copies", 4 * copies * count, f"{copies} x 4 B x {count:,} parameters")
    if settings.picture_pixels and not settings.tower_learns:
        yield term("features of pictures", KEPT_FEATURES_BYTES, "at most")
    if settings.picture_pixels and not settings.is_gpu:
        yield term("decoded pictures", KEPT_PIXELS_BYTES, "at most")


def seeing_terms(settings: LocalSettings) -> list[Term]:
    """Pictures of an engine's prompts that go through a vision tower, if there are any."""
    tower, knob = settings.architecture.tower, "data.max_image_pixels"
    if tower is None or not settings.picture_pixels:
        return []
    p = settings.work.bytes_each if settings.tower_learns else 4
    patches = max(PATCHES_PER_PASS, settings.picture_pixels // tower.patch**2)
    pixels, each = 2 * 4 * tower.values_per_patch, towers.forward_per_patch(tower, p)
    return [
        term("pixels of pictures", pixels * patches, f"{pixels:,} B x {patches:,} patches", knob),
        term("one block of tower", each * patches, f"{each:,} B x {patches:,} patches", knob),
    ]


def exported(architecture: Architecture, copies: int) -> Term:
    """Weights are exported one at a time: gathered or merged in float32, and converted on the host."""
    fused = architecture.layer_parameters if architecture.experts else 0  # a layer's experts are one weight
    count = max(architecture.vocab * architecture.hidden, fused)
    return term("exported weight", 4 * copies * count, f"{copies} x 4 B x {count:,} parameters of the largest")


def states(prefix: str, count: int, p: int) -> Iterator[Term]:
    """Master weights, gradient, moments and compute copy of what is trained."""
    yield term(f"{prefix}master weights", 4 * count, f"4 B x {count:,} parameters")
    yield term(f"{prefix}gradient", 4 * count, f"4 B x {count:,} parameters")
    yield term(f"{prefix}AdamW moments", 8 * count, f"8 B x {count:,} parameters")
    if p == 2:
        yield term(f"{prefix}compute copy", 2 * count, f"2 B x {count:,} parameters", "run.precision")


# ---- replicas on devices of their own


def reading_terms(work: Pass, models: Sequence[ScoringModel]) -> list[Term]:
    """What the reward model with the largest forward pass holds besides weights while it reads.

    Args:
        work: of the policy; how its layers are computed.
    """
    passes = (
        replace(work, architecture=one.architecture, tokens=max(one.batch_tokens, work.longest), has_logits=False)
        for one in models
    )
    each = ([*_layer_forward(one, "reward.components.args.batch_tokens")] for one in passes)
    return max(each, key=lambda terms: sum(one.bytes for one in terms))


def engine_terms(settings: LocalSettings, workload: Workload) -> list[Term]:
    """What Hone's engine holds besides weights at its fullest moment."""
    working = [[*part(settings, workload)] for part in (_sampling, _growth, _prefill)] + [seeing_terms(settings)]
    return [*_cache(settings, workload), *max(working, key=lambda terms: sum(one.bytes for one in terms))]


# ---- rollout


def _rows(settings: LocalSettings, workload: Workload) -> int:
    """Rows that decode together."""
    in_flight = workload.samples * (workload.max_staleness + 1)
    return settings.max_concurrent if workload.evaluates else min(settings.max_concurrent, in_flight)


def _cache(settings: LocalSettings, workload: Workload) -> Iterator[Term]:
    """The engine's keys and values, and what its decoding steps work in where they are CUDA graphs; in a run both stay
    between rollouts."""
    per_token, room = settings.architecture.kv_bytes_per_token(bytes_each=settings.work.bytes_each), settings.room
    rows, tokens = settings.max_concurrent, room.tokens(settings.max_concurrent)
    prompts, responses = room.prompts_stored(rows) * room.prompt_tokens, room.responses(rows)
    parts = f"prompts {prompts:,}, responses {responses:,} at their longest"
    held = f"{tokens:,} tokens x {per_token:,} B ({parts})"
    yield term("KV cache", tokens * per_token, held, "rollout.kv_cache_tokens")
    if each := settings.architecture.state_bytes(settings.work.bytes_each):
        in_flight, knob = _rows(settings, workload), "rollout.max_concurrent_samples"
        yield term("KV cache, states", each * in_flight, f"{in_flight:,} samples x {each:,} B", knob)
    if settings.graphs:
        scores, formula = _scores(settings, workload)
        formula = f"{formula}, and 1 GiB of what the driver keeps (estimate)"
        yield term("CUDA graphs", scores + GRAPH_BYTES, formula, "cluster.engines.enforce_eager")


def _growth(settings: LocalSettings, workload: Workload) -> Iterator[Term]:
    """While the cache is laid out anew, or grows by a token, one layer of it is there twice."""
    per_token = settings.architecture.kv_bytes_per_token(bytes_each=settings.work.bytes_each)
    tokens, layers = settings.room.tokens(settings.max_concurrent), max(settings.architecture.attention_layers, 1)
    held = f"{tokens:,} tokens x {per_token:,} B / {layers} layers"
    yield term("one layer of cache", tokens * per_token // layers, held, "rollout.kv_cache_tokens")
    if states := settings.architecture.states:
        each, rows = states.state_bytes(settings.work.bytes_each), _rows(settings, workload)
        yield term(
            "one layer of states", each * rows, f"{rows:,} samples x {each:,} B", "rollout.max_concurrent_samples"
        )


def _sampling(settings: LocalSettings, workload: Workload) -> Iterator[Term]:
    """Logits and probabilities of all rows, and the attention of one layer."""
    arch, p, rows = settings.architecture, settings.work.bytes_each, _rows(settings, workload)
    each = (10 if p == 2 else 8) + (28 if workload.cuts_distribution else 0)
    knob = "rollout.max_concurrent_samples"
    yield term("logits", each * rows * arch.vocab, f"{each} B x {rows:,} rows x {arch.vocab:,} vocabulary", knob)
    yield term("attention scores", *_scores(settings, workload), knob)


def _scores(settings: LocalSettings, workload: Workload) -> tuple[int, str]:
    """Bytes of the scores in one layer of a decoding step, and how they were counted: in two parts, side by side, and
    their softmax. On CUDA these are float32, and the softmax is converted."""
    heads, p, rows = settings.architecture.heads, settings.work.bytes_each, _rows(settings, workload)
    each, width = 3 * 4 + 2 if settings.work.on_cuda and p == 2 else 3 * p, workload.lengths.longest
    return each * rows * heads * width, f"{each} B x {rows:,} rows x {heads} heads x {width:,} tokens"


def _prefill(settings: LocalSettings, workload: Workload) -> Iterator[Term]:
    work = replace(settings.work, tokens=_prefill_tokens(settings, workload))
    each = forward_per_token(work)
    yield term(
        "one layer", each * work.tokens, f"{each:,.0f} B x {work.tokens:,} prompt tokens", "rollout.prefill_tokens"
    )


def _prefill_tokens(settings: LocalSettings, workload: Workload) -> int:
    """Most tokens of prompts that are computed at one time."""
    longest, rows = workload.lengths.max_prompt, _rows(settings, workload)
    prompts = rows if workload.evaluates else -(-rows // workload.group)  # evaluated, each row may have its own
    return longest * min(prompts, max(1, settings.prefill_tokens // longest))


# ---- passes


def _layer_forward(work: Pass, knob: str = "train.tokens_per_microbatch") -> Iterator[Term]:
    """A layer of a pass without gradients."""
    each = forward_per_token(work)
    yield term("one layer", each * work.tokens, f"{each:,.0f} B x {work.tokens:,} tokens", knob)
    yield of_attention(work, backward=False)


def _loss_forward(work: Pass) -> Iterator[Term]:
    yield _hidden(work)
    yield _logits(logits_forward_bytes(work), logits_forward_bytes_each(work), work)


def forward_moments(work: Pass, held: list[Term]) -> Iterator[Moment]:
    """The two moments of a pass without gradients; `held` is there besides."""
    yield moment("logprobs", "layers", held, _layer_forward(work))
    yield moment("logprobs", "logits", held, _loss_forward(work))


def update_moments(prefix: str, work: Pass, held: list[Term], *, trained: bool) -> Iterator[Moment]:
    """The moments of a microbatch that may be its largest; `held` is there besides."""
    arch = work.architecture
    saved = term("activations", *kept_by_layers(work), "train.tokens_per_microbatch")
    kept = [*held, saved, of_attention(work, backward=False)]
    if work.has_logits:
        yield moment("update", f"{prefix}loss forward", kept, _loss_forward(work))
        loss = [_hidden(work), _logits(logits_backward_bytes(work), logits_backward_bytes_each(work), work)]
        size, p = work.bytes_each * arch.hidden * work.response_tokens, work.bytes_each
        formula = f"{p} B x {arch.hidden} x {work.response_tokens:,}"
        loss.append(term("gradient of hidden states", size, formula))
        if trained:
            formula = f"4 to 6 B x {arch.vocab:,} x {arch.hidden}"
            loss.append(term("gradient of output layer", output_gradient_bytes(work), formula))
        yield moment("update", f"{prefix}loss backward", kept, loss)
    mask = of_attention(work, backward=True)
    if arch.states:
        each = LAST_NORM_BYTES[work.bytes_each] * arch.hidden
        norm = term("last norm", each * work.tokens, f"{each:,} B x {work.tokens:,} tokens")
        yield moment("update", f"{prefix}last norm backward", held, saved, mask, norm)
    yield moment("update", f"{prefix}layer backward", held, saved, mask, _layer_backward(work, trained=trained))
    if trained:
        # Its own; of a matrix that is the output layer too, that one's; for bfloat16 their sum, converted to float32.
        each = {(4, False): 4, (4, True): 8, (2, False): 6, (2, True): 10}[
            work.bytes_each, arch.tied and work.has_logits
        ]
        size = round(each * arch.vocab * arch.hidden / work.tensor_parallel)
        formula = f"{arch.vocab:,} x {arch.hidden}, twice where it is the output layer too, and converted"
        last = term("gradient of embedding", size, formula)
        yield moment("update", f"{prefix}embedding backward", held, mask, last)


def _layer_backward(work: Pass, *, trained: bool) -> Iterator[Term]:
    arch, tokens, knob = work.architecture, work.tokens, "train.tokens_per_microbatch"
    each = backward_per_token(work)
    yield term("gradients of one layer", each * tokens, f"{each:,.0f} B x {tokens:,} tokens", knob)
    if recomputes_last(work):
        again = made_again_per_token(work)
        yield term("one layer again", again * tokens, f"{again:,.0f} B x {tokens:,} tokens", knob)
    if trained:
        matrix = 2 * arch.hidden * arch.active_inner
        bytes_of = 4 if work.bytes_each == 4 else 6
        yield term("gradient of one matrix", bytes_of * matrix, f"{bytes_of} B x {matrix:,}")
        if work.has_logits and arch.tied:
            size = work.bytes_each * arch.vocab * arch.hidden
            formula = f"{work.bytes_each} B x {arch.vocab:,} x {arch.hidden}, until the embedding's comes"
            yield term("gradient of output layer", size, formula)


def _hidden(work: Pass) -> Term:
    p, arch, tokens = work.bytes_each, work.architecture, work.response_tokens
    return term("hidden states", 3 * p * arch.hidden * tokens, f"{3 * p} B x {arch.hidden} x {tokens:,} tokens")


def of_attention(work: Pass, *, backward: bool) -> Term:
    """Masks, indices and scores."""
    size = attention_bytes(work, backward=backward)
    what = f"blocks of {work.tokens:,} queries"
    if work.is_flash and work.rows != "padded":
        what = f"places of {work.tokens:,} tokens for flash attention"
    return term("masks and indices", size, what, "train.tokens_per_microbatch")


def _logits(size: int, each: int, work: Pass) -> Term:
    formula = f"{each} B x {work.chunk:,} tokens x {work.architecture.vocab:,} vocabulary"
    return term("logits", size, formula, "train.logprob_chunk_tokens")


def routing_records(architecture: Architecture, workload: Workload) -> list[Term]:
    """Records of all samples that may be in flight or trained, and of one update besides: the batch that is made of
    them, or on a cluster objects of several samples of which some are still in use.

    None where routing is not replayed.
    """
    moe, lengths = architecture.experts, workload.lengths
    if not workload.replays_routing or moe is None:
        return []
    layers = architecture.expert_layers
    each = layers * moe.active * (1 if moe.count <= ONE_BYTE_EXPERTS else 2)
    tokens = workload.prompts * lengths.max_prompt + workload.samples * lengths.max_response
    updates = workload.max_staleness + 2
    formula = f"{updates} x {tokens:,} tokens x {each} B ({layers} layers x {moe.active} experts)"
    return [term("routing records", updates * tokens * each, formula, "algorithm.replay_routing")]
