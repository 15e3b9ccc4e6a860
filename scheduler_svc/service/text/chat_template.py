"""Messages into the text of a prompt, by a model's Jinja template.

Templates come with models and are not trusted: they run in Jinja's sandbox, on plain data.
The functions they find are those that transformers offers.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from scheduler_svc.errors import ConfigError

# What expressions of a template raise on data they were not written for.
_DATA_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class TemplateError(ValueError):
    """The chat template cannot render these messages: the caller's fault. Says why."""


class ChatTemplate:
    """The template, or templates, of one model."""

    __slots__ = ("_default", "_special_tokens", "_tool_use")

    def __init__(
        self,
        source: str | None,
        tool_source: str | None = None,
        *,
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile the template, and the one for requests with tools if there is one.

        `special_tokens` are variables of the template (`bos_token`, …). `now` dates a
        prompt, if the template wants a date.

        Raises: ConfigError if a source is no template.
        """
        environment = _environment(now)
        self._default = _compile(environment, source)
        self._tool_use = _compile(environment, tool_source) or self._default
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, object] | None = None,
    ) -> str:
        """Return the prompt's text.

        Messages are JSON-like: role, content and what else the template reads; values that
        are None count as absent. `extra` are further variables of the template.

        Raises: TemplateError if there is no template or no message, or rendering fails.
        """
        template = self._tool_use if tools else self._default
        if template is None:
            raise TemplateError("messages: this model has no chat template; send a text prompt")
        if not messages:
            raise TemplateError("messages: is empty, must have at least 1")
        variables = {
            **self._special_tokens,
            "documents": None,
            **(extra or {}),
            "messages": [
                {key: value for key, value in message.items() if value is not None}
                for message in messages
            ],
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = template.render(variables)
            # JSON can carry half a surrogate pair, which is no text.
            text.encode()
        except jinja2.TemplateError as error:
            raise TemplateError(f"messages: the chat template says: {error.message}") from error
        except _DATA_ERRORS as error:
            raise TemplateError(f"messages: the chat template fails on them: {error}") from error
        return text


def _compile(
    environment: ImmutableSandboxedEnvironment, source: str | None
) -> jinja2.Template | None:
    if source is None:
        return None
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"chat template, line {error.lineno}: {error.message}") from error


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
    return environment


class _Generation(Extension):
    """Lets `{% generation %}` … `{% endgeneration %}` stand for what is between them.

    Training code reads the borders; for serving they mean nothing.
    """

    tags = {"generation"}  # noqa: RUF012  jinja2 types it as a set of the instance

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _tojson(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002  templates may pass it by position
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """Return JSON as transformers does: Jinja's own filter escapes HTML characters."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
