"""Checks of what a recipe says about memory, one function per kind of sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from hone.errors import ConfigError
from hone.plan.activations import Pass
from hone.plan.architecture import GIB, Architecture
from hone.plan.audit.context import Context
from hone.plan.audit.findings import Finding, Kind
from hone.plan.audit.nanochat import Nanochat
from hone.plan.audit.recipe import Claim, TrainingRecipe, ends
from hone.plan.cluster import Trained, update_moments
from hone.plan.engine import EnginePlan
from hone.plan.hardware import find_hardware
from hone.plan.ledger import gib, percent

TOLERANCE = 0.05
"""A claim this close to the number that comes out is right."""
MEMORY_SETTINGS = ("device_batch", "sequence_tokens", "tokens_per_microbatch", "max_batched_tokens", "memory_frac")
"""Settings that peak memory follows from; prompts per step and samples per prompt only add passes."""

CheckClaim = Callable[[Context, Claim, str], Iterator[Finding]]


def check_claims(context: Context) -> Iterator[Finding]:
    """A finding, or several, for every claim."""
    for number, claim in enumerate(context.read.recipe.claims):
        yield from CHECKS[claim.about](context, claim, f"claims.{number}")


# ---- what claims speak of


def _engine(context: Context, claim: Claim, path: str) -> EnginePlan:
    engine = context.engines.get(claim.of or "")
    if engine is None:
        known = ", ".join(context.engines) or "none"
        raise ConfigError([f"{context.read.where(path)}  {path}.of: must name an engine ({known}), got {claim.of!r}"])
    return engine


def _training(context: Context, path: str) -> tuple[TrainingRecipe, Nanochat]:
    training, model = context.read.recipe.training, context.nanochat
    if training is None or model is None:
        raise ConfigError([f"{context.read.where(path)}  {path}: needs `training` with a nanochat model"])
    return training, model


def _said(claim: Claim, context: Context, path: str) -> tuple[float, float]:
    said = claim.bytes
    if said is None:
        raise ConfigError([f"{context.read.where(path)}  {path}: needs gb or mb"])
    return said


def _size(size: tuple[float, float]) -> str:
    low, high = (_decimal(end) for end in size)
    return low if low == high else f"{low} to {high}"


def _decimal(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"


def _is_right(said: tuple[float, float], true: float, tolerance: float = TOLERANCE) -> bool:
    return said[0] * (1 - tolerance) <= true <= said[1] * (1 + tolerance)


def _finding(path: str, claim: Claim, kind: Kind, text: str, values: Mapping[str, float]) -> Finding:
    return Finding(claim.about, kind, path, text, values)


# ---- inference


def weights(context: Context, claim: Claim, path: str) -> Iterator[Finding]:
    """Weights in bfloat16, divided over devices."""
    engine, said = _engine(context, claim, path), _said(claim, context, path)
    count, ways = engine.settings.architecture.total_parameters, claim.tensor_parallel or 1
    true = 2 * count / ways
    kind: Kind = "right" if _is_right(said, true) else "wrong"
    text = f"{count:,} parameters x 2 B / {ways} = {true / 1e9:.2f} GB = {true / GIB:.2f} GiB (said: {_size(said)})"
    yield _finding(path, claim, kind, text, {"parameters": count, "bytes": true, "gib": true / GIB})


def fits(context: Context, claim: Claim, path: str) -> Iterator[Finding]:
    """Weights and one longest sequence fit on a device, if the engine gets 0.9 of it."""
    engine = _engine(context, claim, path)
    capacity = find_hardware(claim.hardware or context.hardware.name).memory_bytes
    ways = claim.tensor_parallel or engine.settings.tensor_parallel
    settings = replace(engine.settings, tensor_parallel=ways, memory_frac=0.9, max_batched_tokens=8192)
    other = EnginePlan(settings, capacity)
    problem = other.problem()
    text = problem or (
        f"{gib(other.weights_bytes)} of weights on {gib(capacity)} leave room for {other.longest_sequences:.1f} "
        f"sequences of {settings.longest:,} tokens"
    )
    yield _finding(path, claim, "wrong" if problem else "right", text, {"sequences": other.longest_sequences})


def kv_cache(context: Context, claim: Claim, path: str) -> Iterator[Finding]:
    """What a cache of this size holds, or what a batch's cache takes."""
    said = _said(claim, context, path)
    if claim.of is None:
        training, model = _training(context, path)
        tokens = (claim.device_batch or training.device_batch) * training.sequence_tokens
        true = model.kv_bytes_per_token * tokens
        kind: Kind = "right" if _is_right(said, true) else "wrong"
        formula = f"{model.layers} layers x 2 x {tokens:,} tokens x {model.hidden} x 2 B = {true / 2**20:,.0f} MiB"
        yield _finding(path, claim, kind, f"{formula} (said: {_size(said)})", {"mib": true / 2**20})
        return
    engine = _engine(context, claim, path)
    arch, longest = engine.settings.architecture, claim.tokens or engine.settings.longest
    each = arch.kv_bytes_per_token() * longest
    samples = claim.samples or engine.settings.max_samples
    needed = samples * each
    holds = tuple(end / each for end in said)
    kind = "right" if said[1] >= needed else "wrong"
    text = (
        f"{_size(said)} hold {holds[0]:.1f} to {holds[1]:.0f} sequences of {longest:,} tokens ({each / GIB:.2f} GiB "
        f"each at {arch.kv_bytes_per_token():,} B a token); {samples} at once would need {gib(needed)}"
    )
    values = {"holds_low": holds[0], "holds_high": holds[1], "each_gib": each / GIB, "needed_gib": needed / GIB}
    if arch.latent:
        text += ". It is a latent for all heads: tensor parallelism does not divide it"
        two = arch.kv_bytes_per_token(tensor_parallel=2)
        values["bytes_per_token_with_2_devices"] = two
    yield _finding(path, claim, kind, text, values)


def shares_left(context: Context, claim: Claim, path: str) -> Iterator[Finding]:
    """What engines leave of a device is all that the trainer has, unless they sleep."""
    recipe, hardware = context.read.recipe, context.hardware
    asked = sum(engine.memory_frac for engine in recipe.engines.values())
    left = (1 - asked) * hardware.memory_bytes
    awake = [name for name, engine in recipe.engines.items() if not engine.sleeps]
    values = {"asked": asked, "left_gib": left / GIB}
    text = (
        f"{' + '.join(f'{engine.memory_frac:g}' for engine in recipe.engines.values())} = {asked:g} leaves "
        f"{gib(left)}, of which training has to live unless the engines sleep"
    )
    kind: Kind = "right"
    if isinstance(context.model, Architecture) and recipe.training is not None:
        idle, low, high = _trainer_needs(context.model, recipe.training)
        values |= {"idle_gib": idle / GIB, "update_low_gib": low / GIB, "update_high_gib": high / GIB}
        text += (
            f": it takes {gib(idle)} idle and {gib(low)} to {gib(high)} in an update "
            f"({context.model.total_parameters:,} parameters on {recipe.training.devices} devices)"
        )
        kind = "wrong" if awake and high > left else "right"
    yield _finding(path, claim, kind, text, values)


def _trainer_needs(model: Architecture, training: TrainingRecipe) -> tuple[float, float, float]:
    """Bytes on one device: idle, and in an update with one sequence and with `device_batch` of them, all activations
    recomputed."""

    def peak(sequences: int) -> float:
        tokens = sequences * training.sequence_tokens
        work = Pass(model, "transformers", 2, tokens, tokens, training.sequence_tokens, "full", "naive")
        return max(moment.bytes for moment in update_moments(Trained("", work, training.devices, False), []))

    return 12 * model.total_parameters / training.devices, peak(1), peak(training.device_batch)


def out_of_memory_order(context: Context, claim: Claim, path: str) -> Iterator[Finding]:
    """A ladder that lowers the engine's share whatever failed."""
    if "memory_frac" not in claim.order:
        return
    engine = _engine(context, claim, path)
    lower = replace(engine, settings=replace(engine.settings, memory_frac=0.9 * engine.settings.memory_frac))
    lost = engine.longest_sequences - lower.longest_sequences
    text = (
        "which step helps depends on the phase that failed. An engine that finds no room for its cache gets less of it "
        f"from a lower memory_frac: {engine.settings.memory_frac:g} to {lower.settings.memory_frac:.2g} takes "
        f"{lost:.1f} sequences away. Lower it only when what shares the device ran out"
    )
    yield _finding(path, claim, "wrong", text, {"sequences_lost": lost})


# ---- training


def kv_cache_batches(context: Context, claim: Claim, path: str) -> Iterator[Finding]:
    """Several batches' caches at one time."""
    training, model = _training(context, path)
    one = model.kv_bytes_per_token * training.device_batch * training.sequence_tokens
    text = (
        "generating and training take turns, and a batch's cache is gone before the next one's: the peak is the "
        f"largest phase, not their sum, so one cache ({gib(one)}) counts"
    )
    if claim.batches is not None:
        text += f", not {'-'.join(f'{end:g}' for end in ends(claim.batches))}"
    yield _finding(path, claim, "wrong", text, {"one_mib": one / 2**20})


def activations(context: Context, claim: Claim, path: str) -> Iterator[Finding]:
    """What the forward pass keeps."""
    training, model = _training(context, path)
    said = _said(claim, context, path)
    tokens = (claim.device_batch or training.device_batch) * training.sequence_tokens
    true, floor = model.saved_bytes(tokens), model.floor_bytes(tokens)
    kind: Kind = "right" if _is_right(said, true) else "wrong"
    text = f"{gib(true)} are kept for {tokens:,} tokens: {true / said[1]:.0f} times what is said ({_size(said)})"
    if _is_right(said, floor):
        text += ". What is said is one bfloat16 tensor per layer, the floor with full activation checkpointing"
    values = {"true_gib": true / GIB, "times": true / said[1], "floor_gib": floor / GIB}
    yield _finding(path, claim, kind, text, values)


def activations_of_passes(context: Context, claim: Claim, path: str) -> Iterator[Finding]:
    """Activations of several passes added up."""
    passes = claim.passes or "more"
    text = f"activations of a pass are freed by its backward pass; {passes} passes in turn take what one takes"
    yield _finding(path, claim, "wrong", text, {"passes_at_once": 1})


def static(context: Context, claim: Claim, path: str) -> Iterator[Finding]:
    """Weights, gradients and moments."""
    _, model = _training(context, path)
    parts = {"weights": model.weights_bytes, "gradients": model.gradients_bytes, "optimizer": model.optimizer_bytes}
    said = {"weights": claim.weights_gb, "gradients": claim.gradients_gb, "optimizer": claim.optimizer_gb}
    words, wrong = [], False
    for name, true in parts.items():
        size = said[name]
        if size is None:
            words.append(f"{name} are left out ({gib(true)})")
            wrong = True
        else:
            low, high = (1e9 * end for end in ends(size))
            right = _is_right((low, high), true)
            words.append(f"{name} {gib(true)}" + ("" if right else f", not {_size((low, high))}"))
            wrong = wrong or not right
    values = {f"{name}_gib": true / GIB for name, true in parts.items()}
    yield _finding(path, claim, "wrong" if wrong else "right", "; ".join(words), values)


def total(context: Context, claim: Claim, path: str) -> Iterator[Finding]:
    """The peak of a training step."""
    training, model = _training(context, path)
    said, batch = _said(claim, context, path), claim.device_batch or training.device_batch
    true = model.peak_bytes(batch * training.sequence_tokens)
    four_more = model.peak_bytes((batch + 4) * training.sequence_tokens) - true
    kind: Kind = "right" if _is_right(said, true) else "wrong"
    text = f"{batch} rows take {gib(true)} (said: {_size(said)}); four more take {gib(four_more)} more"
    values = {"gib": true / GIB, "four_more_gib": four_more / GIB, "times_with_four_more": (true + four_more) / true}
    yield _finding(path, claim, kind, text, values)


def grows_with(context: Context, claim: Claim, path: str) -> Iterator[Finding]:
    """A setting that is said to take memory."""
    if claim.setting in MEMORY_SETTINGS:
        yield _finding(path, claim, "right", f"{claim.setting} is in every activation's size", {})
        return
    training = context.read.recipe.training
    text = f"{claim.setting} adds passes, one after the other: peak memory stays as it is"
    values: dict[str, float] = {"bytes_more": 0}
    if claim.setting == "prompts_per_step" and training is not None and training.rows and claim.before and claim.after:
        steps = [training.rows // int(size) for size in (claim.before, claim.after)]
        text += f". It changes what is learnt: {training.rows:,} rows make {steps[1]} updates instead of {steps[0]}"
        values |= {"updates_before": steps[0], "updates_after": steps[1]}
    yield _finding(path, claim, "no effect", text, values)


def utilisation(context: Context, claim: Claim, path: str) -> Iterator[Finding]:
    """A size as a share of the device, in the recipe's own units."""
    said = _said(claim, context, path)
    card = 1e9 * claim.card_gb if claim.card_gb else float(context.hardware.memory_bytes)
    shares = tuple(end / card for end in said)
    percents = ends(claim.percent) if claim.percent is not None else (100 * shares[0], 100 * shares[1])
    is_right = all(abs(100 * share - end) <= 2 for share, end in zip(shares, percents, strict=True))
    text = (
        f"{_size(said)} of {card / 1e9:.0f} GB are {percent(shares[0])} to {percent(shares[1])}, "
        f"not {percents[0]:g} to {percents[1]:g} %"
    )
    values = {"low_percent": 100 * shares[0], "high_percent": 100 * shares[1]}
    yield _finding(path, claim, "right" if is_right else "wrong", text, values)


def out_of_memory_step(context: Context, claim: Claim, path: str) -> Iterator[Finding]:
    """A step of a ladder that breaks a rule of its own recipe."""
    training = context.read.recipe.training
    if training is None or claim.setting != "device_batch" or claim.after is None:
        return
    size = int(claim.after)
    rest = training.group_size % size
    legal = [n for n in range(size, 0, -1) if training.group_size % n == 0][:1]
    if rest:
        text = (
            f"device_batch {claim.before:g} to {size} with {training.group_size} samples breaks the recipe's own rule: "
            f"{training.group_size} % {size} = {rest}, and only {training.group_size - rest} samples are generated. "
            f"Nearest: {legal[0]}"
        )
        values = {"kept": training.group_size - rest, "nearest": legal[0]}
        yield _finding(path, claim, "contradictory", text, values)
    else:
        yield _finding(path, claim, "right", f"{training.group_size} % {size} = 0", {"nearest": size})


CHECKS: Mapping[str, CheckClaim] = {
    "weights": weights,
    "fits": fits,
    "kv_cache": kv_cache,
    "kv_cache_batches": kv_cache_batches,
    "activations": activations,
    "activations_of_passes": activations_of_passes,
    "static": static,
    "total": total,
    "grows_with": grows_with,
    "utilisation": utilisation,
    "shares_left": shares_left,
    "out_of_memory_step": out_of_memory_step,
    "out_of_memory_order": out_of_memory_order,
}
