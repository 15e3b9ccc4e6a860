"""Steps on a device that computes beside the host: launched in order, collected as they end."""

import threading
from time import perf_counter_ns

import numpy as np
import numpy.typing as npt
import torch

from worker_svc.errors import InvariantError
from worker_svc.model.causal_model import CausalModel
from worker_svc.runtime.candidates import find_candidates
from worker_svc.runtime.decode_batches import DecodeBatches
from worker_svc.runtime.device_rows import DeviceRows, to_device
from worker_svc.runtime.device_sampling import DeviceSampler, draw
from worker_svc.runtime.launched_step import Launched, Sampled, TokensUnderWay, UnderWay
from worker_svc.runtime.logit_rules import apply_rules
from worker_svc.runtime.model_runner import ModelRunner
from worker_svc.runtime.sampler import number_samples
from worker_svc.runtime.step_plan import (
    Int64Array,
    StepPlan,
    StepResult,
    StepTiming,
    no_int32,
)

_NOT_FINITE = "the model's logits are not finite"


class DeviceRunner:
    """Runs step plans, in order, without waiting for the device between them.

    `launch` hands the device a step and returns; sampled tokens stay on the device, where the
    next step finds them, and travel to the host beside it. What a row's logits turned out to be
    is known when its step is collected; a row that failed is not run from then on, and what it
    sampled meanwhile is dropped.

    A step in which a row tells more than tokens and candidates (log-probabilities, vectors),
    verifies drafts or takes embeddings is run as on a CPU, by a `ModelRunner`: `launch` waits for
    it. Its draws are the device's, so who shares a step with such a row samples what it would
    have alone.

    Thread safety: one thread launches, another may collect, oldest step first.
    """

    __slots__ = (
        "_batches",
        "_device",
        "_device_rows",
        "_generations",
        "_last_step_id",
        "_lock",
        "_max_model_len",
        "_model",
        "_waiting",
        "kv_cache",
        "rows",
    )

    def __init__(self, model: CausalModel, waiting: ModelRunner) -> None:
        """Take over rows and cache of a runner that has not run."""
        max_rows, self._max_model_len = waiting.rows.tokens.shape
        self.kv_cache = waiting.kv_cache
        self.rows = rows = waiting.rows
        self._waiting = waiting
        self._model = model
        self._device = model.device
        self._device_rows = DeviceRows(rows, model.device)
        self._batches = DecodeBatches(
            self._decode, max_rows, self._device_rows.padding, model.device
        )
        # Raised when a row is given to somebody else, so that what a step in flight finds out
        # about the old one is not believed of the new one.
        self._generations: Int64Array = np.zeros(max_rows, dtype=np.int64)
        self._last_step_id = -1
        self._lock = threading.Lock()
        waiting.sampler = DeviceSampler(self._device_rows, model.device)

    @torch.inference_mode()
    def record_graphs(self) -> None:
        """Record the decode step in every batch size, if the model lets it. Needs a CUDA device."""
        if self._model.can_be_recorded:
            self._batches.record()

    def replay(self, rows: Int64Array, places: Int64Array) -> torch.Tensor:
        """Launch one decode step outside of any plan, to time it. As `DecodeBatches.run`."""
        return self._batches.run(rows, places)

    def run(self, plan: StepPlan) -> StepResult:
        """Launch a step and wait for it."""
        return self.collect(self.launch(plan))

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Hand the device one step.

        Raises: InvariantError if a step is missing between this plan and the last, or the plan
            does not fit the rows. The runner must not be used after that.
        """
        started_ns = perf_counter_ns()
        with self._lock:
            if plan.step_id != self._last_step_id + 1 and not plan.reset:
                raise InvariantError(
                    f"step {plan.step_id} follows step {self._last_step_id} without a reset"
                )
            self._last_step_id = plan.step_id
            self.rows.apply(plan)
            self._waiting.fail_without_adapter(plan)
            self._count_generations(plan)
            self.kv_cache.copy_blocks(plan.copies)
            self._device_rows.follow(plan)
            running = self.rows.running()
            row_errors = self.rows.failed()
            prepared_ns = perf_counter_ns()
            under_way, result = None, None
            if self._must_wait(running):
                result = self._wait_for(plan.step_id, running, started_ns)
            elif len(running):
                sampled = self._launch_rows(running)
                self._expect_tokens(sampled.rows)
                tokens = TokensUnderWay(sampled.tokens)
                under_way = UnderWay(sampled, tokens, self._generations[sampled.rows])
            return Launched(plan.step_id, under_way, row_errors, started_ns, prepared_ns, result)

    @torch.inference_mode()
    def collect(self, launched: Launched) -> StepResult:
        """Wait until a step has ended, and return what it brought. Call it once, in order."""
        if launched.result is not None:
            return launched.result
        if launched.under_way is None:
            return _idle(launched)
        sampled = launched.under_way.sampled
        tokens = launched.under_way.tokens.wait()
        computed_ns = perf_counter_ns()
        firsts = np.cumsum(sampled.counts) - sampled.counts
        reasons = self._settle(sampled.rows, tokens[firsts] < 0, launched.under_way.generations)
        kept = np.array([reason is None for reason in reasons], dtype=np.bool_)
        rows, counts = sampled.rows[kept], sampled.counts[kept]
        candidates = None
        if sampled.logits is not None and len(rows):
            logits = sampled.logits[torch.from_numpy(kept).to(self._device)]
            candidates = find_candidates(logits, sampled.num_candidates[kept])
        failed = [
            (row, reason)
            for row, reason in zip(sampled.rows.tolist(), reasons, strict=True)
            if reason is not None
        ]
        ended_ns = perf_counter_ns()
        return StepResult(
            step_id=launched.step_id,
            rows=rows.astype(np.int32),
            tokens=tokens[np.repeat(kept, sampled.counts)],
            timing=StepTiming(
                prepare_ns=launched.prepared_ns - launched.started_ns,
                forward_ns=computed_ns - launched.prepared_ns,
                sample_ns=ended_ns - computed_ns,
                total_ns=ended_ns - launched.started_ns,
            ),
            row_errors=tuple(sorted([*launched.row_errors, *failed])),
            num_tokens=counts.astype(np.int32) if (counts != 1).any() else no_int32(),
            candidates=candidates,
        )

    def _settle(
        self, rows: Int64Array, failed: npt.NDArray[np.bool_], generations: Int64Array
    ) -> list[str | None]:
        """Remember rows that failed; return why each sampled nothing, None if it did.

        Shapes: rows, failed, generations [S].
        """
        with self._lock:
            reasons: list[str | None] = [None] * len(rows)
            for place in np.flatnonzero(failed).tolist():
                reasons[place] = _NOT_FINITE
            for place, row in enumerate(rows.tolist()):
                if self._generations[row] != generations[place]:
                    continue
                if reasons[place] is not None:
                    self.rows.failures.setdefault(row, _NOT_FINITE)
                elif row in self.rows.failures:
                    # It failed in a step before, which had not ended when this one began.
                    reasons[place] = self.rows.failures[row]
            return reasons

    def _count_generations(self, plan: StepPlan) -> None:
        if plan.reset:
            self._generations += 1
        self._generations[plan.released_rows] += 1
        for entry in plan.admitted:
            self._generations[entry.row] += 1
        for fork in plan.forked:
            if fork.row != fork.parent_row:
                self._generations[fork.row] += 1

    def _must_wait(self, running: Int64Array) -> bool:
        """Return whether a row takes or tells what only a step that is waited for can."""
        rows = self.rows
        return (
            rows.embedded.are_of(running)
            or bool(rows.sampling.logprobs[running].any())
            or rows.read_all_tokens(running)
        )

    def _wait_for(self, step_id: int, running: Int64Array, started_ns: int) -> StepResult:
        """Run a step with all tokens on the host, and give the device those it samples."""
        self._fetch_tokens(running)
        before = self.rows.num_tokens[running].copy()
        result = self._waiting.run_rows(step_id, running, started_ns)
        after = self.rows.num_tokens[running]
        for row, start, end in zip(running.tolist(), before.tolist(), after.tolist(), strict=True):
            sampled = self.rows.tokens[row, start:end].astype(np.int64)
            self._device_rows.tokens[row, start:end] = self._place(sampled).int()
        return result

    def _fetch_tokens(self, rows: Int64Array) -> None:
        """Let the host know the tokens that rows have sampled; the device has to end its steps."""
        for row in rows.tolist():
            count = int(self.rows.num_tokens[row])
            self.rows.tokens[row, :count] = self._device_rows.tokens[row, :count].cpu().numpy()

    def _expect_tokens(self, rows: Int64Array) -> None:
        """Count the token that each row samples; the device alone knows which one."""
        if len(rows) and self.rows.num_tokens[rows].max() >= self._max_model_len:
            raise InvariantError(f"a row has more than {self._max_model_len} tokens")
        self.rows.num_tokens[rows] += 1
        self.rows.sampling.num_samples[rows] = 1

    def _launch_rows(self, running: Int64Array) -> Sampled:
        rows, params = self.rows, self.rows.sampling
        starts = rows.num_computed_tokens[running].astype(np.int64)
        counts = rows.num_new_tokens[running].astype(np.int64)
        samples = starts + counts == rows.num_tokens[running]
        several = params.num_samples[running] > 1
        reports = params.num_candidates[running] > 0
        ruled = params.is_ruled[running]
        if samples.all() and counts.max() == 1 and not (several | reports | ruled).any():
            tokens = self._batches.run(running, starts)
            return Sampled(running, np.ones_like(running), np.zeros_like(running), tokens)
        return self._run_mixed(running, starts, counts, samples)

    def _decode(self, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Run one token of each row, draw the next, and append it. See `DecodeStep`."""
        known, block_size = self._device_rows, self.kv_cache.block_size
        real = places >= 0
        positions = places.clamp(min=0)
        tables = tuple(table[rows] for table in known.tables)
        column, offset = (positions // block_size)[:, None], positions % block_size
        slots = tuple(
            torch.where(real, table.gather(1, column)[:, 0].long() * block_size + offset, -1)
            for table in tables
        )
        hidden = self._model.forward(
            known.tokens[rows, positions].long(),
            positions,
            self.kv_cache.layers,
            slots,
            tables,
            torch.where(real, positions + 1, 0).int(),
            torch.arange(len(rows) + 1, dtype=torch.int32, device=self._device),
        ).hidden
        places = positions + 1
        tokens = draw(self._model.logits(hidden), known.sampling[rows], places)
        known.tokens[rows, places] = tokens.clamp(min=0)
        return tokens

    def _run_mixed(
        self,
        running: Int64Array,
        starts: Int64Array,
        counts: Int64Array,
        samples: npt.NDArray[np.bool_],
    ) -> Sampled:
        """Run a step of any shape. Shapes: all [R]."""
        known, block_size = self._device_rows, self.kv_cache.block_size
        num_tokens = int(counts.sum())
        ends = np.cumsum(counts)
        placed = self._place(np.stack((running, counts, starts - (ends - counts), starts + counts)))
        row = torch.repeat_interleave(placed[0], placed[1], output_size=num_tokens)
        shift = torch.repeat_interleave(placed[2], placed[1], output_size=num_tokens)
        positions = torch.arange(num_tokens, device=self._device) + shift
        width = -(-int((starts + counts).max()) // block_size)
        column, offset = positions // block_size, positions % block_size
        hidden = self._model.forward(
            known.tokens[row, positions].long(),
            positions,
            self.kv_cache.layers,
            tuple(table[row, column].long() * block_size + offset for table in known.tables),
            tuple(table[placed[0], :width].contiguous() for table in known.tables),
            placed[3].int(),
            self._place(np.concatenate(([0], ends)).astype(np.int32)),
        ).hidden
        return self._draw_rows(running[samples], hidden, ends[samples] - 1)

    def _draw_rows(self, rows: Int64Array, hidden: torch.Tensor, last: Int64Array) -> Sampled:
        """Draw each row's tokens, and append the first of them. Shapes: rows, last [S]."""
        known, params = self._device_rows, self.rows.sampling
        counts = params.num_samples[rows]
        source, nth = number_samples(counts)
        firsts = np.flatnonzero(nth == 0)
        places = self.rows.num_tokens[rows].astype(np.int64)
        placed = self._place(np.stack((source, nth, rows[source], places[source])))
        logits = self._model.logits(hidden[self._place(last)])
        if params.is_ruled[rows].any():
            self._apply_rules(logits, rows)
        tokens = draw(logits[placed[0]], known.sampling[placed[2]], placed[3], placed[1])
        placed = self._place(np.stack((firsts, rows, places)))
        known.tokens[placed[1], placed[2]] = tokens[placed[0]].clamp(min=0)
        wanted = params.num_candidates[rows]
        return Sampled(rows, counts, wanted, tokens, logits if wanted.any() else None)

    def _apply_rules(self, logits: torch.Tensor, rows: Int64Array) -> None:
        """Change the logits of rows with rules. The host must see their tokens: it waits for them.

        Shapes: logits [S, V], changed in place; rows [S].
        """
        params = self.rows.sampling
        self._fetch_tokens(rows[params.is_ruled[rows]])
        apply_rules(logits, rows, self.rows.tokens, self.rows.num_tokens, params.rules)

    def _place(self, column: npt.NDArray[np.integer]) -> torch.Tensor:
        return to_device(column, self._device)


def _idle(launched: Launched) -> StepResult:
    """Return the result of a step without rows."""
    prepare_ns = launched.prepared_ns - launched.started_ns
    return StepResult(
        step_id=launched.step_id,
        rows=no_int32(),
        tokens=no_int32(),
        timing=StepTiming(prepare_ns=prepare_ns, forward_ns=0, sample_ns=0, total_ns=prepare_ns),
        row_errors=launched.row_errors,
    )
