"""Measured beam searches, replayed: which beam each beam goes on from, whatever the tokens are.

The searches are those of the demo model over prompts of a chat, recorded by bench/beam_forks.py.
A replay answers with candidates that make the core's search choose just these parents.
"""

from importlib.resources import files

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.step_plan import Float32Array, Int32Array

Parents = npt.NDArray[np.uint8]

BEAM_WIDTHS = (2, 4, 6)
"""The widths that were recorded, and are in the paper."""

_DATA = "beam_parents.npz"

# Scores are multiples of this, so that their sums in float32 are exact up to 2^24 of them.
_UNIT = np.float32(2.0**-6)

_HOPELESS = np.float32(-1e6)
"""Log-probability of the one candidate of a beam that nothing continues."""


def read_parents(width: int) -> Parents:
    """Return the recorded searches of a width of `BEAM_WIDTHS`.

    Shape: [searches, steps, width]. At [s, t, b] the beam of step t - 1 that beam b of step t
    continues; the best beam is 0.
    """
    with (
        files("scheduler_svc.simulate").joinpath(_DATA).open("rb") as file,
        np.load(file) as arrays,
    ):
        parents: Parents = arrays[f"width_{width}"]
    return parents


def parents_at(parents: Parents, num_generated: int) -> Parents:
    """Return the parents of the beams of a step, from a search [steps, width].

    What is longer than the record goes through it again, but for the first step, in which all
    beams come from the prompt.
    """
    if num_generated < len(parents):
        row: Parents = parents[num_generated]
    else:
        row = parents[1 + (num_generated - 1) % (len(parents) - 1)]
    return row


def candidates(parents: Parents, beam: int, first_token: int) -> tuple[Int32Array, Float32Array]:
    """Return the tokens that one beam offers, and their log-probabilities, the likeliest first.

    With what the others offer, the search goes on with beam b from `parents[b]`, and with token
    `first_token + b`, by which its row is known as that beam's.

    Shape: parents [width].
    """
    children = np.flatnonzero(parents == beam)
    if not len(children):
        return np.array([first_token], dtype=np.int32), np.array([_HOPELESS])
    # Beam b has lost b units more than the best, each step the width more.
    lost = len(parents) + children - beam
    return (first_token + children).astype(np.int32), -_UNIT * lost.astype(np.float32)
