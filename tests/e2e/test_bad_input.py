"""Bad input gets a status and a sentence that names field and bound, and harms nobody else."""

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from e2e.serving import Served, serving
from pagemill.client import AsyncClient
from pagemill.v1 import generation_pb2, inference_pb2
from tiny_llama import write_tiny_llama

Request = inference_pb2.GenerateRequest
BeamSearch = generation_pb2.BeamSearch
Sampling = generation_pb2.Sampling
Stopping = generation_pb2.Stopping
GENERATE = "/pagemill.v1.Inference/Generate"
INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    tiny = write_tiny_llama(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048)
    with serving(str(tiny), "--num-gpu-blocks-override", "64") as running:
        yield running


def generate_raw(channel: grpc.aio.Channel) -> "grpc.aio.UnaryStreamMultiCallable[bytes, bytes]":
    """Return Generate without codecs: bytes out, bytes in."""
    return channel.unary_stream(GENERATE, response_deserializer=bytes)


def ids(*tokens: int) -> generation_pb2.TokenIds:
    return generation_pb2.TokenIds(ids=tokens)


def ask(**fields: Any) -> bytes:
    if not {"text", "token_ids", "chat"} & fields.keys():
        fields["token_ids"] = ids(1, 2, 3)
    return Request(**fields).SerializeToString()


CASES = [
    pytest.param(ask(token_ids=ids()), INVALID, "prompt|token_ids", id="no ids"),
    pytest.param(Request().SerializeToString(), INVALID, "prompt", id="no prompt"),
    pytest.param(ask(token_ids=ids(-1)), INVALID, "-1", id="negative id"),
    pytest.param(ask(token_ids=ids(272)), INVALID, "272", id="id beyond the vocabulary"),
    pytest.param(ask(token_ids=ids(*[1] * 2048)), INVALID, "2048", id="longer than the model"),
    pytest.param(ask(token_ids=ids(*[1] * 1500)), INVALID, "1024", id="longer than the pool"),
    pytest.param(
        ask(sampling=Sampling(temperature=-1)), INVALID, "temperature", id="negative temperature"
    ),
    pytest.param(
        ask(sampling=Sampling(temperature=float("nan"))), INVALID, "temperature", id="no number"
    ),
    pytest.param(ask(sampling=Sampling(top_p=0)), INVALID, "top_p", id="top_p"),
    pytest.param(ask(sampling=Sampling(top_k=-5)), INVALID, "top_k", id="top_k"),
    pytest.param(ask(sampling=Sampling(min_p=2)), INVALID, "min_p", id="min_p"),
    pytest.param(ask(stopping=Stopping(max_tokens=0)), INVALID, "max_tokens", id="max_tokens 0"),
    pytest.param(
        ask(stopping=Stopping(max_tokens=2046)), INVALID, "max_tokens", id="max_tokens too large"
    ),
    pytest.param(ask(stopping=Stopping(stop=[""])), INVALID, "stop", id="empty stop string"),
    pytest.param(
        ask(stopping=Stopping(stop_token_ids=[999_999])), INVALID, "stop_token_ids", id="stop id"
    ),
    pytest.param(ask(model="gpt-17"), grpc.StatusCode.NOT_FOUND, "gpt-17", id="unknown model"),
    pytest.param(ask(request_id="x" * 65536), INVALID, "request_id", id="long request id"),
    pytest.param(ask(text="word " * 2_000_000), INVALID, "2048", id="ten megabytes of text"),
    pytest.param(b"\x0a\x02\xff\xfe", INVALID, "request_id", id="bytes that are no UTF-8"),
    pytest.param(b"\xff\xff\xff", INVALID, "", id="bytes that are no message"),
    pytest.param(ask(sampling=Sampling(n=257)), INVALID, "sampling.n", id="n"),
    pytest.param(ask(beam=BeamSearch(width=257)), INVALID, "beam.width", id="beam width"),
    pytest.param(
        ask(token_ids=ids(*[1] * 600), sampling=Sampling(n=4), stopping=Stopping(max_tokens=400)),
        INVALID,
        "each of 4 sequences",
        id="sequences longer than the pool",
    ),
    pytest.param(
        ask(guide=generation_pb2.Guide(regex="a+")),
        grpc.StatusCode.UNIMPLEMENTED,
        "guide",
        id="not served yet",
    ),
]


@pytest.mark.parametrize(("message", "status", "named"), CASES)
async def test_bad_input_is_refused(
    served: Served, message: bytes, status: grpc.StatusCode, named: str
) -> None:
    options = [("grpc.max_send_message_length", 64 << 20)]
    async with (
        grpc.aio.insecure_channel(served.address, options=options) as channel,
        AsyncClient(served.address) as client,
    ):
        call = generate_raw(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in call(message, timeout=20):
                pass
        assert await client.health()
    assert refused.value.code() is status
    sentence = refused.value.details() or ""
    assert any(word in sentence for word in named.split("|")), sentence


async def test_a_message_over_the_limit_is_refused_by_the_transport(served: Served) -> None:
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(served.address, options=options) as channel:
        call = generate_raw(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in call(ask(text="x" * (65 << 20)), timeout=20):
                pass
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_others_are_served_meanwhile(served: Served) -> None:
    async with AsyncClient(served.address) as client:
        alone = await client.complete(
            prompt=[7, 8, 9], max_tokens=400, temperature=0.0, ignore_eos=True
        )

        async def refused() -> None:
            for parameters in CASES:
                message = parameters.values[0]
                assert isinstance(message, bytes)
                async with grpc.aio.insecure_channel(served.address) as channel:
                    call = generate_raw(channel)
                    with pytest.raises(grpc.aio.AioRpcError):
                        async for _ in call(message, timeout=20):
                            pass

        beside, _ = await asyncio.gather(
            client.complete(prompt=[7, 8, 9], max_tokens=400, temperature=0.0, ignore_eos=True),
            refused(),
        )
    assert beside.token_ids == alone.token_ids


async def test_a_live_request_id_is_taken(served: Served) -> None:
    async with AsyncClient(served.address) as client:
        first = client.generate(
            prompt=[5], max_tokens=300, temperature=0.0, ignore_eos=True, request_id="id-1"
        )
        received = 0
        async for event in first:
            if received == 0:
                with pytest.raises(Exception, match="id-1"):
                    await client.complete(prompt=[6], max_tokens=2, request_id="id-1")
            received += len(getattr(event, "token_ids", ()))
        assert received == 300
        again = await client.complete(
            prompt=[6], max_tokens=2, temperature=0.0, ignore_eos=True, request_id="id-1"
        )
    assert len(again.token_ids) == 2
