"""The kernel bench prints a line a case, under the names that stay."""

import json

import pytest
import torch

from kernels.cpu_build import native_code
from worker_svc import bench_kernels, bench_linears
from worker_svc.bench_kernels import Bench, Heads, main
from worker_svc.bench_linears import linears

TINY = Heads(4, 2, 16)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    for module in (bench_kernels, bench_linears):
        monkeypatch.setattr(module, "COLD_BYTES", 1 << 20)
    code = native_code()
    assert code is not None
    return Bench(code, num_pairs=3)


def test_decoding_is_a_share_of_bandwidth_beside_its_rivals(bench: Bench) -> None:
    line = bench.decode(2, 64, TINY, torch.bfloat16).fields()
    assert set(line) == {
        "kernel", "case", "seconds", "bytes_per_second", "share_of_read_bandwidth",
        "sdpa_seconds", "times_sdpa", "gather_sdpa_seconds", "times_gather_sdpa",
    }  # fmt: skip
    assert line["kernel"] == "paged_decode"
    bandwidth = bench.bandwidth().fields()
    assert set(bandwidth) == {"kernel", "case", "seconds", "bytes_per_second"}


def test_fp8_has_no_rival(bench: Bench) -> None:
    line = bench.decode(2, 64, TINY, torch.bfloat16, torch.float8_e5m2).fields()
    assert "sdpa_seconds" not in line
    assert str(line["case"]).endswith("cache float8_e5m2")


def test_prefill_and_products_are_rates(bench: Bench) -> None:
    line = bench.prefill(64, TINY, torch.float32).fields()
    assert set(line) == {"kernel", "case", "seconds", "tflops", "sdpa_seconds", "times_sdpa"}


def test_linear_layers_of_all_types_are_timed_beside_torch(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_linears, "_MODEL", ((32, 16), (8, 24)))
    monkeypatch.setattr(bench_linears, "_LARGE", (64, 32))
    lines = [line.fields() for line in linears(bench)]
    assert all({"f_linear_seconds", "times_f_linear", "tflops"} <= set(line) for line in lines)
    assert {(line["kernel"], str(line["case"]).partition(", ")[2]) for line in lines} >= {
        ("packed_linear", "64 x 32, bfloat16"),
        ("packed_linear", "8 x 24, float32"),
        ("quantised_linear", "32 x 16, 8 bits under bfloat16"),
        ("quantised_linear", "64 x 32, 4 bits under bfloat16"),
    }


def test_the_command_prints_one_object_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_kernels, "COLD_BYTES", 1 << 20)
    assert main(["--device", "cpu", "--json", "--pairs", "1", "--kernel", "layers"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["kernel"] for line in lines] == ["read", "rms_norm", "silu_and_mul", "rotary"]
    assert all(line["seconds"] > 0 for line in lines)


def test_an_impossible_number_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--pairs", "0"])
    assert "must be at least 1" in capsys.readouterr().err
