"""A token computed anew gets the bits it had, but for what attention itself rounds otherwise."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tiny_llama
from paged_logits import CPU, all_logits
from thread_ranks import on_all_ranks
from worker_svc.model.native_operations import NativeOperations
from worker_svc.model.operations import LayerCache, StepAttention, StepColumns
from worker_svc.model.other_ranks import OtherRanks
from worker_svc.model.quantised_operations import QuantisedOperations
from worker_svc.model.weights import load_model

NUM_TOKENS = 70
PROMPT = [(7 * i * i + 3) % tiny_llama.VOCAB for i in range(NUM_TOKENS)]


class Alike:
    """Attention of every new token as if it were decoded, one row each."""

    def begin(
        self, columns: StepColumns, inverse_frequencies: torch.Tensor, cache: LayerCache
    ) -> StepAttention:
        """As `Operations.begin`, for the one sequence of these tests."""
        num_tokens = len(columns.positions)
        rows = StepColumns(
            columns.positions,
            columns.slot_mapping,
            columns.block_tables.expand(num_tokens, -1).contiguous(),
            (columns.positions + 1).int(),
            torch.arange(num_tokens + 1, dtype=torch.int32),
        )
        return NativeOperations().begin(rows, inverse_frequencies, cache)

    def stack(self, *_arguments: object) -> None:
        """Run layers one by one, as ranks do: attention is above."""


class AlikeQuantised(Alike, QuantisedOperations):
    """Weights of 4 or 8 bits."""


class AlikePlain(Alike, NativeOperations):
    """Weights of the run dtype."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough for layers to be shared among threads, and to be split unevenly."""
    with pytest.MonkeyPatch.context() as patch:
        for name, size in {"HIDDEN": 320, "INTERMEDIATE": 1088, "HEADS": 9, "KV_HEADS": 3}.items():
            patch.setattr(tiny_llama, name, size)
        return tiny_llama.write_tiny_llama(tmp_path_factory.mktemp("wide"))


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def logits(
    path: Path, bits: int, dtype: torch.dtype, chunks: list[int], ranks: OtherRanks | None = None
) -> list[torch.Tensor]:
    operations = AlikeQuantised(bits, dtype) if bits else AlikePlain()
    model = load_model(path, dtype, CPU, operations, ranks).model
    return [all_logits(model, PROMPT, chunk) for chunk in chunks]


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8, 0])
@pytest.mark.parametrize("world_size", [1, 2])
def test_decoding_prefill_and_any_chunks_give_the_same_bits(
    world_size: int, bits: int, dtype: torch.dtype, model: Path
) -> None:
    """Ranks of 2 and 1 KV groups share three threads, and take them from each other."""
    chunks = [NUM_TOKENS, 23, 1, NUM_TOKENS]

    def run(group: OtherRanks | None) -> list[torch.Tensor]:
        return logits(model, bits, dtype, chunks, group)

    found = run(None) if world_size == 1 else on_all_ranks(world_size, run)[0]
    for other in found[1:]:
        assert torch.equal(other, found[0])


@pytest.mark.parametrize("bits", [4, 8])
def test_threads_change_no_bits(bits: int, model: Path, three_threads: None) -> None:
    (shared,) = logits(model, bits, torch.bfloat16, [NUM_TOKENS])
    torch.set_num_threads(1)
    (alone,) = logits(model, bits, torch.bfloat16, [NUM_TOKENS])
    assert torch.equal(shared, alone)
