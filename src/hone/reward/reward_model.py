"""The `reward_model` reward: a model that reads question and answer as text and says one number.

    reward:
      components:
        - use: reward_model
          args: {path: ../../runs/run-rm/hf, normalize: true}

Any Hugging Face sequence-classification directory with one label, Hone's own from `stages: [reward_model]` among them.
It reads with its own tokenizer and chat template, never the policy's token ids. Architectures that Hone has a decoder
for compute what the samples of a group share once; others run in Transformers' class. All work is done in one thread
beside the event loop, one group at a time: waiting for it is bounded by the deadlines of the groups in front.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from threading import Event
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast

from hone.config.engine import REWARD_MODEL_BATCH_TOKENS
from hone.config.run import Section, key
from hone.data.chat import resolve_model
from hone.data.conversation import ConversationReader, UnreadableConversation
from hone.devices import DeviceName, device_of, devices_here, give_back_memory
from hone.errors import DataError
from hone.model.decoder import unsupported
from hone.model.heads import FORM, MEAN, STD, ScalarModel, Sequences, last_token_scores, load_scalar_model
from hone.model.load import model_folder, read_config
from hone.reward.args import settings_of
from hone.reward.signature import Range, all_faulty
from hone.runtime.user_code import DETAIL_CHARACTERS, describe
from hone.types import Fault, Group, Prompt, Score


class RewardModelSettings(Section):
    """`args` of the `reward_model` reward."""

    path: str = key(..., min_length=1)
    """The model: a directory, relative to the run file, or a hub name."""
    normalize: bool = key(False)
    """Give (score - mean) / std, with mean and std of held-out data as the model's config.json has them."""
    batch_tokens: int = key(REWARD_MODEL_BATCH_TOKENS, unit="tokens", ge=1)
    """Tokens of one forward pass, padding counted; a longer conversation goes alone. Memory, never the result."""
    minimum: float | None = key(None)
    """The least that a response earns, as one does that the model cannot be shown; null: such a one earns the least of
    its prompt's responses, and alone nothing is known."""
    device: DeviceName = key("auto")
    """auto: a GPU when torch sees one, and bfloat16 there; float32 on a CPU."""


Families = Sequence[Sequence[Sequence[int]]]
"""Token ids of conversations, those with one prompt together."""


class Model(Protocol):
    """Token ids of conversations to their scores."""

    def scores(self, families: Families, batch_tokens: int) -> Iterator[tuple[int, float]]:
        """(index, score) of each conversation, counted through all families, one microbatch after the other."""
        ...

    def move(self, device: torch.device) -> None:
        """Put the weights somewhere else; they must be back before they are used."""
        ...


class RewardModel:
    """The scorer (`rewards.StatefulScorer`): loaded by `start`, freed by `close`."""

    def __init__(self, settings: RewardModelSettings, *, folder: Path, timeout_s: float) -> None:
        self.settings, self.hone_range = settings, Range(settings.minimum)
        self._folder, self._timeout_s = folder, timeout_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward-model")
        self._turn = asyncio.Lock()
        self._given_up = Event()
        """Set when the current work is no longer needed."""
        self._loaded: LoadedRewardModel | None = None

    @classmethod
    def from_args(cls, args: Mapping[str, Any], *, folder: Path, timeout_s: float) -> Self:
        """Raises Unusable when the args do not fit."""
        return cls(settings_of(RewardModelSettings, args), folder=folder, timeout_s=timeout_s)

    async def start(self) -> list[str]:
        """Load the model; returns what is wrong with it."""
        try:
            self._loaded = await self._in_thread(LoadedRewardModel.of, self.settings, self._folder)
        except DataError as error:
            return [f"reward_model: {error}"]
        return []

    async def close(self) -> None:
        self._given_up.set()
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._loaded = None

    async def sleep(self) -> None:
        """Give the device's memory back once what is being scored is: weights wait on the host. Until `wake` nothing is
        to be scored."""
        assert self._loaded is not None, "`start` came first"
        async with self._turn:
            await self._in_thread(self._loaded.sleep)

    async def wake(self) -> None:
        """Be ready to score again."""
        assert self._loaded is not None, "`start` came first"
        async with self._turn:
            await self._in_thread(self._loaded.wake)

    async def score(self, group: Group) -> tuple[Score, ...]:
        (scores,) = await self.score_many([group])
        return scores

    async def score_many(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """The scores of several groups, read in microbatches of all of them; the time limit is for all of them too."""
        assert self._loaded is not None, "`start` came first and found nothing wrong"
        async with self._turn:
            given_up = self._given_up = Event()
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await self._in_thread(self._loaded.score, groups, given_up)
            except TimeoutError:
                detail = f"not done within {self._timeout_s:g} s (timeout_s)"
            except Exception as error:  # boundary: a foreign model may raise anything, memory may run out
                detail = f"raised {describe(error)}"
            finally:
                given_up.set()  # the thread cannot be stopped, but it looks here before each microbatch
        return [all_faulty(len(group.samples), detail) for group in groups]

    async def _in_thread(self, work: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)


class LoadedRewardModel:
    """A reward model in memory, with what it needs to read."""

    def __init__(
        self,
        model: Model,
        reader: ConversationReader,
        config: PreTrainedConfig,
        settings: RewardModelSettings,
        device: torch.device,
    ) -> None:
        self.model, self.reader, self.settings, self.device = model, reader, settings, device
        self.mean, self.std = _mean_and_std(config) if settings.normalize else (0.0, 1.0)
        self.max_tokens = getattr(config, "max_position_embeddings", None) or math.inf
        tokens = reader.tokenizer.added_tokens_decoder.values()
        self.special = [token.content for token in tokens if token.special]

    @classmethod
    def of(cls, settings: RewardModelSettings, folder: Path) -> Self:
        """Raises DataError for whatever is not a reward model, or lacks what is asked of it."""
        place = model_folder(resolve_model(settings.path, folder))
        config = read_config(place)
        if config.num_labels != 1:
            raise DataError(f"{place}: has {config.num_labels} labels; a reward model has one (num_labels: 1)")
        try:
            tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=True)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise DataError(f"{place}: its tokenizer cannot be loaded: {describe(error)}") from error
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise DataError(f"{place}: {type(tokenizer).__name__} is not a fast tokenizer (tokenizer.json), as needed")
        form = getattr(config, FORM, None) or ("text" if tokenizer.chat_template is None else "chat")
        device = device_of(settings.device, "args.device")
        dtype = torch.bfloat16 if devices_here(device.type).bfloat16 else torch.float32
        if unsupported(config) is None:
            model = OwnModel(load_scalar_model(place, dtype=dtype, device=device, config=config))
        else:
            model = TransformersClassifier(place, dtype, device)
        return cls(model, ConversationReader(tokenizer, form), config, settings, device)

    def sleep(self) -> None:
        self.model.move(torch.device("cpu"))
        give_back_memory()

    def wake(self) -> None:
        self.model.move(self.device)

    def score(self, groups: Sequence[Group], given_up: Event) -> list[tuple[Score, ...]]:
        """One score per sample; what cannot be read is a fault of the row or the response, what is not finite ours."""
        scores = [[Score(None, Fault.INFRA, "given up")] * len(group.samples) for group in groups]
        families: list[list[list[int]]] = []
        sample_of: list[tuple[int, int]] = []
        broken: list[tuple[int, int]] = []
        """What cannot be read because of the response."""
        for place, group in enumerate(groups):
            family: list[list[int]] = []
            for number, sample in enumerate(group.samples):
                try:
                    family.append(self.read(group.prompt, sample.text))
                    sample_of.append((place, number))
                except UnreadableConversation as error:
                    scores[place][number] = Score(None, Fault.DATA, str(error)[:DETAIL_CHARACTERS])
                    broken += [(place, number)] if self._can_read(group.prompt) else []
            families += [family] if family else []
        if families:
            with torch.inference_mode():
                for index, value in self.model.scores(families, self.settings.batch_tokens):
                    place, number = sample_of[index]
                    scores[place][number] = self.normalised(value)
                    if given_up.is_set():
                        break
        for place, number in broken:
            scores[place][number] = self._least(scores[place], scores[place][number])
        return [tuple(of_group) for of_group in scores]

    def _can_read(self, prompt: Prompt) -> bool:
        try:
            self.read(prompt, "")
        except UnreadableConversation:
            return False
        return True

    def _least(self, scores: Sequence[Score], broken: Score) -> Score:
        """The score of a response that cannot be read: the declared minimum, else the least of its siblings."""
        value = self.settings.minimum
        if value is None and not any(score.fault is Fault.INFRA for score in scores):
            value = min((score.value for score in scores if score.value is not None), default=None)
        return broken if value is None else Score(value, Fault.MODEL, broken.detail)

    def read(self, prompt: Prompt, answer: str) -> list[int]:
        """Token ids of a conversation. Raises UnreadableConversation when this model cannot be given it."""
        spelled = next((token for token in self.special if token in answer), None)
        if spelled is not None:  # it would be read as the end of the answer, or as another turn
            raise UnreadableConversation(f"the response spells {spelled!r}, a special token of the reward model")
        ids = self.reader.read(prompt.text if prompt.messages is None else list(map(dict, prompt.messages)), answer)
        if len(ids) > self.max_tokens:
            raise UnreadableConversation(
                f"{len(ids)} tokens are more than the {self.max_tokens} that the reward model can read"
            )
        return ids

    def normalised(self, value: float) -> Score:
        value = (value - self.mean) / self.std
        if self.settings.minimum is not None and math.isfinite(value):
            value = max(self.settings.minimum, value)
        return Score(value) if math.isfinite(value) else Score(None, Fault.INFRA, f"gave {value}, not a finite number")


class OwnModel:
    """A reward model of an architecture that Hone has a decoder for."""

    def __init__(self, model: ScalarModel) -> None:
        self.model = model.eval()

    def move(self, device: torch.device) -> None:
        self.model.to(device)

    def scores(self, families: Families, batch_tokens: int) -> Iterator[tuple[int, float]]:
        pad_id = self.model.hf_config.pad_token_id
        sequences = Sequences.of([[_without_padding(ids, pad_id) for ids in family] for family in families])
        for samples in _microbatches(sequences, batch_tokens):
            yield from zip(samples.tolist(), last_token_scores(self.model, sequences, samples).tolist(), strict=True)


class TransformersClassifier:
    """Any other architecture, in Transformers' own class."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        loaded: Any = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=dtype, use_safetensors=True, local_files_only=True, output_loading_info=True
        )
        model, report = loaded
        missing = sorted(report["missing_keys"])
        if missing:  # Transformers would leave these random
            raise DataError(f"{folder}: {len(missing)} weights are missing, {missing[0]} among them: no reward model")
        self.model, self.device = model.to(device).eval(), device

    def move(self, device: torch.device) -> None:
        self.model.to(device)

    def scores(self, families: Families, batch_tokens: int) -> Iterator[tuple[int, float]]:
        conversations = list(chain.from_iterable(families))
        pad_id = self.model.config.pad_token_id
        order = sorted(range(len(conversations)), key=lambda index: len(conversations[index]))
        while order:
            longest = len(conversations[order[-1]])
            # Without a padding token the class cannot know where a row ends, so each goes alone.
            count = max(1, batch_tokens // longest) if pad_id is not None else 1
            order, batch = order[:-count], order[-count:]
            ids = torch.full((len(batch), longest), pad_id or 0)
            mask = torch.zeros_like(ids)
            for row, index in enumerate(batch):
                ids[row, : len(conversations[index])] = torch.tensor(conversations[index])
                mask[row, : len(conversations[index])] = 1
            logits = self.model(input_ids=ids.to(self.device), attention_mask=mask.to(self.device)).logits
            yield from zip(batch, logits[:, 0].float().tolist(), strict=True)


def _microbatches(sequences: Sequences, batch_tokens: int) -> Iterator[NDArray[np.int64]]:
    """Runs of consecutive sequences of at most `batch_tokens` tokens; what they share counts once in each."""
    shared = len(sequences.prompts[0]) if len(sequences.prompts) == 1 else 0
    first, tokens = 0, shared
    for number, length in enumerate(sequences.length_S.tolist()):
        cost = length - 1 + (0 if shared else len(sequences.prompts[sequences.prompt_S[number]]))
        if number > first and tokens + cost > batch_tokens:
            yield np.arange(first, number)
            first, tokens = number, shared
        tokens += cost
    if len(sequences.length_S):
        yield np.arange(first, len(sequences.length_S))


def _without_padding(ids: Sequence[int], pad_id: int | None) -> Sequence[int]:
    """Up to the last token that is not padding, where Transformers' classes take the score too."""
    end = len(ids)
    while end > 1 and ids[end - 1] == pad_id:
        end -= 1
    return ids[:end]


def _mean_and_std(config: PreTrainedConfig) -> tuple[float, float]:
    """Of `config.json`: as Hone's stage writes them, or as OpenRLHF does, `mean` and `std`."""
    pairs = [(getattr(config, m, None), getattr(config, s, None)) for m, s in ((MEAN, STD), ("mean", "std"))]
    mean, std = next((pair for pair in pairs if None not in pair), (None, None))
    if mean is None or std is None:
        raise DataError(
            f"normalize: true, but the model's config.json has no {MEAN} and {STD}. Models that Hone trained to the "
            "end of their stage have them; for another one, add what you measured, or set normalize: false."
        )
    if not (math.isfinite(mean) and math.isfinite(std) and std > 0):
        raise DataError(
            f"normalize: true, but config.json has {MEAN} = {mean} and {STD} = {std}; both must be finite, and the "
            "standard deviation positive"
        )
    return float(mean), float(std)
