"""Chats are rendered as transformers renders them, and what fails is told in a sentence."""

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from scheduler_svc.errors import ConfigError
from scheduler_svc.service.text.chat_template import ChatTemplate, TemplateError
from scheduler_svc.service.text.model_facts import ModelFacts

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS: list[dict[str, object]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Say how warm it is, in °C & <b>.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
CHAT: list[dict[str, object]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  How warm is it in Zürich?\n"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": '{"celsius": 21}'},
    {"role": "user", "content": [{"type": "text", "text": "Thanks <b>"}, {"type": "image"}]},
]

LOOPS = """
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- continue %}
    {%- endif %}
    {{- '<|' + message.role + '|>\\n' }}
    {%- if message.content is string %}
        {{- message.content | trim + eos_token }}
    {%- else %}
        {%- for part in message.content or [] if part.type == 'text' %}
{{ part.text }}
        {%- endfor %}
    {%- endif %}
    {%- if loop.index > 4 %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""
TEMPLATES = {
    "loops": LOOPS,
    "tools": (
        "{{ bos_token }}{% if tools %}{{ tools | tojson }}{{ tools | tojson(indent=2) }}"
        "{{ tools[0].function | tojson(sort_keys=true, separators=(',', ':')) }}{% endif %}"
        "{% for m in messages %}{{ m.role }}:{% if m.tool_calls %}{{ m.tool_calls }}{% endif %}"
        "{{ m.content }};{% endfor %}"
    ),
    "generation": (
        "{% set ns = namespace(found=false) %}{% for m in messages %}"
        "{% generation %}{% set ns.found = true %}{{ m.role | upper }}{% endgeneration %}\n"
        "{% endfor %}{{ ns.found }}{{ documents is none }}{{ mood }}{{ unknown }}"
    ),
    "trimming": "  {% if true %}  \n  x\n  {% endif %}\n{# why #}\n{{ messages | length }}\n",
}


def expected(
    source: str,
    messages: Sequence[Mapping[str, object]],
    tools: Sequence[Mapping[str, object]] | None,
    *,
    prompt: bool,
) -> str:
    # apply_chat_template leaves out what is None before it renders.
    present = [{k: v for k, v in message.items() if v is not None} for message in messages]
    options: dict[str, Any] = {"tools": tools, "mood": "calm", **SPECIAL_TOKENS}
    rendered = render_jinja_template(
        [present], chat_template=source, add_generation_prompt=prompt, **options
    )
    return rendered[0][0]


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("name", TEMPLATES)
def test_chats_are_rendered_as_transformers_renders_them(
    name: str, tools: list[dict[str, object]] | None, prompt: bool
) -> None:
    template = ChatTemplate(TEMPLATES[name], special_tokens=SPECIAL_TOKENS)
    text = template.render(CHAT, tools=tools, add_generation_prompt=prompt, extra={"mood": "calm"})
    assert text == expected(TEMPLATES[name], CHAT, tools, prompt=prompt)


def test_the_demo_template_is_rendered_as_transformers_renders_it(demo_gguf: Path) -> None:
    facts = ModelFacts.from_path(demo_gguf)
    assert facts.chat_template is not None
    template = ChatTemplate(facts.chat_template, special_tokens=facts.special_tokens)
    answer: dict[str, object] = {"role": "assistant", "content": "21"}
    for chat in (CHAT[1:2], [*CHAT[:2], answer, CHAT[1]]):
        assert template.render(chat) == expected(facts.chat_template, chat, None, prompt=True)


def test_requests_with_tools_may_have_a_template_of_their_own() -> None:
    template = ChatTemplate("plain", "with tools", special_tokens={})
    assert template.render(CHAT) == "plain"
    assert template.render(CHAT, tools=[]) == "plain"
    assert template.render(CHAT, tools=TOOLS) == "with tools"


def test_a_request_cannot_replace_its_messages_by_template_arguments() -> None:
    template = ChatTemplate("{{ messages | length }}{{ tools }}", special_tokens={})
    assert template.render(CHAT, extra={"messages": [], "tools": 1}) == "5None"


def test_a_prompt_may_be_dated() -> None:
    template = ChatTemplate(
        "{{ strftime_now('%d %B %Y') }}",
        special_tokens={},
        now=lambda: datetime(2026, 2, 3, tzinfo=UTC),
    )
    assert template.render(CHAT) == "03 February 2026"


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("{{ raise_exception('roles must alternate') }}", "says: roles must alternate"),
        ("{{ messages[0].content + 1 }}", "fails on them: can only concatenate str"),
        ("{{ messages[0].absent.more }}", "says: .* has no attribute 'absent'"),
        ("{{ messages[9].content }}", "says: .* has no element 9"),
        ("{{ 1 / 0 }}", "fails on them: division by zero"),
        ("{{ ''.__class__.__mro__ }}", "says: access to attribute '__class__' .* is unsafe"),
        ("{{ messages.append(1) }}", "says: access to attribute 'append' .* is unsafe"),
        ("{{ '\\ud800' }}", "fails on them: .*surrogates not allowed"),
    ],
)
def test_a_chat_that_cannot_be_rendered_is_refused(source: str, complaint: str) -> None:
    template = ChatTemplate(source, special_tokens={})
    with pytest.raises(TemplateError, match=f"^messages: the chat template {complaint}"):
        template.render(CHAT)


def test_a_model_without_a_template_cannot_chat() -> None:
    with pytest.raises(TemplateError, match="this model has no chat template"):
        ChatTemplate(None, special_tokens={}).render(CHAT)


def test_a_chat_without_messages_is_refused() -> None:
    with pytest.raises(TemplateError, match="messages: is empty, must have at least 1"):
        ChatTemplate("x", special_tokens={}).render([])


def test_a_source_that_is_no_template_is_the_operators_fault() -> None:
    with pytest.raises(ConfigError, match=r"chat template, line 2: .*endfor"):
        ChatTemplate("{% for x in messages %}\n{% endif %}", special_tokens={})
