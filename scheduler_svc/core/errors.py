"""Why a request is refused, and what counts as our own bug.

RequestError               the caller's fault, or a limit the caller met
 ├ InvalidRequestError     a field is out of its bound
 │  └ NeverFitsError       no pool of this server could ever hold it
 ├ DuplicateRequestError   a live request of the tenant has this id
 ├ QueueFullError          too many requests wait
 ├ UnknownModelError       no such model is served
 ├ UnknownAdapterError     no adapter of this name is loaded
 ├ AdapterSlotsError       more adapters would be loaded than may be
 ├ AdapterLoadError        a worker cannot load an adapter
 ├ PinQuotaError        more blocks would be pinned than may be
 ├ PrefixNotCachedError nothing of a prefix to pin is in the cache
 ├ UnknownPinError      no such pin
 ├ NotServedError          a field of the protocol that this version does not serve
 ├ UnavailableError        no worker, or draining
 ├ SlowReaderError         the caller reads more slowly than its tokens come
 ├ NotComputedError        the worker could not compute it
 ├ AbortedError            somebody ended it
 └ DeadlineError           the caller's deadline passed
    └ HopelessDeadlineError  it would pass before the request could start
InvariantError             ours: never caught, the process ends
"""


class RequestError(Exception):
    """A request cannot be served. The message is a sentence for the caller."""


class InvalidRequestError(RequestError):
    """A field is out of its bound; the message names field, value and bound."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class NeverFitsError(InvalidRequestError):
    """The request needs more KV memory than the whole pool has."""


class DuplicateRequestError(RequestError):
    """A live request of the tenant has the same id."""


class _RetryableError(RequestError):
    """The same request may succeed later."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFullError(_RetryableError):
    """The waiting queue is at its limit."""


class UnavailableError(_RetryableError):
    """No worker is ready, or the server drains."""


class UnknownModelError(RequestError):
    """No model of this name is served."""


class UnknownAdapterError(RequestError):
    """No adapter of this name is loaded; the message lists what is."""


class AdapterSlotsError(RequestError):
    """As many adapters are loaded, or still in use, as may be."""


class AdapterLoadError(RequestError):
    """A worker could not load the adapter; the message says why."""


class PinQuotaError(RequestError):
    """More blocks would be pinned than may be, or as many pins are there as may be."""


class PrefixNotCachedError(RequestError):
    """Nothing of the prefix to pin is in the cache."""


class UnknownPinError(RequestError):
    """No pin has this id: it never was, or has ended."""


class NotServedError(RequestError):
    """A field of the protocol that this server does not serve yet."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class NotComputedError(RequestError):
    """The worker could not compute what was asked for; the message says why."""


class AbortedError(RequestError):
    """Somebody ended the request before its answer was there."""


class SlowReaderError(RequestError):
    """More output piled up than the stream's bound."""


class DeadlineError(RequestError):
    """The caller's deadline passed."""


class HopelessDeadlineError(DeadlineError):
    """The request cannot start before its deadline; the message has the numbers."""


class InvariantError(AssertionError):
    """The scheduler contradicts itself. Never caught."""
