"""Conversations as input of a reward model: question and answer, rendered by its own template.

The same code prepares training pairs and what is scored later. The policy's prompts and responses are `chat.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from transformers import PreTrainedTokenizerFast

from hone.data.chat import ChatMessage, TemplateRefusal, alphabet_of, check_characters, rendering
from hone.errors import DataError

RowForm = Literal["chat", "text"]


class UnreadableConversation(DataError):
    """A conversation that this reward model cannot read, and why."""


class ConversationReader:
    """Questions and answers to token ids.

    Args:
        tokenizer: the reward model's; it need have no EOS.
        form: `chat` puts the answer as the assistant's message after the others, through the chat template; `text`
            writes it right after the prompt's text, with the tokenizer's EOS behind it if it has one.
        clock: further arguments of the chat template, see `render.Renderer.clock`.
    Raises:
        DataError: `chat` without a chat template.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, form: RowForm, *, clock: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        if form == "chat" and tokenizer.chat_template is None:
            raise DataError(
                f"reward model: its tokenizer ({tokenizer.name_or_path or 'of characters'}) has no chat template, "
                "though it scores chats. Set model.chat_template, or use a plain data.template."
            )
        self.tokenizer, self.form, self._clock = tokenizer, form, clock
        self._alphabet = alphabet_of(tokenizer)

    def read(self, question: str | Sequence[ChatMessage], answer: str | Sequence[ChatMessage]) -> list[int]:
        """Token ids of one conversation, never empty.

        Args:
            question: text, which a chat takes as one message of the user; or messages, which only a chat can take.
            answer: text; or, in a chat, messages that follow the question, or that repeat it in front.
        Raises:
            Unreadable: see above, a template that refuses the messages, or a character that cannot be spelled.
        """
        if self.form == "chat":
            text, special = self._chat_text(question, answer), self.tokenizer.all_special_tokens
        elif isinstance(question, str) and isinstance(answer, str):
            text, special = question + answer, ()
        else:
            raise UnreadableConversation("got messages, but the reward model reads plain text")
        try:
            check_characters(text, self._alphabet, special=special)
        except DataError as error:
            raise UnreadableConversation(str(error)) from error
        ids: list[int] = self.tokenizer(text, add_special_tokens=self.form == "text", verbose=False)["input_ids"]
        end = self.tokenizer.eos_token_id
        if self.form == "text" and isinstance(end, int) and ids[-1:] != [end]:
            ids = [*ids, end]
        if not ids:
            raise UnreadableConversation("the conversation is empty")
        return ids

    def _chat_text(self, question: str | Sequence[ChatMessage], answer: str | Sequence[ChatMessage]) -> str:
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else list(question)
        if isinstance(answer, str):
            messages.append({"role": "assistant", "content": answer})
        else:
            repeats = list(answer[: len(messages)]) == messages
            messages = list(answer) if repeats else [*messages, *answer]
        try:
            with rendering():
                text = self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=False, **self._clock
                )
        except TemplateRefusal as error:
            raise UnreadableConversation(str(error)) from error
        assert isinstance(text, str)
        return text
