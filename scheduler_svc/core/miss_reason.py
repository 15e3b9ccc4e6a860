"""Why a prefix was not in the cache."""

from enum import Enum


class MissReason(Enum):
    """Why the prefix hit of a request, at its first admission, went no further."""

    UNSEEN = "unseen"
    """Its next block has no name here: never seen, under this salt, or too long ago."""

    EVICTED = "evicted"
    """Its next block was evicted lately."""

    LAST_TOKEN = "last_token"  # noqa: S105 - no password
    """All is cached, but the last block runs, since only a run gives logits."""

    TAIL = "tail"
    """What is left fills no block."""

    NOT_READ = "not_read"
    """The request reads no cache."""

    DISABLED = "disabled"
    """Prefix caching is off."""
