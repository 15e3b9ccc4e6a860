"""The bare loop runs what a scheduler would plan: every token once, within the budget, as asked."""

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiny_llama import write_tiny_llama
from worker_svc.errors import ConfigError
from worker_svc.runtime.step_plan import StepPlan
from worker_svc.service.bench_forward import BenchRun, bench_forward, plan_run
from worker_svc.service.local_model import LocalModel, LocalSettings
from worker_svc.service.logs import make_logger

runs = st.builds(
    BenchRun,
    num_seqs=st.integers(1, 6),
    input_len=st.integers(1, 12),
    output_len=st.integers(1, 6),
    block_size=st.sampled_from([1, 4, 16]),
    max_num_batched_tokens=st.integers(1, 40),
)


class Rows:
    """What a worker knows of rows, by the rules of step plans."""

    def __init__(self) -> None:
        self.num_tokens: dict[int, int] = {}
        self.num_computed: dict[int, int] = {}
        self.num_new: dict[int, int] = {}
        self.num_sampled: dict[int, int] = {}

    def run(self, plan: StepPlan) -> int:
        """Run a plan, and return its tokens."""
        for row in plan.released_rows.tolist():
            del self.num_new[row]
        for row, count in self.num_new.items():
            self.num_computed[row] += count
            self.num_new[row] = min(count, 1)
        for entry in plan.admitted:
            assert entry.row not in self.num_tokens
            self.num_tokens[entry.row] = len(entry.tokens)
            self.num_computed[entry.row] = 0
            self.num_new[entry.row] = entry.num_new_tokens
        for row, computed, count in zip(
            plan.exception_rows.tolist(),
            plan.exception_num_computed_tokens.tolist(),
            plan.exception_num_new_tokens.tolist(),
            strict=True,
        ):
            self.num_computed[row], self.num_new[row] = computed, count
        for row, count in self.num_new.items():
            assert self.num_computed[row] + count <= self.num_tokens[row]
            if count and self.num_computed[row] + count == self.num_tokens[row]:
                self.num_tokens[row] += 1
                self.num_sampled[row] = self.num_sampled.get(row, 0) + 1
        return sum(self.num_new.values())


@given(run=runs)
def test_every_row_gets_all_its_tokens_within_the_budget(run: BenchRun) -> None:
    rows = Rows()
    plans = plan_run(run)
    assert [plan.step_id for plan in plans] == list(range(len(plans)))
    assert [plan.reset for plan in plans] == [True] + [False] * (len(plans) - 1)
    counts = [rows.run(plan) for plan in plans]
    assert all(1 <= count <= run.max_num_batched_tokens for count in counts)
    assert rows.num_sampled == dict.fromkeys(range(run.num_seqs), run.output_len)
    # The last token of each row is sampled, and never run.
    assert sum(counts) == run.num_seqs * (run.max_model_len - 1)


@given(run=runs, num_groups=st.integers(1, 3))
def test_no_two_rows_share_a_block_and_none_has_the_null_block(
    run: BenchRun, num_groups: int
) -> None:
    rows = [row for plan in plan_run(run, num_groups) for row in plan.admitted]
    assert all(len(row.block_tables) == num_groups for row in rows)
    tables = [table for row in rows for table in row.block_tables]
    blocks = np.concatenate(tables)
    assert sorted(blocks.tolist()) == list(range(1, len(blocks) + 1))
    assert all(len(table) * run.block_size >= run.max_model_len for table in tables)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    path = write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")
    return LocalModel(_settings(path), make_logger(sys.stderr, "text", "info"))


def _settings(path: Path) -> LocalSettings:
    return LocalSettings(
        model_path=str(path),
        device="cpu",
        dtype="float32",
        kv_cache_dtype="auto",
        attention_backend="auto",
        kv_cache_memory_bytes=1 << 24,
        gpu_memory_utilization=0.92,
        num_gpu_blocks_override=None,
    )


def test_runs_are_answered_line_by_line_until_the_input_ends(host: LocalModel) -> None:
    requests = io.StringIO(
        '{"num_seqs": 4, "input_len": 10, "output_len": 5, "max_num_batched_tokens": 16}\n'
        "\n"
        '{"num_seqs": 2, "input_len": 3, "output_len": 2, "block_size": 8,'
        ' "prompts": [[1, 2, 3], [4, 5, 6]]}\n'
    )
    answers = io.StringIO()
    bench_forward(host, requests, answers)
    ready, first, second = map(json.loads, answers.getvalue().splitlines())
    assert ready == {"ready": True}
    for answer, tokens in ((first, 20), (second, 4)):
        assert set(answer) == {"output_tok_s", "wall_s", "steps", "mean_step_ms"}
        assert answer["output_tok_s"] == pytest.approx(tokens / answer["wall_s"])
        assert answer["mean_step_ms"] == pytest.approx(1e3 * answer["wall_s"] / answer["steps"])
    assert second["steps"] == 2


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        ("nonsense", "Invalid JSON"),
        ('{"num_seqs": 0, "input_len": 1, "output_len": 1}', "num_seqs"),
        ('{"num_seqs": 1, "input_len": 510, "output_len": 3}', "must be at most 512"),
        ('{"num_seqs": 9999, "input_len": 500, "output_len": 1}', "num_seqs is 9999"),
        ('{"num_seqs": 2, "input_len": 1, "output_len": 1, "prompts": [[1]]}', "prompts must be"),
    ],
)
def test_an_impossible_run_says_why(host: LocalModel, run: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        bench_forward(host, io.StringIO(run), io.StringIO())
