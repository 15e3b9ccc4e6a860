"""The Python client: AsyncClient, Client, the events they yield and the errors they raise."""

from pagemill.client.arguments import ChatArguments, GenerateArguments
from pagemill.client.async_client import AsyncClient
from pagemill.client.channel import Keepalive
from pagemill.client.embedding import Embeddings
from pagemill.client.errors import (
    AlreadyExistsError,
    CallCancelledError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    PagemillError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
)
from pagemill.client.events import (
    Accepted,
    Completion,
    Delta,
    Event,
    Finished,
    FinishReason,
    Output,
    Summary,
    Timing,
    TokenLogprob,
    Usage,
)
from pagemill.client.retry import RetryPolicy
from pagemill.client.server_facts import (
    AbortResult,
    Load,
    ModelInfo,
    Pin,
    ServerInfo,
    StepTimes,
    Totals,
    WorkerGroupInfo,
    WorkerInfo,
)
from pagemill.client.sync_client import Client

__all__ = [
    "AbortResult",
    "Accepted",
    "AlreadyExistsError",
    "AsyncClient",
    "CallCancelledError",
    "ChatArguments",
    "Client",
    "Completion",
    "DeadlineExceededError",
    "Delta",
    "Embeddings",
    "Event",
    "FinishReason",
    "Finished",
    "GenerateArguments",
    "InternalError",
    "InvalidArgumentError",
    "Keepalive",
    "Load",
    "ModelInfo",
    "NotFoundError",
    "Output",
    "PagemillError",
    "PermissionDeniedError",
    "Pin",
    "ResourceExhaustedError",
    "RetryPolicy",
    "ServerInfo",
    "StepTimes",
    "Summary",
    "Timing",
    "TokenLogprob",
    "Totals",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "Usage",
    "WorkerGroupInfo",
    "WorkerInfo",
]
