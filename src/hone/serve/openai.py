"""OpenAI request and response types, as far as `hone serve policy` supports them. No model, no routes.

What a request may ask for and the server cannot do is refused by name, unless it asks for nothing (`n: 1` of a
penalty of 0). Fields beyond OpenAI's have vLLM's names (`top_k`, `min_p`, `stop_token_ids`, `return_token_ids`,
`include_stop_str_in_output`), and `weight_version` is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from hone.reward.wire import Message, Wire
from hone.serve.problem import HttpProblem

MAX_CHOICES = 1024
"""Samples of one request: prompts times `n`."""


class OpenAIProblem(HttpProblem):
    """A problem that OpenAI's clients can read too: they look for an `error` object."""

    def __init__(self, status: int, kind: str, detail: str, *, param: str | None = None, **more: Any) -> None:
        super().__init__(status, kind, detail, errors=[(f"/{param}", detail)] if param else (), **more)
        self.param = param

    def more_members(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status_code < 500 else "server_error"
        return {"error": {"message": str(self.detail), "type": kind, "param": self.param, "code": self.kind}}


def only(*neutral: Any) -> AfterValidator:
    """Of a field that is there for other servers: these values ask for nothing, and no others are taken."""

    def check(value: Any) -> Any:
        if value is not None and value not in neutral:
            raise ValueError(f"this server cannot do that; leave it out or send {' or '.join(map(repr, neutral))}")
        return value

    return AfterValidator(check)


class StreamOptions(Wire):
    """Options of a stream."""

    include_usage: bool = False
    """A last chunk without choices has the token counts."""
    include_obfuscation: Annotated[bool | None, only(False)] = None


class SamplingRequest(Wire):
    """What completions and chat completions have in common."""

    model: str | None = None
    """The served model's id; null: whatever is served."""
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    """Samples for each prompt."""
    temperature: float | None = Field(None, ge=0)
    """0 is greedy; null: 1."""
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    """-1, 0 and null are off."""
    min_p: float | None = Field(None, ge=0, lt=1)
    seed: int | None = None
    """The same request with the same seed gives the same samples; null draws one, which the reply has."""
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    """Texts that end a sample; not in its text unless `include_stop_str_in_output`."""
    stop_token_ids: list[int] | None = Field(None, max_length=256)
    include_stop_str_in_output: bool = False
    return_token_ids: bool = False
    """Include the ids of the prompt's and the samples' tokens, and the weight version that sampled each."""
    stream: bool | None = None
    """Send the samples as they are drawn, as server-sent events."""
    stream_options: StreamOptions | None = None

    frequency_penalty: Annotated[float | None, only(0)] = None
    presence_penalty: Annotated[float | None, only(0)] = None
    repetition_penalty: Annotated[float | None, only(1)] = None
    logit_bias: Annotated[dict[str, Any] | None, only({})] = None
    response_format: Annotated[dict[str, Any] | None, only({"type": "text"})] = None
    min_tokens: Annotated[int | None, only(0)] = None
    ignore_eos: Annotated[bool | None, only(False)] = None
    skip_special_tokens: Annotated[bool | None, only(True)] = None
    echo: Annotated[bool | None, only(False)] = None

    user: Any = None
    """Ignored, as are `metadata`, `store` and `service_tier`: they change no sample."""
    metadata: Any = None
    store: Any = None
    service_tier: Any = None

    @model_validator(mode="after")
    def _options_go_with_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options go with stream: true")
        return self

    @property
    def stop_texts(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


T = TypeVar("T")
Tokens = Annotated[list[int], Field(fail_fast=True)]
Several = Annotated[list[T], Field(fail_fast=True, max_length=MAX_CHOICES)]


class CompletionRequest(SamplingRequest):
    """Body of `POST /v1/completions`."""

    prompt: str | Tokens | Several[str] | Several[Tokens]
    """One prompt or several, each as text or as token ids, which are taken as they are."""
    max_tokens: int | None = Field(16, ge=1)
    """Most tokens of a sample; null: as many as the context has room for."""
    logprobs: Annotated[int | None, only(0)] = None
    """0: the logprob of each sampled token; alternatives are not given."""
    best_of: Annotated[int | None, only(1)] = None
    suffix: Annotated[str | None, only("")] = None

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """One entry for each prompt."""
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]  # type: ignore[list-item]  # the type of the first entry is that of all
        return self.prompt  # type: ignore[return-value]


class ChatRequest(SamplingRequest):
    """Body of `POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1, fail_fast=True)
    """Rendered through the model's chat template. Content is text, or a list of parts that are text."""
    chat_template_kwargs: dict[str, bool | int | float | str | None] = Field({}, max_length=64)
    """Arguments of the chat template, such as `enable_thinking`, as vLLM takes them."""
    max_tokens: int | None = Field(None, ge=1)
    """Most tokens of a sample; null: as many as the context has room for."""
    max_completion_tokens: int | None = Field(None, ge=1)
    """The same, by its newer name."""
    logprobs: bool | None = None
    """The logprob of each sampled token; alternatives are not given."""
    top_logprobs: Annotated[int | None, only(0)] = None
    tools: Annotated[list[Any] | None, only([])] = None
    tool_choice: Annotated[Any, only("none", "auto")] = None


class Reply(BaseModel):
    """Base class of replies."""

    model_config = ConfigDict(use_attribute_docstrings=True, protected_namespaces=())


class Usage(Reply):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(Reply):
    """Of the distribution that was sampled from, temperature and truncation applied; greedy: of the plain softmax."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: None = None
    text_offset: list[int]


class ChatTokenLogprob(Reply):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[Any] = []


class ChatLogprobs(Reply):
    content: list[ChatTokenLogprob]


class Choice(Reply):
    index: int
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] | None = None
    """With `return_token_ids`: the sample's tokens, the one that ended it included."""
    weight_versions: list[int] | None = None
    """With `return_token_ids`: the weight version that sampled each token."""


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class AnswerMessage(Reply):
    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(Choice):
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None


class Completion(Reply):
    """What both replies have in common."""

    id: str
    created: int
    model: str
    usage: Usage
    weight_version: int
    """Updates made to the weights that sampled the last token; 0 for a model that was loaded from a directory."""
    seed: int


class CompletionReply(Completion):
    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class ChatReply(Completion):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | None = None


class Chunk(Reply):
    """One event of a stream. Unset members are left out, but for `finish_reason`."""

    id: str
    created: int
    model: str
    seed: int
    usage: Usage | None = None
    """In the last chunk, which has no choices, if it was asked for."""
    weight_version: int | None = None
    """Of the newest token in it."""


class CompletionChunkChoice(Reply):
    index: int
    text: str
    """What follows the choice's last chunk."""
    finish_reason: Literal["stop", "length"] | None = None
    logprobs: CompletionLogprobs | None = None
    """Of the tokens since that chunk, as are `token_ids` and `weight_versions`; text may lag behind its tokens."""
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    weight_versions: list[int] | None = None


class CompletionChunk(Chunk):
    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChunkChoice]


class Delta(Reply):
    role: Literal["assistant"] | None = None
    """In a choice's first chunk."""
    content: str | None = None


class ChatChunkChoice(Reply):
    index: int
    delta: Delta
    finish_reason: Literal["stop", "length"] | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | None = None
    weight_versions: list[int] | None = None


class ChatChunk(Chunk):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | None = None
    """In the first chunk of all."""


class ModelCard(Reply):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "hone"
    max_model_len: int
    """Tokens of a prompt and its sample together, at most."""
    weight_version: int


class ModelList(Reply):
    object: Literal["list"] = "list"
    data: list[ModelCard]
