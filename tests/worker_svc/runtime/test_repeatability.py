"""What a row stores and samples does not depend on how its steps were cut, as far as promised.

Keys and values are stored as they are computed, before anything attends; so a byte of an fp8 cache
can differ only where hidden states do. These are bitwise equal wherever attention takes a token the
same way: alone, or as one of several. Between the two, sums run in another order, and a value that
lies within their rounding of a tie falls to the other side.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import cpu_threads
from kernels.cache_layout import to_rows
from kernels.cpu_build import native_code
from plan_driver import PlanDriver, Sequence, int32, make_plan
from tiny_llama import VOCAB, write_tiny_llama
from worker_svc.model.native_operations import NativeOperations
from worker_svc.model.weights import LoadedModel, load_model
from worker_svc.runtime.kv_form import choose_kv_form
from worker_svc.runtime.model_runner import ModelRunner
from worker_svc.runtime.start_up import RunnerLimits, make_runner
from worker_svc.runtime.step_plan import AdmittedRow, Draft, SamplingParams

pytestmark = pytest.mark.skipif(native_code() is None, reason="this machine compiles no C++")

LENGTH, OUTPUT, BLOCK = 150, 14, 16
_DRAW = random.Random(7)
PROMPT = [_DRAW.randrange(VOCAB) for _ in range(LENGTH)]
OTHERS = [[_DRAW.randrange(VOCAB) for _ in range(LENGTH)] for _ in range(3)]
chunks = st.lists(st.integers(2, LENGTH), min_size=1, max_size=6)


@dataclass
class Kind:
    """A model, and how its cache is stored."""

    loaded: LoadedModel
    kv_dtype: torch.dtype

    def runner(self) -> ModelRunner:
        limits = RunnerLimits(
            block_size=BLOCK, max_num_seqs=4, max_model_len=192, num_gpu_blocks_override=48
        )
        return make_runner(self.loaded, limits, choose_kv_form(self.loaded, self.kv_dtype))[0]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def kind(request: pytest.FixtureRequest, directory: Path) -> Kind:
    dtype = getattr(torch, request.param)
    loaded = load_model(directory, dtype, torch.device("cpu"), NativeOperations())
    return Kind(loaded, torch.float8_e4m3fn)


def stored(runner: ModelRunner, blocks: list[int], count: int) -> torch.Tensor:
    """Return the bytes of a sequence's keys and values. Shape: [layers * 2, count, G, D]."""
    tensors = [cache for layer in runner.kv_cache.layers for cache in to_rows(layer.k, layer.v)]
    return torch.stack(
        [cache.view(torch.uint8)[blocks].flatten(0, 1)[:count].clone() for cache in tensors]
    )


def run_prompt(kind: Kind, sizes: list[int], num_others: int = 0) -> torch.Tensor:
    """Run a prompt in chunks of these sizes, then of two, beside others; return what it stored."""
    runner = kind.runner()
    driver = PlanDriver(runner, seed=len(sizes))
    own, others = Sequence(PROMPT), [Sequence(prompt) for prompt in OTHERS[:num_others]]
    left = [*sizes, *[2] * LENGTH]
    while own.num_computed_tokens < LENGTH:
        missing = LENGTH - own.num_computed_tokens
        # A last token alone is another matter.
        new = missing if missing <= left[0] + 1 else left[0]
        work = {own: new}
        for other in others:
            if other.num_computed_tokens < LENGTH:
                work[other] = min(7, LENGTH - other.num_computed_tokens)
        driver.step(work)
        left.pop(0)
    return stored(runner, own.blocks, LENGTH)


@settings(max_examples=12, deadline=None)
@given(sizes=chunks, num_others=st.integers(0, 3), threads=st.integers(1, 3))
def test_a_prompt_stores_the_same_bytes_in_any_chunks_of_two_and_more(
    kind: Kind, sizes: list[int], num_others: int, threads: int
) -> None:
    whole = run_prompt(kind, [LENGTH])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_threads, "num_threads", lambda: threads)
        assert torch.equal(run_prompt(kind, sizes, num_others), whole)


@dataclass
class Told:
    """What a decoding row sampled, was told of it, and stored."""

    tokens: list[int] = field(default_factory=list)
    bytes: torch.Tensor | None = None


def decode(kind: Kind, drafts: Callable[[list[int]], list[int]]) -> Told:
    """Sample `OUTPUT` tokens behind the prompt; `drafts` says what to verify behind an output."""
    runner = kind.runner()
    blocks = list(range(1, 13))
    entry = AdmittedRow(
        1, "r", int32(*PROMPT), LENGTH, 0, LENGTH, (int32(*blocks),),
        SamplingParams(temperature=1.0, seed=5),
    )  # fmt: skip
    told = Told()
    told.tokens += runner.run(make_plan(0, admitted=[entry])).tokens.tolist()
    step_id = 1
    while len(told.tokens) < OUTPUT:
        computed = LENGTH + len(told.tokens) - 1
        draft = drafts(told.tokens)[: OUTPUT - len(told.tokens) - 1]
        plan = make_plan(step_id, exceptions=[(1, computed, 1 + len(draft))])
        if draft:
            plan = replace(plan, drafts=(Draft(1, int32(*draft)),))
        told.tokens += runner.run(plan).tokens.tolist()
        step_id += 1
    told.bytes = stored(runner, blocks, LENGTH + OUTPUT - 1)
    return told


@settings(max_examples=12, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    num_right=st.lists(st.integers(0, 6), min_size=1, max_size=4),
)
def test_a_row_with_drafts_stores_and_samples_what_it_does_without(
    kind: Kind, sizes: list[int], num_right: list[int]
) -> None:
    """Bit for bit: also what stood behind a draft's first wrong token is written anew."""
    plain = decode(kind, lambda _: [])

    def drafts(output: list[int]) -> list[int]:
        size, right = sizes[len(output) % len(sizes)], num_right[len(output) % len(num_right)]
        ahead = plain.tokens[len(output) : len(output) + size]
        return ahead[:right] + [(token + 1) % VOCAB for token in ahead[right:]]

    drafted = decode(kind, drafts)
    assert drafted.tokens == plain.tokens
    assert drafted.bytes is not None
    assert plain.bytes is not None
    assert torch.equal(drafted.bytes, plain.bytes)


def test_a_prompt_token_by_token_differs_by_rounding_alone(directory: Path) -> None:
    """In float32: first at ties of the first layer that sees attention's result, by one step."""
    loaded = load_model(directory, torch.float32, torch.device("cpu"), NativeOperations())
    kind = Kind(loaded, torch.float8_e4m3fn)
    whole = run_prompt(kind, [LENGTH]).numpy().astype(np.int16)
    runner = kind.runner()
    driver, own = PlanDriver(runner), Sequence(PROMPT)
    for _ in range(LENGTH):
        driver.step({own: 1})
    one_by_one = stored(runner, own.blocks, LENGTH).numpy().astype(np.int16)
    # The first layer's come from the embedding, before any attention.
    assert (whole[:2] == one_by_one[:2]).all()
    differ = whole != one_by_one
    assert differ.mean() < 1e-3
    assert np.abs(whole - one_by_one)[differ].max(initial=0) <= 1
