"""Every kernel compiles for every GPU, without a GPU, into the code it was written to become."""

from pathlib import Path

import pytest
import triton

from compile_kernels import SHARED_MEMORY, Report, build_all, table
from kernel_launches import all_builds, table_builds

TABLE = Path(__file__).parents[2] / "docs" / "kernels_compiled.md"

# What these move, they must move 16 bytes at a time.
_WIDE = {"_paged_decode", "_paged_prefill", "_shared_prefix", "_store_kv", "_copy_blocks",
         "_gather_blocks", "_scatter_blocks", "_rms_norm", "_silu_and_mul", "_shrink",
         "_paged_attention_classic", "_quantised_matmul"}  # fmt: skip

# Of 120 builds or more, so that the ten minutes can be spent one at a time.
PARTS = sorted({(each.target, each.dtype) for each in all_builds()})


def check(report: Report) -> None:
    what = f"{report.name} {report.build}"
    assert report.shared <= SHARED_MEMORY[report.build.target], what
    if report.build.target == "sm_90":
        # A combination nobody serves: fp32 activations over fp8 heads of 256 fill the registers.
        crowded = report.build.dtype == "fp32" and report.build.head_dim == 256
        crowded &= report.build.kv_dtype != "fp32"
        assert report.spills <= (64 if crowded else 0), what
    # 4 bits in groups of 16 are 32 bytes an output: on AMD a thread takes 4 of them.
    narrow = report.name == "_quantised_matmul" and report.build.block_size == 16
    if report.name in _WIDE and not (narrow and report.build.target == "gfx942"):
        assert report.wide_loads > 0, what
    if report.name == "_quantised_matmul":
        assert report.matrix, what
    if report.build.kernel in {"paged_decode", "paged_prefill"} and report.build.dtype != "fp32":
        assert report.matrix or report.name == "_merge_splits", what


@pytest.mark.timeout(900)
def test_what_a_server_runs_compiles_as_the_table_says() -> None:
    reports = build_all(table_builds(), processes=2)
    assert len(reports) >= 40
    for report in reports:
        check(report)
    text = TABLE.read_text(encoding="utf-8")
    # Another compiler allocates registers otherwise; the table names the one it is from.
    if f"Triton {triton.__version__}" in text:
        assert table(reports) in text, f"write this into {TABLE}:\n{table(reports)}"


@pytest.mark.slow
@pytest.mark.parametrize(("target", "dtype"), PARTS)
def test_everything_that_dispatch_can_choose_compiles(target: str, dtype: str) -> None:
    builds = [each for each in all_builds() if (each.target, each.dtype) == (target, dtype)]
    reports = build_all(builds, processes=2)
    assert {report.build for report in reports} == set(builds)
    for report in reports:
        check(report)
