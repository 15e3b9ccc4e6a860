"""A GenerateRequest into the submission that the engine takes."""

import uuid

from pagemill.v1.generation_pb2 import Stopping
from pagemill.v1.inference_pb2 import CacheOptions, GenerateRequest, OutputOptions
from scheduler_svc.core.errors import InvalidRequestError
from scheduler_svc.core.reports import Reports
from scheduler_svc.service.embedding_reading import read_embeddings
from scheduler_svc.service.engine_door import Submission
from scheduler_svc.service.field_bounds import check_fields
from scheduler_svc.service.front_end import FrontEnd
from scheduler_svc.service.sampling_reading import check_drawable, read_beam, read_sampling

MAX_PROMPT_ENTRIES = 2**20
"""Ids and candidates of prompt positions in one answer: 30 MB, of 64 that a message may have."""


async def read_request(
    message: GenerateRequest,
    front: FrontEnd,
    *,
    arrival_ns: int,
    deadline_ns: int | None,
    traceparent: str,
) -> Submission:
    """Check every field of a request, fill in what it left open, and tokenize its prompt.

    Raises: UnknownModelError; InvalidRequestError or NotServedError, naming the field.
    """
    front.model_name(message.model)
    check_fields(message, front.facts.vocab_size, front.limits.max_num_seqs, front.max_logprobs)
    token_ids = await front.prompts.read(message)
    hidden_size = front.facts.hidden_size
    embeddings = await read_embeddings(message.embeddings, len(token_ids), hidden_size)
    stopping, cache = message.stopping, message.cache
    eos_token_ids = frozenset() if stopping.ignore_eos else front.facts.eos_token_ids
    stop_token_ids = frozenset(stopping.stop_token_ids)
    sampling = read_sampling(message, front.sampling, front.tokenizer.encode_plain)
    check_drawable(sampling, eos_token_ids | stop_token_ids if stopping.min_tokens else ())
    reports = read_reports(message.output)
    _check_told(message, reports, len(token_ids))
    return Submission(
        request_id=message.request_id or uuid.uuid4().hex,
        tenant=message.tenant,
        token_ids=token_ids,
        sampling=sampling,
        max_output_tokens=_max_output_tokens(stopping, len(token_ids), front.limits.max_model_len),
        min_output_tokens=_min_output_tokens(stopping, len(token_ids), front.limits.max_model_len),
        eos_token_ids=eos_token_ids,
        stop_token_ids=stop_token_ids,
        salt=cache.salt.encode(),
        read_cache=_reads_cache(cache, reports),
        priority=message.priority,
        deadline_ns=deadline_ns,
        arrival_ns=arrival_ns,
        traceparent=traceparent,
        num_sequences=message.sampling.n or 1,
        beam=read_beam(message.beam),
        adapter=message.adapter,
        embeddings=embeddings,
        reports=reports,
    )


def read_reports(output: OutputOptions) -> Reports:
    """Return what a request wants to know beside its tokens.

    An output that begins with the prompt has log-probabilities of that too, if it has any.
    """
    logprobs = output.logprobs if output.HasField("logprobs") else None
    prompt = output.prompt_logprobs if output.HasField("prompt_logprobs") else None
    if output.echo and logprobs is not None:
        prompt = max(logprobs, prompt or 0)
    return Reports(logprobs=logprobs, prompt_logprobs=prompt)


def _reads_cache(cache: CacheOptions, reports: Reports) -> bool:
    """Whether cached blocks may serve the prompt: not if each of its positions must be told of."""
    if reports.prompt_logprobs is not None:
        return False
    return cache.read_cache if cache.HasField("read_cache") else True


def _check_told(message: GenerateRequest, reports: Reports, num_prompt_tokens: int) -> None:
    """Refuse an answer that would repeat so much of its prompt that no message holds it."""
    output, entries = message.output, 0
    if output.HasField("prompt_logprobs"):
        entries += output.prompt_logprobs + 1
    if output.echo:
        per_position = 1 if reports.logprobs is None else reports.logprobs + 2
        entries += per_position * (message.sampling.n or max(1, message.beam.num_returned))
    entries *= num_prompt_tokens
    if entries > MAX_PROMPT_ENTRIES:
        field = "output.echo" if output.echo else "output.prompt_logprobs"
        raise InvalidRequestError(
            field,
            f"{field} makes the answer tell {entries} entries of the prompt, all sequences "
            f"together, must be at most {MAX_PROMPT_ENTRIES}",
        )


def _min_output_tokens(stopping: Stopping, num_prompt_tokens: int, max_model_len: int) -> int:
    """Return the tokens before which nothing stops the output."""
    room = max_model_len - num_prompt_tokens
    if stopping.min_tokens > room:
        raise InvalidRequestError(
            "stopping.min_tokens",
            f"stopping.min_tokens is {stopping.min_tokens}, must be at most {room}, the model's "
            f"length of {max_model_len} less the {num_prompt_tokens} tokens of the prompt",
        )
    return stopping.min_tokens


def _max_output_tokens(
    stopping: Stopping, num_prompt_tokens: int, max_model_len: int
) -> int | None:
    """Return the bound of the output. None: the engine takes what length and pool allow."""
    if not stopping.HasField("max_tokens"):
        return None
    room = max_model_len - num_prompt_tokens
    if stopping.max_tokens > room:
        raise InvalidRequestError(
            "stopping.max_tokens",
            f"stopping.max_tokens is {stopping.max_tokens}, must be at most {room}, the model's "
            f"length of {max_model_len} less the {num_prompt_tokens} tokens of the prompt",
        )
    return stopping.max_tokens
