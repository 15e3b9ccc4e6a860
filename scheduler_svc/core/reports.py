"""What a request wants to know beside its tokens, or in place of them."""

from dataclasses import dataclass
from enum import IntEnum, IntFlag

from scheduler_svc.core.told import PromptTable


class Pooling(IntEnum):
    """Which hidden states make a pooled vector; numbered as in the protocol."""

    LAST = 1
    """The last token's."""

    MEAN = 2
    """The mean over all tokens."""


class Asks(IntFlag):
    """What a row is asked for beside its tokens: bits of `Rows.asks`."""

    LOGPROBS = 1
    PROMPT = 2
    VECTOR = 4


@dataclass(frozen=True, slots=True)
class Reports:
    """What a request wants to know beside its tokens, or in place of them."""

    logprobs: int | None = None
    """Likeliest tokens at each output position, beside the drawn one. 0: that alone."""

    prompt_logprobs: int | None = None
    """The same at each prompt position. Each must then be computed: no cache is read."""

    pooling: Pooling | None = None
    """A vector is wanted; nothing is drawn."""

    def asks(self, table: PromptTable | None) -> int:
        """Return the bits of `Asks` for a row, of whose prompt so much has been told."""
        asks, prompt_is_told = 0, table is not None and table.is_complete
        if self.logprobs is not None:
            asks |= Asks.LOGPROBS
        if self.prompt_logprobs is not None and not prompt_is_told:
            asks |= Asks.PROMPT
        if self.pooling is not None:
            asks |= Asks.VECTOR
        return asks
