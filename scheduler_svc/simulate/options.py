"""The command line of a replay."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from scheduler_svc.core.eviction import EVICTION_POLICIES
from scheduler_svc.core.victims import VICTIM_POLICIES
from scheduler_svc.simulate.beam_forks import BEAM_WIDTHS
from scheduler_svc.simulate.contiguous import RESERVATIONS
from scheduler_svc.simulate.workload import LENGTHS

_USAGE = 2
_SATURATE = "saturate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to replay, against what."""

    lengths: str | None
    trace: Path | None
    allocator: str
    block_size: int
    slots: int
    requests: int | None
    rate: float | None
    """Requests a second. None: the trace's own arrivals, or all at once."""
    saturate: bool
    n: int
    """Sequences of each prompt."""
    beam_width: int | None
    """Beams of each prompt. None: no beam search."""
    own_lengths: bool
    """Each of them has a drawn length, instead of that of the first."""
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    pipeline_depth: int
    enable_prefix_caching: bool
    preemption_victim: str
    eviction_policy: str
    chunk_tokens: int
    seed: int
    as_json: bool


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(_USAGE, f"pagemill simulate: {message}\n")


def read_options(argv: Sequence[str]) -> Options:
    """Return the options of a command line.

    Raises: SystemExit, with 0 after --help and 2 after a sentence on standard error.
    """
    parser = _make_parser()
    given = parser.parse_args(argv)
    flag = "--n" if given.beam_width is None else "--beam-width"
    width = given.beam_width or given.n
    if width > 1 and given.allocator != "paged":
        parser.error(f"{flag} is {width}, which --allocator {given.allocator} cannot do")
    if width > given.max_num_seqs:
        parser.error(f"{flag} is {width}, must be at most --max-num-seqs, {given.max_num_seqs}")
    if given.own_lengths and given.lengths is None:
        parser.error("--own-lengths draws lengths, so it needs --lengths")
    if given.block_size > given.slots:
        parser.error(f"--block-size is {given.block_size}, must be at most --slots, {given.slots}")
    rate = given.rate
    return Options(
        lengths=given.lengths,
        trace=given.trace,
        allocator=given.allocator,
        block_size=given.block_size,
        slots=given.slots,
        requests=given.requests,
        rate=None if rate == _SATURATE else rate,
        saturate=rate == _SATURATE,
        n=given.n,
        beam_width=given.beam_width,
        own_lengths=given.own_lengths,
        max_model_len=given.max_model_len,
        max_num_seqs=given.max_num_seqs,
        max_num_batched_tokens=given.max_num_batched_tokens,
        pipeline_depth=given.pipeline_depth,
        enable_prefix_caching=given.enable_prefix_caching,
        preemption_victim=given.preemption_victim,
        eviction_policy=given.eviction_policy,
        chunk_tokens=given.chunk_tokens,
        seed=given.seed,
        as_json=given.json,
    )


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="pagemill simulate",
        description="Replay a load against the scheduler's core in virtual time.",
        allow_abbrev=False,
    )
    _add_load(parser)
    _add_server(parser)
    parser.add_argument("--seed", type=int, default=0, help="Of all that is drawn. Default: 0.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    return parser


def _add_load(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--lengths", choices=sorted(LENGTHS), help="A named distribution.")
    source.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="JSON lines of arrival_s, input_length, output_length and, if wanted, hash_ids.",
    )
    add = parser.add_argument
    add(
        "--chunk-tokens",
        type=_positive,
        default=512,
        help="Prompt tokens that one of hash_ids stands for. Default: 512.",
    )
    add(
        "--requests",
        type=_positive,
        help="How many. Default: 1000, or all of the trace.",
    )
    add(
        "--rate",
        type=_rate,
        help="Arrivals a second, at random (Poisson), or saturate: all at once. Default: "
        "saturate, or the times of the trace.",
    )
    several = parser.add_mutually_exclusive_group()
    several.add_argument(
        "--n",
        type=_positive,
        default=1,
        help="Paged. Sequences of each prompt, all as long as the first. Default: 1.",
    )
    several.add_argument(
        "--beam-width",
        type=int,
        choices=BEAM_WIDTHS,
        help="Paged. Beams of each prompt, which fork as those of a measured search did.",
    )
    add("--own-lengths", action="store_true", help="Draw a length for each of the --n sequences.")


def _add_server(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--allocator",
        choices=["paged", *RESERVATIONS],
        default="paged",
        help="paged: the real core. Others reserve contiguous memory: the longest length, the "
        "output's rounded up to a power of two, or the exact one. Default: paged.",
    )
    add("--block-size", type=_positive, default=16, help="Tokens in a block. Default: 16.")
    add("--slots", type=_positive, default=15_700, help="Of the KV cache. Default: 15700.")
    add("--max-model-len", type=_positive, default=2048, help="Default: 2048.")
    add("--max-num-seqs", type=_positive, default=256, help="Rows. Default: 256.")
    add("--max-num-batched-tokens", type=_positive, default=2048, help="Paged. Default: 2048.")
    add("--pipeline-depth", type=int, choices=[1, 2], default=2, help="Paged. Default: 2.")
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    add(
        "--preemption-victim",
        choices=sorted(VICTIM_POLICIES),
        default="cheapest",
        help="Paged. Default: cheapest.",
    )
    add(
        "--eviction-policy",
        choices=sorted(EVICTION_POLICIES),
        default="lru",
        help="Paged. Which cached block goes first. Default: lru.",
    )


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) < 2**30:
        raise argparse.ArgumentTypeError(f"is {text!r}, must be an integer from 1 to 2^30 - 1")
    return int(text)


def _rate(text: str) -> float | str:
    if text == _SATURATE:
        return text
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0.0 < rate < float("inf"):
        raise argparse.ArgumentTypeError(f"is {text!r}, must be above 0, or saturate")
    return rate
