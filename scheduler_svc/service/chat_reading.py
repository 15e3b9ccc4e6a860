"""A conversation as a client sends it, checked and laid out by the model's chat template."""

import json
import re

from pagemill.v1.inference_pb2 import Chat, ChatMessage
from scheduler_svc.core.errors import InvalidRequestError
from scheduler_svc.service.field_bounds import quoted
from scheduler_svc.service.text.chat_template import ChatTemplate, TemplateError
from scheduler_svc.service.text.special_text import SpecialText

_ROLES = frozenset({"assistant", "developer", "system", "tool", "user"})
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_MAX_COMPLAINT = 300


def everything_in(chat: Chat) -> str:
    """Return all that a client wrote in a conversation, to judge its size."""
    parts = [part for message in chat.messages for part in (message.content, message.extra_json)]
    return "".join([*parts, *chat.tools_json, chat.template_arguments_json])


def read_chat(chat: Chat, template: ChatTemplate, special_text: SpecialText) -> str:
    """Return the text of a conversation, for `Tokenizer.encode_chat`.

    All that the client wrote is marked, so that special tokens in it stay plain text.

    Raises: InvalidRequestError for a role or a JSON text that cannot be, and for what the
        template refuses.
    """
    messages = [
        _marked_message(f"chat.messages[{index}]", message, special_text)
        for index, message in enumerate(chat.messages)
    ]
    tools = [
        _marked_object(f"chat.tools_json[{index}]", tool, special_text)
        for index, tool in enumerate(chat.tools_json)
    ]
    arguments = _marked_object(
        "chat.template_arguments_json", chat.template_arguments_json, special_text
    )
    try:
        rendered = template.render(
            messages,
            tools=tools,
            add_generation_prompt=not chat.continue_last_message,
            extra=arguments,
        )
    except TemplateError as error:
        raise InvalidRequestError("chat", f"chat.{error!s:.{_MAX_COMPLAINT}}") from error
    if chat.continue_last_message:
        return _open_last_message(rendered, str(messages[-1]["content"]))
    return rendered


def _marked_message(
    field: str, message: ChatMessage, special_text: SpecialText
) -> dict[str, object]:
    """Return a message as templates read it; named members win over those of the JSON."""
    _check_role(f"{field}.role", message.role, special_text)
    extra = _marked_object(f"{field}.extra_json", message.extra_json, special_text)
    named = special_text.mark({"role": message.role, "content": message.content})
    return {**extra, **named}


def _check_role(field: str, role: str, special_text: SpecialText) -> None:
    """Refuse a role that a template which writes `<|` role `|>` would make a special token."""
    if role in _ROLES:
        return
    if not _ROLE.fullmatch(role) or any(role in text for text in special_text.alias_by_text):
        raise InvalidRequestError(
            field,
            f"{field} is {quoted(role)}, must be one of {', '.join(sorted(_ROLES))}, or up to 64 "
            "letters, digits, _ and - that are no part of a special token",
        )


def _marked_object(field: str, text: str, special_text: SpecialText) -> dict[str, object]:
    if not text:
        return {}
    try:
        value = json.loads(text)
        if isinstance(value, dict):
            return special_text.mark(value)
    except ValueError as error:
        raise InvalidRequestError(field, f"{field} is not JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequestError(field, f"{field} is nested too deeply") from error
    raise InvalidRequestError(field, f"{field} is not a JSON object")


def _open_last_message(rendered: str, content: str) -> str:
    """Cut a rendered chat behind the last message's content, so that the model goes on with it.

    Source: `continue_final_message` of transformers, which also finds the content by its
        text, since a template may trim it.
    """
    start = rendered.rfind(content.strip())
    if start < 0:
        raise InvalidRequestError(
            "chat.continue_last_message",
            "chat.continue_last_message: the chat template changes the last message's content",
        )
    kept = content.lstrip()
    if not rendered.startswith(kept, start):
        kept = content.strip()
    return rendered[: start + len(kept)]
