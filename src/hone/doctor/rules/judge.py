"""Advice on the engines of judges: their caches, prompts and memory."""

from __future__ import annotations

from dataclasses import replace

from hone.doctor.history import History
from hone.doctor.rule import AlarmRule, Cause, above, below, when
from hone.doctor.rules.common import LESS_JUDGE_MEMORY, OURS

JUDGE_HITS, JUDGE_CACHE = "reward/<component>_prefix_hit_frac_mean", "reward/<component>_cache_used_frac_mean"
JUDGE_MEMORY, JUDGE_ROOM = "reward/<component>_device_used_gib_mean", "reward/<component>_device_total_gib_mean"


def _judge_memory_used(h: History, used: str) -> float:
    """Share of the memory of a judge's devices that is used, on average of ten."""
    total = h.mean(used.replace("_device_used_", "_device_total_"), 10)
    return h.mean(used, 10) / total if total > 0 else 0.0


JUDGE_CACHE_FULL = Cause(
    name="judge_cache_full",
    what="a judge's KV cache is full: it answers fewer questions at once than it is asked, or begins some again.",
    change="services.<name>.engine: more gpu_memory_utilization, or fewer max_num_seqs; then a shorter "
    "max_model_len, enforce_eager: true, a larger tensor_parallel_size, a pool of its own",
    confirm="With a smaller max_in_flight among the judge's args the cache is less used and no fewer "
    "samples are judged per second.",
    applies=lambda h: any(h.mean(name, 10) > 0.9 for name in h.names(JUDGE_CACHE)),
    reads=(JUDGE_CACHE,),
)
JUDGE_PROMPTS_DIFFER_EARLY = Cause(
    name="judge_prompts_differ_early",
    what="a judge computes every prompt anew: few tokens of its prompts are in its prefix cache.",
    change="the judge's template: what all questions share, then the question, the response last; "
    "services.<name>.engine: enable_prefix_caching: true",
    confirm="The judge's line `prefix cache hits` rises, and its answers per second with it.",
    applies=lambda h: any(h.mean(name, 10) < 0.1 for name in h.names(JUDGE_HITS)),
    reads=(JUDGE_HITS,),
)
JUDGES = (
    AlarmRule(
        name="judge_cache_full",
        level="tuning",
        pattern="the KV cache of a judge is full",
        metrics=(JUDGE_CACHE,),
        when=above(JUDGE_CACHE, 0.9, mean=10),
        of=(8, 10),
        after=5,
        silenced_by=("rewards_slow",),
        causes=(replace(JUDGE_CACHE_FULL, applies=lambda _: True),),
        source=OURS,
    ),
    AlarmRule(
        name="judge_prompts_differ",
        level="tuning",
        pattern="a judge finds few tokens of its prompts in its prefix cache",
        metrics=(JUDGE_HITS,),
        when=below(JUDGE_HITS, 0.1, mean=10),
        of=(8, 10),
        after=5,
        silenced_by=("rewards_slow",),
        causes=(replace(JUDGE_PROMPTS_DIFFER_EARLY, applies=lambda _: True),),
        source=OURS,
        worst=lambda h, name: -h.now(name),
    ),
    AlarmRule(
        name="judge_memory_full",
        level="tuning",
        pattern="nearly all memory of a judge's devices is used",
        metrics=(JUDGE_MEMORY, JUDGE_ROOM),
        when=when(
            "above 0.97 of reward/<component>_device_total_gib_mean, on average of ten",
            lambda h: any(_judge_memory_used(h, name) > 0.97 for name in h.names(JUDGE_MEMORY)),
        ),
        of=(8, 10),
        after=5,
        worst=_judge_memory_used,
        causes=(
            Cause(
                name="judge_memory_tight",
                what="a longer question, or another process on these devices, may find no memory, and the judge ends.",
                change=LESS_JUDGE_MEMORY,
                confirm="nvidia-smi names the processes on these devices. If the judge is alone there, its own "
                "gpu_memory_utilization decides; else what shares them.",
                reads=(JUDGE_CACHE,),
            ),
        ),
        source="a share of 0.9 is usual for an engine alone on its devices (docs/rewards-judge.md); 0.97 ours",
    ),
)
