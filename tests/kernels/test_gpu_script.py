"""The script for a GPU runs to its end without one, on tiny shapes."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu_kernels.py"
KERNELS = {
    "copy", "matmul", "paged_decode", "paged_prefill", "shared_prefix", "paged_attention_classic",
    "rms_norm", "silu_and_mul", "store_kv", "rotary", "sample", "copy_blocks", "gather_blocks",
    "scatter_blocks",
}  # fmt: skip


def test_every_section_of_the_dry_run_passes(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--dry-run", "--out", out],
        capture_output=True, text=True, timeout=170, check=False, cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert {result["kernel"] for result in results} == KERNELS
    assert all(result["seconds"] > 0 for result in results)
    assert "FAILED" not in done.stdout
