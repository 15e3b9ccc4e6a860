"""What a request's fields may hold: tables of bounds, and the sentence for a value outside."""

import math
from collections.abc import Callable, Collection, Mapping, Sized
from dataclasses import dataclass

from google.protobuf.message import Message

from pagemill.v1.generation_pb2 import EarlyStopping, Sampling, Stopping
from pagemill.v1.inference_pb2 import GenerateRequest
from scheduler_svc.core.errors import InvalidRequestError, NotServedError

MAX_BAD_WORD_BYTES = 8192
MAX_STOPS = 64
MAX_STOP_BYTES = 4096
MAX_LIST_ENTRIES = 1024
MAX_REQUEST_ID_BYTES = 256
MAX_TENANT_BYTES = 256
MAX_ADAPTER_BYTES = 256
MAX_SALT_BYTES = 256
MAX_INTERVAL_S = 60.0

_MAX_QUOTED = 64


def quoted(text: str) -> str:
    """Return a client's text for a message: escaped, in quotes, and cut."""
    return repr(text if len(text) <= _MAX_QUOTED else text[:_MAX_QUOTED] + "…")


@dataclass(frozen=True, slots=True)
class Interval:
    """An interval of finite numbers. NaN is in none."""

    low: float
    high: float = math.inf

    above_low: bool = False
    """True: `low` itself is outside."""

    def check(self, field: str, value: float) -> None:
        """Refuse a value outside.

        Raises: InvalidRequestError naming field, value and interval.
        """
        inside = self.low <= value <= self.high and math.isfinite(value)
        if not inside or (self.above_low and value == self.low):
            raise InvalidRequestError(field, f"{field} is {value}, must be in {self}")

    def __str__(self) -> str:
        low = "(-∞" if math.isinf(self.low) else f"{'(' if self.above_low else '['}{self.low:g}"
        return f"{low}, {'∞)' if math.isinf(self.high) else f'{self.high:g}]'}"


_SAMPLING = {
    "temperature": Interval(0, 2),
    "top_k": Interval(-1),
    "top_p": Interval(0, 1, above_low=True),
    "min_p": Interval(0, 1),
    "presence_penalty": Interval(-2, 2),
    "frequency_penalty": Interval(-2, 2),
    # A logit times or by more than this is no float32 any more, and by 1e-46 it is a zero.
    "repetition_penalty": Interval(1e-30, 1e30),
}
_STOPPING = {"max_tokens": Interval(1)}
_OUTPUT = {"min_interval_s": Interval(0, MAX_INTERVAL_S)}
_BEAM = {
    "length_penalty": Interval(-math.inf),
    "early_stopping": Interval(0, max(EarlyStopping.values())),
}
_BIAS = Interval(-100, 100)

# Fields of this protocol that wait for later versions, and whether a request uses them.
_NOT_SERVED: Mapping[str, Callable[[GenerateRequest], bool]] = {
    "guide": lambda m: m.HasField("guide"),
}

# Fields that say how tokens are drawn or when text ends, and whether a request uses them:
# beam search draws nothing, and has no text before its end.
_NOT_WITH_BEAMS: Mapping[str, Callable[[GenerateRequest], bool]] = {
    "sampling.n": lambda m: m.sampling.n > 1,
    "sampling.temperature": lambda m: m.sampling.temperature not in (0, 1),
    "sampling.top_k": lambda m: m.sampling.top_k > 0,
    "sampling.top_p": lambda m: m.sampling.HasField("top_p") and m.sampling.top_p != 1,
    "sampling.min_p": lambda m: m.sampling.min_p > 0,
    "stopping.stop": lambda m: bool(m.stopping.stop),
}

# Fields that could mean something in beam search, whose tokens are chosen elsewhere.
_NOT_SERVED_WITH_BEAMS: Mapping[str, Callable[[GenerateRequest], bool]] = {
    "sampling.presence_penalty": lambda m: m.sampling.presence_penalty != 0,
    "sampling.frequency_penalty": lambda m: m.sampling.frequency_penalty != 0,
    "sampling.repetition_penalty": lambda m: (
        m.sampling.HasField("repetition_penalty") and m.sampling.repetition_penalty != 1
    ),
    "sampling.logit_bias": lambda m: bool(m.sampling.logit_bias),
    "sampling.allowed_token_ids": lambda m: bool(m.sampling.allowed_token_ids),
    "sampling.bad_words": lambda m: bool(m.sampling.bad_words),
    "stopping.min_tokens": lambda m: m.stopping.min_tokens > 0,
    "output.logprobs": lambda m: m.output.HasField("logprobs"),
}


def check_fields(
    message: GenerateRequest, vocab_size: int, max_num_seqs: int, max_logprobs: int
) -> None:
    """Refuse a request for one of its values, the prompt's aside.

    Raises: InvalidRequestError naming the first field outside its bound, value and bound.
        NotServedError naming the first field that is right, but not served yet.
    """
    check_request_id(message.request_id)
    check_tenant(message.tenant)
    check_name("adapter", message.adapter, MAX_ADAPTER_BYTES)
    check_size("cache.salt", message.cache.salt.encode(), MAX_SALT_BYTES, "bytes")
    _check_sampling(message.sampling, vocab_size)
    _check_stopping(message.stopping, vocab_size)
    _check_numbers("output", message.output, _OUTPUT)
    told = Interval(0, max_logprobs)
    told.check("output.logprobs", message.output.logprobs)
    told.check("output.prompt_logprobs", message.output.prompt_logprobs)
    _check_cache(message)
    if message.sampling.HasField("n"):
        _check_sequences("sampling.n", message.sampling.n, 1, max_num_seqs)
    _check_beam(message, max_num_seqs)
    for field, is_used in _NOT_SERVED.items():
        if is_used(message):
            raise NotServedError(field, f"{field} is not served by this version")
    for field, is_used in _NOT_SERVED_WITH_BEAMS.items():
        if message.beam.width and is_used(message):
            raise NotServedError(field, f"{field} is not served with beams by this version")


def check_token_ids(field: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Refuse ids outside the vocabulary.

    Raises: InvalidRequestError naming field, id and bound.
    """
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        wrong = next(id_ for id_ in token_ids if not 0 <= id_ < vocab_size)
        raise InvalidRequestError(
            field, f"{field} has the id {wrong}, must be in [0, {vocab_size - 1}], the vocabulary"
        )


def sampling_interval(name: str) -> Interval:
    """Return what the field of `pagemill.v1.Sampling` with this name may hold."""
    return _SAMPLING[name]


def _check_numbers(prefix: str, message: Message, intervals: Mapping[str, Interval]) -> None:
    """Check the numbers of a message that are set."""
    for field, value in message.ListFields():
        if interval := intervals.get(field.name):
            interval.check(f"{prefix}.{field.name}", value)


def check_size(field: str, content: Sized, most: int, unit: str) -> None:
    """Refuse what has more than `most` units.

    Raises: InvalidRequestError naming field, size and bound.
    """
    if len(content) > most:
        raise InvalidRequestError(
            field, f"{field} has {len(content)} {unit}, must have at most {most}"
        )


def _check_texts(field: str, texts: Collection[str], most: int) -> None:
    check_size(field, texts, most, "entries")
    for index, text in enumerate(texts):
        if not text:
            raise InvalidRequestError(field, f"{field}[{index}] is empty, must have a character")


def check_request_id(request_id: str) -> None:
    """Refuse a request's name that is too long, or no printable text.

    Raises: InvalidRequestError.
    """
    check_name("request_id", request_id, MAX_REQUEST_ID_BYTES)


def check_tenant(tenant: str) -> None:
    """Refuse a tenant's name that is too long, or no printable text.

    Raises: InvalidRequestError.
    """
    check_name("tenant", tenant, MAX_TENANT_BYTES)


def check_name(field: str, name: str, most_bytes: int) -> None:
    """Refuse a text that is too long, or not printable.

    Raises: InvalidRequestError naming the field and its bound.
    """
    check_size(field, name.encode(), most_bytes, "bytes")
    if not name.isprintable():
        raise InvalidRequestError(field, f"{field} is {quoted(name)}, must be printable text")


def _check_sampling(sampling: Sampling, vocab_size: int) -> None:
    _check_numbers("sampling", sampling, _SAMPLING)
    check_size("sampling.logit_bias", sampling.logit_bias, MAX_LIST_ENTRIES, "entries")
    check_token_ids("sampling.logit_bias", sampling.logit_bias, vocab_size)
    for id_, bias in sampling.logit_bias.items():
        _BIAS.check(f"sampling.logit_bias[{id_}]", bias)
    check_size("sampling.allowed_token_ids", sampling.allowed_token_ids, vocab_size, "ids")
    check_token_ids("sampling.allowed_token_ids", sampling.allowed_token_ids, vocab_size)
    _check_texts("sampling.bad_words", sampling.bad_words, MAX_LIST_ENTRIES)
    bad_words = "".join(sampling.bad_words).encode()
    check_size("sampling.bad_words", bad_words, MAX_BAD_WORD_BYTES, "bytes")


def _check_stopping(stopping: Stopping, vocab_size: int) -> None:
    _check_numbers("stopping", stopping, _STOPPING)
    if stopping.HasField("max_tokens"):
        Interval(0, stopping.max_tokens).check("stopping.min_tokens", stopping.min_tokens)
    _check_texts("stopping.stop", stopping.stop, MAX_STOPS)
    stops = "".join(stopping.stop)
    check_size("stopping.stop", stops.encode(), MAX_STOP_BYTES, "bytes")
    check_size("stopping.stop_token_ids", stopping.stop_token_ids, MAX_STOPS, "ids")
    check_token_ids("stopping.stop_token_ids", stopping.stop_token_ids, vocab_size)


def _check_cache(message: GenerateRequest) -> None:
    output = message.output
    tells_prompt = output.HasField("prompt_logprobs") or (
        output.echo and output.HasField("logprobs")
    )
    if message.cache.read_cache and tells_prompt:
        raise InvalidRequestError(
            "cache.read_cache",
            "cache.read_cache is true, must be false or unset with log-probabilities of the "
            "prompt, for which every position is computed",
        )


def _check_sequences(field: str, count: int, least: int, max_num_seqs: int) -> None:
    """Refuse fewer sequences than make sense, and more than a step can have."""
    if count < least:
        raise InvalidRequestError(field, f"{field} is {count}, must be at least {least}")
    if count > max_num_seqs:
        raise InvalidRequestError(
            field,
            f"{field} is {count}, must be at most {max_num_seqs}, the most sequences of a step",
        )


def _check_beam(message: GenerateRequest, max_num_seqs: int) -> None:
    beam = message.beam
    if not beam.ListFields():
        return
    _check_sequences("beam.width", beam.width, 2, max_num_seqs)
    Interval(0, beam.width).check("beam.num_returned", beam.num_returned)
    _check_numbers("beam", beam, _BEAM)
    for field, is_used in _NOT_WITH_BEAMS.items():
        if is_used(message):
            raise InvalidRequestError(field, f"{field} has no meaning in beam search: leave it out")
