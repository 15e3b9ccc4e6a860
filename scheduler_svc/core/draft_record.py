"""How a request's drafts have done, and when they rest because they do not pay."""

from dataclasses import dataclass
from typing import Final

TRIAL: Final = 8
"""Drafts after which it is judged whether they pay …"""

LEAST_ACCEPTED: Final = 4
"""… by the drafted tokens accepted in these. A draft makes its row wait for each result."""

FIRST_REST: Final = 32
"""Tokens that a request goes on without drafts if they did not pay; twice as many each time …"""

LONGEST_REST: Final = 1024
"""… up to so many."""


@dataclass(slots=True)
class DraftRecord:
    """How a request's drafts have done."""

    num_drafted: int = 0
    """Tokens drafted, in all."""

    num_accepted: int = 0
    """Of these, tokens that were what the model said."""

    num_tried: int = 0
    """Drafts of the trial."""

    accepted_in_trial: int = 0
    """Drafted tokens accepted in these."""

    rest: int = FIRST_REST
    """Tokens without drafts, when next they do not pay."""

    rests_until: int = 0
    """Tokens known at which drafting begins again."""

    def note(self, num_drafted: int, num_accepted: int, num_tokens: int) -> None:
        """Count a draft that was verified; the request knows `num_tokens` now."""
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self.num_tried += 1
        self.accepted_in_trial += num_accepted
        if self.num_tried == TRIAL:
            if self.accepted_in_trial < LEAST_ACCEPTED:
                self.rests_until = num_tokens + self.rest
                self.rest = min(2 * self.rest, LONGEST_REST)
            else:
                self.rest = FIRST_REST
            self.num_tried = self.accepted_in_trial = 0
