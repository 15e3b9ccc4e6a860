"""A cell of the throughput bench: so many requests, each of so many prompt and output tokens."""

import random
import re
from dataclasses import dataclass
from typing import Self

from pagemill.cli.exit_status import CliError, ExitStatus

_FORMS = re.compile(r"(\d{1,6})x(\d{1,7})[x/](\d{1,7})")
# Ids of a prompt are drawn from these, so that none is a special token where vocabularies begin or
# end with those; the same range as other engines' scripts use, so the same prompts.
_FIRST_TOKEN, _LAST_TOKEN = 100, 49_000


MAX_REQUESTS = 4096
"""As many as a server's queue takes, unless it is told otherwise."""

MAX_PROMPT_TOKENS = 1 << 24
"""Of all requests of a cell together. As Python's numbers they take some 600 MB."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Requests that are all there at once, greedy, and run to their full length."""

    num_requests: int
    """At least 1, as all three."""

    input_len: int
    """Tokens of each prompt."""

    output_len: int
    """Tokens generated for each."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `32x128x64` or `32x128/64`.

        Raises: CliError if it is neither, or more than a client can hold at once.
        """
        found = _FORMS.fullmatch(text.strip())
        numbers = [int(part) for part in found.groups()] if found else [0]
        if min(numbers) < 1:
            raise CliError(
                f"cell is {text.strip()!r}, must be REQUESTSxINPUTxOUTPUT "
                "(or INPUT/OUTPUT), each at least 1, such as 32x128x64",
                ExitStatus.USAGE,
            )
        cell = cls(*numbers)
        num_prompt_tokens = cell.num_requests * cell.input_len
        if cell.num_requests > MAX_REQUESTS or num_prompt_tokens > MAX_PROMPT_TOKENS:
            raise CliError(
                f"cell is {text.strip()!r}, must have at most {MAX_REQUESTS} requests and "
                f"{MAX_PROMPT_TOKENS} prompt tokens in all",
                ExitStatus.USAGE,
            )
        return cell

    def __str__(self) -> str:
        """As `parse` reads it."""
        return f"{self.num_requests}x{self.input_len}x{self.output_len}"

    @property
    def output_tokens(self) -> int:
        """Tokens that the cell generates."""
        return self.num_requests * self.output_len

    @property
    def total_tokens(self) -> int:
        """Tokens of prompts and outputs together."""
        return self.num_requests * self.input_len + self.output_tokens

    def prompts(self, seed: int, vocab_size: int) -> list[list[int]]:
        """Return the prompts of one run: the same for the same cell, seed and vocabulary."""
        name = f"{self.num_requests}x{self.input_len}/{self.output_len}"
        draw = random.Random(f"{name}:{seed}")  # noqa: S311 reproducible, not secret
        end = min(_LAST_TOKEN, vocab_size)
        first = min(_FIRST_TOKEN, end // 2)
        return [
            [draw.randrange(first, end) for _ in range(self.input_len)]
            for _ in range(self.num_requests)
        ]
