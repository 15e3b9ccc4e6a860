"""Pinning what the cache holds of a prefix, and letting go of it."""

from array import array

from scheduler_svc.core.block_hash import ExtraKeys
from scheduler_svc.core.errors import PrefixNotCachedError, RequestError, UnavailableError
from scheduler_svc.core.pins import Pin, PinEnd
from scheduler_svc.core.state import SchedulerState


def pin_prefix(
    state: SchedulerState, tokens: "array[int]", extra: ExtraKeys, expires_ns: int
) -> Pin:
    """Pin the leading whole blocks of `tokens` that are in the cache, in use or idle.

    Blocks that are cached later are not added: who wants all of a prefix pinned lets a request
    compute it first.

    Raises: UnavailableError without a pool; PrefixNotCachedError; PinQuotaError; RequestError
        if there is no cache. Nothing is changed then.
    """
    if state.pool is None:
        raise UnavailableError("no worker has joined yet")
    if not state.prefixes.enabled:
        raise RequestError("prefix caching is off: there is nothing to pin")
    blocks = state.prefixes.find_prefix(tokens, extra, state.pool)
    if not blocks:
        raise PrefixNotCachedError("the cache does not hold the first block of the prefix")
    return state.pool.pin(blocks, expires_ns)


def unpin(state: SchedulerState, number: int) -> bool:
    """Let go of a pin. False: there is no such pin."""
    return state.pool is not None and state.pool.end_pin(number, PinEnd.UNPINNED)
