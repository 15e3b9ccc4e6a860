"""What drafts by prompt lookup save: one request at a time, with and without, on the demo model.

PYTHONPATH=.:proto:clients python3 bench/speculation.py --dtype bfloat16
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from pagemill.cli.local_server import local_server
from pagemill.cli.model_source import DEMO, resolve

NUM_TOKENS: Final = 128
ROUNDS: Final = 2

_TEXT: Final = (
    "The committee met on Tuesday to discuss the new library. It decided to keep the old reading "
    "room, to build a second floor for children, and to open on Sundays. The cost will be shared "
    "by the town and the county."
)
_CODE: Final = (
    "def area_of_square(side):\n    return side * side\n\n"
    "def area_of_circle(radius):\n    return 3.14 * radius * radius\n\n"
    "def area_of_triangle(base, height):\n    return 0.5 * base * height\n"
)


def _ask(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


PROMPTS: Final[dict[str, dict[str, Any]]] = {
    "a loop": {"prompt": "The cat sat on the mat. " * 12},
    "repeat a text": _ask(f"Repeat this text word for word:\n{_TEXT}"),
    "edit code": _ask(f"Rewrite this code and add one docstring to each function:\n{_CODE}"),
    "a story": _ask("Write a story about a lighthouse keeper."),
}


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt's answer."""

    seconds: float
    """The best of the rounds."""

    steps: int
    token_ids: tuple[int, ...]
    drafted: int
    accepted: int


async def measure(flags: dict[str, object]) -> dict[str, Run]:
    """Serve the demo model with some flags, and ask everything."""
    runs = {}
    async with local_server(resolve(DEMO), flags) as client:
        await client.complete(prompt="Hello", max_tokens=4)
        for name, prompt in PROMPTS.items():
            best_s = float("inf")
            for _ in range(ROUNDS):
                before = (await client.load()).totals.steps
                started_s = time.perf_counter()
                answer = await client.complete(
                    max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, **prompt
                )
                best_s = min(best_s, time.perf_counter() - started_s)
                steps = (await client.load()).totals.steps - before
            usage = answer.usage
            runs[name] = Run(
                best_s,
                steps,
                tuple(answer.token_ids),
                usage.draft_tokens,
                usage.accepted_draft_tokens,
            )
    return runs


async def compare(flags: dict[str, object], num_draft: int) -> None:
    """Print a line for each prompt."""
    plain = await measure(flags)
    drafting = {"speculation": "prompt-lookup", "num_speculative_tokens": num_draft}
    drafted = await measure({**flags, **drafting})
    for name, before in plain.items():
        after = drafted[name]
        line = {
            "prompt": name,
            "seconds": round(before.seconds, 2),
            "seconds_with_drafts": round(after.seconds, 2),
            "steps": before.steps,
            "steps_with_drafts": after.steps,
            "drafted": after.drafted,
            "accepted": after.accepted,
            "same_tokens": before.token_ids == after.token_ids,
        }
        sys.stdout.write(json.dumps(line) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    options = parser.parse_args(argv)
    flags: dict[str, object] = {"device": "cpu", "dtype": options.dtype}
    asyncio.run(compare(flags, options.num_speculative_tokens))


if __name__ == "__main__":
    main()
