"""Beam search over one prompt: which hypotheses go on, which are finished, and when it is over.

The search knows no rows, blocks or requests: candidates in, continuations out. It decides as
`transformers` 5 does with `num_beams`, in the same float32 arithmetic and in the same order; of
equals the lower place wins, where torch leaves it open.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.beam_options import BeamOptions, EarlyStopping
from scheduler_svc.core.request import FinishReason, Hypothesis, Stopping
from scheduler_svc.core.step_plan import Float32Array, Int32Array

_NEVER = np.float32(-1e9)
"""Added to what must not be chosen; a sum of log-probabilities this low does not occur."""


_NO_SCORE = np.float32(-np.inf)
"""Of a place that nothing has taken. A finished hypothesis is better, whatever its score."""


class Continuation(NamedTuple):
    """A hypothesis that goes on."""

    parent: int
    """Which of those that ran before it continues."""

    token: int


class _Running(NamedTuple):
    output: "_Output | None"
    score: np.float32
    """Sum of its log-probabilities."""


class _Output(NamedTuple):
    """Generated ids as a chain, since hypotheses share their beginnings."""

    before: "_Output | None"
    token: int


class _Finished(NamedTuple):
    score: np.float32
    hypothesis: Hypothesis | None
    """None in a place that nothing has taken yet."""


class BeamSearch:
    """The hypotheses of one request. Call `advance` until `done`.

    Shapes: W beams.
    """

    __slots__ = ("_early", "_finished", "_improvable", "_num_generated", "_options", "_running",
                 "_stop_ids", "_stopping", "done", "max_output")  # fmt: skip

    def __init__(self, options: BeamOptions, stopping: Stopping, max_output: int) -> None:
        self._options = options
        self._stopping = stopping
        self._stop_ids = np.array(
            sorted(stopping.eos_token_ids | stopping.stop_token_ids), dtype=np.int32
        )
        # All begin as the prompt. Only the first counts, or all would choose the same tokens.
        scores = [np.float32(0), *[_NEVER] * (options.width - 1)]
        self._running = [_Running(None, score) for score in scores]
        self._finished = [_Finished(_NO_SCORE, None)] * options.width
        self._improvable = True
        self._num_generated = 0
        self.max_output = max_output
        """Tokens at which every hypothesis ends."""
        self.done = False

    @property
    def num_candidates(self) -> int:
        """Likeliest tokens to give of each beam: enough that, stopping ones aside, W go on."""
        return num_candidates(self._options, self._stopping)

    def advance(self, candidates: Sequence[tuple[Int32Array, Float32Array]]) -> list[Continuation]:
        """Choose among the likeliest tokens of each beam; return those that go on, W or none.

        Candidates are ids and log-probabilities, of the prompt first, then of each continuation
        that the call before returned, in its order. At least one each.
        """
        is_first = self._num_generated == 0
        if is_first:
            candidates = list(candidates) * self._options.width
        parents, tokens, scores = self._best(candidates)
        if is_first:
            parents[:] = 0
        stops = self._stops(tokens)
        self._num_generated += 1
        self._finish(parents, tokens, scores, stops)
        before = self._running
        lowered = scores + stops.astype(np.float32) * _NEVER
        chosen = _top(lowered, self._options.width)
        going = [Continuation(int(parents[place]), int(tokens[place])) for place in chosen.tolist()]
        self._running = [
            _Running(_Output(before[parent].output, token), score)
            for (parent, token), score in zip(going, lowered[chosen], strict=True)
        ]
        self.done = self._is_over(bool(stops.all()))
        return [] if self.done else going

    def best(self) -> list[Hypothesis]:
        """Return the finished hypotheses that were asked for, the best first."""
        found = [each.hypothesis for each in self._finished if each.hypothesis is not None]
        return found[: self._options.num_returned]

    def _best(
        self, candidates: Sequence[tuple[Int32Array, Float32Array]]
    ) -> tuple[npt.NDArray[np.intp], Int32Array, Float32Array]:
        """Return parent, token and summed log-probability of the best of all, the best first."""
        counts = [len(ids) for ids, _ in candidates]
        parents = np.repeat(np.arange(len(candidates)), counts)
        tokens = np.concatenate([ids for ids, _ in candidates])
        scores = np.concatenate(
            [
                logprobs + running.score
                for (_, logprobs), running in zip(candidates, self._running, strict=True)
            ]
        )
        order = np.lexsort((tokens, parents, -scores))[: self.num_candidates]
        return parents[order], tokens[order], scores[order]

    def _stops(self, tokens: Int32Array) -> npt.NDArray[np.bool_]:
        if self._num_generated + 1 >= self.max_output:
            return np.ones(len(tokens), dtype=np.bool_)
        if self._num_generated + 1 < self._stopping.min_output_tokens:
            return np.zeros(len(tokens), dtype=np.bool_)
        return np.isin(tokens, self._stop_ids)

    def _finish(
        self,
        parents: npt.NDArray[np.intp],
        tokens: Int32Array,
        scores: Float32Array,
        stops: npt.NDArray[np.bool_],
    ) -> None:
        """Keep the W best of those that were finished and those that finish now.

        Only the W best candidates may finish; those behind them are spare ones to go on with.
        """
        width = self._options.width
        finishes = stops & (np.arange(len(stops)) < width)
        if self._is_full and self._options.early_stopping is EarlyStopping.YES:
            return
        if not self._improvable or not finishes.any():
            return
        penalized = self._score(scores, self._num_generated)
        found = list(self._finished)
        for place in np.flatnonzero(finishes).tolist():
            hypothesis = self._hypothesis(
                self._running[int(parents[place])].output,
                int(tokens[place]),
                float(scores[place]),
                float(penalized[place]),
            )
            found.append(_Finished(penalized[place], hypothesis))
        kept = _top(np.array([each.score for each in found], dtype=np.float32), width)
        self._finished = [found[place] for place in kept.tolist()]

    def _hypothesis(
        self, before: "_Output | None", token: int, logprob: float, score: float
    ) -> Hypothesis:
        stopped = len(np.intersect1d(self._stop_ids, [token])) > 0
        stopped = stopped and self._num_generated >= self._stopping.min_output_tokens
        tokens = [token]
        while before is not None:
            tokens.append(before.token)
            before = before.before
        return Hypothesis(
            tokens=tuple(reversed(tokens)),
            cumulative_logprob=logprob,
            score=score,
            reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            stop_token_id=token if stopped and token not in self._stopping.eos_token_ids else None,
        )

    def _is_over(self, all_stop: bool) -> bool:  # noqa: FBT001 - a claim is a boolean
        early, penalty = self._options.early_stopping, self._options.length_penalty
        longest = early is EarlyStopping.NEVER and penalty > 0
        best = self._running[0].score
        length = self.max_output if longest else self._num_generated
        [possible] = self._score(np.array([best]), length)
        worst = min(each.score for each in self._finished)
        # A place that nothing has taken is improved on by whatever may go on.
        self._improvable &= bool(possible > worst if self._is_full else best > _NEVER)
        full_is_enough = self._is_full and early is EarlyStopping.YES
        return not self._improvable or full_is_enough or all_stop

    @property
    def _is_full(self) -> bool:
        return all(each.hypothesis is not None for each in self._finished)

    def _score(self, logprobs: Float32Array, length: int) -> Float32Array:
        """Return sums of log-probabilities over the penalized length: finite, whatever it is."""
        limits = np.finfo(np.float32)
        with np.errstate(over="ignore", under="ignore"):
            norm = np.float32(np.float64(length) ** self._options.length_penalty)
            scores: Float32Array = logprobs / max(norm, limits.smallest_normal)
            return np.maximum(scores, limits.min)


def num_candidates(options: BeamOptions, stopping: Stopping) -> int:
    """Return how many of the likeliest tokens a search wants of each beam."""
    num_stop_ids = len(stopping.eos_token_ids | stopping.stop_token_ids)
    return max(2, 1 + num_stop_ids) * options.width


def _top(values: Float32Array, count: int) -> npt.NDArray[np.intp]:
    """Return the places of the greatest values, the greatest first; of equals the first."""
    return np.argsort(-values, kind="stable")[:count]
