"""Fakes for the tests of hone.observe: groups, settings, a small run."""

from dataclasses import dataclass

from hone.types import Fault, Group, Prompt, Sample, Score, VersionSpan


@dataclass(frozen=True)
class Settings:
    console: str = "quiet"
    tensorboard: bool = False
    wandb: str | None = None
    swanlab: str | None = None
    trackio: str | None = None
    mlflow: str | None = None
    samples_max_mib: float = 1.0
    samples_step_tokens: int | None = None
    tracker_samples: int = 0
    trace: bool = False


def make_group(index: int = 0, texts: tuple[str, ...] = ("4", "22"), rewards=(1.0, 0.0), step: int = 0) -> Group:
    """A group whose responses are `texts`, one token a character and a stop token 0."""
    prompt = Prompt(f"row-{index}", index, "2+2=", (50, 43, 50, 61), "4", {"seen": True})
    samples = tuple(
        Sample(
            prompt_id=prompt.id,
            index=i,
            token_ids=(*map(ord, text), 0),
            sampler_logprobs=tuple(-0.125 * (position + 1) for position in range(len(text) + 1)),
            versions=(VersionSpan(step, len(text) + 1),),
            finish_reason="stop",
            text=text,
        )
        for i, text in enumerate(texts)
    )
    scores = tuple(Score(r) if r is not None else Score(None, Fault.INFRA, "time-out") for r in rewards)
    return Group(prompt, samples, {"exact": scores}, tuple(rewards))


def decode(token_ids) -> str:
    return "".join(map(chr, token_ids)).replace("\0", "")
