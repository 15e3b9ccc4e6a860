"""The client for programs without an event loop: the same calls, run on a thread of its own."""

from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from types import TracebackType
from typing import Self, Unpack

import grpc

from pagemill.client.arguments import ChatArguments, GenerateArguments
from pagemill.client.async_client import AsyncClient
from pagemill.client.channel import Keepalive
from pagemill.client.embedding import Embeddings, Pooling
from pagemill.client.events import Completion, Event
from pagemill.client.loop_thread import LoopThread
from pagemill.client.retry import RetryPolicy
from pagemill.client.server_facts import AbortResult, AdapterInfo, Load, ModelInfo, Pin, ServerInfo


class Client:
    """A connection to one server, for use from any thread.

        with Client("127.0.0.1:50051") as client:
            for event in client.generate(prompt="Once upon a time", max_tokens=32):
                ...

    Calls, arguments and errors are AsyncClient's. Leaving the loop over `generate` cancels
    the call. A program that runs asyncio itself uses AsyncClient: gRPC serves two loops in
    one process, but wakes both for each message.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout: float = 300.0,
        retry: RetryPolicy | None = None,
        keepalive: Keepalive | None = None,
        metadata: Mapping[str, str] | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """Start the thread and prepare a client; it connects with its first call.

        Args: AsyncClient's.
        """

        def connect() -> AsyncClient:
            return AsyncClient(
                address,
                timeout=timeout,
                retry=retry,
                keepalive=keepalive,
                metadata=metadata,
                credentials=credentials,
            )

        self._loop_thread = LoopThread(connect)
        self._client = self._loop_thread.client

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what runs, disconnect, and end the thread. Idempotent."""
        self._loop_thread.close()

    def generate(
        self, *, timeout: float | None = None, **arguments: Unpack[GenerateArguments]
    ) -> Generator[Event, None, None]:
        """Return the events of one generation, as they arrive."""
        events = self._client.generate(timeout=timeout, **arguments)

        def iterate() -> Generator[Event, None, None]:
            try:
                while (event := self._loop_thread.run(_next(events))) is not None:
                    yield event
            except GeneratorExit:
                if not self._loop_thread.closed:
                    self._loop_thread.run(events.aclose())
                raise

        return iterate()

    def complete(
        self, *, timeout: float | None = None, **arguments: Unpack[GenerateArguments]
    ) -> Completion:
        """Return a generation once it has ended."""
        return self._loop_thread.run(self._client.complete(timeout=timeout, **arguments))

    def tokenize(
        self,
        text: str | None = None,
        *,
        model: str = "",
        omit_special_tokens: bool = False,
        timeout: float | None = None,
        **chat: Unpack[ChatArguments],
    ) -> tuple[int, ...]:
        """Return the token ids of a text, or of `messages` under the chat template."""
        return self._loop_thread.run(
            self._client.tokenize(
                text,
                model=model,
                omit_special_tokens=omit_special_tokens,
                timeout=timeout,
                **chat,
            )
        )

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        keep_special_tokens: bool = False,
        timeout: float | None = None,
    ) -> str:
        """Return the text of token ids."""
        return self._loop_thread.run(
            self._client.detokenize(
                token_ids, model=model, keep_special_tokens=keep_special_tokens, timeout=timeout
            )
        )

    def embed(
        self,
        inputs: Sequence[str] | Sequence[Sequence[int]],
        *,
        pooling: Pooling = "last",
        normalize: bool = False,
        model: str = "",
        request_id: str = "",
        timeout: float | None = None,
    ) -> Embeddings:
        """Return one vector of hidden states for each text, or list of token ids."""
        return self._loop_thread.run(
            self._client.embed(
                inputs,
                pooling=pooling,
                normalize=normalize,
                model=model,
                request_id=request_id,
                timeout=timeout,
            )
        )

    def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        """Return how the server is set."""
        return self._loop_thread.run(self._client.server_info(timeout=timeout))

    def model_info(self, model: str = "", *, timeout: float | None = None) -> ModelInfo:
        """Return what a served model is; the default one for an empty name."""
        return self._loop_thread.run(self._client.model_info(model, timeout=timeout))

    def load(self, *, timeout: float | None = None) -> Load:
        """Return how busy the server is, and where its recent steps spent their time."""
        return self._loop_thread.run(self._client.load(timeout=timeout))

    def abort(
        self, request_ids: Sequence[str], *, tenant: str = "", timeout: float | None = None
    ) -> AbortResult:
        """End a tenant's live requests; their streams finish with reason ABORT."""
        return self._loop_thread.run(
            self._client.abort(request_ids, tenant=tenant, timeout=timeout)
        )

    def abort_all(self, *, tenant: str | None = "", timeout: float | None = None) -> AbortResult:
        """End every live request of a tenant; None: of all tenants."""
        return self._loop_thread.run(self._client.abort_all(tenant=tenant, timeout=timeout))

    def pin(
        self,
        token_ids: Sequence[int],
        time_to_live: float,
        *,
        salt: str = "",
        tenant: str = "",
        model: str = "",
        timeout: float | None = None,
    ) -> Pin:
        """Keep what is cached of a prefix for `time_to_live` seconds, however long it is idle."""
        return self._loop_thread.run(
            self._client.pin(
                token_ids, time_to_live, salt=salt, tenant=tenant, model=model, timeout=timeout
            )
        )

    def unpin(self, pin_id: str, *, timeout: float | None = None) -> None:
        """Let go of a pinned prefix."""
        self._loop_thread.run(self._client.unpin(pin_id, timeout=timeout))

    def load_adapter(self, name: str, path: str, *, timeout: float | None = None) -> int:
        """Load an adapter; return its generation."""
        return self._loop_thread.run(self._client.load_adapter(name, path, timeout=timeout))

    def unload_adapter(self, name: str, *, timeout: float | None = None) -> None:
        """Refuse an adapter to new requests, and return when none uses it any more."""
        self._loop_thread.run(self._client.unload_adapter(name, timeout=timeout))

    def adapters(self, *, timeout: float | None = None) -> tuple[AdapterInfo, ...]:
        """Return the adapters that requests can name, in order of name."""
        return self._loop_thread.run(self._client.adapters(timeout=timeout))

    def health(self, *, timeout: float | None = None) -> bool:
        """Tell whether the server can answer; it cannot while a worker loads, or draining."""
        return self._loop_thread.run(self._client.health(timeout=timeout))


async def _next(events: AsyncGenerator[Event, None]) -> Event | None:
    """Return the next event, or None behind the last."""
    return await anext(events, None)
