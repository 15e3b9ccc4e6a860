"""An answer on the terminal, as it comes."""

from collections.abc import AsyncGenerator
from typing import TextIO

from pagemill.cli.terminal import shown
from pagemill.client import Completion, Delta, Event, Finished
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


async def write_sequences(events: AsyncGenerator[Event, None], out: TextIO) -> Completion:
    """Write each sequence below a line of its own once it has ended; return the whole.

    They grow side by side, and a terminal has one place to write: so they come in order of index,
    and none before those in front of it.
    """
    collector = Collector()
    num_written = 0
    async for event in events:
        collector.add(event)
        while (sequence := collector.finished(num_written)) is not None:
            text = shown(sequence.text) if out.isatty() else sequence.text
            out.write(f"{_heading(sequence.finished)}\n{text}\n")
            out.flush()
            num_written += 1
    return collector.completion()


def _heading(ended: Finished) -> str:
    """Return the line above a sequence: its index, how it ended, and what beams say of it."""
    scores = ""
    if ended.score is not None:
        scores = f", score {ended.score:.4f}, log-probability {ended.cumulative_logprob or 0:.4f}"
    return f"[{ended.sequence_index}] {ended.reason.value}{scores}"


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
