"""Measures the engine's steps on the GPU of this machine, as a share of what the GPU can do.

One script, less than five minutes on an H200, random weights of real shapes:

    python3 bench/gpu_engine.py [--budget SECONDS] [--out FILE]
    python3 bench/gpu_engine.py --dry-run       tiny shapes in Triton's interpreter, no GPU

It measures copy bandwidth and the rate of a matrix product, then for each model a step of one
row, eager and as a graph; how busy graphs keep the GPU when plans come two deep; and 256 sequences
from prompt to end. It plays the scheduler itself: what is measured is the worker. JSON lines
first, a table last. The exit status is 1 if a section failed; a missed goal is a result.
"""

import argparse
import json
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

DRY = "--dry-run" in sys.argv
if DRY:
    # Triton reads it when a kernel's module is imported.
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from worker_svc.model.families import FAMILIES  # noqa: E402
from worker_svc.model.loader import Loader  # noqa: E402
from worker_svc.model.model_config import Family, ModelConfig  # noqa: E402
from worker_svc.model.triton_operations import TritonOperations  # noqa: E402
from worker_svc.runtime.device_runner import DeviceRunner  # noqa: E402
from worker_svc.runtime.kv_cache import KVCache, block_bytes  # noqa: E402
from worker_svc.runtime.model_runner import ModelRunner  # noqa: E402
from worker_svc.runtime.step_plan import (  # noqa: E402
    AdmittedRow,
    AppendedBlocks,
    BlockCopies,
    SamplingParams,
    StepPlan,
    no_int32,
)

DEVICE = torch.device("cpu" if DRY else "cuda")
BLOCK_SIZE = 16
STEP_TOKENS = 64 if DRY else 8192
LONGEST = 128 if DRY else 2304
MAX_ROWS = 2 if DRY else 256


@dataclass(frozen=True)
class Shape:
    """A model, and the shares a step of one row should reach."""

    name: str
    family: Family
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    goal: float
    """Of copy bandwidth, at one row."""

    def config(self) -> ModelConfig:
        """Return it as the worker knows it."""
        return ModelConfig(
            architecture=self.name,
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=LONGEST,
            rms_norm_eps=1e-6,
            rope_theta=1e6,
            rope_scaling=None,
            tie_word_embeddings=self.tied,
            qkv_bias=False,
            output_bias=False,
            mlp_bias=False,
            family=self.family,
        )


SHAPES = (
    (Shape("tiny", Family.QWEN3, 2, 64, 128, 4, 2, 64, 128, True, 0.45),)
    if DRY
    else (
        Shape("qwen3-0.6b", Family.QWEN3, 28, 1024, 3072, 16, 8, 128, 151936, True, 0.45),
        Shape("llama-8b", Family.LLAMA, 32, 4096, 14336, 32, 8, 128, 128256, False, 0.80),
    )
)


class RandomTensors:
    """A checkpoint of normal noise, made on the device tensor by tensor."""

    def __init__(self, shape: Shape) -> None:
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        hidden, inner = shape.hidden, shape.intermediate
        self._shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (shape.vocab, hidden),
            "model.norm.weight": (hidden,),
        }
        if not shape.tied:
            self._shapes["lm_head.weight"] = (shape.vocab, hidden)
        for number in range(shape.layers):
            layer = f"model.layers.{number}"
            self._shapes |= {
                f"{layer}.input_layernorm.weight": (hidden,),
                f"{layer}.post_attention_layernorm.weight": (hidden,),
                f"{layer}.self_attn.q_proj.weight": (queries, hidden),
                f"{layer}.self_attn.k_proj.weight": (keys, hidden),
                f"{layer}.self_attn.v_proj.weight": (keys, hidden),
                f"{layer}.self_attn.o_proj.weight": (hidden, queries),
                f"{layer}.mlp.gate_proj.weight": (inner, hidden),
                f"{layer}.mlp.up_proj.weight": (inner, hidden),
                f"{layer}.mlp.down_proj.weight": (hidden, inner),
            }
            if shape.family is Family.QWEN3:
                self._shapes |= {
                    f"{layer}.self_attn.q_norm.weight": (shape.head_dim,),
                    f"{layer}.self_attn.k_norm.weight": (shape.head_dim,),
                }
        self.names = frozenset(self._shapes)

    def shape(self, name: str) -> list[int]:
        """Return the shape of one tensor."""
        return list(self._shapes[name])

    def read(self, name: str, dtype: torch.dtype, *_parts: range) -> torch.Tensor:
        """Return one tensor."""
        return torch.randn(self._shapes[name], device=DEVICE, dtype=dtype) * 0.02


class Load:
    """A runner, and a scheduler that gives each row blocks of its own for its longest."""

    def __init__(self, shape: Shape, *, graphs: bool) -> None:
        self.shape = shape
        config = shape.config()
        loader = Loader(RandomTensors(shape), config, torch.bfloat16, DEVICE, TritonOperations())
        self.model = FAMILIES[shape.family](loader)
        # An embedding that is not the head, too, is looked up, not read.
        looked_up = 0 if shape.tied else shape.vocab * shape.hidden * 2
        self.read_bytes = loader.weight_bytes - looked_up
        self.kv_token_bytes = block_bytes(config, BLOCK_SIZE, torch.bfloat16) // BLOCK_SIZE
        self._width = LONGEST // BLOCK_SIZE
        self._cache = KVCache(config, MAX_ROWS * self._width, BLOCK_SIZE, torch.bfloat16, DEVICE)
        self.record_s = 0.0
        self._eager = self._new_runner()
        self._recorded: DeviceRunner | None = None
        self.reset(graphs=False)

    def reset(self, *, graphs: bool) -> None:
        """Start anew, without rows."""
        if graphs and self._recorded is None:
            self._recorded = self._new_runner()
            started = time.perf_counter()
            if not DRY:
                self._recorded.record_graphs()
            self.record_s = time.perf_counter() - started
        self.runner = self._recorded if graphs and self._recorded else self._eager
        self._step_id = 0

    def _new_runner(self) -> DeviceRunner:
        waiting = ModelRunner(self.model, self._cache, max_num_seqs=MAX_ROWS, max_model_len=LONGEST)
        return DeviceRunner(self.model, waiting)

    def plan(
        self,
        admitted: list[AdmittedRow] | None = None,
        exceptions: list[tuple[int, int, int]] | None = None,
        released: list[int] | None = None,
    ) -> StepPlan:
        """Return the next plan; exceptions are (row, computed tokens, new tokens)."""
        columns = np.array(exceptions or np.empty((0, 3)), dtype=np.int32).T.copy()
        self._step_id += 1
        return StepPlan(
            step_id=self._step_id - 1,
            reset=self._step_id == 1,
            released_rows=np.array(released or [], dtype=np.int32),
            forked=(),
            admitted=tuple(admitted or []),
            appended=(AppendedBlocks(no_int32(), no_int32()),),
            copies=BlockCopies(no_int32(), no_int32()),
            exception_rows=columns[0],
            exception_num_computed_tokens=columns[1],
            exception_num_new_tokens=columns[2],
        )

    def row(self, row: int, num_tokens: int, new: int) -> AdmittedRow:
        """Return a row of random tokens, which runs `new` of them first."""
        rng = np.random.default_rng(row)
        first = 1 + row * self._width
        return AdmittedRow(
            row=row,
            request_id=str(row),
            tokens=rng.integers(0, self.shape.vocab, num_tokens, dtype=np.int32),
            num_prompt_tokens=num_tokens,
            num_computed_tokens=0,
            num_new_tokens=new,
            block_tables=(np.arange(first, first + self._width, dtype=np.int32),),
            sampling=SamplingParams(),
        )

    def admit(self, count: int, num_tokens: int) -> None:
        """Admit rows, some at a time, until all decode."""
        at_once = max(1, STEP_TOKENS // num_tokens)
        for first in range(0, count, at_once):
            rows = range(first, min(count, first + at_once))
            self.runner.run(self.plan([self.row(row, num_tokens, num_tokens) for row in rows]))

    def decode(self, steps: int) -> float:
        """Run so many steps, two in flight; return seconds of wall time."""
        under_way = deque([self.runner.launch(self.plan())])
        started = time.perf_counter()
        for _ in range(steps):
            under_way.append(self.runner.launch(self.plan()))
            self.runner.collect(under_way.popleft())
        seconds = time.perf_counter() - started
        self.runner.collect(under_way.popleft())
        return seconds


@dataclass(frozen=True)
class Result:
    """One measurement."""

    model: str
    what: str
    value: float
    unit: str
    share: float | None = None
    of: str = ""
    goal: float | None = None


class Run:
    """What was measured, and the ceilings it is compared with."""

    def __init__(self, budget_s: float) -> None:
        self.started = time.perf_counter()
        self.budget_s = budget_s
        self.results: list[Result] = []
        self.failures: list[str] = []
        self.copy_bytes_per_s = float("nan")
        self.flops_per_s = float("nan")

    def add(self, *values: object) -> None:
        """Print and keep a result."""
        result = Result(*values)  # type: ignore[arg-type]
        print(json.dumps(asdict(result)), flush=True)
        self.results.append(result)

    def section(self, name: str, body: Callable[[], None]) -> None:
        """Run one part; its failure is reported and ends nothing else."""
        spent = time.perf_counter() - self.started
        if spent > self.budget_s:
            self.failures.append(f"{name}: skipped, {spent:.0f} s are spent")
            return
        try:
            body()
        except Exception as error:  # noqa: BLE001 - the report of a failed section is its result
            traceback.print_exc()
            self.failures.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
        print(f"# {name}: done after {time.perf_counter() - self.started:.0f} s", flush=True)


def timed(work: Callable[[], object], repeats: int) -> float:
    """Return seconds of one call, on the device where there is one."""
    work()
    if DRY:
        started = time.perf_counter()
        for _ in range(repeats):
            work()
        return (time.perf_counter() - started) / repeats
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(repeats):
        work()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3 / repeats


def ceilings(run: Run) -> None:
    """Measure copy bandwidth and the rate of a matrix product in bf16."""
    source = torch.empty(1 << (16 if DRY else 31), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    run.copy_bytes_per_s = 2 * len(source) / timed(lambda: target.copy_(source), 10)
    run.add("", "copy", run.copy_bytes_per_s / 1e9, "GB/s")
    size = 64 if DRY else 8192
    matrix = torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16)
    run.flops_per_s = 2 * size**3 / timed(lambda: matrix @ matrix, 10)
    run.add("", "matrix product", run.flops_per_s / 1e12, "TFLOP/s")


def one_row(run: Run, load: Load) -> None:
    """A step of one row against the time to read the weights, without and with a graph."""
    steps = 2 if DRY else 200
    floor_s = load.read_bytes / run.copy_bytes_per_s
    for graphs in (False, True):
        load.reset(graphs=graphs)
        load.admit(1, 16)
        load.decode(2)
        step_s = load.decode(steps) / steps
        name = "step of 1 row, " + ("graph" if graphs else "eager")
        run.add(
            load.shape.name, name, step_s * 1e3, "ms", floor_s / step_s,
            "weights / copy bandwidth", load.shape.goal if graphs else None,
        )  # fmt: skip
    run.add(load.shape.name, "recording of all graphs", load.record_s, "s")


def busy(run: Run, load: Load) -> None:
    """How much of the wall time graphs run, when plans come two deep."""
    for count in (2,) if DRY else (64, 256):
        load.reset(graphs=True)
        load.admit(count, 16 if DRY else 128)
        load.decode(2)
        steps = 2 if DRY else 300
        wall_s = load.decode(steps)
        rows = np.arange(count)
        places = load.runner.rows.num_computed_tokens[:count].astype(np.int64)
        with torch.inference_mode():
            graph_s = timed(lambda: load.runner.replay(rows, places), 2 if DRY else 20)  # noqa: B023
        run.add(
            load.shape.name, f"step of {count} rows", wall_s / steps * 1e3, "ms",
            graph_s * steps / wall_s, "wall time", 0.97,
        )  # fmt: skip


def whole_requests(run: Run, load: Load) -> None:
    """Sequences from prompt to end, in and out U[100, 1024], against their steps' roofline."""
    load.reset(graphs=True)
    rng = np.random.default_rng(0)
    low, high = (2, 5) if DRY else (100, 1024)
    prompts, outputs = (rng.integers(low, high + 1, MAX_ROWS) for _ in range(2))
    waiting, sampled = deque(range(MAX_ROWS)), np.zeros(MAX_ROWS, dtype=np.int64)
    lengths = np.zeros(MAX_ROWS, dtype=np.int64)
    weights = load.read_bytes // 2
    roof_s, released, under_way = 0.0, [], deque()
    running: set[int] = set()
    started = time.perf_counter()
    while waiting or running or released:
        admitted, tokens = [], len(running)
        while waiting and tokens + prompts[waiting[0]] <= STEP_TOKENS:
            row = waiting.popleft()
            admitted.append(load.row(row, int(prompts[row]), int(prompts[row])))
            lengths[row] = prompts[row]
            tokens += prompts[row]
            running.add(row)
        under_way.append(load.runner.launch(load.plan(admitted, released=released)))
        members = np.array(sorted(running), dtype=np.int64)
        moved = load.read_bytes + lengths[members].sum() * load.kv_token_bytes
        roof_s += max(2 * weights * tokens / run.flops_per_s, moved / run.copy_bytes_per_s)
        lengths[members] += 1
        sampled[members] += 1
        released = [row for row in running if sampled[row] == outputs[row]]
        running.difference_update(released)
        if len(under_way) == 2:
            load.runner.collect(under_way.popleft())
    while under_way:
        load.runner.collect(under_way.popleft())
    seconds = time.perf_counter() - started
    run.add(
        load.shape.name, f"{MAX_ROWS} sequences, output", outputs.sum() / seconds, "tokens/s",
        roof_s / seconds, "roofline", 0.60,
    )  # fmt: skip


def main() -> int:
    """Run all sections and print the table."""
    parser = argparse.ArgumentParser(description="Measure the engine's steps on this GPU.")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes in the interpreter")
    parser.add_argument(
        "--budget", type=float, default=270.0, help="seconds until parts are skipped"
    )
    parser.add_argument("--out", type=Path, help="write the results here too, as JSON lines")
    arguments = parser.parse_args()
    if not DRY and not torch.cuda.is_available():
        print("no CUDA device: try --dry-run", file=sys.stderr)
        return 2
    run = Run(float("inf") if DRY else arguments.budget)
    run.section("ceilings", lambda: ceilings(run))
    for shape in SHAPES:
        load: list[Load] = []
        run.section(f"{shape.name}, weights", lambda: load.append(Load(shape, graphs=False)))  # noqa: B023
        for body in (one_row, busy, whole_requests) if load else ():
            name = f"{shape.name}, {body.__name__}"
            run.section(name, lambda: body(run, load[0]))  # noqa: B023
    if arguments.out is not None:
        lines = [json.dumps(asdict(result)) + "\n" for result in run.results]
        arguments.out.write_text("".join(lines), encoding="utf-8")
    print(f"\n{'model':12} {'what':28} {'value':>12} {'unit':9} {'share':>6}  goal")
    for r in run.results:
        share = "" if r.share is None else f"{r.share:.2f}"
        goal = r.of if r.goal is None else f"{r.goal:.2f} of {r.of}"
        print(f"{r.model:12} {r.what:28} {r.value:12.3f} {r.unit:9} {share:>6}  {goal}")
    for failure in run.failures:
        print(f"FAILED {failure}")
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
