"""What five common practices say about memory, against the planner's arithmetic: the page docs/reference/practices.md.

`python tests/plan/practices.py` writes the page; test_practices.py compares it and asserts its figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shapes import shape

from hone.plan.activations import Pass
from hone.plan.cluster import Trained, update_moments
from hone.plan.engine import EnginePlan, EngineSettings
from hone.plan.hardware import find_hardware
from hone.runtime.files import write_whole
from hone.sizes import GIB

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "practices.md"


@dataclass(frozen=True)
class Claim:
    """One sentence of a practice, what comes out, and whether that agrees."""

    said: str
    verdict: str
    found: str
    values: tuple[float, ...]


# ---- practice A: a judge of 16 billion parameters on the trainer's GPUs


def longest_sequences(engine: EnginePlan) -> float:
    """Sequences of the longest kind that the cache holds."""
    return engine.cache_bytes / (engine.kv_bytes_per_token * engine.settings.max_model_len)


def judge(frac: float = 0.3, ways: int = 1, tokens: int = 50_000, device: str = "A100-80G") -> EnginePlan:
    settings = EngineSettings(shape("deepseek-v2-lite"), ways, frac, tokens, 128, 17_000, "judge", graphs=False)
    return EnginePlan(settings, find_hardware(device).memory_bytes)


def update_bytes(sequences: int) -> float:
    """Of Qwen3-8B on 8 devices, sequences of 4,096 tokens, everything recomputed."""
    tokens = sequences * 4096
    work = Pass(shape("qwen3-8b"), "transformers", 2, tokens, tokens, 4096, "full", "naive")
    return max(moment.bytes for moment in update_moments(Trained("", work, 8, False), []))


def practice_a() -> Iterator[Claim]:
    engine, arch = judge(), shape("deepseek-v2-lite")
    count = arch.total_parameters
    yield Claim(
        "the judge runs with `gpu_memory_utilization: 0.3` of 80 GB",
        "impossible",
        f"0.3 is {engine.requested_bytes / GIB:.1f} GiB, weights alone are {engine.weights_bytes / GIB:.2f} GiB. "
        f"At least {engine.smallest_frac:.2f} is needed; with two devices each 0.3 is enough",
        (
            engine.requested_bytes / GIB,
            engine.weights_bytes / GIB,
            engine.smallest_frac,
            longest_sequences(judge(ways=2)),
        ),
    )
    yield Claim(
        "16 B parameters are 32 GB, 16 GB on each of two devices",
        "right",
        f"{count:,} x 2 B = {2 * count / 1e9:.2f} GB = {2 * count / GIB:.2f} GiB",
        (count, 2 * count / GIB),
    )
    each, low, high = arch.kv_bytes_per_token(), 5e9, 10e9
    long = 21_096
    yield Claim(
        "5 to 10 GB of cache are enough for 128 sequences, half on each of two devices",
        "wrong",
        f"they hold {low / each / long:.1f} to {high / each / long:.0f} of {long:,} tokens; 128 need "
        f"{128 * long * each / GIB:.0f} GiB. {each:,} B a token are a latent of all heads: two devices keep it twice",
        (low / each / long, high / each / long, 128 * long * each / GIB, arch.kv_bytes_per_token(tensor_parallel=2)),
    )
    needed = 1024 + 15_000 + 1500
    yield Claim(
        "prompt 1,024, response 15,000 and answer 1,500 fit into 17,000",
        "contradictory",
        f"they are {needed:,}",
        (needed,),
    )
    left = 0.3 * find_hardware("A100-80G").memory_bytes / GIB
    idle = 12 * shape("qwen3-8b").total_parameters / 8 / GIB
    one, four = update_bytes(1) / GIB, update_bytes(4) / GIB
    yield Claim(
        "0.4 for the policy's engine and 0.3 for the judge leave enough for the trainer",
        "wrong",
        f"they leave {left:.1f} GiB; the trainer takes {idle:.1f} idle and {one:.1f} to {four:.1f} in an update of 1 "
        "to 4 sequences. Engines that sleep in turn make room",
        (left, idle, one, four),
    )
    lost = (engine.workspace_bytes - judge(tokens=8192).workspace_bytes) / GIB
    yield Claim(
        "`max_num_batched_tokens: 50000` admits long prompts",
        "wasteful",
        f"chunked prefill cuts them; the workspace takes {lost:.1f} GiB more than with 8,192",
        (lost,),
    )
    lower = longest_sequences(judge(0.45)) - longest_sequences(judge(0.9 * 0.45))
    yield Claim(
        "out of memory: lower `gpu_memory_utilization` last",
        "wrong",
        f"it depends on the phase: an engine without room for its cache loses {lower:.1f} more sequences by it",
        (lower,),
    )


# ---- practice C: OpenRLHF's placements


def practice_c() -> Iterator[Claim]:
    yield Claim(
        "all models on 8 GPUs, critic and reward model together besides",
        "impossible",
        "two groups ask for 8 + 8 = 16 devices and wait for them. `hone import` places all roles on the 8",
        (16,),
    )
    asked = 16 + 16 + 16 + 8 + 8
    yield Claim(
        "a 70B on 48 GPUs, 16 + 16 + 16",
        "impossible",
        f"reference and reward model are not sized and get 8 each: {asked} devices. `hone plan --hardware 48xA100-80G` "
        "of the imported file says so",
        (asked,),
    )


# ---- practice E: nanochat's GRPO at 8 % of a card of 32 GB


@dataclass(frozen=True)
class Nanochat:
    """nanochat's model as memory sees it, counted from its source and met by a trace of it within 1 %.

    Matrices and output layer are float32, the embedding and every other layer's value embedding bfloat16; matrices have
    one moment (Muon), everything else two in its own dtype (AdamW). Linear layers keep a bfloat16 copy for the backward
    pass.
    """

    vocab: int
    layers: int = 16
    hidden: int = 1024

    @property
    def matrices(self) -> int:
        return 12 * self.hidden**2 * self.layers

    @property
    def embedding(self) -> int:
        return self.vocab * self.hidden

    @property
    def weights_bytes(self) -> int:
        return 4 * (self.matrices + self.embedding) + 2 * self.embedding * (1 + self.layers // 2)

    @property
    def optimizer_bytes(self) -> int:
        return 4 * self.matrices + 8 * self.embedding + 4 * self.embedding * (1 + self.layers // 2)

    def saved_bytes(self, tokens: int, per_logit: int = 8) -> int:
        """What a forward pass keeps: 24 numbers per unit of width, and its capped cross-entropy."""
        layers = 48 * self.hidden * self.layers * tokens + 2 * (self.matrices + self.embedding)
        return layers + per_logit * tokens * self.vocab

    def peak_bytes(self, tokens: int) -> int:
        """While the loss goes backward, gradients of earlier passes there."""
        return 2 * self.weights_bytes + self.optimizer_bytes + self.saved_bytes(tokens, per_logit=16)


def practice_e(vocab: int = 32_768) -> Iterator[Claim]:
    model, tokens = Nanochat(vocab), 8 * 512
    cache = 4 * model.layers * model.hidden * tokens
    yield Claim(
        "the cache of 8 samples is 512 MB, two or three are there at one time",
        "wrong",
        f"16 layers x 2 x {tokens:,} tokens x 1,024 x 2 B = {cache / 2**20:.0f} MiB, and generating and "
        "and training take turns",
        (cache / 2**20,),
    )
    said, kept = 2 * tokens * model.hidden * model.layers, model.saved_bytes(tokens)
    yield Claim(
        "activations are batch x tokens x width x layers x 2 B = 134 MB",
        "wrong",
        f"that is one tensor per layer, the floor with full recomputation. {kept / GIB:.2f} GiB are kept: "
        f"{kept / said:.0f} times as many",
        (said / GIB, kept / GIB, kept / said),
    )
    yield Claim("4 passes add up to 536 MB", "wrong", "a pass frees its activations before the next", (1,))
    weights, moments = model.weights_bytes / GIB, model.optimizer_bytes / GIB
    yield Claim(
        "weights 1 to 2 GB, optimizer 1 GB",
        "wrong",
        f"weights {weights:.2f} GiB, optimizer {moments:.2f} GiB, and gradients ({weights:.2f} GiB) are left out",
        (weights, moments),
    )
    totals = [model.peak_bytes(512 * rows) / GIB for rows in (4, 8, 12)]
    yield Claim(
        "4, 8 and 12 rows take 2.6, 10 to 15 and 18 to 25 GB",
        "wrong",
        f"they take {', '.join(f'{total:.1f}' for total in totals)} GiB: four more rows are 2.5 GiB, not 4 to 8 times",
        tuple(totals),
    )
    yield Claim(
        "more samples and more prompts per step use more memory",
        "no effect",
        f"they add passes; 64 prompts for 32 make {7473 // 64} updates of {7473 // 32}: another algorithm",
        (7473 // 32, 7473 // 64),
    )
    yield Claim(
        "10 to 15 GB of 32 are 50 to 70 %, 18 to 25 are 75 to 85 %",
        "wrong",
        f"they are {1000 / 32:.0f} to {1500 / 32:.0f} and {1800 / 32:.0f} to {2500 / 32:.0f} %",
        (1000 / 32, 1500 / 32, 1800 / 32, 2500 / 32),
    )
    yield Claim(
        "out of memory: 8 rows to 6, with 32 samples",
        "contradictory",
        f"32 is not a multiple of 6: only {32 // 6 * 6} are drawn, silently. 4 divides them",
        (32 // 6 * 6,),
    )


PRACTICES = {
    "A": ("a judge inside the training job (verl, DeepSeek-GRM-16B, 8 x A100-80G)", practice_a),
    "C": ("placements of OpenRLHF", practice_c),
    "E": ("nanochat at 8 % of a card of 32 GB (16 layers, vocabulary 32,768)", practice_e),
}


def page() -> str:
    """Text of the page."""
    lines = [
        "# Common practices, checked",
        "",
        "Settings and sentences of guides that many runs follow, against the arithmetic of `hone plan`. The commands",
        "themselves are in `tests/dialects/practices`. `hone import` reads them; `hone check` and `hone plan`",
        "refuse what cannot work in the imported files. This page is written by `tests/plan/practices.py`.",
    ]
    for name, (title, claims) in PRACTICES.items():
        lines += ["", f"## {name}: {title}", "", "| Practice | Verdict | What comes out |", "|---|---|---|"]
        lines += [f"| {claim.said} | {claim.verdict} | {claim.found} |" for claim in claims()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    write_whole(PAGE, page())
