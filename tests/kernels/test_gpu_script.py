"""The scripts for a GPU run to their ends without one, on tiny shapes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCH = Path(__file__).parents[2] / "bench"
KERNELS = {
    "copy", "matmul", "paged_decode", "paged_prefill", "shared_prefix", "paged_attention_classic",
    "rms_norm", "silu_and_mul", "store_kv", "rotary", "sample", "copy_blocks", "gather_blocks",
    "scatter_blocks", "quantised_matmul",
}  # fmt: skip


def dry_run(script: str, directory: Path) -> list[dict[str, Any]]:
    """Run a script of bench/ without a GPU and return its results."""
    out = directory / "results.jsonl"
    done = subprocess.run(
        [sys.executable, BENCH / script, "--dry-run", "--out", out],
        capture_output=True, text=True, timeout=170, check=False, cwd=directory,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "FAILED" not in done.stdout
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def test_every_section_on_kernels_passes(tmp_path: Path) -> None:
    results = dry_run("gpu_kernels.py", tmp_path)
    assert {result["kernel"] for result in results} == KERNELS
    assert all(result["seconds"] > 0 for result in results)


def test_every_section_on_the_engine_passes(tmp_path: Path) -> None:
    results = dry_run("gpu_engine.py", tmp_path)
    assert [result["what"] for result in results] == [
        "copy",
        "matrix product",
        "step of 1 row, eager",
        "step of 1 row, graph",
        "recording of all graphs",
        "step of 2 rows",
        "2 sequences, output",
    ]
    assert all(result["value"] > 0 for result in results if result["unit"] != "s")
