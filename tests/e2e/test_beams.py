"""In float32, beam search returns what `transformers` returns with `num_beams`."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from transformers import LlamaForCausalLM

from e2e.conftest import PROMPTS
from e2e.serving import Served, serving
from pagemill.client import AsyncClient, Completion, InvalidArgumentError
from scheduler_svc.service.text.model_facts import ModelFacts
from scheduler_svc.service.text.tokenizer import Tokenizer
from transformers_oracle import BeamOracle, beam_search, load_demo

WIDTH = 4
NUM_TOKENS = 16
# A text that goes on, one with a period to end at, code, and a conversation, which ends.
CHAT = "<|im_start|>user\nSay yes or no.<|im_end|>\n<|im_start|>assistant\n"
EarlyStopping = bool | Literal["never"]
BEAM_PROMPTS = (PROMPTS[0], PROMPTS[1], PROMPTS[-1], CHAT)


class Oracle:
    """The demo model in `transformers`, with our tokenizer, which has an oracle of its own."""

    def __init__(self, path: Path) -> None:
        self._model: LlamaForCausalLM = load_demo(path)
        self._eos_token_ids = sorted(ModelFacts.from_path(path).eos_token_ids)
        self._tokenizer = Tokenizer.from_path(path)
        self._found: dict[object, list[BeamOracle]] = {}

    def encode(self, prompt: str) -> list[int]:
        return list(self._tokenizer.encode(prompt))

    def search(
        self, prompt: str, *, early_stopping: EarlyStopping = False, length_penalty: float = 1.0
    ) -> list[BeamOracle]:
        """Search once for the same; a search takes seconds."""
        key = (prompt, early_stopping, length_penalty)
        if key not in self._found:
            self._found[key] = beam_search(
                self._model,
                self.encode(prompt),
                NUM_TOKENS,
                width=WIDTH,
                num_returned=WIDTH,
                eos_token_ids=self._eos_token_ids,
                early_stopping=early_stopping,
                length_penalty=length_penalty,
            )
        return self._found[key]


@pytest.fixture(scope="module")
def theirs(demo_gguf: Path) -> Oracle:
    return Oracle(demo_gguf)


@pytest.fixture(scope="module")
def demo() -> Iterator[Served]:
    with serving("demo") as served:
        yield served


async def search(
    client: AsyncClient,
    prompt: list[int],
    *,
    num_returned: int = WIDTH,
    early_stopping: EarlyStopping | None = None,
    length_penalty: float | None = None,
) -> Completion:
    return await client.complete(
        prompt=prompt,
        beam_width=WIDTH,
        num_returned=num_returned,
        max_tokens=NUM_TOKENS,
        early_stopping=early_stopping,
        length_penalty=length_penalty,
    )


def assert_same(
    completion: Completion, expected: list[BeamOracle], length_penalty: float = 1.0
) -> None:
    """A negative penalty multiplies a sum of log-probabilities, and its rounding errors with it."""
    assert [list(sequence.token_ids) for sequence in completion.sequences] == [
        hypothesis.tokens for hypothesis in expected
    ]
    for sequence, hypothesis in zip(completion.sequences, expected, strict=True):
        factor = max(1.0, len(hypothesis.tokens) ** -length_penalty)
        assert sequence.finished.score == pytest.approx(hypothesis.score, abs=2e-4 * factor)


async def test_hypotheses_are_those_of_transformers(demo: Served, theirs: Oracle) -> None:
    async with AsyncClient(demo.address) as client:
        completions = [await search(client, theirs.encode(prompt)) for prompt in BEAM_PROMPTS]
        load = await client.load()
    for prompt, completion in zip(BEAM_PROMPTS, completions, strict=True):
        assert_same(completion, theirs.search(prompt))
        for sequence in completion.sequences:
            ended = sequence.finished
            assert ended.cumulative_logprob is not None
            assert ended.score is not None
            length = len(sequence.token_ids)
            assert ended.score == pytest.approx(ended.cumulative_logprob / length)
            assert ended.reason == ("length" if length == NUM_TOKENS else "stop")
    reasons = {sequence.finished.reason for found in completions for sequence in found.sequences}
    assert reasons == {"stop", "length"}
    assert (load.running, load.waiting, load.used_blocks) == (0, 0, 0)


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty"),
    [(False, 2.0), (True, 2.0), (False, -0.5), ("never", -0.5)],
)
async def test_the_end_of_a_search_is_that_of_transformers(
    demo: Served, theirs: Oracle, early_stopping: EarlyStopping, length_penalty: float
) -> None:
    async with AsyncClient(demo.address) as client:
        completion = await search(
            client,
            theirs.encode(CHAT),
            early_stopping=early_stopping,
            length_penalty=length_penalty,
        )
    expected = theirs.search(CHAT, early_stopping=early_stopping, length_penalty=length_penalty)
    assert_same(completion, expected, length_penalty)


async def test_beams_do_not_depend_on_what_else_runs(demo: Served, theirs: Oracle) -> None:
    async with AsyncClient(demo.address) as client:
        drawn = client.complete(
            prompt=PROMPTS[2], n=3, seed=5, temperature=1.0, max_tokens=NUM_TOKENS
        )
        *found, _ = await asyncio.gather(
            *(search(client, theirs.encode(prompt)) for prompt in BEAM_PROMPTS), drawn
        )
    for prompt, completion in zip(BEAM_PROMPTS, found, strict=True):
        assert_same(completion, theirs.search(prompt))


@pytest.mark.parametrize(
    "flags",
    [
        ("--pipeline-depth", "1"),
        # Two searches fit, but not both to their ends.
        ("--num-gpu-blocks-override", "12"),
        ("--no-enable-prefix-caching", "--num-gpu-blocks-override", "12"),
    ],
    ids=" ".join,
)
async def test_beams_are_the_same_under(flags: tuple[str, ...], theirs: Oracle) -> None:
    prompts = (PROMPTS[0], PROMPTS[-1])
    with serving("demo", *flags) as served:
        async with AsyncClient(served.address) as client:
            found = await asyncio.gather(
                *(search(client, theirs.encode(prompt)) for prompt in prompts)
            )
            load = await client.load()
    for prompt, completion in zip(prompts, found, strict=True):
        assert_same(completion, theirs.search(prompt))
    assert (load.running, load.waiting, load.used_blocks) == (0, 0, 0)
    if "--num-gpu-blocks-override" in flags:
        assert load.totals.preemptions > 0


async def test_the_best_are_returned_and_counted(demo: Served, theirs: Oracle) -> None:
    prompt = theirs.encode(PROMPTS[0])
    async with AsyncClient(demo.address) as client:
        all_of_them = await search(client, prompt)
        best = await search(client, prompt, num_returned=2)
    assert [s.token_ids for s in best.sequences] == [s.token_ids for s in all_of_them.sequences[:2]]
    assert best.usage.completion_tokens == sum(len(s.token_ids) for s in best.sequences)
    assert 0 < best.timing.ttft_s < best.timing.total_s


async def test_a_search_wider_than_a_step_is_refused(demo: Served) -> None:
    async with AsyncClient(demo.address) as client:
        with pytest.raises(InvalidArgumentError, match=r"beam\.width is 257") as refused:
            await client.complete(prompt="Hi", beam_width=257)
    assert refused.value.field == "beam.width"
