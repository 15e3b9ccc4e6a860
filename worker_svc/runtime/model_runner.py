"""One step: a plan in, sampled tokens out."""

from time import perf_counter_ns
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from worker_svc.errors import InvariantError
from worker_svc.model.adapters import AdapterBank
from worker_svc.model.causal_model import CausalModel
from worker_svc.model.operations import States
from worker_svc.model.other_ranks import NoOtherRanks, OtherRanks
from worker_svc.runtime import sampler
from worker_svc.runtime.block_tables import BlockTables
from worker_svc.runtime.candidates import find_candidates
from worker_svc.runtime.drafts import verify_drafts, with_verified
from worker_svc.runtime.embedded_spans import EmbeddedSpans
from worker_svc.runtime.kv_cache import KVCache
from worker_svc.runtime.logit_rules import apply_rules
from worker_svc.runtime.logprobs import find_prompt_logprobs, sampled_logprobs
from worker_svc.runtime.memory_budget import blocks_for
from worker_svc.runtime.native_inputs import input_builder
from worker_svc.runtime.pooling import Pooler
from worker_svc.runtime.rows import Rows
from worker_svc.runtime.sampler import Sampler
from worker_svc.runtime.step_inputs import StepInputs
from worker_svc.runtime.step_plan import (
    Candidates,
    Int32Array,
    Int64Array,
    StepPlan,
    StepResult,
    StepTiming,
    TokenLogprobs,
    no_int32,
)

_NOT_FINITE = "the model's logits are not finite"
_ALL_BANNED = "no token may be drawn: the request's own rules leave none"

_FAILED = np.int32(-1)
"""What ranks are told in place of a token."""


class Sampled(NamedTuple):
    """What rows sampled; the columns are those of StepResult."""

    rows: Int32Array
    tokens: Int32Array
    num_tokens: Int32Array
    candidates: Candidates | None
    logprobs: TokenLogprobs | None


class ModelRunner:
    """Runs step plans, in order, on a model and its cache.

    What the plans said is kept in rows; a token that a row samples is appended to it here, so
    the scheduler need not send it back.

    Of several ranks all run every plan, on their parts of the model. Rank 0 alone samples; the
    others append the tokens it shares, and have no results.
    """

    __slots__ = (
        "_adapters",
        "_build_inputs",
        "_last_step_id",
        "_model",
        "_pooler",
        "_ranks",
        "kv_cache",
        "rows",
        "sampler",
    )

    def __init__(
        self,
        model: CausalModel,
        kv_cache: KVCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        ranks: OtherRanks | None = None,
        adapters: AdapterBank | None = None,
    ) -> None:
        """Run rows with adapters of the bank that the model was loaded with, if it was."""
        tables = tuple(
            BlockTables(
                max_num_seqs,
                blocks_for(max_model_len, kv_cache.block_size),
                kv_cache.block_size,
                last_block=kv_cache.num_blocks,
                windowed=group.window is not None,
            )
            for group in model.config.kv_groups
        )
        self.kv_cache = kv_cache
        embedded = EmbeddedSpans(model.config.hidden_size, model.dtype, model.device)
        vocab_size = model.config.vocab_size
        self.rows = Rows(max_num_seqs, max_model_len, tables, vocab_size, embedded)
        self._build_inputs = input_builder(self.rows, model.device)
        self._model = model
        self._adapters = adapters
        self._pooler = Pooler()
        self._ranks = ranks or NoOtherRanks()
        self.sampler: Sampler = sampler
        self._last_step_id = -1

    def run(self, plan: StepPlan) -> StepResult:
        """Run one step. A row that fails is named in the result; the others are unharmed.

        Raises: InvariantError if a step is missing between this plan and the last, or the plan
            does not fit the rows. The runner must not be used after that.
        """
        started = perf_counter_ns()
        if plan.step_id != self._last_step_id + 1 and not plan.reset:
            raise InvariantError(
                f"step {plan.step_id} follows step {self._last_step_id} without a reset"
            )
        self._last_step_id = plan.step_id
        self.rows.apply(plan)
        self.fail_without_adapter(plan)
        self.kv_cache.copy_blocks(plan.copies)
        return self.run_rows(plan.step_id, self.rows.running(), started)

    def run_rows(self, step_id: int, running: Int64Array, started: int) -> StepResult:
        """Run rows that have applied a plan, and whose tokens are all known here.

        `started`: when the step began, in nanoseconds. Shape: running [R], ascending.
        """
        if not len(running):
            now = perf_counter_ns()
            return StepResult(
                step_id,
                no_int32(),
                no_int32(),
                _timing(started, now, now, now),
                self.rows.failed(),
            )
        inputs = self._build_inputs(running)
        if self._adapters is not None:
            self._adapters.begin(self.rows.adapter[running], self.rows.num_new_tokens[running])
        prepared = perf_counter_ns()
        hidden, logits = self._compute(inputs)
        prompts = find_prompt_logprobs(
            self._model.narrow_logits, hidden, self.rows, running, self._ranks
        )
        vectors = self._pooler.pool(hidden, self.rows, running)
        if logits is None:
            logits = self._model.logits(hidden[inputs.last_tokens])
        computed = perf_counter_ns()
        verified = verify_drafts(
            self._model.logits, self._draw, hidden, self.rows, running, _NOT_FINITE
        )
        sampled = self._sample(logits, inputs.sampling_rows)
        result = StepResult(
            step_id=step_id,
            rows=sampled.rows,
            tokens=sampled.tokens,
            timing=_timing(started, prepared, computed, perf_counter_ns()),
            row_errors=self.rows.failed(),
            num_tokens=sampled.num_tokens,
            candidates=sampled.candidates,
            token_logprobs=sampled.logprobs,
            prompt_logprobs=prompts,
            vectors=vectors,
        )
        return result if verified is None else with_verified(result, verified)

    def fail_without_adapter(self, plan: StepPlan) -> None:
        """Fail admitted rows whose adapter is not here."""
        for entry in plan.admitted:
            if entry.adapter and not (self._adapters and self._adapters.has(entry.adapter)):
                self.rows.failures[entry.row] = f"adapter {entry.adapter} is not loaded here"

    def _compute(self, inputs: StepInputs) -> States:
        """Run all tokens through the model."""
        return self._model.forward(
            inputs.token_ids,
            inputs.positions,
            self.kv_cache.layers,
            inputs.slot_mappings,
            inputs.block_tables,
            inputs.seq_lens,
            inputs.query_start_loc,
            inputs.embedded,
            inputs.read_tokens,
        )

    def _sample(self, logits: torch.Tensor, rows: Int64Array) -> Sampled:
        """Sample for each row, and append to it the token that it keeps.

        What is told of a token is told of the raw logits; rules change what it is drawn from.
        """
        if self.rows.failures:
            # A position of the prompt was no number, so the row is not asked for a token.
            kept = ~np.isin(rows, list(self.rows.failures))
            rows = rows[kept]
            if self._ranks.shard.leads:
                logits = _kept(logits, kept)
        if not len(rows):
            return Sampled(no_int32(), no_int32(), no_int32(), None, None)
        params, positions = self.rows.sampling, self.rows.num_tokens[rows]
        scores, raw_failed = self._ruled(logits, rows)
        tokens, failed = self._draw(scores, rows, positions, raw_failed)
        if failed.any():
            self._note_failed(scores, rows, failed)
            kept = ~failed
            if self._ranks.shard.leads:
                logits, scores = _kept(logits, kept), _kept(scores, kept)
            rows, tokens, positions = rows[kept], tokens[kept], positions[kept]
        self.rows.append_tokens(rows, tokens)
        if not self._ranks.shard.leads:
            params.num_samples[rows] = 1
            return Sampled(no_int32(), no_int32(), no_int32(), None, None)
        num_tokens, candidates, logprobs = no_int32(), None, None
        if params.asking:
            if (params.num_samples[rows] > 1).any():
                tokens, num_tokens = self.sampler.sample_several(
                    scores, tokens, rows, positions, params
                )
                params.num_samples[rows] = 1
            if params.num_candidates[rows].any():
                candidates = find_candidates(logits, params.num_candidates[rows])
            logprobs = sampled_logprobs(logits, tokens, num_tokens, params.logprobs[rows])
        return Sampled(rows.astype(np.int32), tokens, num_tokens, candidates, logprobs)

    def _draw(
        self,
        scores: torch.Tensor,
        rows: Int64Array,
        positions: Int32Array,
        raw_failed: npt.NDArray[np.bool_] | None = None,
    ) -> tuple[Int32Array, npt.NDArray[np.bool_]]:
        """Return a token for each row, and whether it failed: what rank 0 says, on every rank."""
        if not self._ranks.shard.leads:
            tokens = self._ranks.share_tokens(np.empty(len(rows), dtype=np.int32))
            return tokens, tokens == _FAILED
        tokens, failed = self.sampler.sample(scores, rows, positions, self.rows.sampling)
        if raw_failed is not None:
            failed |= raw_failed
        if self._ranks.shard.world_size > 1:
            self._ranks.share_tokens(np.where(failed, _FAILED, tokens))
        return tokens, failed

    def _ruled(
        self, logits: torch.Tensor, rows: Int64Array
    ) -> tuple[torch.Tensor, npt.NDArray[np.bool_] | None]:
        """Return the logits that rows draw from, and rows whose raw ones are told and no numbers.

        A copy only where a row with rules also tells of the raw logits; mostly the logits.
        """
        params = self.rows.sampling
        if not (params.rules and self._ranks.shard.leads):
            return logits, None
        ruled = params.is_ruled[rows]
        if not ruled.any():
            return logits, None
        scores, failed = logits, None
        telling = ruled & (params.logprobs[rows] | (params.num_candidates[rows] > 0))
        if telling.any():
            scores = logits.clone()
            failed = telling & ~np.isfinite(logits.amax(dim=-1).cpu().numpy())
        apply_rules(scores, rows, self.rows.tokens, self.rows.num_tokens, params.rules)
        return scores, failed

    def _note_failed(
        self, scores: torch.Tensor, rows: Int64Array, failed: npt.NDArray[np.bool_]
    ) -> None:
        if not self._ranks.shard.leads:
            # Rank 0 alone knows why, and alone is asked.
            self.rows.failures.update(dict.fromkeys(rows[failed].tolist(), _NOT_FINITE))
            return
        best = scores.amax(dim=-1).cpu().numpy()
        for row, score in zip(rows[failed].tolist(), best[failed].tolist(), strict=True):
            banned = score == -np.inf and self.rows.sampling.is_ruled[row]
            self.rows.failures[row] = _ALL_BANNED if banned else _NOT_FINITE


def _kept(logits: torch.Tensor, kept: npt.NDArray[np.bool_]) -> torch.Tensor:
    return logits[torch.from_numpy(kept).to(logits.device)]


def _timing(started: int, prepared: int, computed: int, ended: int) -> StepTiming:
    return StepTiming(
        prepare_ns=prepared - started,
        forward_ns=computed - prepared,
        sample_ns=ended - computed,
        total_ns=ended - started,
    )
