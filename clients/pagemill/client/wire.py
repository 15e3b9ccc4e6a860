"""Arguments to messages, and messages to events. The only file of the client that knows both."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message

from pagemill.client.arguments import ChatArguments, EmbeddingSpan, GenerateArguments
from pagemill.client.errors import InvalidArgumentError
from pagemill.client.events import (
    Accepted,
    Delta,
    Event,
    Finished,
    FinishReason,
    PositionLogprobs,
    Summary,
    Timing,
    TokenLogprob,
    Usage,
)
from pagemill.client.one_field import one_field
from pagemill.v1 import generation_pb2, inference_pb2

MessageT = TypeVar("MessageT", bound=Message)

_PROMPT = ("prompt", "messages", "embeddings")
_PLAIN = ("model", "request_id", "tenant", "priority", "adapter")
_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
)
# Fields of BeamSearch, by the names of their arguments.
_BEAM = {
    "beam_width": "width",
    "length_penalty": "length_penalty",
    "early_stopping": "early_stopping",
    "num_returned": "num_returned",
}
_EARLY_STOPPING = {
    False: generation_pb2.EARLY_STOPPING_FALSE,
    True: generation_pb2.EARLY_STOPPING_TRUE,
    "never": generation_pb2.EARLY_STOPPING_NEVER,
}
_ELEMENT_TYPES = {
    "float16": generation_pb2.ELEMENT_TYPE_FLOAT16,
    "float32": generation_pb2.ELEMENT_TYPE_FLOAT32,
    "bfloat16": generation_pb2.ELEMENT_TYPE_BFLOAT16,
}
_STOPPING = (
    "max_tokens",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_string",
)
_OUTPUT = (
    "omit_text",
    "keep_special_tokens",
    "logprobs",
    "prompt_logprobs",
    "echo",
    "min_interval_s",
)
_CACHE = ("salt", "read_cache")
_CHAT = ("tools", "template_arguments", "continue_last_message")
_KNOWN = frozenset((*_PROMPT, *_PLAIN, *_SAMPLING, *_BEAM, *_STOPPING, *_OUTPUT, *_CACHE, *_CHAT))

_REASONS = {
    generation_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    generation_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    generation_pb2.FINISH_REASON_ABORT: FinishReason.ABORT,
}


def generate_request(arguments: GenerateArguments) -> inference_pb2.GenerateRequest:
    """Return the message for these arguments.

    Raises: TypeError for a name that is none; InvalidArgumentError for a value that no
        message can hold or that allows no token, and if not exactly one of prompt and
            messages is given.
    """
    given = _given(arguments, _KNOWN, "generate")
    if ("prompt" in given) == ("messages" in given):
        raise InvalidArgumentError("exactly one of prompt and messages is needed", field="prompt")
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    if "allowed_token_ids" in given and not given["allowed_token_ids"]:
        # In a message, no ids are all ids.
        raise InvalidArgumentError(
            "allowed_token_ids is empty, must have at least 1 id", field="allowed_token_ids"
        )

    request = _message(inference_pb2.GenerateRequest, given, _PLAIN)
    if "messages" in given:
        request.chat.CopyFrom(_chat(given))
    elif isinstance(given["prompt"], str):
        request.MergeFrom(
            one_field(inference_pb2.GenerateRequest, "text", given["prompt"], "prompt")
        )
    else:
        request.token_ids.CopyFrom(
            one_field(generation_pb2.TokenIds, "ids", given["prompt"], "prompt")
        )
    request.embeddings.extend(_embeddings(given.get("embeddings", ())))
    _fill(request.sampling, given, _SAMPLING)
    _fill_beam(request.beam, given)
    _fill(request.stopping, given, _STOPPING)
    _fill(request.output, given, _OUTPUT)
    _fill(request.cache, given, _CACHE)
    return request


def _embeddings(spans: object) -> Iterator[generation_pb2.EmbeddingSpan]:
    if not isinstance(spans, Iterable):
        raise InvalidArgumentError("embeddings must be a list", field="embeddings")
    for index, span in enumerate(spans):
        if not isinstance(span, EmbeddingSpan):
            raise InvalidArgumentError(
                f"embeddings[{index}] is {type(span).__name__}, must be EmbeddingSpan",
                field="embeddings",
            )
        yield _embedding(f"embeddings[{index}]", span)


def _embedding(argument: str, span: EmbeddingSpan) -> generation_pb2.EmbeddingSpan:
    message = generation_pb2.EmbeddingSpan()
    for name in ("offset", "content_id", "embeddings"):
        value = getattr(span, name)
        message.MergeFrom(
            one_field(generation_pb2.EmbeddingSpan, name, value, f"{argument}.{name}")
        )
    if span.element_type not in _ELEMENT_TYPES:
        raise InvalidArgumentError(
            f"{argument}.element_type is {span.element_type!r}, must be one of "
            f"{', '.join(_ELEMENT_TYPES)}",
            field=f"{argument}.element_type",
        )
    message.element_type = _ELEMENT_TYPES[span.element_type]
    return message


def tokenize_request(
    text: str | None, arguments: ChatArguments, model: str, *, omit_special_tokens: bool
) -> inference_pb2.TokenizeRequest:
    """Return the message that asks for the ids of a text or of a conversation.

    Raises: InvalidArgumentError as generate_request does.
    """
    given = _given(arguments, {"messages", *_CHAT}, "tokenize")
    if (text is None) == ("messages" not in given):
        raise InvalidArgumentError("exactly one of text and messages is needed", field="text")
    fields = {"text": text, "model": model, "omit_special_tokens": omit_special_tokens}
    request = _message(inference_pb2.TokenizeRequest, fields, fields)
    if "messages" in given:
        request.chat.CopyFrom(_chat(given))
    return request


def detokenize_request(
    token_ids: Sequence[int], model: str, *, keep_special_tokens: bool
) -> inference_pb2.DetokenizeRequest:
    """Return the message that asks for the text of token ids.

    Raises: InvalidArgumentError for ids that no message can hold.
    """
    fields = {"token_ids": token_ids, "model": model, "keep_special_tokens": keep_special_tokens}
    return _message(inference_pb2.DetokenizeRequest, fields, fields)


def _given(arguments: Mapping[str, Any], known: Collection[str], function: str) -> dict[str, Any]:
    """Return the arguments that say something. TypeError for a name that is none."""
    if unknown := arguments.keys() - known:
        raise TypeError(f"{function}() has no argument {', '.join(sorted(unknown))}")
    return {name: value for name, value in arguments.items() if value is not None}


def _chat(given: Mapping[str, Any]) -> inference_pb2.Chat:
    chat = inference_pb2.Chat(messages=[_chat_message(message) for message in given["messages"]])
    chat.tools_json.extend(_json("tools", tool) for tool in given.get("tools", ()))
    if given.get("template_arguments"):
        chat.template_arguments_json = _json("template_arguments", given["template_arguments"])
    chat.continue_last_message = given.get("continue_last_message", False)
    return chat


def _chat_message(message: object) -> inference_pb2.ChatMessage:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidArgumentError(
            "messages are objects with a role, such as {'role': 'user', 'content': 'Hello'}",
            field="messages",
        )
    content = message.get("content")
    if not isinstance(content, str | None):
        raise InvalidArgumentError(
            f"content in messages is {type(content).__name__}, must be text", field="messages"
        )
    more = {name: value for name, value in message.items() if name not in {"role", "content"}}
    fields = {
        "role": message["role"],
        "content": content,
        "extra_json": _json("messages", more) if more else "",
    }
    return _message(inference_pb2.ChatMessage, fields, fields)


def _json(field: str, value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"{field} cannot become JSON: {error}", field=field) from error


def _message(kind: type[MessageT], given: Mapping[str, Any], names: Iterable[str]) -> MessageT:
    message = kind()
    _fill(message, given, names)
    return message


def _fill(message: Message, given: Mapping[str, Any], names: Iterable[str]) -> None:
    """Set those of `names` that are given. A part of which none is given stays unset."""
    for name in names:
        if given.get(name) is not None:
            message.MergeFrom(one_field(type(message), name, given[name], name))


def _fill_beam(beam: generation_pb2.BeamSearch, given: Mapping[str, Any]) -> None:
    """Set what is given of a beam search. If nothing is, it stays unset."""
    for name, field in _BEAM.items():
        if name not in given:
            continue
        value = given[name]
        if name == "early_stopping":
            if not isinstance(value, bool | str) or value not in _EARLY_STOPPING:
                raise InvalidArgumentError(
                    f"{name} is {value!r}, must be True, False or 'never'", field=name
                )
            value = _EARLY_STOPPING[value]
        beam.MergeFrom(one_field(generation_pb2.BeamSearch, field, value, name))


def events(message: inference_pb2.GenerateResponse) -> Iterator[Event]:
    """Yield what one message of a stream tells, in order."""
    if message.HasField("accepted"):
        accepted = message.accepted
        yield Accepted(accepted.request_id, accepted.prompt_tokens, accepted.seed)
    for delta in message.deltas:
        yield Delta(
            delta.sequence_index,
            tuple(delta.token_ids),
            delta.text,
            _positions(delta.logprobs),
            delta.step_id,
        )
    for finished in message.finished:
        yield _finished(finished)
    if message.HasField("summary"):
        yield _summary(message.summary)


def _positions(
    positions: Sequence[inference_pb2.PositionLogprobs],
) -> tuple[PositionLogprobs, ...]:
    return tuple(
        tuple(
            TokenLogprob(entry.token_id, entry.logprob, entry.rank, entry.text)
            for entry in position.entries
        )
        for position in positions
    )


def _finished(finished: inference_pb2.Finished) -> Finished:
    kind = finished.WhichOneof("stop_match")
    has_sum = finished.HasField("cumulative_logprob")
    has_score = finished.HasField("score")
    return Finished(
        finished.sequence_index,
        _REASONS.get(finished.reason, FinishReason.ERROR),
        None if kind is None else getattr(finished, kind),
        finished.cumulative_logprob if has_sum else None,
        finished.score if has_score else None,
        finished.error,
    )


def _summary(summary: inference_pb2.Summary) -> Summary:
    usage, timing = summary.usage, summary.timing
    return Summary(
        Usage(
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.cached_tokens,
            usage.recomputed_tokens,
            usage.draft_tokens,
            usage.accepted_draft_tokens,
        ),
        Timing(timing.queue_s, timing.ttft_s, timing.total_s, timing.preemptions),
        _positions(summary.prompt_logprobs),
    )
