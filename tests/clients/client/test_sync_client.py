"""The client without an event loop: the same calls from any thread, and nothing left behind."""

import concurrent.futures
import threading
from collections.abc import Iterator

import grpc
import pytest

from pagemill.client import (
    CallCancelledError,
    Client,
    Delta,
    InvalidArgumentError,
    Summary,
)
from scripted_server import ScriptedServer, fails, forever, silent


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with Client(address, timeout=30) as client:
        yield client


def test_events_come_one_by_one(client: Client) -> None:
    events = list(client.generate(prompt="Hi"))
    assert [event.text for event in events if isinstance(event, Delta)] == ["Hel", "lo"]
    assert isinstance(events[-1], Summary)


def test_every_call_has_its_twin(client: Client) -> None:
    assert client.complete(prompt="Hi").text == "Hello"
    assert client.tokenize("Hi") == (72, 105)
    assert client.detokenize([72, 105]) == "Hi"
    assert client.server_info().model_names == ("demo",)
    assert client.model_info().vocab_size == 272
    assert client.load().running == 1
    assert client.abort(["r1"]).aborted == ("r1",)
    assert client.abort_all().aborted == ()
    assert client.pin([7] * 16, 1.0).num_blocks == 1
    client.unpin("p1")
    assert client.health()


def test_errors_are_the_async_clients(client: Client, script: ScriptedServer) -> None:
    script.plays = [fails(grpc.StatusCode.INVALID_ARGUMENT, "top_p is 2")]
    with pytest.raises(InvalidArgumentError, match="top_p is 2"):
        client.complete(prompt="Hi")
    with pytest.raises(InvalidArgumentError, match="exactly one"):
        client.generate()
    with pytest.raises(ValueError, match="address is"):
        Client("nonsense")


def test_many_threads_share_a_client(client: Client) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda _: client.complete(prompt="Hi").text, range(32)))
    assert texts == ["Hello"] * 32


def test_leaving_the_loop_cancels_the_call(client: Client, script: ScriptedServer) -> None:
    script.plays = [forever]
    for event in client.generate(prompt="Hi", request_id="left"):
        if isinstance(event, Delta):
            break
    assert script.cancellation.wait(10)
    assert script.cancelled == ["left"]


def test_closing_ends_calls_and_the_thread(address: str, script: ScriptedServer) -> None:
    script.plays = [silent]
    client = Client(address)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        call = pool.submit(client.complete, prompt="Hi")
        assert script.request_came.wait(10)
        client.close()
        with pytest.raises(CallCancelledError):
            call.result(10)
    assert "pagemill-client" not in [thread.name for thread in threading.enumerate()]


def test_a_closed_client_says_so(address: str) -> None:
    client = Client(address)
    events = client.generate(prompt="Hi")
    next(events)
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.health()
    events.close()
