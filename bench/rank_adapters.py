"""What adapters cost over gRPC, on one worker or on the ranks of a group, beside none in use.

PYTHONPATH=.:proto:clients python3 bench/rank_adapters.py --ranks 2 --turns 5

Serves the demo model on this CPU, once without adapters and once with two. Loads take turns. A line
each: median milliseconds of a step of 16 rows, of one of 1 row, and until the first token of a
prompt of 512 tokens; and each as times that of the plain server.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import torch
from safetensors.torch import save_file

from pagemill.cli.local_server import local_server
from pagemill.cli.model_source import DEMO, resolve
from pagemill.client import AsyncClient, Delta

HIDDEN, QUERIES, KEYS, MLP, LAYERS = 576, 576, 192, 1536, 30
"""Of the demo model."""

SHAPES: Final = {
    "self_attn.q_proj": (QUERIES, HIDDEN),
    "self_attn.k_proj": (KEYS, HIDDEN),
    "self_attn.v_proj": (KEYS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, QUERIES),
    "mlp.gate_proj": (MLP, HIDDEN),
    "mlp.up_proj": (MLP, HIDDEN),
    "mlp.down_proj": (HIDDEN, MLP),
}
PROMPT_LEN: Final = 64
NUM_STEPS: Final = 24


@dataclass(frozen=True, slots=True)
class Load:
    """Who is asked, and with which adapters in turns."""

    client: AsyncClient
    adapters: tuple[str, ...]
    times_ms: dict[str, list[float]] = field(default_factory=dict)


def write_adapter(folder: Path, rank: int, seed: int) -> None:
    """Write an adapter that changes every matrix, in the files of PEFT."""
    folder.mkdir()
    made = torch.Generator().manual_seed(seed)
    tensors = {
        f"base_model.model.model.layers.{layer}.{name}.lora_{half}.weight": (
            torch.randn(shape, generator=made) * 0.01
        )
        for layer in range(LAYERS)
        for name, (outputs, inputs) in SHAPES.items()
        for half, shape in (("A", (rank, inputs)), ("B", (outputs, rank)))
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = [name.partition(".")[2] for name in SHAPES]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps(config))


async def arrivals(
    client: AsyncClient, prompt: Sequence[int], num_tokens: int, adapter: str
) -> list[float]:
    """Return when each message with tokens came, in seconds."""
    stream = client.generate(
        prompt=list(prompt), max_tokens=num_tokens, ignore_eos=True, adapter=adapter
    )
    return [time.perf_counter() async for event in stream if isinstance(event, Delta)]


async def measure(load: Load, random: np.random.Generator) -> None:
    """Run each kind of step once, and note its time."""

    async def together(num_rows: int, prompt_len: int, num_tokens: int) -> list[list[float]]:
        prompts = random.integers(100, 40_000, (num_rows, prompt_len)).tolist()
        names = load.adapters or ("",)
        return await asyncio.gather(
            *(
                arrivals(load.client, prompt, num_tokens, names[row % len(names)])
                for row, prompt in enumerate(prompts)
            )
        )

    for num_rows in (16, 1):
        steps = [np.diff(each)[8:] for each in await together(num_rows, PROMPT_LEN, 8 + NUM_STEPS)]
        step_ms = float(np.median(np.concatenate(steps))) * 1e3
        load.times_ms.setdefault(f"{num_rows} rows", []).append(step_ms)
    began = time.perf_counter()
    ((first,),) = await together(1, 512, 1)
    load.times_ms.setdefault("512 tokens", []).append((first - began) * 1e3)


async def run(options: argparse.Namespace) -> None:
    """Serve, measure in turns, and print what was found."""
    flags = {
        "device": "cpu",
        "dtype": options.dtype,
        "threads": options.threads,
        "tensor_parallel_size": options.ranks,
    }
    model, random = resolve(DEMO), np.random.default_rng(0)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for number in (1, 2):
            write_adapter(folder / f"a{number}", options.rank, number)
        plain = await stack.enter_async_context(local_server(model, flags))
        adapted = await stack.enter_async_context(
            local_server(model, {**flags, "adapter_dir": folder, "max_loras": 2})
        )
        for number in (1, 2):
            await adapted.load_adapter(f"a{number}", f"a{number}")
        loads = {
            "plain": Load(plain, ()),
            "none in use": Load(adapted, ()),
            "one": Load(adapted, ("a1",)),
            "two": Load(adapted, ("a1", "a2")),
        }
        for turn in range(options.turns + 1):
            for load in loads.values():
                await measure(load, random)
                if turn == 0:  # to warm up
                    load.times_ms.clear()
    base = {kind: statistics.median(times) for kind, times in loads["plain"].times_ms.items()}
    for name, load in loads.items():
        found = {kind: statistics.median(times) for kind, times in load.times_ms.items()}
        words = (f"{kind} {ms:.1f} ms ({ms / base[kind]:.2f})" for kind, ms in found.items())
        sys.stdout.write(f"{name}: {', '.join(words)}\n")


def main() -> int:
    """Run the benchmark of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="workers of the group")
    parser.add_argument("--threads", type=int, default=1, help="of each")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--turns", type=int, default=5)
    asyncio.run(run(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
