"""Tokenizer and chat templates: the only place where text becomes tokens and tokens text.

A `Tokenizer` wraps a Hugging Face fast tokenizer: prompts and responses to ids, ids to text, stop ids. A
character-level one can be built for experiments with randomly initialised models; it saves and loads like any other.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import huggingface_hub
import jinja2
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hone.config.run import ModelSection
from hone.data.picture_processors import known_family
from hone.data.pictures import PictureTokens, processor_files
from hone.errors import DataError, first_line
from hone.sizes import CHARACTER_SPECIALS

ChatMessage = dict[str, Any]
"""{"role": ..., "content": ...}"""

PAD, EOS = CHARACTER_SPECIALS
_SURROGATE = re.compile("[\ud800-\udfff]")
"""An unpaired surrogate: JSON can hold one, UTF-8 and tokenizers cannot."""


class TemplateRefusal(Exception):
    """A chat template cannot render some messages; says why."""


@contextmanager
def rendering() -> Iterator[None]:
    """Raises TemplateRefusal for whatever a chat template raises inside: it is a program, and may not only refuse
    messages, but add text to a number or count too far."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # boundary: a chat template may raise anything
        what = str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
        raise TemplateRefusal(f"the chat template refuses it: {what}") from error


class Tokenizer:
    """A Hugging Face fast tokenizer, and the ids that end a response.

    Attributes:
        hf: the tokenizer itself, for saving beside weights.
        eos_id: what `encode_responses` appends.
        eos_ids: every id that ends a response: `eos_id` and those of the model's generation_config.json.
        pad_id: fills unused places; EOS where the tokenizer has no pad token. Never carries loss.
        vocab_size: smallest vocabulary a model needs, added tokens included.
        processor: files beside it that describe how pictures become input, by name; exported with it.
    """

    def __init__(
        self,
        hf: PreTrainedTokenizerFast,
        *,
        eos_ids: Sequence[int] = (),
        name: str = "tokenizer",
        processor: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Raises DataError without an EOS token."""
        own_end, pad = _token_id(hf.eos_token_id), _token_id(hf.pad_token_id)
        ends = [own_end] if own_end is not None else []
        ends += [end for end in eos_ids if end not in ends]
        if not ends:
            raise DataError(
                f"{name}: has no EOS token, so no response could end. Set `eos_token` in its tokenizer_config.json, or "
                "`eos_token_id` in generation_config.json beside the model."
            )
        self.hf = hf
        self.processor = dict(processor)
        self.eos_id: int = ends[0]
        self.eos_ids: tuple[int, ...] = tuple(ends)
        self.pad_id: int = pad if pad is not None else self.eos_id
        self.vocab_size: int = max(hf.get_vocab().values()) + 1
        self._alphabet = alphabet_of(hf)

    @property
    def picture_tokens(self) -> PictureTokens:
        """Those that stand for pictures. Raises DataError if the vocabulary or the processor has none."""
        return PictureTokens.of(known_family(self.processor).marks, self.hf.get_vocab())

    def encode_prompts(self, texts: Sequence[str], *, rendered: bool) -> list[list[int]]:
        """Token ids of whole prompts, in one batch.

        Args:
            rendered: the texts come from a chat template, which wrote its own special tokens; otherwise the
                tokenizer adds what it adds at the start (a BOS, say), and an EOS at the end is taken away.
        Raises:
            UnknownCharacter: see `check_characters`.
        """
        for text in texts:
            self.check_characters(text, rendered=rendered)
        if not texts:
            return []
        ids = self.hf(
            list(texts), add_special_tokens=not rendered, return_attention_mask=False, return_token_type_ids=False,
            verbose=False,
        )["input_ids"]  # fmt: skip
        if rendered:
            return ids
        return [prompt[:-1] if prompt and prompt[-1] == self.eos_id else prompt for prompt in ids]

    def encode_responses(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of what follows a prompt, EOS appended, in one batch; nothing is added in front."""
        for text in texts:
            self.check_characters(text)
        return [[*ids, self.eos_id] for ids in self.encode_prompts(texts, rendered=True)]

    def encode_observation(self, text: str) -> list[int]:
        """Token ids of environment text within a sample; nothing is added.

        Special tokens that the text spells out become these tokens: so a turn's marks of a chat template are written.
        Raises UnknownCharacter, see `check_characters`.
        """
        return self.encode_prompts([text], rendered=True)[0]

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens, exactly as the tokens spell it."""
        return self.hf.backend_tokenizer.decode(list(ids), skip_special_tokens=True)

    def spell(self, ids: Sequence[int]) -> str:
        """Text with special tokens, for people."""
        return self.hf.backend_tokenizer.decode(list(ids), skip_special_tokens=False)

    def render(self, messages: Sequence[ChatMessage], template_args: Mapping[str, Any] = MappingProxyType({})) -> str:
        """Messages rendered by the chat template, with the generation prompt.

        Args:
            template_args: further variables of the template, instead of its defaults.
        Raises:
            DataError: there is no template, or an argument has the name of one of Transformers' own.
            TemplateRefusal: see there.
        """
        if own := sorted(template_args.keys() & _parameters(type(self.hf).apply_chat_template)):
            raise DataError(f"the chat template has no variable {own[0]}")
        if self.hf.chat_template is None:
            raise DataError(
                f"data.chat: the tokenizer of {self.hf.name_or_path or 'this model'} has no chat template. Use a plain "
                "data.template, or a model whose tokenizer has one."
            )
        with rendering():
            text = self.hf.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **template_args
            )
        assert isinstance(text, str)
        return text

    def digest(self) -> str:
        """SHA-256 of all that decides how it spells and renders."""
        spelling = json.dumps([self.hf.backend_tokenizer.to_str(), self.hf.chat_template, self.eos_ids], default=str)
        return hashlib.sha256(spelling.encode()).hexdigest()

    def check_characters(self, text: str, *, rendered: bool = False) -> None:
        """Raises UnknownCharacter for an unpaired surrogate, or a character that a character-level tokenizer lacks.

        Args:
            rendered: special tokens in the text were written by a template, and are not characters.
        """
        check_characters(text, self._alphabet, special=self.hf.all_special_tokens if rendered else ())


@functools.cache  # a look at a signature takes as long as a template
def _parameters(function: Callable[..., object]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def check_characters(text: str, alphabet: frozenset[str] | None, *, special: Sequence[str] = ()) -> None:
    """Like `Tokenizer.check_characters`; `alphabet` is that of a character-level tokenizer, else None."""
    for token in special if alphabet is not None else ():
        text = text.replace(token, "")
    unknown = set(text) - alphabet if alphabet is not None else _SURROGATE.findall(text)
    for character in sorted(unknown):
        place = "model.characters" if alphabet is not None else "Unicode text"
        raise UnknownCharacter(f"character {character!r} (U+{ord(character):04X}) is not in {place}")


class UnknownCharacter(DataError):
    """A text has a character that the tokenizer cannot encode."""


def load_tokenizer(
    model: ModelSection, folder: Path, template_args: Mapping[str, Any] = MappingProxyType({})
) -> Tokenizer:
    """The tokenizer that a run file asks for.

    Args:
        model: `characters` builds one; else `tokenizer`, else the one beside `path`.
        folder: the run file's, for relative paths.
        template_args: `data.template_args`, which become defaults of its chat template.
    Raises:
        DataError: there is none, it cannot be loaded, it is not a fast tokenizer, or it has no EOS.
    """
    if model.characters is not None:
        built = character_tokenizer(model.characters)
        built.chat_template = with_template_args(_chat_template(model, folder), template_args)
        return Tokenizer(built, name="model.characters")
    source = model.tokenizer or model.path
    if source is None:
        raise DataError("model: no tokenizer. Set model.characters or model.tokenizer; model.init brings none.")
    place = resolve_model(source, folder)
    offline = not Path(place).is_dir() and not can_resolve(huggingface_hub.constants.ENDPOINT)
    try:
        hf = AutoTokenizer.from_pretrained(place, trust_remote_code=model.trust_remote_code, local_files_only=offline)
    except (OSError, ValueError, KeyError, ImportError, json.JSONDecodeError) as error:
        raise DataError(f"tokenizer {source}: cannot be loaded: {first_line(error)}") from error
    if not isinstance(hf, PreTrainedTokenizerFast):
        raise DataError(f"tokenizer {source}: {type(hf).__name__} is not a fast tokenizer (tokenizer.json), as needed")
    if len(hf.get_vocab()) <= len(hf.get_added_vocab()):  # Transformers makes an empty one where there are no files
        raise DataError(
            f"tokenizer {source}: has no tokens but {len(hf.get_added_vocab())} special ones, as where its files are "
            "missing. Put tokenizer.json beside the weights, or name a directory or hub name in model.tokenizer."
        )
    hf.chat_template = with_template_args(_chat_template(model, folder) or hf.chat_template, template_args)
    beside = resolve_model(model.path, folder) if model.path is not None else place
    processor = processor_files(beside, offline=offline)
    return Tokenizer(hf, eos_ids=_generation_eos(Path(beside)), name=f"tokenizer {source}", processor=processor)


def with_template_args(template: Any, template_args: Mapping[str, Any]) -> Any:
    """A chat template with these defaults of its variables; a caller may still pass others.

    The variables are set in the template itself, so they go wherever it goes: to exports, engines and servers.

    Raises DataError where there is no template.
    """
    if not template_args:
        return template
    if not isinstance(template, str):
        raise DataError("data.template_args: the tokenizer has no chat template that could take them.")
    defaults = "".join(
        f"{{%- set {name} = {name} if {name} is defined else {'none' if value is None else json.dumps(value)} %}}"
        for name, value in template_args.items()
    )
    return template if template.startswith(defaults) else defaults + template


def thinks(template: Any, prompt: str) -> bool:
    """Whether a prompt that a chat template has rendered lets the model think before it answers."""
    if not isinstance(template, str) or "</think>" not in template:
        return False
    is_open = prompt.rstrip().endswith("<think>")
    return is_open or ("enable_thinking" in template and not prompt.rstrip().endswith("</think>"))


def _chat_template(model: ModelSection, folder: Path) -> str | None:
    """The text of `model.chat_template`, if it is set."""
    if model.chat_template is None:
        return None
    try:
        return (folder / Path(model.chat_template).expanduser()).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"model.chat_template: {model.chat_template} cannot be read: {error}") from error


def resolve_model(name: str, folder: Path) -> str:
    """A model's or tokenizer's directory where it exists, relative to the run file; else the hub name unchanged.

    Raises DataError for something that can only be a path and is not there.
    """
    path = folder / Path(name).expanduser()
    if path.is_dir():
        return str(path)
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or path.exists():
        raise DataError(f"model {name}: no directory at {path}. Give a Hugging Face model directory or hub name.")
    return name


def can_resolve(endpoint: str) -> bool:
    """Whether a hub's host name resolves, or a proxy would do that.

    Without it, asking the hub means most of a minute of retries before it says that there is no network.
    """
    if urllib.request.getproxies():
        return True
    try:
        socket.getaddrinfo(urllib.parse.urlsplit(endpoint).hostname, 443)
    except OSError:
        return False
    return True


def character_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """One token per character, `<pad>` = 0 and `<eos>` = 1 before them; without an unknown token.

    Saves and loads as an ordinary tokenizer directory. Raises DataError when a character is given twice or none is.
    """
    repeated = sorted({c for c in characters if characters.count(c) > 1})
    if repeated or not characters:
        what = f"given twice: {''.join(repeated)!r}" if repeated else "none given"
        raise DataError(f"model.characters: {what}. List each character of prompts and responses once.")
    vocabulary = {token: number for number, token in enumerate([PAD, EOS, *characters])}
    backend = Backend(models.WordLevel(vocabulary))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False
    )


def alphabet_of(hf: PreTrainedTokenizerFast) -> frozenset[str] | None:
    """The characters of a character-level tokenizer; None for every other kind."""
    words = set(hf.get_vocab()) - set(hf.all_special_tokens)
    is_word_level = isinstance(hf.backend_tokenizer.model, models.WordLevel) and hf.unk_token is None
    return frozenset(words) if is_word_level and all(len(word) == 1 for word in words) else None


def _generation_eos(folder: Path) -> list[int]:
    """`eos_token_id` of generation_config.json, which may be one id or a list; chat models often end in several."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return []
    try:
        ends = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (json.JSONDecodeError, AttributeError) as error:
        raise DataError(f"{path}: malformed JSON: {error}") from error
    return [end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)]


def _token_id(found: Any) -> int | None:
    """A special token's id; Transformers' type hints allow more than that."""
    return found if isinstance(found, int) else None
