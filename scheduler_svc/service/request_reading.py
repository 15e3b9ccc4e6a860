"""A GenerateRequest into the submission that the engine takes."""

import uuid

from pagemill.v1.generation_pb2 import Stopping
from pagemill.v1.inference_pb2 import GenerateRequest
from scheduler_svc.core.errors import InvalidRequestError
from scheduler_svc.service.embedding_reading import read_embeddings
from scheduler_svc.service.engine_door import Submission
from scheduler_svc.service.field_bounds import check_fields
from scheduler_svc.service.front_end import FrontEnd
from scheduler_svc.service.sampling_reading import read_beam, read_sampling


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
    check_fields(message, front.facts.vocab_size, front.limits.max_num_seqs)
    token_ids = await front.prompts.read(message)
    hidden_size = front.facts.hidden_size
    embeddings = await read_embeddings(message.embeddings, len(token_ids), hidden_size)
    stopping, cache = message.stopping, message.cache
    return Submission(
        request_id=message.request_id or uuid.uuid4().hex,
        tenant=message.tenant,
        token_ids=token_ids,
        sampling=read_sampling(message, front.sampling),
        max_output_tokens=_max_output_tokens(stopping, len(token_ids), front.limits.max_model_len),
        min_output_tokens=stopping.min_tokens,
        eos_token_ids=frozenset() if stopping.ignore_eos else front.facts.eos_token_ids,
        stop_token_ids=frozenset(stopping.stop_token_ids),
        salt=cache.salt.encode(),
        read_cache=cache.read_cache if cache.HasField("read_cache") else True,
        priority=message.priority,
        deadline_ns=deadline_ns,
        arrival_ns=arrival_ns,
        traceparent=traceparent,
        num_sequences=message.sampling.n or 1,
        beam=read_beam(message.beam),
        adapter=message.adapter,
        embeddings=embeddings,
    )


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
