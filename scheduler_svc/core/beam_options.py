"""What a request says of its beams."""

from dataclasses import dataclass
from enum import Enum


class EarlyStopping(Enum):
    """When a beam search with as many finished hypotheses as beams ends, as in `transformers`."""

    NO = "false"
    """When the best running hypothesis, at its present length, is worse than the worst finished."""

    YES = "true"
    """At once."""

    NEVER = "never"
    """When no running hypothesis can become better, whatever its length."""


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """A beam search: the likeliest outputs are looked for, instead of drawn."""

    width: int
    """Hypotheses that run at once. At least 1."""

    length_penalty: float = 1.0
    """The score is the log-probability over the generated length to this power."""

    early_stopping: EarlyStopping = EarlyStopping.NO

    num_returned: int = 1
    """Best hypotheses to return, 1 to `width`."""
