"""Whether a poster says what the ground truth says, and visibly: score A.

    similarity  1 - Levenshtein distance / longer length, on code points: right for scripts without spaces
    A_layers    sum over matched texts of similarity * visible * (lengths of both) / (all lengths of both)
    A = 0.8 A_layers + 0.2 * (similarity of all texts in reading order) * (mean visible)

Texts are matched for the largest such sum, whatever their boxes. The second term forgives a text that was cut into
two layers. Visibility is taken relative to the ground truth's own: a poster equal to it has A = 1.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import cdist
from scipy.optimize import linear_sum_assignment

from hone_poster.parse import Poster, PosterLayer
from hone_poster.render import Rendering

NO_TEXT_SCALE = 40
"""Characters too many that cost a factor of e when the ground truth has no text at all."""


@dataclass(frozen=True, slots=True)
class Text:
    """A text of a poster, normalised."""

    text: str
    layer: PosterLayer
    visible: float


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Score A and the mean visibility of the texts, each in [0, 1]."""

    score: float
    visible: float


def normalize(text: str, *, ignore_case: bool = False) -> str:
    """NFKC, without invisible characters, white space collapsed."""
    shown = "".join(c for c in unicodedata.normalize("NFKC", text) if unicodedata.category(c) != "Cf")
    collapsed = " ".join(shown.split())
    return collapsed.casefold() if ignore_case else collapsed


def texts_of(poster: Poster, rendering: Rendering, *, ignore_case: bool = False) -> list[Text]:
    """The texts that were drawn, in the order of the layers; those that normalise to nothing left out."""
    texts = [
        Text(
            normalize(poster.layers[facts.layer].text, ignore_case=ignore_case),
            poster.layers[facts.layer],
            facts.visible,
        )
        for facts in rendering.texts
    ]
    return [text for text in texts if text.text]


def score_accuracy(found: Sequence[Text], gold: Sequence[Text], *, malformed_characters: int = 0) -> Accuracy:
    """Compare what two posters say.

    Args:
        malformed_characters: length of the texts of layers without a usable box, which match nothing.
    """
    length_P = np.array([len(text.text) for text in found], np.float64)
    length_G = np.array([len(text.text) for text in gold], np.float64)
    num_found = float(length_P.sum()) + malformed_characters
    if not gold:
        return Accuracy(math.exp(-num_found / NO_TEXT_SCALE), 1.0)
    if not found:
        return Accuracy(0.0, 0.0)
    similarity_PG = text_similarity([text.text for text in found], [text.text for text in gold])
    visible_P = np.array([text.visible for text in found])
    seen_PG = _relative(visible_P[:, None], np.array([text.visible for text in gold]))
    worth_PG = similarity_PG * seen_PG * (length_P[:, None] + length_G)
    rows, columns = linear_sum_assignment(worth_PG, maximize=True)
    layers = float(worth_PG[rows, columns].sum()) / (num_found + float(length_G.sum()))
    seen_P = visible_P.copy()
    seen_P[rows] = seen_PG[rows, columns]
    visible = float(seen_P @ length_P) / num_found
    whole = Levenshtein.normalized_similarity(_read_aloud(found), _read_aloud(gold))
    return Accuracy(min(1.0, 0.8 * layers + 0.2 * whole * visible), min(1.0, visible))


def text_similarity(found: Sequence[str], gold: Sequence[str]) -> NDArray[np.float64]:
    """(P, G) similarity in [0, 1] of all pairs."""
    return cdist(found, gold, scorer=Levenshtein.normalized_similarity, dtype=np.float64)


def _relative(visible: NDArray[np.float64], gold: NDArray[np.float64]) -> NDArray[np.float64]:
    """Visibility as a share of the ground truth's, at most 1; 1 where that cannot be seen either."""
    return np.minimum(1.0, np.divide(visible, gold, out=np.ones(np.broadcast(visible, gold).shape), where=gold > 0))


def _read_aloud(texts: Sequence[Text]) -> str:
    """All texts in reading order: rows from the top, each from the left.

    Two texts are in one row if they share half the height of the lower box, so that small shifts change no order.
    """
    waiting = sorted(texts, key=lambda text: (text.layer.y + text.layer.height / 2, text.layer.x))
    spoken: list[str] = []
    while waiting:
        first = waiting[0].layer
        row = [text for text in waiting if _share_a_row(first, text.layer)]
        waiting = [text for text in waiting if not _share_a_row(first, text.layer)]
        spoken += [text.text for text in sorted(row, key=lambda text: text.layer.x)]
    return re.sub(" +", " ", " ".join(spoken))


def _share_a_row(one: PosterLayer, other: PosterLayer) -> bool:
    shared = min(one.y + one.height, other.y + other.height) - max(one.y, other.y)
    return one is other or shared >= min(one.height, other.height) / 2
