"""Scalar heads: a decoder with one number per token instead of logits, for reward models (last token) and critics.

On disk it is what Transformers calls a sequence-classification model with one label. Sequences with a common prefix
are computed once up to where they differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedConfig

from hone.errors import DataError
from hone.model.base import CausalModel
from hone.model.decoder import Decoder, unsupported
from hone.model.hf import TransformersModel
from hone.model.layout import Layout
from hone.model.load import read_config, read_weights
from hone.model.weights import Contents
from hone.ragged import Ints, ranges, starts_of

HEAD = "score.weight"
"""The head's name in Transformers' sequence-classification classes."""
MEAN, STD, FORM = "hone_reward_mean", "hone_reward_std", "hone_reward_form"
"""Keys of config.json: mean and standard deviation of scores on held-out data; `chat` or `text`, what is scored."""


class ScalarModel(nn.Module):
    """`body` without its output layer, and a linear head onto one number.

    Args:
        body: is taken over: its output layer is dropped (or frozen, where Transformers' own class needs it).
    The head starts at zero, so that learning begins from one score for all.
    """

    def __init__(self, body: CausalModel) -> None:
        super().__init__()
        self.body = body
        if isinstance(body, Decoder):
            body.drop_output_layer()
        elif isinstance(body, TransformersModel):
            tied = body.output_weight is getattr(body.hf.get_input_embeddings(), "weight", None)
            body.output_weight.requires_grad_(tied)
        self.hf_config: PreTrainedConfig = body.hf_config
        """Written by `save_hf`."""
        like = next(body.parameters())
        self.score = nn.Linear(body.hidden_size, 1, bias=False, dtype=like.dtype, device=like.device)
        nn.init.zeros_(self.score.weight)
        self.contents = body.contents and body.contents.with_more(partial(_zero_head, body.hidden_size))
        """As the body's."""

    @property
    def device(self) -> torch.device:
        return self.score.weight.device

    def forward(self, layout: Layout) -> Tensor:
        """(U,) float32: the number at each position that predicts `layout.target_U`, so before that token is known."""
        hidden_UH, weight = self.body.hidden(layout), self.score.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        value_U = (hidden_UH.to(dtype) @ weight.to(dtype).T).squeeze(1)
        return self.body.sequences.whole(value_U, len(layout.target_U)).clone()  # no view: FSDP2 hangs a hook on it

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its Hugging Face name, the head last; views, not copies."""
        yield from self.body.named_weights()
        yield HEAD, self.score.weight.detach()

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copies weights in place. Raises DataError for a missing head, and as `CausalModel.load_weights`."""
        head: list[Tensor] = []

        def of_the_body() -> Iterator[tuple[str, Tensor]]:
            for name, weight in weights:
                if name == HEAD:
                    head.append(weight)
                else:
                    yield name, weight

        self.body.load_weights(of_the_body())
        if [weight.shape for weight in head] != [self.score.weight.shape]:
            found = f"of shape {tuple(head[0].shape)}" if head else "missing"
            raise DataError(
                f"weights: {HEAD}, the head of a reward model, is {found}; it must be {tuple(self.score.weight.shape)}"
            )
        self.score.weight.copy_(head[0])


@dataclass(frozen=True)
class Sequences:
    """S token sequences in families with a common prefix, as a layout takes them: the prefix, and each continuation.

    Each continuation has one token more than its sequence, which is never computed: the score before it is the one
    at the sequence's last token.
    """

    prompts: tuple[tuple[int, ...], ...]
    prompt_S: Ints
    length_S: Ints
    token_ids_T: Ints

    @classmethod
    def of(cls, families: Sequence[Sequence[Sequence[int]]]) -> Sequences:
        """Sequences in order, family by family; none is empty. Those of a family should begin alike."""
        prompts: list[tuple[int, ...]] = []
        prompt_S: list[int] = []
        rests: list[tuple[int, ...]] = []
        for family in families:
            first, last = min(map(tuple, family)), max(map(tuple, family))  # in dictionary order: others lie between
            differ = (place for place, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
            shared = first[: next(differ, len(first))]  # one that begins another comes before it
            for number, sequence in enumerate(family):
                if number == 0 or not shared:
                    prompts.append(shared or tuple(sequence))
                prompt_S.append(len(prompts) - 1)
                rests.append((*sequence[len(prompts[-1]) :], 0))
        length_S = np.fromiter(map(len, rests), np.int64, len(rests))
        token_ids_T = np.fromiter(chain.from_iterable(rests), np.int64, int(length_S.sum()))
        return cls(tuple(prompts), np.asarray(prompt_S, np.int64), length_S, token_ids_T)


def last_token_scores(
    model: ScalarModel, sequences: Sequences, samples: Ints, device: torch.device | None = None
) -> Tensor:
    """(len(samples),) float32: the scores at the last tokens of some of the sequences, in the order of `samples`.

    Args:
        device: where the model computes, if that is not where its weights are.
    """
    device = device or model.device
    if not len(samples):
        return model(idle := Layout.idle(device))[idle.expand_T]
    length_S = sequences.length_S[samples]
    last_T = length_S.cumsum() - 1
    index_T = ranges(starts_of(sequences.length_S)[samples], length_S)
    layout = Layout.from_flat(
        sequences.prompts, sequences.prompt_S[samples], length_S, sequences.token_ids_T[index_T], device
    )
    values_U = model(layout)
    values_T = values_U if layout.expand_T is None else values_U[layout.expand_T]
    return values_T[torch.from_numpy(last_T).to(values_T.device, non_blocking=True)]


def reward_config(config: PreTrainedConfig, *, pad_id: int | None, form: str) -> PreTrainedConfig:
    """The config.json of a reward model of this architecture, which Transformers loads as a sequence classifier.

    Args:
        pad_id: a token that no sequence ends in: Transformers takes the score at the last token that is another one.
        form: `chat` or `text`, see `FORM`.
    Raises:
        DataError: Transformers has no such class, or Hone no decoder of its own for the architecture.
    """
    classes: Any = AutoModelForSequenceClassification._model_mapping  # the public way would build the model
    if unsupported(config) is not None or type(config) not in classes:
        why = unsupported(config) or "Transformers has no sequence-classification class for it"
        raise DataError(f"stage reward_model: cannot be trained on this model: {why}. Take a Llama, Mistral or Qwen.")
    changed = type(config).from_dict(config.to_dict())
    changed.architectures = [classes[type(config)].__name__]
    changed.num_labels = 1
    changed.pad_token_id = pad_id
    setattr(changed, FORM, form)
    return changed


def load_scalar_model(
    folder: Path, *, dtype: torch.dtype, device: torch.device | str, config: PreTrainedConfig | None = None
) -> ScalarModel:
    """A reward model of one of Hone's own families from a sequence-classification directory.

    Raises:
        DataError: another architecture, no safetensors, or names and shapes that do not fit; see `load_model`.
    """
    model = ScalarModel(Decoder(config or read_config(folder), dtype=dtype, device=device))
    if model.device.type == "meta":
        model.contents = Contents(partial(read_weights, folder))
    else:
        model.load_weights(read_weights(folder))
    return model


def _zero_head(hidden_size: int) -> Iterator[tuple[str, Tensor]]:
    yield HEAD, torch.zeros(1, hidden_size)
