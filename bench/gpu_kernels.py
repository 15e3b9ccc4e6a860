"""Measures every Triton kernel on the GPU of this machine, as a share of what the GPU can do.

One script, less than four minutes on an H200, nothing installed:

    python3 bench/gpu_kernels.py [--budget SECONDS] [--out FILE]
    python3 bench/gpu_kernels.py --dry-run       tiny shapes in Triton's interpreter, no GPU

It first measures the two ceilings, copy bandwidth and the rate of a matrix product, then checks
values, then times. A section that fails prints its error and the others go on; a section that
would start after the budget is skipped, and says so. JSON lines first, a table last. The exit
status is 1 if a section failed or a value was wrong; a missed goal is a result, not a failure.
"""

# Single capital letters are the dimensions of the legend in kernels/__init__.py.
# ruff: noqa: N806

import argparse
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

DRY = "--dry-run" in sys.argv
if DRY:
    # Triton reads it when a kernel's module is imported.
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402
import triton  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from kernels import reference_layers, reference_quantised  # noqa: E402
from kernels.adapter_runs import adapter_runs  # noqa: E402
from kernels.cache_addresses import CacheAddresses  # noqa: E402
from kernels.checks import Scales  # noqa: E402
from kernels.copy_blocks import copy_blocks  # noqa: E402
from kernels.gather_blocks import gather_blocks  # noqa: E402
from kernels.kept_weight import BITS, Form, KeptWeight  # noqa: E402
from kernels.multi_lora import multi_lora  # noqa: E402
from kernels.paged_attention_classic import paged_attention_classic  # noqa: E402
from kernels.paged_decode import paged_decode  # noqa: E402
from kernels.paged_prefill import paged_prefill  # noqa: E402
from kernels.quantised_matmul import quantised_matmul  # noqa: E402
from kernels.reference_attention import attention, quantise  # noqa: E402
from kernels.reference_sample import noisy_scores  # noqa: E402
from kernels.rms_norm import rms_norm  # noqa: E402
from kernels.rotary import Store, rotary  # noqa: E402
from kernels.sample import SamplingColumns, sample  # noqa: E402
from kernels.scatter_blocks import scatter_blocks  # noqa: E402
from kernels.shared_prefix import shared_prefix  # noqa: E402
from kernels.silu_and_mul import silu_and_mul  # noqa: E402
from kernels.store_kv import store_kv  # noqa: E402

DEVICE = torch.device("cpu" if DRY else "cuda")
BF16 = torch.bfloat16
E4M3 = torch.float8_e4m3fn
H, G, D, S = (4, 2, 64, 16) if DRY else (32, 8, 128, 16)
SCALE = D**-0.5


@dataclass(frozen=True)
class Result:
    """One measurement."""

    kernel: str
    case: str
    seconds: float
    gb_per_s: float | None = None
    tflops: float | None = None
    share: float | None = None
    """Of copy bandwidth, of the matrix product's rate, or of a rival's speed: `of` says which."""

    of: str = ""
    goal: str = ""


class Run:
    """What was measured so far, and the ceilings it is compared with."""

    def __init__(self, budget_s: float) -> None:
        self.started = time.perf_counter()
        self.budget_s = budget_s
        self.results: list[Result] = []
        self.failures: list[str] = []
        self.copy_gb_per_s = float("nan")
        self.gemm_tflops = float("nan")

    def add(self, result: Result) -> Result:
        """Print and keep a result."""
        print(json.dumps(asdict(result)), flush=True)
        self.results.append(result)
        return result

    def memory(
        self, kernel: str, case: str, seconds: float, moved: float, goal: str = ""
    ) -> Result:
        """Add a result that is bound by memory."""
        rate = moved / seconds / 1e9
        share = rate / self.copy_gb_per_s
        return self.add(Result(kernel, case, seconds, rate, None, share, "copy bandwidth", goal))

    def matrix(
        self, kernel: str, case: str, seconds: float, flops: float, goal: str = ""
    ) -> Result:
        """Add a result that is bound by the tensor cores."""
        rate = flops / seconds / 1e12
        share = rate / self.gemm_tflops
        return self.add(Result(kernel, case, seconds, None, rate, share, "matrix product", goal))

    def ratio(
        self, kernel: str, case: str, seconds: float, share: float, of: str, goal: str
    ) -> None:
        """Add a comparison of two results of this run."""
        self.add(Result(kernel, case, seconds, share=share, of=of, goal=goal))

    def section(self, name: str, body: Callable[["Run"], None]) -> None:
        """Run one part; its failure is reported and ends nothing else."""
        spent = time.perf_counter() - self.started
        if spent > self.budget_s:
            print(
                f"# {name}: skipped, {spent:.0f} s of {self.budget_s:.0f} s are spent", flush=True
            )
            self.failures.append(f"{name}: skipped for time")
            return
        try:
            body(self)
        except Exception as error:  # noqa: BLE001 - the report of a failed section is its result
            traceback.print_exc()
            self.failures.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
        finally:
            if not DRY:
                torch.cuda.empty_cache()
        print(f"# {name}: done after {time.perf_counter() - self.started:.0f} s", flush=True)


def timed(*calls: Callable[[], object]) -> float:
    """Return the median seconds of one call, over replays of a graph of all `calls`.

    A graph leaves the host's time out. Several calls, over inputs of their own, keep inputs out
    of the L2 cache between replays.
    """
    for call in calls:
        call()
    if DRY:
        began = time.perf_counter()
        calls[0]()
        return time.perf_counter() - began
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times: list[float] = []
    deadline = time.perf_counter() + 0.4
    while len(times) < 5 or (len(times) < 50 and time.perf_counter() < deadline):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times) / len(calls)


def sized(on_gpu: int, dry: int) -> int:
    """Return a size: that of the measurement, or one the interpreter can do."""
    return dry if DRY else on_gpu


def ints(values: Sequence[int]) -> torch.Tensor:
    """Return int32 on the device."""
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def make_cache(num_blocks: int, block_size: int = S, kv_dtype: torch.dtype = BF16) -> torch.Tensor:
    """Return a cache of random numbers: zeros would run faster."""
    cache = torch.empty(num_blocks, block_size, G, D, dtype=BF16, device=DEVICE).normal_()
    return cache if kv_dtype == BF16 else cache.to(kv_dtype)


def make_tables(
    lengths: Sequence[int], block_size: int = S, *, ordered: bool = False
) -> torch.Tensor:
    """Return block tables over blocks in random order, or in order."""
    widths = [-(-length // block_size) for length in lengths]
    total = sum(widths)
    blocks = torch.arange(total) if ordered else torch.randperm(total)
    tables = torch.zeros(len(lengths), max(widths), dtype=torch.int32)
    for row, part in enumerate(blocks.int().split(widths)):
        tables[row, : len(part)] = part
    return tables.to(DEVICE)


def expect(name: str, out: torch.Tensor, exact: torch.Tensor, bound: float) -> None:
    """Fail unless ||out - exact|| / ||exact|| is below `bound` and everything was written."""
    error = float((out.float() - exact.float()).norm() / exact.float().norm().clamp_min(1e-30))
    if not error < bound:  # NaN fails, too
        raise ValueError(f"{name}: relative error {error:.2e}, must be below {bound:.0e}")
    print(f"# {name}: relative error {error:.2e}", flush=True)


def ceilings(run: Run) -> None:
    """Measure what the GPU can do: bytes read plus written by a copy, and a matrix product."""
    size = sized(2 << 30, 1 << 16)
    src = torch.empty(size // 2, dtype=BF16, device=DEVICE).normal_()
    dst = torch.empty_like(src)
    seconds = timed(lambda: dst.copy_(src))
    run.copy_gb_per_s = 2 * size / seconds / 1e9
    run.add(Result("copy", f"{size >> 20} MiB", seconds, run.copy_gb_per_s))
    n = sized(8192, 64)
    a, b = (torch.empty(n, n, dtype=BF16, device=DEVICE).normal_() for _ in "ab")
    seconds = timed(lambda: a @ b)
    run.gemm_tflops = 2 * n**3 / seconds / 1e12
    run.add(Result("matmul", f"{n}^3 bf16", seconds, tflops=run.gemm_tflops))


def values_of_attention(run: Run) -> None:
    """Compare the attention kernels with dense attention in fp32."""
    lengths = [1, 15, 70, 33] if DRY else [1, 15, 16, 17, 300, 4096, 777, 2500]
    tables, lens = make_tables(lengths), ints(lengths)
    blocks = int(tables.max()) + 1
    starts = ints(range(len(lengths) + 1))
    for kv_dtype in (BF16, E4M3):
        k, v = make_cache(blocks, S, kv_dtype), make_cache(blocks, S, kv_dtype)
        scales = None
        if kv_dtype == E4M3:
            scales = Scales(*(torch.tensor([x], device=DEVICE) for x in (1.5, 0.5)))
        q = torch.randn(len(lengths), H, D, device=DEVICE).to(BF16)
        nan = torch.full_like(q, float("nan"))
        for window, cap in ((None, None), (100, 20.0)):
            exact = attention(q, k, v, tables, lens, starts, SCALE, window=window, soft_cap=cap,
                              scales=scales)  # fmt: skip
            out = paged_decode(q, k, v, tables, lens, SCALE, max(lengths), window=window,
                               soft_cap=cap, scales=scales, out=nan.clone())  # fmt: skip
            expect(f"paged_decode {kv_dtype} window {window} soft cap {cap}", out, exact, 1e-2)
        news = [min(length, 1 + 97 * i) for i, length in enumerate(lengths)]
        begins = ints([sum(news[:i]) for i in range(len(news) + 1)])
        q = torch.randn(sum(news), H, D, device=DEVICE).to(BF16)
        exact = attention(q, k, v, tables, lens, begins, SCALE, scales=scales)
        out = paged_prefill(q, k, v, tables, lens, begins, SCALE, max(news), scales=scales,
                            out=torch.full_like(q, float("nan")))  # fmt: skip
        expect(f"paged_prefill {kv_dtype}", out, exact, 1e-2)
    shared = tables[-1, : lengths[-1] // S // 2].contiguous()
    group = tables[-1:].repeat(5, 1)
    q, lens = torch.randn(5, H, D, device=DEVICE).to(BF16), ints([lengths[-1]] * 4 + [0])
    k, v = make_cache(blocks), make_cache(blocks)
    exact = attention(q, k, v, group, lens, ints(range(6)), SCALE)
    out = shared_prefix(q, k, v, shared, group, lens, SCALE, lengths[-1],
                        out=torch.full_like(q, float("nan")))  # fmt: skip
    expect("shared_prefix", out, exact, 1e-2)
    classic = reference_layers.to_classic(k, v)
    out = paged_attention_classic(q, *classic, group, lens, SCALE)
    expect("paged_attention_classic", out, exact, 1e-2)


def values_of_layers(run: Run) -> None:
    """Compare the other kernels with their references."""
    T, E = sized(500, 5), sized(4096, 200)
    x, residual = (torch.randn(T, E, device=DEVICE).to(BF16) for _ in "xr")
    weight, total = torch.randn(E, device=DEVICE).to(BF16), (x.float() + residual.float())
    out = rms_norm(x, weight, 1e-5, residual)
    expect("rms_norm, sum", residual, total, 5e-3)
    expect("rms_norm", out, reference_layers.rms_norm(residual, weight, 1e-5), 5e-3)
    expect("silu_and_mul", silu_and_mul(x), reference_layers.silu_and_mul(x), 5e-3)
    q, k, v = (torch.randn(T, n, D, device=DEVICE).to(BF16) for n in (H, G, G))
    angles = torch.rand(T, D // 2, device=DEVICE) * 100
    cos, sin = angles.cos(), angles.sin()
    wanted_q, wanted_k = (reference_layers.rotary(t, cos, sin) for t in (q, k))
    k_cache, v_cache = (torch.zeros(-(-T // S), S, G, D, dtype=BF16, device=DEVICE) for _ in "kv")
    slots = torch.randperm(len(k_cache) * S, device=DEVICE)[:T]
    rotary(q, k, cos, sin, Store(v, k_cache, v_cache, slots))
    expect("rotary, queries", q, wanted_q, 5e-3)
    expect("rotary, stored keys", k_cache.view(-1, G, D)[slots], wanted_k, 5e-3)
    for fp8 in (E4M3, torch.float8_e5m2):
        k_cache, v_cache = (cache.to(fp8) for cache in (k_cache, v_cache))
        scales = Scales(*(torch.rand(G, device=DEVICE) + 0.1 for _ in "kv"))
        store_kv(k, v, k_cache, v_cache, slots, scales)
        stored = k_cache.view(torch.uint8).view(-1, G, D)[slots]
        if not torch.equal(stored, quantise(k, scales.k, fp8).view(torch.uint8)):
            raise ValueError(f"store_kv: {fp8} bytes differ from torch's")
    a, b = torch.randn(3, 16, E, device=DEVICE).to(BF16), torch.randn(3, E, 16, device=DEVICE)
    runs = adapter_runs(torch.randint(-1, 3, (T,), dtype=torch.int32, device=DEVICE), 3)
    y, scale = (
        torch.zeros(T, E, dtype=BF16, device=DEVICE),
        torch.tensor([0.5, 1, 2], device=DEVICE),
    )
    multi_lora(x, a, b.to(BF16), scale, runs, y)
    expect("multi_lora", y, reference_layers.multi_lora(x, a, b.to(BF16), scale, runs), 1e-2)
    for form in BITS:
        weight = kept_weight(form, sized(2048, 40), sized(4096, 256), group=128)
        for rows in (1, sized(200, 19)):
            x = torch.randn(rows, weight.num_inputs, device=DEVICE).to(BF16)
            exact = reference_quantised.quantised_matmul(x, weight)
            expect(f"quantised_matmul {form} of {rows}", quantised_matmul(x, weight), exact, 1e-2)
    rows, vocabulary = sized(16, 3), sized(128256, 500)
    params = columns(rows, top_k=50, top_p=0.9)
    logits = torch.randn(rows, vocabulary, device=DEVICE) * 4
    scores = noisy_scores(logits.cpu(), SamplingColumns(*(
        getattr(params, name).cpu() for name in SamplingColumns.__dataclass_fields__
    )))  # fmt: skip
    taken = scores.gather(1, sample(logits, params).long().cpu()[:, None])[:, 0]
    if not bool((taken >= scores.amax(1) - 1e-3).all()):
        raise ValueError("sample: a token is not the one that sorting gives")


def columns(rows: int, top_k: int, top_p: float) -> SamplingColumns:
    """Return sampling parameters, equal in all rows but the seed."""
    ones, zeros = torch.ones(rows, device=DEVICE), torch.zeros(rows, device=DEVICE)
    return SamplingColumns(ones, ints([top_k] * rows), ones * top_p, zeros,
                           torch.arange(rows, device=DEVICE), ints([0] * rows),
                           ints(range(rows)))  # fmt: skip


def decode_seconds(
    lengths: Sequence[int], kv_dtype: torch.dtype = BF16, block_size: int = S, *,
    ordered: bool = False, kernel: str = "modern",
) -> float:  # fmt: skip
    """Time decoding of one layer, over as many caches as it takes to outgrow the L2."""
    tables = make_tables(lengths, block_size, ordered=ordered)
    blocks, lens = int(tables.max()) + 1, ints(lengths)
    total, longest = sum(lengths), max(lengths)
    cache_bytes = 2 * blocks * block_size * G * D * kv_dtype.itemsize
    calls: list[Callable[[], object]] = []
    for _ in range(sized(-(-(1 << 29) // cache_bytes), 1)):
        k, v = make_cache(blocks, block_size, kv_dtype), make_cache(blocks, block_size, kv_dtype)
        q = torch.randn(len(lengths), H, D, device=DEVICE).to(BF16)
        if kernel == "classic":
            # The same bytes in the other layout; random numbers need no rearranging.
            k = k.view(blocks, G, D // 8, block_size, 8)
            v = v.view(blocks, G, D, block_size)
            calls.append(partial(paged_attention_classic, q, k, v, tables, lens, SCALE))
        else:
            calls.append(
                partial(paged_decode, q, k, v, tables, lens, SCALE, longest, num_tokens=total)
            )
    return timed(*calls)


def decode(run: Run) -> None:
    """Decoding: full batches, one long request, uneven lengths, other block sizes, order."""
    batch = [sized(8192, 40)] * sized(64, 2)
    token = 2 * G * D * 2
    skewed = [sized(32768, 70)] + [sized(2048, 9)] * sized(63, 2)
    whole = decode_seconds(batch)
    name = f"{len(batch)} x {batch[0]}"
    run.memory("paged_decode", name, whole, sum(batch) * token, ">= 0.88, aim 0.95")
    one = [sized(32768, 70)]
    run.memory("paged_decode", f"1 x {one[0]}", decode_seconds(one), sum(one) * token, ">= 0.70")
    case = f"{skewed[0]} and {len(skewed) - 1} x {skewed[1]}"
    run.memory("paged_decode", case, decode_seconds(skewed), sum(skewed) * token, ">= 0.75")
    small = [sized(1024, 20)] * sized(256, 3)
    case = f"{len(small)} x {small[0]}"
    run.memory("paged_decode", case, decode_seconds(small), sum(small) * token)
    ordered = decode_seconds(batch, ordered=True)
    run.ratio(
        "paged_decode", "permuted / ordered blocks", whole, whole / ordered, "time", "<= 1.05"
    )
    large = decode_seconds(batch, block_size=128)
    run.memory("paged_decode", f"{name}, blocks of 128", large, sum(batch) * token)
    eighth = decode_seconds(batch, kv_dtype=E4M3)
    run.memory("paged_decode", f"{name}, e4m3", eighth, sum(batch) * token / 2)
    long = [sized(16384, 50)] * sized(32, 2)
    wide, narrow = decode_seconds(long), decode_seconds(long, kv_dtype=E4M3)
    case = f"e4m3 / bf16 at {len(long)} x {long[0]}"
    run.ratio("paged_decode", case, narrow, narrow / wide, "time", "<= 0.60")


def classic(run: Run) -> None:
    """Both layouts, side by side, at a batch that needs no splits."""
    batch = [sized(2048, 40)] * sized(128, 2)
    token = 2 * G * D * 2
    name = f"{len(batch)} x {batch[0]}"
    old, new = decode_seconds(batch, kernel="classic"), decode_seconds(batch)
    run.memory("paged_attention_classic", name, old, sum(batch) * token)
    run.ratio("paged_decode", f"classic / modern at {name}", new, old / new, "time", "")


def prefill(run: Run) -> None:
    """Prefill: whole prompts, after a cached prefix, and beside decoding rows."""
    for length in (sized(4096, 48), sized(8192, 64)):
        seconds, rate = _prefill_seconds([(length, length)])
        result = run.matrix("paged_prefill", f"causal {length}", seconds, rate, ">= 0.55, aim 0.70")
        best, rival = _best_sdpa(length)
        run.ratio("paged_prefill", f"causal {length} against SDPA {rival}", result.seconds,
                  best / seconds, "speed of SDPA", ">= 0.75")  # fmt: skip
        half, flops = _prefill_seconds([(length, length // 2)])
        run.ratio("paged_prefill", f"half of {length} cached", half,
                  (flops / half) / (rate / seconds), "rate without", ">= 0.90")  # fmt: skip
    long, rows = sized(4096, 48), sized(64, 3)
    decoding = [(sized(2048, 33), 1)] * rows
    mixed, _ = _prefill_seconds([*decoding, (long, long)])
    alone, _ = _prefill_seconds([(long, long)])
    apart = alone + decode_seconds([length for length, _ in decoding])
    case = f"{long} new and {rows} single tokens / both apart"
    run.ratio("paged_prefill", case, mixed, mixed / apart, "time", "<= 1.10")


def _prefill_seconds(requests: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Return the time of one layer, and its flops."""
    lengths, news = [length for length, _ in requests], [new for _, new in requests]
    tables = make_tables(lengths)
    blocks = int(tables.max()) + 1
    k, v = make_cache(blocks), make_cache(blocks)
    q = torch.randn(sum(news), H, D, device=DEVICE).to(BF16)
    lens, starts = ints(lengths), ints([sum(news[:i]) for i in range(len(news) + 1)])
    pairs = sum(new * (length - new) + new * (new + 1) / 2 for length, new in requests)
    longest = max(news)
    call = partial(paged_prefill, q, k, v, tables, lens, starts, SCALE, longest)
    return timed(call), 4 * H * D * pairs


def _best_sdpa(length: int) -> tuple[float, str]:
    """Return the time of torch's fastest attention over contiguous keys, and its name."""
    q = torch.randn(1, H, length, D, device=DEVICE).to(BF16)
    k, v = (torch.randn(1, G, length, D, device=DEVICE).to(BF16) for _ in "kv")
    times: list[tuple[float, str]] = []
    for backend in (SDPBackend.MATH,) if DRY else (
        SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION,
    ):  # fmt: skip
        try:
            with sdpa_kernel(backend):
                call = partial(
                    functional.scaled_dot_product_attention,
                    q,
                    k,
                    v,
                    is_causal=True,
                    enable_gqa=True,
                )
                times.append((timed(call), backend.name))
        except RuntimeError as error:
            print(f"# SDPA {backend.name}: {str(error)[:200]}", flush=True)
    return min(times)


def cascade(run: Run) -> None:
    """Many requests with one long prefix."""
    rows, shared, own = sized(64, 3), sized(8192, 32), sized(256, 5)
    width, own_width = shared // S, -(-own // S)
    tables = torch.empty(rows, width + own_width, dtype=torch.int32)
    tables[:, :width] = torch.randperm(width)
    tables[:, width:] = width + torch.randperm(rows * own_width).view(rows, own_width)
    tables = tables.to(DEVICE)
    k, v = (make_cache(width + rows * own_width) for _ in "kv")
    q, lens = torch.randn(rows, H, D, device=DEVICE).to(BF16), ints([shared + own] * rows)
    prefix = tables[0, :width].contiguous()
    longest = shared + own
    apart = timed(lambda: paged_decode(q, k, v, tables, lens, SCALE, longest))
    together = timed(lambda: shared_prefix(q, k, v, prefix, tables, lens, SCALE, longest))
    least = (shared + rows * own) * 2 * G * D * 2
    run.memory("shared_prefix", f"{rows} x ({shared} shared + {own})", together, least)
    case = f"times paged_decode at {rows} x ({shared} shared + {own})"
    run.ratio("shared_prefix", case, together, apart / together, "speed", ">= 4")


def layers(run: Run) -> None:
    """What stands around attention, at sizes far above the L2 cache."""
    T, E, V = sized(32768, 4), sized(4096, 200), sized(128256, 700)
    x, residual, out = (torch.randn(T, E, device=DEVICE).to(BF16) for _ in "xro")
    weight = torch.ones(E, dtype=BF16, device=DEVICE)
    seconds = timed(lambda: rms_norm(x, weight, 1e-5, residual, out))
    run.memory("rms_norm", f"{T} x {E}, with residual", seconds, 4 * T * E * 2)
    gate_up = torch.randn(T, 2 * E, device=DEVICE).to(BF16)
    seconds = timed(lambda: silu_and_mul(gate_up, out))
    run.memory("silu_and_mul", f"{T} x {E}", seconds, 3 * T * E * 2)
    q, k, v = (torch.randn(T, n, D, device=DEVICE).to(BF16) for n in (H, G, G))
    angles = torch.rand(T, D // 2, device=DEVICE) * 100
    cos, sin = angles.cos(), angles.sin()
    k_cache, v_cache = (make_cache(-(-T // S)) for _ in "kv")
    slots = torch.randperm(len(k_cache) * S, device=DEVICE)[:T]
    seconds = timed(lambda: store_kv(k, v, k_cache, v_cache, slots))
    run.memory("store_kv", f"{T} tokens", seconds, 4 * T * G * D * 2)
    store = Store(v, k_cache, v_cache, slots)
    seconds = timed(lambda: rotary(q, k, cos, sin, store))
    run.memory("rotary", f"{T} tokens, stored", seconds, T * D * (2 * H + 4 * G) * 2 + T * D * 4)
    for rows, top_k, top_p in ((sized(64, 1), 0, 1.0), (sized(64, 1), 50, 0.9)):
        logits = torch.randn(rows, V, device=DEVICE) * 4
        params = columns(rows, top_k, top_p)
        seconds = timed(partial(sample, logits, params))
        run.memory("sample", f"{rows} x {V}, top_k {top_k}, top_p {top_p}", seconds, rows * V * 4)


def kept_weight(form: Form, rows: int, columns: int, group: int) -> KeptWeight:
    """Return random weights in words; of e4m3, none is NaN."""
    words = torch.randint(
        -(1 << 31), 1 << 31, (columns // 128, rows, BITS[form] * 4), dtype=torch.int32,
        device=DEVICE,
    )  # fmt: skip
    if form == "e4m3":
        words &= 0x77777777
    scales = torch.rand(max(1, columns // group if group else 1), rows, device=DEVICE).half()
    zero = 0 if form == "e4m3" else 8 if form == "int4" else 128
    zeros = None
    if form == "int4" and group:
        # AWQ's kind: each group has its own.
        zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8, device=DEVICE)
    return KeptWeight(form, columns, 128, group, words, scales, zeros, zero)


def quantised(run: Run) -> None:
    """Products of few and of many tokens with weights of few bits, beside bf16's."""
    rows, columns, many = sized(28672, 48), sized(4096, 256), sized(4096, 20)
    copies = sized(4, 1)
    plain = [torch.randn(rows, columns, device=DEVICE).to(BF16) for _ in range(copies)]
    for tokens in (1, sized(16, 3), many):
        x = torch.randn(tokens, columns, device=DEVICE).to(BF16)
        bf16 = timed(*(partial(functional.linear, x, weight) for weight in plain))
        for form, group, goal in (
            ("int4", 128, ">= 2"),
            ("int8", 0, ">= 1.6"),
            ("e4m3", 0, ">= 1.6"),
        ):
            weights = [kept_weight(form, rows, columns, group) for _ in range(copies)]
            seconds = timed(*(partial(quantised_matmul, x, weight) for weight in weights))
            case = f"{form}, {tokens} x {columns} to {rows}"
            if tokens == many:
                flops = 2 * tokens * rows * columns
                run.matrix("quantised_matmul", case, seconds, flops, ">= 0.50")
            else:
                run.memory("quantised_matmul", case, seconds, weights[0].num_bytes, ">= 0.60")
                case = f"{form} / bf16 at {tokens}"
                run.ratio("quantised_matmul", case, seconds, bf16 / seconds, "speed of bf16", goal)


def blocks(run: Run) -> None:
    """Block moves over all layers."""
    layers_, count = sized(32, 2), sized(256, 2)
    caches = [make_cache(2 * count) for _ in range(2 * layers_)]
    addresses = CacheAddresses.of(caches)
    order = torch.randperm(2 * count, device=DEVICE)
    src, dst = order[:count].contiguous(), order[count:].contiguous()
    moved = 2 * count * len(caches) * addresses.block_bytes
    case = f"{count} blocks of {len(caches) * addresses.block_bytes >> 10} KiB"
    run.memory("copy_blocks", case, timed(lambda: copy_blocks(addresses, src, dst)), moved)
    shape = (count, len(caches), addresses.block_bytes)
    staging = torch.empty(shape, dtype=torch.uint8, device=DEVICE)
    seconds = timed(lambda: gather_blocks(addresses, src, staging))
    run.memory("gather_blocks", case, seconds, moved)
    seconds = timed(lambda: scatter_blocks(addresses, dst, staging))
    run.memory("scatter_blocks", case, seconds, moved)


SECTIONS: tuple[tuple[str, Callable[[Run], None]], ...] = (
    ("ceilings", ceilings),
    ("values of attention", values_of_attention),
    ("values of layers", values_of_layers),
    ("decode", decode),
    ("prefill", prefill),
    ("cascade", cascade),
    ("classic", classic),
    ("layers", layers),
    ("quantised", quantised),
    ("blocks", blocks),
)


def main() -> int:
    """Run all sections and print the table."""
    parser = argparse.ArgumentParser(description="Measure the Triton kernels on this GPU.")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes in the interpreter")
    parser.add_argument(
        "--budget", type=float, default=220.0, help="seconds until sections are skipped"
    )
    parser.add_argument("--out", type=Path, help="write the results here too, as JSON lines")
    arguments = parser.parse_args()
    if not DRY and not torch.cuda.is_available():
        print("no CUDA device: try --dry-run", file=sys.stderr)
        return 2
    torch.manual_seed(time.time_ns() % (1 << 31))
    name = "the interpreter" if DRY else torch.cuda.get_device_name()
    print(f"# {name}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    run = Run(float("inf") if DRY else arguments.budget)
    for section, body in SECTIONS:
        run.section(section, body)
    if arguments.out is not None:
        lines = [json.dumps(asdict(result)) + "\n" for result in run.results]
        arguments.out.write_text("".join(lines), encoding="utf-8")
    print(f"\n{'kernel':24} {'case':52} {'us':>10} {'rate':>12} {'share':>6}  goal")
    for r in run.results:
        rate = (
            f"{r.gb_per_s:.0f} GB/s"
            if r.gb_per_s
            else f"{r.tflops:.0f} TFLOP/s"
            if r.tflops
            else ""
        )
        share = "" if r.share is None else f"{r.share:.2f}"
        goal = f"{r.goal} of {r.of}" if r.goal else r.of
        print(f"{r.kernel:24} {r.case:52} {r.seconds * 1e6:10.1f} {rate:>12} {share:>6}  {goal}")
    for failure in run.failures:
        print(f"FAILED {failure}")
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
