"""Prompts as clients send them, text, conversation or ids, into token ids of the model."""

import asyncio
from array import array
from collections.abc import Callable, Sequence

from pagemill.v1.inference_pb2 import Chat, GenerateRequest
from scheduler_svc.core.errors import InvalidRequestError
from scheduler_svc.service.chat_reading import everything_in, read_chat
from scheduler_svc.service.field_bounds import check_size, check_token_ids
from scheduler_svc.service.text.chat_template import ChatTemplate
from scheduler_svc.service.text.tokenizer import Tokenizer

# The tokenizer needs 0.25 us a character; beyond this, a thread is cheaper than the pause
# it would be for every stream of the loop.
_MAX_INLINE_CHARACTERS = 2000

# A message costs 16 us, however short it is.
_MAX_MESSAGES = 4096
_MAX_TOOLS = 1024
_MAX_INLINE_MESSAGES = 32


class PromptReader:
    """Reads prompts for one model."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, vocab_size: int, max_model_len: int
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len

    async def read(self, message: GenerateRequest) -> "array[int]":
        """Return the token ids of a request's prompt.

        Raises: InvalidRequestError naming the field, if there is no prompt, it is empty, has
            ids outside the vocabulary, or leaves no room for output.
        """
        field = message.WhichOneof("prompt")
        if field is None:
            raise InvalidRequestError(
                "prompt", "prompt is missing, must be one of text, token_ids, chat"
            )
        if field == "text":
            ids: Sequence[int] = await self.encode_text(message.text)
        elif field == "chat":
            ids = await self.encode_chat(message.chat)
        else:
            ids = message.token_ids.ids
        return self.checked(field, ids)

    def checked(self, field: str, ids: Sequence[int]) -> "array[int]":
        """Return the ids of a field as a prompt.

        Raises: InvalidRequestError if there is none, too many, or one outside the vocabulary.
        """
        if not ids:
            raise InvalidRequestError(field, f"{field} is empty, must have at least 1 token")
        self._check_room(field, len(ids))
        check_token_ids(field, ids, self._vocab_size)
        return array("i", ids)

    async def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a plain text.

        Raises: InvalidRequestError for a text that is too long by its mere size.
        """
        self._check_room("text", self._tokenizer.fewest_tokens(text), "at least ")
        return await _threaded_if_long(
            text, lambda: self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        )

    async def encode_chat(self, chat: Chat) -> list[int]:
        """Return the ids of a conversation, laid out by the model's template.

        Raises: InvalidRequestError for one that is too long by its mere size, that has a role
            or JSON which cannot be, or that the template refuses.
        """
        check_size("chat.messages", chat.messages, _MAX_MESSAGES, "entries")
        check_size("chat.tools_json", chat.tools_json, _MAX_TOOLS, "entries")
        text = everything_in(chat)
        self._check_room("chat", self._tokenizer.fewest_tokens(text), "at least ")
        if len(chat.messages) > _MAX_INLINE_MESSAGES:
            return await asyncio.to_thread(self._encode_chat, chat)
        return await _threaded_if_long(text, lambda: self._encode_chat(chat))

    def _encode_chat(self, chat: Chat) -> list[int]:
        rendered = read_chat(chat, self._template, self._tokenizer.special_text)
        return self._tokenizer.encode_chat(rendered)

    def _check_room(self, field: str, num_tokens: int, at_least: str = "") -> None:
        """Refuse a prompt behind which not one token of output fits."""
        if num_tokens >= self._max_model_len:
            raise InvalidRequestError(
                field,
                f"{field} has {at_least}{num_tokens} tokens, must have fewer than "
                f"{self._max_model_len}, the most a request may have with its output",
            )


async def _threaded_if_long(text: str, work: Callable[[], list[int]]) -> list[int]:
    """Do work that takes time in proportion to a text, without stopping the loop for long."""
    if len(text) <= _MAX_INLINE_CHARACTERS:
        return work()
    return await asyncio.to_thread(work)
