"""The arguments of the judge reward, checked before anything is asked: sampling, scale, and the sum of lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import model_validator

from hone.config.engine import JUDGE_ANSWER_TOKENS, ROLE_TOKENS
from hone.config.run import Section, key
from hone.reward.http import FIRST_BACKOFF_S
from hone.reward.judge.guard import FLAGS, Flag
from hone.reward.judge.parse import Method
from hone.reward.resolve import Unusable

PROFILES: dict[str, tuple[Method, ...]] = {
    "deepseek_grm": ("grm_boxed",),
    "json": ("json",),
    "answer_tag": ("answer_tag",),
    "choice": ("choice",),
}


class SamplingConfig(Section):
    """How the judge samples."""

    temperature: float = key(1.0, ge=0)
    """0 is greedy, which makes several votes the same vote."""
    top_p: float = key(1.0, gt=0, le=1)
    """1 is off."""
    top_k: int = key(-1, ge=-1)
    """-1 and 0 are off."""
    max_tokens: int | None = key(None, unit="tokens", ge=1)
    """Most tokens of one answer; null takes `response_length`."""


class DataProcessorConfig(Section):
    """The user's own functions; see `user.py`."""

    path: str = key(...)
    """Python file, relative to the run file."""
    preprocess_fn_name: str | None = key(None)
    """Makes the judge's prompt; null: the template does."""
    postprocess_fn_name: str | None = key(None)
    """Makes a score of the judge's text; null: the parsers do."""


class JudgeSettings(Section):
    """`args` of the `judge` reward."""

    url: str | tuple[str, ...] | None = key(None)
    """Base URL of an OpenAI-compatible endpoint, or of several with the same model. Exactly one of `url`, `service`."""
    service: str | None = key(None)
    """Name of a service of the run file."""
    model: str | None = key(None)
    """Model name in requests; null leaves it to the endpoint."""
    token_env: str | None = key(None)
    """Environment variable with the endpoint's key."""
    profile: Literal["deepseek_grm", "json", "answer_tag", "choice"] = key("deepseek_grm")
    """Form of answer that the prompt asks for, and its parser."""
    parsers: tuple[Method, ...] | None = key(None, min_length=1)
    """Parsers in the order in which they are tried; null: the profile's. The first one's form is asked for."""
    template: str | None = key(None)
    """File with a prompt of your own, relative to the run file; placeholders as in `prompt.py`. null: the built-in."""
    mode: Literal["pointwise", "groupwise"] = key("pointwise")
    """Each response by itself, or all of a prompt in one question."""
    votes: int = key(1, ge=1, le=64)
    """Answers asked for each question; the score is the mean of the valid ones, at least half of them."""
    sampling_config: SamplingConfig = key(SamplingConfig())
    """How the judge samples."""
    template_args: dict[str, bool | int | float | str | None] = key({})
    """Arguments of the judge's chat template, such as `{enable_thinking: false}`; sent as `chat_template_kwargs`."""
    seed: int = key(0, ge=0)
    """Every vote's seed and order of responses is a function of it."""
    scale: tuple[float, float] = key((1.0, 10.0))
    """Lowest and highest score that the judge may give; the reward is where between them it lies, in [0, 1]."""
    choices: dict[str, float] = key({})
    """With the parser `choice`: each verdict and its score on the scale."""
    reference: bool = key(False)
    """Show the row's answer to the judge as a right one."""
    pictures: bool = key(False)
    """Show the pictures of the prompt to the judge, in front of the question; the judge must read pictures."""
    picture_px: int = key(1024, unit="pixels", ge=28)
    """Longest side of a picture as the judge is sent it."""
    picture_tokens: int | None = key(None, unit="tokens", ge=1)
    """Tokens that a picture counts in `prompt_length`; null: a token for each 28 x 28 pixels, as Qwen-VL has it."""
    prompt_length: int | None = key(None, unit="tokens", ge=1)
    """Most tokens of a judge's prompt; null: what `max_model_len` leaves, or no limit."""
    response_length: int = key(JUDGE_ANSWER_TOKENS, unit="tokens", ge=1)
    """Most tokens of a judge's answer."""
    max_model_len: int | None = key(None, unit="tokens", ge=1)
    """Context of the judge; null: not known, and not checked."""
    max_question_tokens: int | None = key(None, unit="tokens", ge=1)
    """Longest question (`data.max_prompt_tokens`), for the check at the start."""
    max_answer_tokens: int | None = key(None, unit="tokens", ge=1)
    """Longest response (`rollout.max_response_tokens`), for the check at the start."""
    template_tokens: int | None = key(None, unit="tokens", ge=0)
    """Tokens of the prompt around question and response; null: counted."""
    tokenizer: str | None = key(None)
    """The judge's tokenizer.json or its folder, to count with; null: one token for each byte, an upper bound."""
    overlong: Literal["truncate", "min_score", "error"] = key("truncate")
    """A response too long for `prompt_length`: without its reasoning, then without its middle; or scored lowest; or a
    data fault."""
    penalties: dict[Flag, float] = key({})
    """Penalty of a flag, of a reward in [0, 1]; a flag that is not listed costs nothing."""
    canary_every: int = key(0, unit="judged responses", ge=0)
    """Judged responses between two sets of worthless ones; 0: never."""
    canary_threshold: float = key(0.5, gt=0, le=1)
    """A canary with this reward or more is an alarm."""
    data_processor_config: DataProcessorConfig | None = key(None)
    """Functions of your own around the judge."""
    deadline_s: float = key(300.0, unit="seconds per answer", gt=0)
    """An answer that cannot be had by then is a fault of infrastructure."""
    first_backoff_s: float = key(FIRST_BACKOFF_S, unit="seconds", gt=0)
    """Bound of the random wait before the first retry; it doubles with each further one, up to 30 s."""
    max_in_flight: int = key(64, unit="requests per URL", ge=1)
    """Requests at one time."""
    cache_items: int = key(16_384, unit="answers", ge=0)
    """Answers remembered: the same question with the same seed is asked once."""
    log_every_s: float = key(60.0, unit="seconds", ge=0)
    """Between two lines about throughput; 0: after each group."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        sampling, (low, high) = self.sampling_config, self.scale
        if not low < high:
            raise ValueError(f"scale: {low:g} is not below {high:g}")
        if self.votes > 1 and sampling.temperature == 0:
            raise ValueError(
                f"votes: {self.votes} at temperature 0 are {self.votes} times the same vote. Set "
                "sampling_config.temperature above 0, or votes: 1."
            )
        if sampling.max_tokens not in (None, self.response_length):
            raise ValueError(
                f"sampling_config.max_tokens = {sampling.max_tokens}, but response_length = {self.response_length}: "
                "both bound the judge's answer; set one of them."
            )
        wants = "choice" in self.methods
        outside = [word for word, score in self.choices.items() if not low <= score <= high]
        if wants != bool(self.choices) or outside:
            raise ValueError("choices: the parser `choice` needs verdicts with scores on the scale; no other does")
        if wants and self.mode == "groupwise":
            raise ValueError("mode: groupwise needs a score for each response; `choice` gives one")
        if self.reference and self.data_processor_config and self.data_processor_config.preprocess_fn_name:
            raise ValueError("reference: your preprocess function is given it in any case; leave this out")
        if self.pictures and self.data_processor_config and self.data_processor_config.preprocess_fn_name:
            raise ValueError("pictures: your preprocess function makes the judge's prompt, and it is given text alone")
        if self.data_processor_config and self.mode == "groupwise":
            raise ValueError("data_processor_config: its functions see one response; use mode: pointwise")
        wrong = [flag for flag, cost in self.penalties.items() if not 0 <= cost <= 1]
        if wrong:
            raise ValueError(f"penalties.{wrong[0]}: must be 0 to 1, of {', '.join(FLAGS)}")
        return self

    @property
    def methods(self) -> tuple[Method, ...]:
        return self.parsers or PROFILES[self.profile]

    @property
    def tokens_per_picture(self) -> int:
        """Of the judge's prompt; an estimate, at most."""
        return self.picture_tokens or (-(-self.picture_px // 28)) ** 2

    @property
    def prompt_budget(self) -> int | None:
        """Most tokens of a prompt that the judge is sent; None: no limit is known."""
        if self.prompt_length is not None or self.max_model_len is None:
            return self.prompt_length
        return self.max_model_len - self.response_length - ROLE_TOKENS

    @property
    def sampling(self) -> dict[str, Any]:
        """Fields of every request; what is off is left out, for endpoints that do not know it."""
        sampling = self.sampling_config
        fields: dict[str, Any] = {"temperature": sampling.temperature, "max_tokens": self.response_length}
        if sampling.top_p < 1:
            fields["top_p"] = sampling.top_p
        if sampling.top_k > 0:
            fields["top_k"] = sampling.top_k
        if self.template_args:
            fields["chat_template_kwargs"] = self.template_args
        return fields


def length_problems(settings: JudgeSettings, template_tokens: int) -> list[str]:
    """Every sum of lengths that does not come out, with its arithmetic."""
    problems: list[str] = []
    limit, room = settings.prompt_budget, settings.max_model_len
    name = "prompt_length" if settings.prompt_length is not None else f"max_model_len - response_length - {ROLE_TOKENS}"
    question, answer = settings.max_question_tokens, settings.max_answer_tokens
    if limit is not None and question is not None and answer is not None:
        total = question + answer + template_tokens
        if total > limit:
            problems.append(
                f"max_question_tokens {question} + max_answer_tokens {answer} + template {template_tokens} = {total} "
                f"tokens > {name} {limit}: the longest responses do not fit. Raise {name} or lower the others; to have "
                "them cut instead, leave max_question_tokens and max_answer_tokens out."
            )
    elif limit is not None and (question is None) != (answer is None):
        problems.append("max_question_tokens and max_answer_tokens go together: the sum needs both")
    if room is not None and settings.prompt_length is not None:
        total = settings.prompt_length + settings.response_length + ROLE_TOKENS
        if total > room:
            problems.append(
                f"prompt_length {settings.prompt_length} + response_length {settings.response_length} + {ROLE_TOKENS} "
                f"for the chat template = {total} tokens > max_model_len {room}."
            )
    elif limit is not None and limit <= template_tokens:
        problems.append(f"template {template_tokens} tokens >= {name} {limit}: there is no room for any response")
    return problems


def template_text(settings: JudgeSettings, folder: Path, built_in: str) -> str:
    """The prompt's template. Raises Unusable when the file cannot be read or has no place for responses."""
    if settings.template is None:
        return built_in
    path = folder / Path(settings.template).expanduser()
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Unusable(f"template: {path} cannot be read: {error}") from error
    missing = [name for name in ("{question}", "{responses}") if name not in text]
    if settings.reference and "{reference}" not in text:
        missing.append("{reference}")
    if missing:
        raise Unusable(f"template: {path} has no {' and no '.join(missing)}")
    return text
