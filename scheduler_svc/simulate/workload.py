"""What arrives: a trace from a file, or lengths drawn from a named distribution."""

import json
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from scheduler_svc.simulate.beam_forks import Parents

# Ids from here on stand for tokens of one request alone; hash ids of traces lie below.
FIRST_OWN_ID = 2**30


class TraceError(Exception):
    """A trace cannot be read. The message names file, line and reason."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a load."""

    arrival_s: float
    """Seconds since the load began."""

    input_length: int
    """Tokens of the prompt, at least 1."""

    output_length: int
    """Tokens until the model ends, at least 1. The core does not know it."""

    hash_ids: tuple[int, ...] = ()
    """Contents of the prompt's chunks; equal ids are equal tokens. None: shared with nobody."""

    sibling_lengths: tuple[int, ...] = ()
    """Output lengths of further sequences of the same prompt, each at least 1."""

    beams: Parents | None = None
    """[steps, width] The beam search that its output is found by, if it is."""


@dataclass(frozen=True, slots=True)
class _LogNormal:
    mu: float
    sigma: float
    shortest: int
    longest: int

    def draw(self, chance: random.Random) -> int:
        length = round(chance.lognormvariate(self.mu, self.sigma))
        return min(max(length, self.shortest), self.longest)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Prompt and output lengths, drawn independently.

    Source: arXiv:2309.06180, Figure 11: means of 161.31 and 337.99 (ShareGPT), 19.31 and 58.45
    (Alpaca). The log-normals are fitted to these.
    """

    inputs: _LogNormal
    outputs: _LogNormal

    def draw(self, count: int, seed: int) -> list[Arrival]:
        """Return `count` requests that are there from the start."""
        chance = random.Random(seed)  # noqa: S311 reproducible, not secret
        return [
            Arrival(0.0, self.inputs.draw(chance), self.outputs.draw(chance)) for _ in range(count)
        ]

    def draw_siblings(
        self, load: Sequence[Arrival], num_sequences: int, seed: int
    ) -> list[Arrival]:
        """Return the load with so many sequences of each prompt, each of a length of its own."""
        # Another stream, so that more sequences leave the first ones as they are.
        chance = random.Random(f"siblings {seed}")  # noqa: S311 reproducible, not secret
        further = range(num_sequences - 1)
        return [
            replace(each, sibling_lengths=tuple(self.outputs.draw(chance) for _ in further))
            for each in load
        ]


LENGTHS = {
    "sharegpt": Lengths(_LogNormal(4.570, 1.064, 4, 1024), _LogNormal(5.551, 0.833, 4, 1024)),
    "alpaca": Lengths(_LogNormal(2.834, 0.555, 4, 512), _LogNormal(3.713, 0.862, 4, 512)),
}


def poisson(load: Sequence[Arrival], rate: float, seed: int) -> list[Arrival]:
    """Return the load with arrivals at random, `rate` a second on the mean."""
    # Another stream than that of the lengths, so that a rate does not change these.
    chance = random.Random(f"arrivals {seed}")  # noqa: S311 reproducible, not secret
    now_s, spread = 0.0, []
    for arrival in load:
        now_s += chance.expovariate(rate)
        spread.append(replace(arrival, arrival_s=now_s))
    return spread


def at_once(load: Sequence[Arrival]) -> list[Arrival]:
    """Return the load with every request there from the start."""
    return [replace(arrival, arrival_s=0.0) for arrival in load]


def repeated(load: Sequence[Arrival], num_sequences: int) -> list[Arrival]:
    """Return the load with so many sequences of each prompt, all as long as the first."""
    further = num_sequences - 1
    return [replace(each, sibling_lengths=(each.output_length,) * further) for each in load]


def searched(load: Sequence[Arrival], searches: Parents, seed: int) -> list[Arrival]:
    """Return the load with each output found as one of these beam searches was, at random.

    Shape: searches [searches, steps, width].
    """
    chance = random.Random(f"beams {seed}")  # noqa: S311 reproducible, not secret
    return [replace(each, beams=searches[chance.randrange(len(searches))]) for each in load]


def read_trace(path: Path, chunk_tokens: int) -> list[Arrival]:
    """Return a trace in order of arrival: a JSON object a line, fields as in `Arrival`.

    Raises: TraceError, naming the line.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            load = [*_read_lines(path, lines, chunk_tokens)]
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"trace is {path}, which cannot be read: {error}") from error
    if not load:
        raise TraceError(f"trace is {path}, which has no request")
    return sorted(load, key=lambda arrival: arrival.arrival_s)


def _read_lines(path: Path, lines: Iterator[str], chunk_tokens: int) -> Iterator[Arrival]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield _read_arrival(json.loads(line), chunk_tokens)
        except KeyError as error:
            raise TraceError(f"{path}, line {number}: {error} is missing") from error
        except (TypeError, ValueError) as error:
            raise TraceError(f"{path}, line {number}: {error}") from error


def _read_arrival(line: object, chunk_tokens: int) -> Arrival:
    if not isinstance(line, dict):
        raise TypeError("must be a JSON object")
    hash_ids = tuple(_integer(value, "hash_ids", 0) for value in line.get("hash_ids") or ())
    arrival = Arrival(
        arrival_s=float(line["arrival_s"]),
        input_length=_integer(line["input_length"], "input_length", 1),
        output_length=_integer(line["output_length"], "output_length", 1),
        hash_ids=hash_ids,
    )
    if not 0.0 <= arrival.arrival_s < float("inf"):
        raise ValueError(f"arrival_s is {arrival.arrival_s}, must be finite and at least 0")
    if hash_ids and len(hash_ids) * chunk_tokens < arrival.input_length:
        raise ValueError(
            f"hash_ids has {len(hash_ids)} chunks of {chunk_tokens} tokens, fewer than "
            f"input_length, {arrival.input_length}"
        )
    return arrival


def _integer(value: object, name: str, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < FIRST_OWN_ID:
        raise ValueError(f"{name} is {value!r}, must be an integer from {least} to 2^30 - 1")
    return value


def prompt_ids(arrival: Arrival, number: int, chunk_tokens: int) -> "array[int]":
    """Return token ids that are equal where chunks are, and otherwise are this request's own.

    Every token of a chunk has the chunk's hash id. Names of blocks are chained, so two prompts
    hit as far as their chunks are equal from the start.
    """
    if not arrival.hash_ids:
        return array("i", [FIRST_OWN_ID + number]) * arrival.input_length
    ids = np.repeat(np.array(arrival.hash_ids, dtype=np.int32), chunk_tokens)
    return array("i", ids[: arrival.input_length].tobytes())
