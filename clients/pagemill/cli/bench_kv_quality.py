"""`pagemill bench kv-quality`: what fp8 KV caches change in a model's outputs."""

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from pagemill.cli import options
from pagemill.cli.bare_loop import bare_loop
from pagemill.cli.local_server import local_server
from pagemill.cli.model_source import DEMO, Model, resolve
from pagemill.cli.program_settings import arguments, program
from pagemill.client import AsyncClient

KV_DTYPES: Final = ("auto", "fp8", "fp8_e5m2")

_NEEDLE_LENGTHS: Final = (500, 1500)
"""Tokens of a prompt that hides a fact, roughly."""

_NEEDLE_DEPTHS: Final = (0.1, 0.5, 0.9)
"""Where the fact stands in it."""

_FACTS: Final = (("Marseille", "4817"), ("Lisbon", "9053"), ("Oslo", "2764"))

PROMPTS: Final = (
    "Explain why the sky is blue.",
    "Write a short story about a lighthouse keeper.",
    "What is the capital of Australia, and why is it not Sydney?",
    "List five ways to save water at home.",
    "Describe how a bicycle stays upright.",
    "Write a Python function that reverses a list.",
    "Summarise the history of the printing press.",
    "What should I pack for a week in the mountains?",
    "Explain photosynthesis to a child.",
    "Give me a recipe for lentil soup.",
    "What are the differences between bees and wasps?",
    "Write a polite letter that declines an invitation.",
    "How do vaccines work?",
    "Name the planets in order, with one fact about each.",
    "What makes a good teacher?",
    "Explain what an operating system does with memory.",
)

_FILLING: Final = (
    "The market opens at seven and smells of bread and oranges.",
    "A river runs through the town and turns slowly towards the sea.",
    "In spring the schools plant trees along the old railway.",
    "Most of the houses have red roofs and small gardens behind them.",
    "The library keeps letters that sailors wrote two hundred years ago.",
    "On Sundays a band plays in the square until the lamps are lit.",
)

NumPrompts = Annotated[
    int, typer.Option(min=1, max=len(PROMPTS), help="Prompts that are continued.")
]
OutputLen = Annotated[int, typer.Option(min=1, help="Tokens generated for each.")]
QualityModel = Annotated[str, typer.Argument(metavar="MODEL", help="As for serve.")]


def kv_quality(
    model: QualityModel = DEMO,
    device: options.Device = "cpu",
    dtype: options.Dtype = None,
    threads: options.Threads = None,
    num_prompts: NumPrompts = 16,
    output_len: OutputLen = 48,
    as_json: options.Json = False,
) -> None:
    """Compare fp8 KV caches with a cache of the run dtype: greedy agreement, logits, hidden facts.

    Greedy agreement is the share of an output before the first token that differs. Logits are
    those of the same tokens: the ones that the run dtype's cache generated.
    """
    flags = {"device": device, "dtype": dtype, "threads": threads}
    lines = asyncio.run(_measure(resolve(model), flags, num_prompts, output_len))
    if as_json:
        for line in lines:
            sys.stdout.write(json.dumps(line) + "\n")
    else:
        Console().print(_table(lines))


def needle_text(fact: tuple[str, str], num_sentences: int, depth: float) -> str:
    """Return a text of so many sentences with one that matters at a depth of 0 to 1."""
    text = [_FILLING[place % len(_FILLING)] for place in range(num_sentences)]
    city, number = fact
    text.insert(int(depth * num_sentences), f"The secret number of {city} is {number}.")
    return " ".join(text)


async def _measure(
    model: Model, flags: Mapping[str, object], num_prompts: int, output_len: int
) -> list[dict[str, Any]]:
    command = program("worker_svc.bench_kv_quality", str(model.path), *arguments(flags))
    # The server knows the model's words; it generates nothing.
    async with local_server(model, {**flags, "num_gpu_blocks_override": 64}) as client:
        longest = (await client.model_info()).max_model_len
        prompts = [await _chat(client, text) for text in PROMPTS[:num_prompts]]
        needles, answers = await _needles(client, longest)
        async with bare_loop(command) as comparison:
            lines = []
            for kv_dtype in KV_DTYPES:
                question = {
                    "kv_dtype": kv_dtype,
                    "prompts": prompts,
                    "output_len": output_len,
                    "needles": needles,
                }
                line = await comparison.run(question)
                told = [await client.detokenize(ids) for ids in line.pop("needle_outputs")]
                line["needles_found"] = sum(
                    answer in text for answer, text in zip(answers, told, strict=True)
                )
                line["needles"] = len(needles)
                lines.append(line)
    return lines


async def _chat(client: AsyncClient, text: str) -> Sequence[int]:
    return await client.tokenize(messages=[{"role": "user", "content": text}])


async def _needles(
    client: AsyncClient, max_model_len: int
) -> tuple[list[Sequence[int]], list[str]]:
    """Return prompts that hide a fact, as token ids, and the facts."""
    needles: list[Sequence[int]] = []
    answers: list[str] = []
    for length in _NEEDLE_LENGTHS:
        # A sentence of the filling has some thirteen tokens.
        for fact, depth in zip(_FACTS, _NEEDLE_DEPTHS, strict=True):
            text = needle_text(fact, length // 13, depth)
            ask = f"{text}\n\nWhat is the secret number of {fact[0]}?"
            ids = await _chat(client, ask)
            if len(ids) + 24 <= max_model_len:
                needles.append(ids)
                answers.append(fact[1])
    return needles, answers


def _table(lines: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="KV caches against the run dtype's", title_style="")
    names = [name for name in lines[0] if name != "kv_dtype"]
    table.add_column("")
    for line in lines:
        table.add_column(str(line["kv_dtype"]), justify="right")
    for name in names:
        cells = (line[name] for line in lines)
        table.add_row(
            name.replace("_", " "),
            *(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells),
        )
    return table
