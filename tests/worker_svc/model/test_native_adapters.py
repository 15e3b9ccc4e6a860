"""Layers that adapters change stay in one native call, and give what layers give one by one."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernels import packed_linear
from kernels.cpu_build import native_code
from kernels.cpu_decoder import Decoder
from paged_logits import CPU, all_logits
from tiny_families import FAMILIES, VOCAB, write_family
from tiny_llama import write_tiny_llama
from worker_svc.errors import AdapterError
from worker_svc.model import adapters, native_operations, native_stack
from worker_svc.model.adapters import AdapterBank, LowRankMatrix
from worker_svc.model.causal_model import CausalModel
from worker_svc.model.native_operations import NativeOperations
from worker_svc.model.operations import Operations, States
from worker_svc.model.quantised_operations import QuantisedOperations
from worker_svc.model.torch_operations import TorchOperations
from worker_svc.model.weights import load_model
from worker_svc.runtime.plain_sequences import PlainSequences

pytestmark = pytest.mark.skipif(native_code() is None, reason="this machine compiles no C++")

PROMPT = [(7 * i * i + 3) % VOCAB for i in range(75)]
RANKS = {1: 4, 2: 17, 3: 64}
"""Of the adapters, by slot."""


def fill(bank: AdapterBank, slots: Sequence[int] = tuple(RANKS), generation: int = 1) -> None:
    """Publish adapters, of which every second leaves two kinds of matrices as they are."""
    for slot in slots:
        draw = torch.Generator().manual_seed(slot + 10 * generation)
        rank = RANKS[slot]
        matrices = {
            name: LowRankMatrix(
                torch.randn(rank, len(target.columns.mine), generator=draw) * 0.2,
                torch.randn(len(target.rows.mine), rank, generator=draw) * (1.0 / rank**0.5),
            )
            for name, target in bank.targets.items()
            if slot % 2 or not name.endswith(("k_proj", "gate_proj"))
        }
        bank.publish(slot, bank.prepare(generation, matrices))


def loaded(
    path: Path, operations: Operations, dtype: torch.dtype = torch.float32
) -> tuple[CausalModel, AdapterBank]:
    bank = AdapterBank(dtype, CPU)
    model = load_model(path, dtype, CPU, operations, adapters=bank).model
    fill(bank)
    return model, bank


def begin(bank: AdapterBank, slots: Sequence[int], counts: Sequence[int]) -> None:
    bank.begin(np.array(slots, np.int32), np.array(counts, np.int32))


@pytest.fixture
def native_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each call of all layers."""
    num_tokens, run = [], Decoder.run

    def counted(self: Decoder, hidden: torch.Tensor, *others: Any) -> torch.Tensor:
        num_tokens.append(len(hidden))
        return run(self, hidden, *others)

    monkeypatch.setattr(Decoder, "run", counted)
    return num_tokens


@pytest.mark.parametrize("name", FAMILIES)
def test_all_layers_of_a_family_run_in_one_call_with_adapters(
    name: str, tmp_path: Path, native_calls: list[int]
) -> None:
    write_family(name, tmp_path)
    exact, bank = loaded(tmp_path, TorchOperations())
    begin(bank, [1, 0, 2], [10, 5, 10])
    expected = all_logits(exact, PROMPT, 25)
    model, bank = loaded(tmp_path, NativeOperations())
    begin(bank, [1, 0, 2], [10, 5, 10])
    torch.testing.assert_close(all_logits(model, PROMPT, 25), expected, atol=1e-3, rtol=1e-3)
    assert native_calls == [25, 25, 25]
    begin(bank, [0], [25])
    assert not torch.allclose(all_logits(model, PROMPT, 25), expected, atol=0.1)


@pytest.mark.parametrize("bits", [4, 8])
def test_layers_of_few_bits_run_in_one_call_with_adapters(
    bits: int, tmp_path: Path, native_calls: list[int]
) -> None:
    write_family("gemma3", tmp_path)
    model, bank = loaded(tmp_path, QuantisedOperations(bits, torch.bfloat16), torch.bfloat16)
    exact, bank_of_exact = loaded(tmp_path, TorchOperations())
    found = {}
    for slot in (0, 3):
        begin(bank, [slot], [len(PROMPT)])
        begin(bank_of_exact, [3], [len(PROMPT)])
        theirs = all_logits(exact, PROMPT)
        both = torch.stack((all_logits(model, PROMPT).flatten(), theirs.flatten()))
        found[slot] = float(torch.corrcoef(both)[0, 1])
    assert native_calls == [75, 75]
    assert found[3] > {4: 0.95, 8: 0.99}[bits]
    assert found[0] < 0.6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_row_gives_does_not_depend_on_the_rows_beside_it(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    write_tiny_llama(tmp_path)
    model, bank = loaded(tmp_path, NativeOperations(), dtype)
    slots = [2, 0, 1, 3, 2, 0, 1]
    # A prompt's chunk for some, a token for others, and then one for each.
    prompts = [PROMPT[: 1 if row % 3 else 14 + row] for row in range(len(slots))]

    def hidden(rows: Sequence[int]) -> list[torch.Tensor]:
        sequences = PlainSequences(model, [40] * len(rows), dtype)
        out = []
        for tokens in ([prompts[row] for row in rows], [[row + 1] for row in rows]):
            counts = [len(each) for each in tokens]
            begin(bank, [slots[row] for row in rows], counts)
            out.append(torch.split(sequences.run(tokens), counts))
        return [torch.cat((first, second)) for first, second in zip(*out, strict=True)]

    together = hidden(range(len(slots)))
    for row, expected in enumerate(together):
        assert torch.equal(hidden([row])[0], expected)
    assert not torch.equal(together[1][:1], together[4][:1])


@pytest.mark.parametrize("read", [[], [0], [3, 4, 9], list(range(10))])
def test_tokens_that_are_read_are_as_if_all_were(read: list[int], tmp_path: Path) -> None:
    write_family("qwen3", tmp_path)
    model, bank = loaded(tmp_path, NativeOperations(), torch.bfloat16)
    begin(bank, [1, 0, 2], [4, 1, 5])
    whole = hidden_of(model, None)
    found = hidden_of(model, torch.tensor(read, dtype=torch.int64))
    assert torch.equal(found[read], whole[read])
    # And the step behind it sees all its tokens again.
    assert torch.equal(hidden_of(model, None), whole)


def hidden_of(model: CausalModel, read: torch.Tensor | None) -> torch.Tensor:
    """Return the hidden states of ten tokens of one sequence."""
    sequences = PlainSequences(model, [16], model.dtype)
    forward = type(model).forward

    def with_read(**given: Any) -> States:
        return forward(model, **given, read=read)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "forward", lambda _, **given: with_read(**given))
        return sequences.run([PROMPT[:10]])


def test_a_step_of_another_size_than_was_told_is_refused(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    model, bank = loaded(tmp_path, NativeOperations())
    begin(bank, [1], [10])
    with pytest.raises(ValueError, match="75 tokens; adapters were told of another number"):
        all_logits(model, PROMPT)


def test_steps_go_on_beside_adapters_that_come_and_go(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    model, bank = loaded(tmp_path, NativeOperations(), torch.bfloat16)

    def step() -> torch.Tensor:
        begin(bank, [1, 0], [40, 35])
        bank_of_others.set()
        return all_logits(model, PROMPT)

    done, bank_of_others = threading.Event(), threading.Event()
    changes: list[int] = []

    def come_and_go() -> None:
        bank_of_others.wait(10.0)
        generation = 2
        while not done.is_set():
            fill(bank, [2, 3], generation)
            bank.drop(2)
            generation += 1
            changes.append(generation)

    expected = step()
    other = threading.Thread(target=come_and_go)
    other.start()
    try:
        for _ in range(30):
            assert torch.equal(step(), expected)
            # One that is gone when its step runs, as when its last row has ended meanwhile.
            begin(bank, [1, 0], [40, 35])
            held = bank._loaded[1]
            bank.drop(1)
            bank.publish(1, held)
    finally:
        done.set()
        other.join(10.0)
    assert len(changes) > 1
    assert not bank.has(2)


def test_an_adapter_that_leaves_its_dtype_is_refused(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    _, bank = loaded(tmp_path, NativeOperations(), torch.float16)
    name, target = next(iter(bank.targets.items()))
    a = torch.ones(2, len(target.columns.mine))
    b = torch.full((len(target.rows.mine), 2), 1e5)
    with pytest.raises(AdapterError, match=r"not all is finite in torch\.float16"):
        bank.prepare(1, {name: LowRankMatrix(a, b)})


def test_without_native_code_torch_adds_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native_calls: list[int]
) -> None:
    write_family("gemma3", tmp_path)
    model, bank = loaded(tmp_path, NativeOperations())
    begin(bank, [1, 0, 2], [10, 5, 60])
    expected = all_logits(model, PROMPT)
    for module in (adapters, packed_linear, native_operations, native_stack):
        monkeypatch.setattr(module, "native_code", lambda: None)
    model, bank = loaded(tmp_path, NativeOperations())
    begin(bank, [1, 0, 2], [10, 5, 60])
    torch.testing.assert_close(all_logits(model, PROMPT), expected, atol=1e-3, rtol=1e-3)
    assert native_calls == [75]
