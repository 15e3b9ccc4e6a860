"""Adapters on the real programs and the demo model, by command line as a user would."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from e2e.serving import serving
from pagemill.client import AsyncClient
from scheduler_svc.service.text.tokenizer import Tokenizer
from tiny_adapter import write_adapter
from transformers_oracle import greedy, load_demo

PROMPT = "The capital of France is"
RANK, ALPHA = 8, 16.0


def _merge(model: LlamaForCausalLM, adapter: Path) -> None:
    """Add B @ A * alpha / r to the model's own weights."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name in tensors:
        if ".lora_A." in name:
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            delta = tensors[name.replace(".lora_A.", ".lora_B.")] @ tensors[name]
            model.get_submodule(module).weight.data += delta * (ALPHA / RANK)  # type: ignore[operator]


def _run(*arguments: str) -> str:
    command = [sys.executable, "-m", "pagemill.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout


TWO_RANKS = ("--tensor-parallel-size", "2", "--threads", "1")
"""Of 2 and 1 KV groups."""


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), TWO_RANKS])
async def test_an_adapter_of_the_demo_model_equals_merged_weights(
    demo_gguf: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    model = load_demo(demo_gguf)
    adapter = write_adapter(
        tmp_path / "adapters" / "poets" / "one",
        rank=RANK,
        alpha=ALPHA,
        std=0.05,
        weights=model.state_dict(),
    )
    ids = Tokenizer.from_path(demo_gguf).encode(PROMPT)
    plain = greedy(model, ids, 24)
    _merge(model, adapter)
    changed = greedy(model, ids, 24)
    assert changed != plain

    with serving("demo", "--adapter-dir", str(tmp_path / "adapters"), *flags) as served:
        assert "GiB kept for adapters, " in served.log()
        assert "for each: max_loras is 8, max_lora_rank is 64" in served.log()
        server = ("--server", served.address)
        loaded = await asyncio.to_thread(_run, "adapters", "load", "poet", "poets/one", *server)
        assert await asyncio.to_thread(_run, "adapters", "list", *server) == loaded
        asked = ("--prompt", PROMPT, "--max-tokens", "24", "--temperature", "0", "--json")
        told = _run("complete", *asked, "--ignore-eos", "--adapter", "poet", *server)
        answer: dict[str, Any] = json.loads(told)
        assert answer["token_ids"] == changed
        async with AsyncClient(served.address) as client:
            both = await asyncio.gather(
                *(
                    client.complete(
                        prompt=PROMPT, max_tokens=24, temperature=0, ignore_eos=True, adapter=name
                    )
                    for name in ("", "poet", "")
                )
            )
        assert [list(each.token_ids) for each in both] == [plain, changed, plain]
        await asyncio.to_thread(_run, "adapters", "unload", "poet", *server)
        assert await asyncio.to_thread(_run, "adapters", "list", *server) == ""
