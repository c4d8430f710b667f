"""What both sides of the comparison with TRL train: models, prompts, reward, learning rate. No torch, no TRL.

The task is two-digit addition, one character a token: `27+85=` -> `112` and EOS. In the long case every response
is `112;` and random digits up to 64 tokens: the warm-up text ends in noise without an EOS, so both sides sample
64 tokens, nearly all different, without either being forced to.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

CHARACTERS = "0123456789+=;"
PROMPTS_PER_STEP, GROUP_SIZE = 32, 8
LEARNING_RATE = 3e-4
BETAS = (0.9, 0.999)
WARMUP_STEPS = 10
"""Steps that count for the reward curve but not for the time."""


@dataclass(frozen=True)
class Case:
    """One model and one length of response."""

    hidden_size: int
    num_layers: int
    max_response_tokens: int
    noisy: bool
    """Responses continue with random digits to the last token."""
    supervised_steps: int
    """How long the common starting point was trained: to about 0.4 sampled accuracy."""

    def architecture(self) -> dict[str, object]:
        """The keys of a config.json: Qwen3, head size 32, gated MLP three times as wide."""
        heads = self.hidden_size // 32
        return {
            "model_type": "qwen3",
            "hidden_size": self.hidden_size,
            "intermediate_size": 3 * self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": 32,
            "max_position_embeddings": 128,
            "tie_word_embeddings": True,
        }


CASES = {
    "0.8M": Case(128, 4, 6, noisy=False, supervised_steps=240),
    "0.8M-64-tokens": Case(128, 4, 64, noisy=True, supervised_steps=300),
    "5M": Case(256, 6, 6, noisy=False, supervised_steps=180),
}


def problem(chance: random.Random) -> tuple[str, str]:
    """A prompt and its answer."""
    left, right = chance.randint(10, 99), chance.randint(10, 99)
    return f"{left}+{right}=", str(left + right)


def solution(answer: str, case: Case, chance: random.Random) -> str:
    """The response of the SFT warm-up; EOS follows it unless the case is noisy."""
    if not case.noisy:
        return answer
    noise = chance.choices("0123456789", k=8)  # no EOS is ever seen, so the policy samples to its last token
    return f"{answer};{''.join(noise)}"


def write_prompts(path: Path, *, seed: int, steps: int) -> None:
    """The prompts of a run in the order in which both sides take them."""
    chance = random.Random(f"prompts {seed}")
    rows = (problem(chance) for _ in range(PROMPTS_PER_STEP * steps))
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in rows))


def correct(text: str, answer: str) -> float:
    """The reward of both sides: 1 for the right sum, whatever noise follows its semicolon."""
    return float(text.partition(";")[0] == answer)
