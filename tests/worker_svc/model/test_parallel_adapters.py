"""Ranks add their parts of adapters, and together what one worker adds."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import tiny_llama
from kernels.cpu_build import native_code
from thread_ranks import on_all_ranks
from tiny_adapter import write_adapter
from worker_svc.model import adapters
from worker_svc.model.adapters import AdapterBank
from worker_svc.model.native_operations import NativeOperations
from worker_svc.model.operations import Operations
from worker_svc.model.other_ranks import OtherRanks
from worker_svc.model.peft_checkpoint import read_checkpoint
from worker_svc.model.quantised_operations import QuantisedOperations
from worker_svc.model.torch_operations import TorchOperations
from worker_svc.model.weights import load_model
from worker_svc.runtime.plain_sequences import PlainSequences

CPU = torch.device("cpu")
# The demo model's heads: two ranks have 2 and 1 KV groups, four hold one head twice.
SIZES = {"HIDDEN": 96, "INTERMEDIATE": 192, "HEADS": 9, "KV_HEADS": 3}
ADAPTERS: dict[int, dict[str, object]] = {
    1: {"seed": 1},
    2: {"seed": 2, "rank": 3, "alpha": 6.0, "modules": ("q_proj", "v_proj", "down_proj")},
    3: {"seed": 3, "rank": 9, "use_rslora": True, "modules": ("k_proj", "up_proj", "o_proj")},
}
SLOTS = [1, 0, 2, 3, 1]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with the model, and an adapter for each slot."""
    with pytest.MonkeyPatch.context() as patch:
        for name, size in SIZES.items():
            patch.setattr(tiny_llama, name, size)
        root = tmp_path_factory.mktemp("adapters")
        tiny_llama.write_tiny_llama(root / "model")
        weights = tiny_llama.tiny_weights(0)
        for slot, what in ADAPTERS.items():
            write_adapter(root / str(slot), weights=weights, **what)  # type: ignore[arg-type]  # any
        yield root


def loaded_bank(
    places: Path, operations: Operations, ranks: OtherRanks | None
) -> tuple[PlainSequences, AdapterBank, int]:
    """Return sequences to run, the bank, and the bytes of its adapters."""
    bank, num_bytes = AdapterBank(torch.float32, CPU), 0
    loaded = load_model(places / "model", torch.float32, CPU, operations, ranks, adapters=bank)
    for slot in ADAPTERS:
        adapter = bank.prepare(*read_checkpoint(places / str(slot), bank.targets, 64))
        num_bytes += adapter.num_bytes
        bank.publish(slot, adapter)
    sequences = PlainSequences(loaded.model, [40] * len(SLOTS), torch.float32)
    return sequences, bank, num_bytes


def batch_logits(
    places: Path, operations: Operations, ranks: OtherRanks | None = None
) -> torch.Tensor:
    """Return logits of five rows with three adapters and none, in two steps."""
    sequences, bank, _ = loaded_bank(places, operations, ranks)
    found = []
    for start, end in ((0, 20), (20, 21)):
        counts = np.full(len(SLOTS), end - start, dtype=np.int32)
        bank.begin(np.array(SLOTS, dtype=np.int32), counts)
        # The same tokens in all rows: only adapters make them differ.
        ids = [(7 * place * place + 3) % tiny_llama.VOCAB for place in range(start, end)]
        found.append(sequences._model.logits(sequences.run([ids] * len(SLOTS))))
    return torch.cat(found)


@pytest.mark.parametrize("operations", [TorchOperations, NativeOperations])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_logits_of_a_mixed_batch_are_those_of_one_worker(
    world_size: int, operations: type[Operations], places: Path
) -> None:
    whole = batch_logits(places, operations())
    last = whole[-len(SLOTS) :]
    assert not torch.allclose(last[0], last[1], atol=0.1)
    torch.testing.assert_close(last[0], last[4], atol=1e-4, rtol=1e-3)
    found = on_all_ranks(world_size, lambda group: batch_logits(places, operations(), group))[0]
    torch.testing.assert_close(found, whole, atol=1e-3, rtol=1e-3)
    assert torch.equal(found.argmax(-1), whole.argmax(-1))


@pytest.mark.skipif(native_code() is None, reason="this machine compiles no C++")
def test_ranks_leave_torch_nothing_to_add(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("torch adds an adapter")

    monkeypatch.setattr(adapters, "fuse", refused)
    assert on_all_ranks(2, lambda group: batch_logits(places, NativeOperations(), group))
    with pytest.raises(AssertionError, match="torch adds an adapter"):
        batch_logits(places, TorchOperations())


def test_ranks_add_adapters_to_quantised_layers_as_well(places: Path) -> None:
    """Parts of heads are no whole groups of 32 inputs, so weights are rounded otherwise."""
    operations = QuantisedOperations(8, torch.float32)
    whole = batch_logits(places, operations)
    found = on_all_ranks(
        2, lambda group: batch_logits(places, QuantisedOperations(8, torch.float32), group)
    )[0]
    assert float((found - whole).norm() / whole.norm()) < 0.05


def test_a_rank_holds_its_part_of_an_adapter_alone(places: Path) -> None:
    """What both have: a of what is split by outputs, b of what is split by inputs."""
    whole = loaded_bank(places, NativeOperations(), None)[2]
    parts = on_all_ranks(2, lambda group: loaded_bank(places, NativeOperations(), group)[2])
    assert parts[0] > parts[1]
    assert max(parts) < 0.8 * whole
    assert whole < sum(parts) < 1.5 * whole
