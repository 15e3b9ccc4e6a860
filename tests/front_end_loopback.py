"""The public services on a real gRPC server, over a fake engine, with a tokenizer one can read."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers
from grpc import aio
from prometheus_client import CollectorRegistry
from tokenizers import decoders, models, pre_tokenizers

from fake_door import FakeDoor
from pagemill.v1.admin_pb2_grpc import AdminStub
from pagemill.v1.control_pb2_grpc import ControlStub
from pagemill.v1.inference_pb2_grpc import InferenceStub
from scheduler_svc.core.limits import Limits
from scheduler_svc.service.metrics import RequestMetrics
from scheduler_svc.service.public_services import FrontEnd, add_public_services
from scheduler_svc.service.request_trace import RequestTracer
from scheduler_svc.service.text.model_facts import ModelFacts, SamplingDefaults
from scheduler_svc.service.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # the stubs for a channel of grpc.aio exist for the type checker only
    from pagemill.v1.admin_pb2_grpc import AdminAsyncStub
    from pagemill.v1.control_pb2_grpc import ControlAsyncStub
    from pagemill.v1.inference_pb2_grpc import InferenceAsyncStub

EOS, TURN, END_OF_TURN = 256, 257, 258
SPECIAL_TOKENS = {"<eos>": EOS, "<|im_start|>": TURN, "<|im_end|>": END_OF_TURN}
LONG_TOKENS = {"ab": 260, "cd": 261, "DEF": 262, "HI": 263}
VOCAB_SIZE = 272
MAX_MODEL_LEN = 64
MAX_RECEIVED_BYTES = 64 << 20

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }} {{ message.content }}<|im_end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer that makes each byte the id of its value.

    Ids of longer tokens appear in outputs only.
    """
    # The characters that stand for bytes in a byte-level vocabulary: see GPT-2.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    characters = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    vocab = {character: byte for byte, character in enumerate(characters)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab | SPECIAL_TOKENS | LONG_TOKENS, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    return Tokenizer(backend)


def facts(path: Path = Path("model"), sampling: SamplingDefaults | None = None) -> ModelFacts:
    """Return the facts of a model that goes with `byte_tokenizer`."""
    return ModelFacts(
        path=path,
        architecture="llama",
        max_position_embeddings=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset({EOS, END_OF_TURN}),
        sampling=sampling or SamplingDefaults(),
        chat_template=CHAT_TEMPLATE,
    )


def front_end(
    model: ModelFacts | None = None,
    *,
    max_model_len: int = MAX_MODEL_LEN,
    registry: CollectorRegistry | None = None,
    tracer: RequestTracer | None = None,
) -> FrontEnd:
    """Return the front end of that model."""
    return FrontEnd.for_model(
        model or facts(),
        byte_tokenizer(),
        served_names=("toy", "toy-alias"),
        limits=Limits(
            block_size=4,
            max_num_seqs=8,
            max_num_batched_tokens=32,
            max_model_len=max_model_len,
            max_waiting_requests=16,
            pipeline_depth=2,
        ),
        version="1.2.3",
        protocol_version=1,
        metrics=RequestMetrics(registry or CollectorRegistry()),
        tracer=tracer,
    )


@dataclass(frozen=True, slots=True)
class Loopback:
    """A server and a client of it."""

    door: FakeDoor
    channel: aio.Channel
    inference: "InferenceAsyncStub"
    control: "ControlAsyncStub"
    admin: "AdminAsyncStub"


@asynccontextmanager
async def loopback(
    front: FrontEnd | None = None, *, unix_socket: Path | None = None
) -> AsyncIterator[Loopback]:
    """Serve over TCP, or over a Unix socket, and connect a client."""
    front = front or front_end()
    door = FakeDoor(front.limits.max_model_len)
    options = [
        ("grpc.max_receive_message_length", MAX_RECEIVED_BYTES),
        ("grpc.max_send_message_length", MAX_RECEIVED_BYTES),
        # The window stays at 64 KiB, so that a slow reader stops the server soon.
        ("grpc.http2.bdp_probe", 0),
    ]
    server = aio.server(options=options)
    add_public_services(server, door, front)
    if unix_socket is None:
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    else:
        address = f"unix:{unix_socket}"
        server.add_insecure_port(address)
    try:
        await server.start()
        async with aio.insecure_channel(address, options=options) as channel:
            yield Loopback(
                door,
                channel,
                InferenceStub(channel),
                ControlStub(channel),
                AdminStub(channel),
            )
    finally:
        await server.stop(None)
