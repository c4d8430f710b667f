"""The shared nouns: what a prompt, a sample, a score, a group and a batch are. No behaviour beyond validation.

Everything here is frozen, and only `Batch` has tensors, so that recording, checking and serving need no torch. What
there is per token is a read-only NumPy array: one process carries all samples of a run. Lifecycle of a sample:

    Prompt --engine--> Sample (tokens, sampler logprobs, version) --reward--> Group (scores, rewards)
           --collate--> Batch (flat tensors) --credit--> advantages_T --trainer--> new weights

Worked example, two samples of one prompt, "2+2=" (4 tokens), answers "4$" and "22$" where $ is EOS:

    samples[0].token_ids = [id("4"), EOS]           samples[0].sampler_logprobs = [-0.3, -0.1]
    samples[1].token_ids = [id("2"), id("2"), EOS]  rewards = (1.0, 0.0)
    Batch: T = 5 response tokens, S = 2 samples, sample_T = [0, 0, 1, 1, 1]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from hone.experts import RoutingRecord

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length"]
TokenIds = NDArray[np.int32]
"""(n,) int32, read-only."""


def read_only(values: ArrayLike | bytes, dtype: DTypeLike) -> NDArray[Any]:
    """(n,) array that cannot be changed: one that is so already, the bytes of one, or a copy of any numbers."""
    if isinstance(values, bytes):
        return np.frombuffer(values, dtype)
    if isinstance(values, np.ndarray) and values.dtype == dtype and not values.flags.writeable:
        return values
    array = np.array(values, dtype)
    array.setflags(write=False)
    return array


class WithArrays:
    """Base of frozen dataclasses whose fields may be arrays: equal if all their bits are, and pickled as bytes, which
    are read-only again when they are read."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(_bits(getattr(self, name)) == _bits(getattr(other, name)) for name in self.__slots__)

    def __hash__(self) -> int:
        values = (getattr(self, name) for name in self.__slots__)
        return hash(tuple(value for value in values if isinstance(value, str | int)))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(_packed(getattr(self, name)) for name in self.__slots__)


def _bits(value: Any) -> Any:
    return value.tobytes() if isinstance(value, np.ndarray) else value


def _packed(value: Any) -> Any:
    """Bytes of a flat array, whose dtype its field knows; NumPy's own form of others."""
    return _bits(value) if isinstance(value, np.ndarray) and value.ndim == 1 else value


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of a prompt, as the model sees it: its place among the tokens, and where its pixels come from."""

    digest: str
    """Hash of everything that its pixels and their normalisation depend on."""
    start: int
    """Place of its first token in the prompt's `token_ids`."""
    rows: int
    """Of its tokens."""
    columns: int
    mean: tuple[float, ...]
    """(3,) of red, green and blue: the model's input is (pixel / 255 - mean) / std."""
    std: tuple[float, ...]
    read: Callable[..., NDArray[Any]] = field(compare=False, repr=False)
    """Decodes it: (height, width, 3) uint8, as the model sees it; tiles, where it sees some, one below the other. A
    keyword `resample` names another filter than the processor's; `within` asks for the whole picture in its own shape
    instead, no side longer than this. It can be pickled."""

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True, slots=True, eq=False)
class Prompt(WithArrays):
    """One task instance: what the policy sees, and what a reward needs to judge the answer."""

    id: str
    """Stable across runs, shuffles and machines: the row's own id column, else a hash of its content."""
    index: int
    """Position in the stream of this run (epoch order); the loop resumes from it."""
    text: str
    """The rendered prompt, template applied; for people and for rewards. Never re-tokenised."""
    token_ids: TokenIds
    answer: Any = None
    """The gold answer, from the mapped column."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Every column of the row but the prompt's, for rewards."""
    messages: tuple[Mapping[str, Any], ...] | None = None
    """The {role, content} messages that `text` renders, when `data.chat`; for rewards with a template of their own."""
    pictures: tuple[Picture, ...] = ()
    """In the order of their tokens, which `token_ids` has in full."""
    source: str = ""
    """The source's name in metrics, where `data.train` or `data.eval` has several."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", read_only(self.token_ids, np.int32))


class VersionSpan(NamedTuple):
    """Consecutive tokens that one policy version (number of updates made) sampled."""

    version: int
    num_tokens: int


def version_spans(versions: ArrayLike) -> tuple[VersionSpan, ...]:
    """Spans of (n,) versions, one per token."""
    each = np.asarray(versions, np.int64)
    if len(each) and (each == each[0]).all():  # nearly every sample
        return (VersionSpan(int(each[0]), len(each)),)
    starts = np.flatnonzero(np.diff(each, prepend=each[:1] - 1))
    return tuple(map(VersionSpan, each[starts].tolist(), np.diff(starts, append=len(each)).tolist()))


@dataclass(frozen=True, slots=True)
class Turn:
    """What the policy wrote between two answers of an environment, and what the environment thought of it."""

    start: int
    end: int
    """`token_ids[start:end]` of the sample are the turn's, its stop token included."""
    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Sample(WithArrays):
    """One sampled token sequence for a prompt. All arrays have one length; any numbers given for one are copied."""

    prompt_id: str
    index: int
    """0 .. group_size - 1: with (seed, step, prompt) the key of its randomness."""
    token_ids: TokenIds
    """What followed the prompt, the stop token included when the policy wrote it."""
    sampler_logprobs: NDArray[np.float32]
    """Natural log, of the distribution really sampled from (temperature and truncation applied)."""
    versions: tuple[VersionSpan, ...]
    """Which policy versions sampled the tokens, in order; never descending."""
    finish_reason: FinishReason
    text: str
    """Decoded response without special tokens, for rewards and people."""
    loss_mask: NDArray[np.bool_] | None = None
    """False marks tokens the policy did not write (tools, environment). None: it wrote all of them."""
    turns: tuple[Turn, ...] = ()
    """The turns of a sample that met an environment, in order; the mask is True on exactly these."""
    fault: str = ""
    """Why the environment failed; the sample ends there and is not scored."""
    engine: str = ""
    """Name of the engine that drew it, of several; of a sample that met an environment, the last."""
    routing: RoutingRecord | None = None
    """Of each token as an input of the engine, where that records it; the last one was no input."""
    prompt_routing: RoutingRecord | None = None
    """Of the prompt's tokens; only in the first sample of a request, which stands for the others."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", read_only(self.token_ids, np.int32))
        object.__setattr__(self, "sampler_logprobs", read_only(self.sampler_logprobs, np.float32))
        if self.loss_mask is not None:
            object.__setattr__(self, "loss_mask", read_only(self.loss_mask, np.bool_))
        for name in ("routing", "prompt_routing"):
            if isinstance(experts := getattr(self, name), np.ndarray):
                view = experts.view()  # the same memory, which cannot be changed through it
                view.setflags(write=False)
                object.__setattr__(self, name, view)
        count, of_versions = len(self.token_ids), sum([span.num_tokens for span in self.versions])
        masked = count if self.loss_mask is None else len(self.loss_mask)
        if not count == len(self.sampler_logprobs) == of_versions == masked:
            raise ValueError(
                f"a sample has {count} tokens, {len(self.sampler_logprobs)} logprobs, versions of {of_versions} "
                f"tokens, and {'no mask' if self.loss_mask is None else f'a mask of {masked}'}"
            )
        if self.routing is not None and len(self.routing) != count:
            raise ValueError(f"a sample has {count} tokens, and the routing of {len(self.routing)}")

    @property
    def is_written_T(self) -> NDArray[np.bool_]:
        """(n,) whether the policy wrote each token."""
        return np.ones(len(self.token_ids), np.bool_) if self.loss_mask is None else self.loss_mask

    def drawn_by(self, engine: str) -> Sample:
        """The same sample, with the name of the engine that drew it: a copy, without the checks that it has passed."""
        copied = object.__new__(Sample)
        for name in Sample.__slots__:
            object.__setattr__(copied, name, getattr(self, name))
        object.__setattr__(copied, "engine", engine)
        return copied

    def token_versions(self) -> list[int]:
        """The version of each token."""
        return [span.version for span in self.versions for _ in range(span.num_tokens)]

    @property
    def reasoning(self) -> str:
        """What the model thought before it answered, by the marks that its tokenizer has for that; "" without marks."""
        return _parts(self.text)[0]

    @property
    def answer_text(self) -> str:
        """`text` after the reasoning; "" where it was cut before the reasoning ended."""
        return _parts(self.text)[1]


THINKING_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
"""Tokens around a model's reasoning: Qwen's, DeepSeek's and GLM's; Mistral's; Seed's."""


def _parts(text: str) -> tuple[str, str]:
    """Reasoning and answer of a response. The opening mark may be the prompt's."""
    for opening, closing in THINKING_MARKS:
        thought, ended, answer = text.partition(closing)
        if ended:
            return thought.strip().removeprefix(opening).strip(), answer.strip()
        if thought.lstrip().startswith(opening):
            return thought.partition(opening)[2].strip(), ""
    return "", text


class Fault(StrEnum):
    """Whose fault it is that a sample could not be scored as usual."""

    MODEL = "model"  # the response broke the scorer: it earns the declared minimum, never more than a wrong answer
    DATA = "data"  # the row is unusable (no gold answer, say): unscored, counted, never retried
    INFRA = "infra"  # we failed (time-out of a service, crash of a scorer): unscored, counted


@dataclass(frozen=True, slots=True)
class Score:
    """One reward component's verdict on one sample: a finite value, or a fault that says why there is none.

    There is no way to say "failed, so 0": a data or infra fault has no value, a model fault has the minimum. Neither
    value nor fault: the component does not apply to this prompt, and is left out of its samples' rewards.
    """

    value: float | None
    fault: Fault | None = None
    detail: str = ""
    """For people: why, when there is a fault."""
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        has_value = self.value is not None
        if has_value and not math.isfinite(self.value):  # type: ignore[arg-type]
            raise ValueError(f"a score must be finite, got {self.value}")
        if self.fault is not None and has_value != (self.fault is Fault.MODEL):
            raise ValueError(
                f"a score has a value unless data or infrastructure failed; got {self.value}, {self.fault}"
            )

    @property
    def applies(self) -> bool:
        """Whether the component had something to say, or should have."""
        return self.value is not None or self.fault is not None


@dataclass(frozen=True, slots=True)
class Group:
    """The G samples of one prompt, and, once scored, their rewards."""

    prompt: Prompt
    samples: tuple[Sample, ...]
    scores: Mapping[str, tuple[Score, ...]] = field(default_factory=dict)
    """Reward component name -> one score per sample."""
    rewards: tuple[float | None, ...] = ()
    """Weighted sum of the scores per sample; None marks a sample that could not be scored."""
    greedy: Group | None = None
    """The prompt's greedy sample as a scored group of one, where the algorithm compares with it."""

    @property
    def known_rewards(self) -> list[float]:
        """Those of the samples that could be scored."""
        return [reward for reward in self.rewards if reward is not None]

    def scored(self, scores: Mapping[str, tuple[Score, ...]], rewards: tuple[float | None, ...]) -> Group:
        if len(rewards) != len(self.samples):
            raise ValueError(f"{len(rewards)} rewards for {len(self.samples)} samples of prompt {self.prompt.id}")
        return replace(self, scores=scores, rewards=rewards)


@dataclass(frozen=True)
class Totals:
    """Counts over one whole optimizer step, all microbatches and all ranks: the only legal denominators."""

    loss_tokens: float
    samples: float


@dataclass(frozen=True)
class Batch:
    """What one policy update (or one optimizer step of it) trains on, as flat ragged tensors.

    S samples of N prompts; T is the number of response tokens of all samples, in sample order. Prompt tokens
    carry no loss, so no per-token column covers them. A column is (T,) or (S,) as its suffix says.
    """

    prompts: tuple[TokenIds, ...]
    """N prompts' token ids; samples of one prompt are adjacent."""
    prompt_S: Tensor
    """(S,) int64: which prompt each sample answers, non-decreasing."""
    length_S: Tensor
    """(S,) int64: response tokens of each sample; may be 0."""
    token_ids_T: Tensor
    """(T,) int64."""
    loss_mask_T: Tensor
    """(T,) float32, 1 where the policy wrote the token and its sample was scored."""
    sampler_logprobs_T: Tensor
    """(T,) float32."""
    reward_S: Tensor
    """(S,) float32, NaN where unscored."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """Added on the way, by name: old_logprobs_T, ref_logprobs_T, advantages_T, ..."""
    pictures: tuple[tuple[Picture, ...], ...] = ()
    """Each prompt's; empty where no prompt has any."""
    engines: tuple[str, ...] = ()
    """Names of the engines that drew it, which the column `engine_T` counts from 0; empty where they have no names."""
    routing_T: RoutingRecord | None = None
    """`Sample.routing` of all samples, which forward passes of the policy and its reference replay; None: none has."""
    prompt_routing: tuple[RoutingRecord, ...] = ()
    """Each prompt's, where `routing_T` is there."""

    def with_column(self, name: str, value: Tensor) -> Batch:
        return replace(self, columns={**self.columns, name: value})


@dataclass(slots=True)
class Control:
    """What an algorithm carries from one update to the next."""

    kl_coef: float | None = None
    """Current KL coefficient; None until a controller has moved it from the configured one."""
    kl_missed_steps: int = 0
    """Updates in a row whose KL was too far from its target for the coefficient to follow; negative: below it."""
    entropy_coef: float | None = None
    """Coefficient of the entropy bonus; None until a controller has moved it."""
    entropy_is_low: bool = False
    """Whether the last update's entropy was at its target or below: then the bonus is on."""
    reward_count: int = 0
    """Rewards that the running mean and deviation are over."""
    reward_mean: float = 0.0
    reward_squares: float = 0.0
    """Sum of squared deviations from that mean."""


class Position(NamedTuple):
    """How far a run's records go; fields as in `Progress`."""

    metrics_bytes: int = 0
    events_bytes: int = 0
    sample_files: int = 0
    alarms: Mapping[str, Any] = {}


@dataclass(slots=True)
class Progress:
    """Where a run is; everything the loop needs besides weights to continue. Written into every checkpoint."""

    stage: str = "rl"
    """The stage of `stages` that is running."""
    step: int = 0
    """Steps of that stage made; in `rl` policy updates, and so the version of the current weights."""
    next_prompt: int = 0
    """Index in the prompt stream of the first prompt that no finished update has consumed."""
    evaluated_step: int = -1
    """The step whose evaluation was logged last, so that one cut short by a stop is made up for."""
    best_metric: str | None = None
    """What `checkpoint.best` named when it was last measured."""
    best_step: int | None = None
    """The step where that metric was highest, and how high; None before an evaluation."""
    best_value: float | None = None
    metrics_bytes: int = 0
    """Length of metrics.jsonl when the checkpoint was written; a resumed run truncates the file to it."""
    events_bytes: int = 0
    """Length of events.jsonl then, at least; less of it means that its end was lost."""
    sample_files: int = 0
    """Files in samples/ then."""
    alarms: Mapping[str, Any] = field(default_factory=dict)
    """State of the alarm rules then (`AlarmWatch.state`), so that a resumed run need not read metrics.jsonl again."""
    reward_fingerprints: dict[str, str] = field(default_factory=dict)
    """Reward component -> fingerprint of the rules that its service scores by."""
    order: dict[str, Any] = field(default_factory=dict)
    """State of the order of the data (`RowOrder.state`); empty where one integer is enough."""
    control: Control = field(default_factory=Control)
    """Of the stage's algorithm, which changes this very object."""

    @property
    def position(self) -> Position:
        """How far the run's records went when the checkpoint was written."""
        return Position(self.metrics_bytes, self.events_bytes, self.sample_files, self.alarms)

    @position.setter
    def position(self, position: Position) -> None:
        self.metrics_bytes, self.events_bytes, self.sample_files, self.alarms = position

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Progress:
        """The inverse of `dataclasses.asdict`. Raises TypeError for fields that there are not."""
        return cls(**{**values, "control": Control(**values.get("control", {}))})
