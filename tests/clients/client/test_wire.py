"""Each argument lands in its field, and one that cannot be sent is named."""

from collections.abc import Callable
from typing import Any, cast

import pytest

from pagemill.client import EmbeddingSpan, InvalidArgumentError, wire
from pagemill.client.arguments import GenerateArguments
from pagemill.client.events import Delta, Finished, FinishReason, Summary, TokenLogprob
from pagemill.v1 import generation_pb2, inference_pb2

VALUES: dict[str, Any] = {
    "model": "demo",
    "request_id": "r1",
    "tenant": "a",
    "priority": -3,
    "adapter": "poet",
    "temperature": 0.0,
    "top_k": -1,
    "top_p": 0.5,
    "min_p": 0.25,
    "seed": 2**64 - 1,
    "n": 2,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {5: -100.0},
    "allowed_token_ids": [1, 2],
    "bad_words": ["no"],
    "max_tokens": 8,
    "min_tokens": 0,
    "stop": ["\n", "END"],
    "stop_token_ids": [0],
    "ignore_eos": True,
    "include_stop_string": True,
    "omit_text": True,
    "keep_special_tokens": True,
    "logprobs": 0,
    "prompt_logprobs": 3,
    "echo": True,
    "min_interval_s": 0.5,
    "salt": "s",
    "read_cache": False,
}


# Arguments of a beam search, whose fields have shorter names: value, field, and what it holds.
BEAM_VALUES: dict[str, tuple[Any, str, Any]] = {
    "beam_width": (4, "width", 4),
    "length_penalty": (0.0, "length_penalty", 0.0),
    "early_stopping": ("never", "early_stopping", generation_pb2.EARLY_STOPPING_NEVER),
    "num_returned": (2, "num_returned", 2),
}


def request(**arguments: Any) -> inference_pb2.GenerateRequest:
    return wire.generate_request(cast(GenerateArguments, arguments))


@pytest.mark.parametrize("name", VALUES)
def test_an_argument_lands_in_the_field_of_its_name(name: str) -> None:
    message = request(prompt="Hi", **{name: VALUES[name]})
    parts = (message, message.sampling, message.stopping, message.output, message.cache)
    found = [
        (field.name, value)
        for part in parts
        for field, value in part.ListFields()
        if field.message_type is None or field.name == "logit_bias"
    ]
    (value,) = [value for field, value in found if field == name]
    if isinstance(VALUES[name], list | dict):
        value = type(VALUES[name])(value)
    assert value == VALUES[name]


def test_the_tables_above_know_every_argument() -> None:
    prompts = {"prompt", "messages", "tools", "template_arguments", "continue_last_message"}
    prompts |= {"embeddings"}  # below
    values = set(VALUES) | set(BEAM_VALUES)
    assert set(GenerateArguments.__annotations__) == values | prompts


@pytest.mark.parametrize("name", BEAM_VALUES)
def test_an_argument_of_a_beam_search_lands_in_its_field(name: str) -> None:
    value, field, held = BEAM_VALUES[name]
    ((said, found),) = request(prompt="Hi", **{name: value}).beam.ListFields()
    assert (said.name, found) == (field, held)


@pytest.mark.parametrize(
    ("value", "held"),
    [
        (True, generation_pb2.EARLY_STOPPING_TRUE),
        (False, generation_pb2.EARLY_STOPPING_FALSE),
    ],
)
def test_a_beam_search_may_end_early_or_not(value: bool, held: int) -> None:
    assert request(prompt="Hi", beam_width=2, early_stopping=value).beam.early_stopping == held


def test_what_is_not_said_is_not_sent() -> None:
    message = request(prompt="Hi", temperature=None, max_tokens=None)
    assert [field.name for field, _ in message.ListFields()] == ["text"]


def test_a_prompt_is_text_or_ids() -> None:
    assert request(prompt="").WhichOneof("prompt") == "text"
    assert list(request(prompt=range(3)).token_ids.ids) == [0, 1, 2]


def test_a_conversation_keeps_what_only_the_template_knows() -> None:
    message = request(
        messages=[
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "é"}]},
        ],
        tools=[{"type": "function"}],
        template_arguments={"thinking": True},
        continue_last_message=True,
    ).chat
    assert [(turn.role, turn.content) for turn in message.messages] == [
        ("user", "Hi"),
        ("assistant", ""),
    ]
    assert message.messages[1].extra_json == '{"tool_calls": [{"id": "é"}]}'
    assert list(message.tools_json) == ['{"type": "function"}']
    assert message.template_arguments_json == '{"thinking": true}'
    assert message.continue_last_message


def test_one_stop_string_may_stand_alone() -> None:
    assert list(request(prompt="Hi", stop="END").stopping.stop) == ["END"]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": []}, "prompt"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 2**32}, "max_tokens"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "seed": -1}, "seed"),
        ({"prompt": "a", "stop": [b"\xff"]}, "stop"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": [1, 2**31]}, "prompt"),
        ({"prompt": [1, "x"]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "a", "beam_width": -1}, "beam_width"),
        ({"prompt": "a", "early_stopping": "soon"}, "early_stopping"),
        ({"prompt": "a", "early_stopping": 1}, "early_stopping"),
        ({"messages": ["Hi"]}, "messages"),
        ({"messages": [{"content": "Hi"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [1]}]}, "messages"),
        ({"messages": [{"role": "user", "name": object()}]}, "messages"),
    ],
)
def test_what_cannot_be_sent_is_named(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError, match=field) as caught:
        request(**arguments)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("name", "value", "bounds"),
    [
        ("max_tokens", -1, "[0, 4294967295]"),
        ("logprobs", -1, "[0, 4294967295]"),
        ("seed", 2**64, "[0, 18446744073709551615]"),
        ("top_k", 2**31, "[-2147483648, 2147483647]"),
        ("priority", 10**30, "[-2147483648, 2147483647]"),
    ],
)
def test_a_number_that_no_field_holds_is_refused_with_the_bounds(
    name: str, value: int, bounds: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        request(**{"prompt": "a", name: value})
    assert str(caught.value) == f"{name} is {value}, must be in {bounds}"


@pytest.mark.parametrize("id_", [2**31, -(2**31) - 1, 10**30])
@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("prompt", lambda id_: [1, id_]),
        ("logit_bias", lambda id_: {7: 1.0, id_: 1.0}),
        ("allowed_token_ids", lambda id_: (id_,)),
        ("stop_token_ids", lambda id_: [0, id_, 1]),
    ],
)
def test_an_id_that_no_field_holds_is_refused_with_the_bounds(
    name: str, entries: Callable[[int], object], id_: int
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        request(**{"prompt": "a", name: entries(id_)})
    told = f"{name} has the id {id_}, must be in [-2147483648, 2147483647]"
    assert (str(caught.value), caught.value.field) == (told, name)


def test_ids_of_a_text_are_refused_with_the_bounds() -> None:
    with pytest.raises(InvalidArgumentError, match=r"token_ids has the id 4294967296, must be in"):
        wire.detokenize_request([2**32], "", keep_special_tokens=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"bad_words": "dragon"}, "bad_words is one text, must be a list"),
        ({"stop_token_ids": "12"}, "stop_token_ids is one text, must be a list"),
        ({"prompt": b"ab"}, "prompt is one text, must be a list"),
        ({"embeddings": 5}, "embeddings must be a list"),
        ({"embeddings": [5]}, r"embeddings\[0\] is int, must be EmbeddingSpan"),
        (
            {"embeddings": [EmbeddingSpan(0, "a", b""), EmbeddingSpan(-1, "b", b"")]},
            r"embeddings\[1\]\.offset is -1, must be in \[0, 4294967295\]",
        ),
    ],
)
def test_what_is_no_list_of_entries_is_not_taken_apart(
    arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        request(**{"prompt": "a", **arguments})


def test_a_prompt_is_not_repeated_in_an_error() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        request(prompt="secret \ud800")
    assert "secret" not in str(caught.value)


def test_an_unknown_argument_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="max_token"):
        request(prompt="Hi", max_token=3)


def test_log_probabilities_and_stop_matches_arrive() -> None:
    entry = inference_pb2.TokenLogprob(token_id=5, logprob=-0.5, rank=2, text=b"\xff")
    position = inference_pb2.PositionLogprobs(entries=[entry])
    message = inference_pb2.GenerateResponse(
        deltas=[inference_pb2.Delta(token_ids=[5], logprobs=[position])],
        finished=[
            inference_pb2.Finished(
                reason=generation_pb2.FINISH_REASON_STOP,
                stop_token_id=0,
                cumulative_logprob=0.0,
                score=-0.0,
            ),
            inference_pb2.Finished(
                sequence_index=1, reason=generation_pb2.FINISH_REASON_ERROR, error="NaN"
            ),
        ],
        summary=inference_pb2.Summary(prompt_logprobs=[inference_pb2.PositionLogprobs(), position]),
    )
    expected = (TokenLogprob(5, -0.5, 2, b"\xff"),)
    drawn, stopped, failed, summary = wire.events(message)
    assert isinstance(drawn, Delta)
    assert drawn.logprobs == (expected,)
    assert stopped == Finished(0, FinishReason.STOP, 0, 0.0, 0.0, "")
    assert failed == Finished(1, FinishReason.ERROR, None, None, None, "NaN")
    assert isinstance(summary, Summary)
    assert summary.prompt_logprobs == ((), expected)


def test_embeddings_land_in_spans() -> None:
    spans = [EmbeddingSpan(3, "cat", b"abcd"), EmbeddingSpan(9, "dog", b"ef", "bfloat16")]
    first, second = request(prompt=[1] * 10, embeddings=spans).embeddings
    assert (first.offset, first.content_id, first.embeddings) == (3, "cat", b"abcd")
    assert first.element_type == generation_pb2.ELEMENT_TYPE_FLOAT32
    assert (second.offset, second.content_id, second.embeddings) == (9, "dog", b"ef")
    assert second.element_type == generation_pb2.ELEMENT_TYPE_BFLOAT16


@pytest.mark.parametrize(
    ("span", "field"),
    [
        (EmbeddingSpan(-1, "cat", b""), "offset"),
        (EmbeddingSpan(0, "cat", cast(Any, "text")), "embeddings"),
        (EmbeddingSpan(0, "cat", b"", cast(Any, "int8")), "element_type"),
    ],
)
def test_a_span_that_cannot_be_sent_is_named(span: EmbeddingSpan, field: str) -> None:
    with pytest.raises(InvalidArgumentError, match=field):
        request(prompt=[1], embeddings=[span])
