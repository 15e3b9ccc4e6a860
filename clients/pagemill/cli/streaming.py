"""An answer on the terminal, as it comes."""

from collections.abc import AsyncGenerator
from typing import TextIO

from pagemill.cli.terminal import shown
from pagemill.client import Completion, Delta, Event
from pagemill.client.events import Collector


async def write_text(events: AsyncGenerator[Event, None], out: TextIO) -> Completion:
    """Write the first sequence's text as it comes; return the whole."""
    collector = Collector()
    begun = False
    try:
        async for event in events:
            collector.add(event)
            if isinstance(event, Delta) and event.sequence_index == 0:
                begun = True
                out.write(shown(event.text) if out.isatty() else event.text)
                out.flush()
    finally:
        # What comes next, an error too, begins on a line of its own.
        if begun:
            out.write("\n")
            out.flush()
    return collector.completion()


def account(completion: Completion) -> str:
    """Return the numbers of an answer as one line."""
    usage, timing = completion.usage, completion.timing
    decode_s = timing.total_s - timing.ttft_s
    # The first token belongs to the prompt's step; the rest came one by one.
    speed = f"{(usage.completion_tokens - 1) / decode_s:.1f} tokens/s" if decode_s > 0 else "-"
    return (
        f"first token after {1000 * timing.ttft_s:.0f} ms, {speed}, "
        f"{usage.prompt_tokens} prompt tokens of which {usage.cached_tokens} cached, "
        f"{usage.completion_tokens} generated"
    )
