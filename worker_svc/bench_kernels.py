"""`python -m worker_svc.bench_kernels`, which is `pagemill bench kernels`: the CPU kernels here.

A kernel and its rivals take turns, and each pair is a ratio of its own; what is told are medians.
Read bandwidth is measured in the same turns. With one thread the clock is the processor's, since
that of the wall also counts what other processes do; with several it is the wall's.
"""

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch.nn import functional

from kernels import cpu_layers
from kernels.cache_layout import layout, to_lanes
from kernels.checks import Store
from kernels.cpu_attention import attend
from kernels.cpu_build import native_code, why_no_native_code
from worker_svc.bench_linears import linears
from worker_svc.bench_lines import COLD_BYTES, Line, Run, dtype_name, times

_BLOCK_SIZE: Final = 16

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of a layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        """H / G / D."""
        return f"{self.num_heads}/{self.num_kv_heads}/{self.head_dim}"


KERNELS: Final = ("paged_decode", "paged_prefill", "packed_linear", "layers")
LARGE, SMALL = Heads(32, 8, 128), Heads(9, 3, 64)


class Bench:
    """Takes turns."""

    def __init__(self, code: ctypes.CDLL, num_pairs: int) -> None:
        self._code = code
        self._num_pairs = num_pairs
        self._threads = torch.get_num_threads()
        self._memory = torch.ones(COLD_BYTES // 4)
        self._clock = time.process_time if self._threads == 1 else time.perf_counter

    def time(self, *runs: Run) -> list[list[float]]:
        """Return the seconds of each run in each turn, after one turn that is not counted."""
        turns = [[self._time_one(run) for run in runs] for _ in range(self._num_pairs + 1)]
        return [list(column) for column in zip(*turns[1:], strict=True)]

    def _time_one(self, run: Run) -> float:
        started = self._clock()
        run()
        return self._clock() - started

    def read(self) -> None:
        """Read `COLD_BYTES`, each thread its part."""
        count = self._memory.numel() // self._threads // 256 * 256
        self._code.pagemill_read(
            ctypes.c_void_p(self._memory.data_ptr()),
            ctypes.c_int64(count),
            ctypes.c_int64(self._threads),
        )

    def bandwidth(self) -> Line:
        """Return the machine's read bandwidth."""
        (seconds,) = self.time(self.read)
        median = statistics.median(seconds)
        return Line(
            kernel="read",
            case=f"{COLD_BYTES >> 20} MiB, {self._threads} threads",
            seconds=median,
            bytes_per_second=COLD_BYTES / median,
        )

    def decode(
        self, num_requests: int, length: int, heads: Heads, dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
    ) -> Line:  # fmt: skip
        """Time `paged_decode` over blocks in random order, in caches that take turns too.

        Ours lie in lanes, as the worker has them, and the rivals' in rows.
        """
        kv_dtype = kv_dtype or dtype
        shape = _Decode(num_requests, length, heads, dtype, kv_dtype)
        rivals = (shape.sdpa, shape.gather_sdpa) if kv_dtype == dtype else ()
        ours, read, *theirs = self.time(shape.paged, self.read, *rivals)
        speeds = [shape.num_bytes / a / (COLD_BYTES / b) for a, b in zip(ours, read, strict=True)]
        per_call = [statistics.median(column) / shape.num_copies for column in (ours, *theirs)]
        cached = "" if kv_dtype == dtype else f", cache {dtype_name(kv_dtype)}"
        return Line(
            kernel="paged_decode",
            case=f"{num_requests} x {length} tokens, heads {heads}, {dtype_name(dtype)}{cached}",
            seconds=per_call[0],
            bytes_per_second=shape.num_bytes / statistics.median(ours),
            share_of_read_bandwidth=statistics.median(speeds),
            sdpa_seconds=per_call[1] if theirs else None,
            times_sdpa=times(ours, theirs[0]) if theirs else None,
            gather_sdpa_seconds=per_call[2] if theirs else None,
            times_gather_sdpa=times(ours, theirs[1]) if theirs else None,
        )

    def prefill(self, length: int, heads: Heads, dtype: torch.dtype) -> Line:
        """Time `paged_prefill` of one prompt, none of it cached."""
        shape = _Prefill(length, heads, dtype)
        ours, theirs = self.time(shape.paged, shape.sdpa)
        return Line(
            kernel="paged_prefill",
            case=f"{length} tokens, heads {heads}, {dtype_name(dtype)}",
            seconds=statistics.median(ours),
            tflops=shape.flops / statistics.median(ours) / 1e12,
            sdpa_seconds=statistics.median(theirs),
            times_sdpa=times(ours, theirs),
        )

    def stream(self, kernel: str, case: str, num_bytes: int, run: Run) -> Line:
        """Time a kernel that reads and writes `num_bytes`."""
        ours, read = self.time(run, self.read)
        speeds = [num_bytes / a / (COLD_BYTES / b) for a, b in zip(ours, read, strict=True)]
        return Line(
            kernel=kernel,
            case=case,
            seconds=statistics.median(ours),
            share_of_read_bandwidth=statistics.median(speeds),
        )


class _Decode:
    """Requests of one length, in as many caches as make a turn cold."""

    def __init__(
        self,
        num_requests: int,
        length: int,
        heads: Heads,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
    ) -> None:
        num_kv_heads, head_dim = heads.num_kv_heads, heads.head_dim
        bytes_of_one = 2 * num_requests * length * num_kv_heads * head_dim * kv_dtype.itemsize
        self.num_copies = max(1, COLD_BYTES // bytes_of_one)
        self.num_bytes = self.num_copies * bytes_of_one
        width = length // _BLOCK_SIZE
        num_blocks = self.num_copies * num_requests * width
        cache = (num_blocks, _BLOCK_SIZE, num_kv_heads, head_dim)
        k, v = (torch.randn(cache).to(kv_dtype) for _ in range(2))
        self._k, self._v = to_lanes(k, v)
        self._rows_of_cache = (k, v)
        self._tables = torch.randperm(num_blocks).int().view(self.num_copies, -1, width)
        self._rows = self._tables.long()
        # Each request's keys in a row, for those that want them so.
        in_rows = (self.num_copies, num_requests, num_kv_heads, length, head_dim)
        self._in_rows = (k.view(in_rows), v.view(in_rows))
        self._lengths = torch.full((num_requests,), length, dtype=torch.int32)
        self._q = torch.randn(num_requests, heads.num_heads, head_dim).to(dtype)
        # Query heads that share a key stand in the place of tokens: SDPA's fastest form.
        self._grouped = self._q.view(num_requests, num_kv_heads, -1, head_dim)
        self._gathered = (num_requests, length, num_kv_heads, head_dim)

    def paged(self) -> None:
        for table in self._tables:
            attend(self._q, self._k, self._v, table, self._lengths, None, 0.1)

    def sdpa(self) -> None:
        for k, v in zip(*self._in_rows, strict=True):
            functional.scaled_dot_product_attention(self._grouped, k, v, scale=0.1)

    def gather_sdpa(self) -> None:
        for rows in self._rows:
            k, v = (
                cache[rows].view(self._gathered).transpose(1, 2) for cache in self._rows_of_cache
            )
            functional.scaled_dot_product_attention(self._grouped, k, v, scale=0.1)


class _Prefill:
    """One prompt."""

    def __init__(self, length: int, heads: Heads, dtype: torch.dtype) -> None:
        num_heads, num_kv_heads, head_dim = heads.num_heads, heads.num_kv_heads, heads.head_dim
        self.flops = 2 * num_heads * head_dim * length * (length + 1)
        cache = (length // _BLOCK_SIZE, _BLOCK_SIZE, num_kv_heads, head_dim)
        self._q = torch.randn(length, num_heads, head_dim).to(dtype)
        k, v = (torch.randn(cache).to(dtype) for _ in range(2))
        self._k, self._v = to_lanes(k, v)
        self._table = torch.randperm(cache[0]).int()[None]
        self._length = torch.tensor([length], dtype=torch.int32)
        self._starts = torch.tensor([0, length], dtype=torch.int32)
        self._by_head = self._q.transpose(0, 1)[None].contiguous()
        # Each query head has its own copy: SDPA is slower when it has to share them out.
        self._k_by_head, self._v_by_head = (
            one.view(1, length, num_kv_heads, head_dim)
            .transpose(1, 2)
            .repeat_interleave(num_heads // num_kv_heads, 1)
            for one in (k, v)
        )

    def paged(self) -> None:
        attend(self._q, self._k, self._v, self._table, self._length, self._starts, 0.1)

    def sdpa(self) -> None:
        functional.scaled_dot_product_attention(
            self._by_head, self._k_by_head, self._v_by_head, is_causal=True, scale=0.1
        )


def lines(bench: Bench, kernel: str | None = None) -> Iterator[Line]:
    """Measure everything, or one kernel, a line at a time."""
    yield bench.bandwidth()
    measures = (_decodes, _prefills, linears, _streams)
    for name, measure in zip(KERNELS, measures, strict=True):
        if kernel in {None, name}:
            yield from measure(bench)


def _decodes(bench: Bench) -> Iterator[Line]:
    yield bench.decode(4, 1024, LARGE, BF16)
    yield bench.decode(16, 1024, LARGE, BF16)
    yield bench.decode(16, 1024, SMALL, BF16)
    yield bench.decode(1, 8192, LARGE, BF16)
    yield bench.decode(4, 1024, LARGE, FP32)
    yield bench.decode(16, 1024, SMALL, FP32)
    yield bench.decode(4, 1024, LARGE, FP16)
    yield bench.decode(4, 1024, LARGE, BF16, torch.float8_e4m3fn)
    yield bench.decode(4, 1024, LARGE, BF16, torch.float8_e5m2)


def _prefills(bench: Bench) -> Iterator[Line]:
    for heads in (LARGE, SMALL):
        for dtype in (BF16, FP32):
            yield bench.prefill(1024, heads, dtype)


def _streams(bench: Bench) -> Iterator[Line]:
    tokens, size = 8192, 2048
    x, residual = (torch.randn(tokens, size).to(BF16) for _ in range(2))
    weight, out, half = torch.ones(size).to(BF16), +x, x[:, : size // 2].clone()
    yield bench.stream(
        "rms_norm",
        f"{tokens} x {size}, bfloat16, residual",
        4 * x.nbytes,
        lambda: cpu_layers.rms_norm(x, weight, 1e-5, residual, out),
    )
    yield bench.stream(
        "silu_and_mul",
        f"{tokens} x {size}, bfloat16",
        x.nbytes + half.nbytes,
        lambda: cpu_layers.silu_and_mul(x, half),
    )
    qkv = torch.randn(tokens, 48, 64).to(BF16)
    q, k, v = qkv[:, :32], qkv[:, 32:40], qkv[:, 40:]
    angles = torch.rand(tokens, 32)
    form = layout(tokens // _BLOCK_SIZE, _BLOCK_SIZE, 8, 64, BF16, in_lanes=True)
    k_cache, v_cache = (torch.zeros(shape, dtype=BF16) for shape in form)
    # A prompt's tokens, in blocks in random order.
    blocks = torch.randperm(tokens // _BLOCK_SIZE)[:, None] * _BLOCK_SIZE
    slots = (blocks + torch.arange(_BLOCK_SIZE)).flatten()
    store = Store(v, k_cache, v_cache, slots)
    yield bench.stream(
        "rotary",
        f"{tokens} tokens, heads 32/8/64, bfloat16, stored",
        2 * qkv.nbytes,
        lambda: cpu_layers.rotary(q, k, angles, angles, store),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for, and print a line for each case."""
    parser = argparse.ArgumentParser(prog="pagemill bench kernels", description=__doc__)
    parser.add_argument("--device", choices=["cpu"], default="cpu", help="GPUs have a script.")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="Default: 1.")
    parser.add_argument("--pairs", type=int, default=10, metavar="N", help="Turns. Default: 10.")
    parser.add_argument("--kernel", choices=KERNELS, help="Only this one. Default: all.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object a line.")
    options = parser.parse_args(argv)
    if min(options.threads, options.pairs) < 1:
        parser.error("--threads and --pairs must be at least 1")
    torch.set_num_threads(options.threads)
    code = native_code()
    if code is None:
        sys.stderr.write(f"error: {why_no_native_code()}\n")
        return 2
    with torch.inference_mode():
        for line in lines(Bench(code, options.pairs), options.kernel):
            text = json.dumps(line.fields()) if options.json else _say(line)
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()
    return 0


def _say(line: Line) -> str:
    fields = {
        name: f"{value:.3g}" if isinstance(value, float) else value
        for name, value in line.fields().items()
        if name not in {"kernel", "case"}
    }
    told = ", ".join(f"{name} {value}" for name, value in fields.items())
    return f"{line.kernel}, {line.case}: {told}"


if __name__ == "__main__":
    sys.exit(main())
