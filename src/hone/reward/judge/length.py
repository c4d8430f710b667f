"""Length limits of a judge's prompt: counting and truncation.

Without a tokenizer a text counts one token for each of its UTF-8 bytes: no byte-level or byte-fallback vocabulary
spends more. That is safe, and up to four times too much; give the judge's tokenizer where long answers matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from hone.reward.resolve import Unusable

if TYPE_CHECKING:
    from tokenizers import Encoding

ELISION = "\n[... the middle is left out ...]\n"


class Counter(Protocol):
    """Counts and cuts text in tokens."""

    special_tokens: Sequence[str]

    def count(self, text: str) -> int: ...

    def cut_middle(self, text: str, max_tokens: int) -> str:
        """The beginning and the end of a text, of at most so many tokens together with the word in between."""
        ...


class ByteBound:
    """One token for each UTF-8 byte: an upper bound."""

    special_tokens: Sequence[str] = ()

    def count(self, text: str) -> int:
        return len(text.encode("utf-8", "replace"))

    def cut_middle(self, text: str, max_tokens: int) -> str:
        data, half = text.encode("utf-8", "replace"), max(0, max_tokens - self.count(ELISION)) // 2
        head, tail = data[:half].decode("utf-8", "ignore"), data[len(data) - half :].decode("utf-8", "ignore")
        return (head + ELISION + tail) if half else ""


class TokenizerCounter:
    """The judge's own tokenizer, a `tokenizer.json` or the folder with it. Needs nothing but the tokenizers library.

    A text with characters that it cannot spell counts by its bytes.
    """

    def __init__(self, path: Path) -> None:
        """Raises Unusable when there is no such file."""
        from tokenizers import Tokenizer

        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise Unusable(f"args.tokenizer: no file {file}; name the judge's tokenizer.json or its folder")
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # boundary: the library raises bare exceptions for a malformed file
            raise Unusable(f"args.tokenizer: {file} cannot be read: {error}") from error
        added = self._tokenizer.get_added_tokens_decoder().values()
        self.special_tokens: Sequence[str] = tuple(token.content for token in added if token.special)

    def count(self, text: str) -> int:
        encoding = self._encoding(text)
        return ByteBound().count(text) if encoding is None else len(encoding.ids)

    def cut_middle(self, text: str, max_tokens: int) -> str:
        encoding = self._encoding(text)
        if encoding is None:
            return ByteBound().cut_middle(text, max_tokens)
        spans = encoding.offsets
        keep = max(0, max_tokens - self.count(ELISION))
        while keep > 0:  # tokens at the seams may join differently, so what was cut is counted again
            half = keep // 2
            head = text[: spans[keep - half - 1][1]]
            tail = text[spans[len(spans) - half][0] :] if half else ""
            if self.count(head + ELISION + tail) <= max_tokens:
                return head + ELISION + tail
            keep -= 1
        return ""

    def _encoding(self, text: str) -> Encoding | None:
        try:
            return self._tokenizer.encode(text, add_special_tokens=False)
        except Exception:  # boundary: the library raises bare exceptions for what it cannot spell
            return None


def without_reasoning(response: str) -> str:
    """What follows the reasoning; an unfinished one is kept whole, for there is nothing else."""
    return response.rpartition("</think>")[2] if "</think>" in response else response


def fitted(response: str, room_tokens: int, count: Callable[[str], int], cut: Callable[[str, int], str]) -> str:
    """A response that is too long, made to fit: first without its reasoning, then without its middle."""
    answer = without_reasoning(response).strip()
    return answer if count(answer) <= room_tokens else cut(answer, room_tokens)
