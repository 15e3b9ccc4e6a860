"""The oracle of the end-to-end tests: what `transformers` says, on the same weights."""

from pathlib import Path

import pytest

from scheduler_svc.service.text.tokenizer import Tokenizer
from transformers_oracle import greedy, load_demo

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea,",
    "Q: What is 17 + 25?\nA:",
    "Die Hauptstadt von Deutschland heißt",
    "List three colours:\n1.",
    "E = mc² means that",
    "In 1969, the first humans landed on the moon. The mission was called Apollo 11, and the "
    "spacecraft carried three astronauts: Neil Armstrong, Buzz Aldrin and Michael Collins. When "
    "they returned to Earth, they",
)
NUM_TOKENS = 32


@pytest.fixture(scope="session")
def oracle(demo_gguf: Path) -> dict[str, list[int]]:
    """Greedy continuations of PROMPTS by `transformers` in float32, 32 tokens each.

    The prompts' ids are our tokenizer's, which has an oracle of its own.
    """
    tokenizer = Tokenizer.from_path(demo_gguf)
    model = load_demo(demo_gguf)
    return {prompt: greedy(model, tokenizer.encode(prompt), NUM_TOKENS) for prompt in PROMPTS}
