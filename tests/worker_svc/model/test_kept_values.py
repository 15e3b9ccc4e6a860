"""A quantised checkpoint's own values multiply on a CPU, none of them rounded anew."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kernels.quantised_linear import QuantisedLinear, QuantisedWeight
from paged_logits import CPU, all_logits
from quantised_checkpoints import FORMATS, Format, awq, gptq, int8, packed_rows, write_quantised
from thread_ranks import on_all_ranks
from tiny_llama import write_tiny_llama
from worker_svc.model.kept_values import keep, stacked
from worker_svc.model.llama import Llama
from worker_svc.model.quantised_matrix import QuantisedMatrix
from worker_svc.model.quantised_operations import QuantisedOperations
from worker_svc.model.weights import LoadedModel, load_model
from worker_svc.service.process_group import ProcessGroup

PROMPT = [(7 * i * i + 3) % 256 for i in range(24)]

KEPT: dict[str, Format] = {
    "awq": awq(32),
    "awq with one group": awq(-1),
    "gptq": gptq(group_size=64),
    "gptq asymmetric": gptq(group_size=32, sym=False),
    "gptq of 8 bits": gptq(8, 64),
    "W4A16": packed_rows(group_size=32),
    "W4A16 asymmetric": packed_rows(group_size=64, symmetric=False),
    "W8A16": packed_rows(8, -1),
    "int8": int8(),
    "int8 asymmetric": int8(symmetric=False),
}


def load(path: Path, bits: int) -> LoadedModel:
    return load_model(path, torch.float32, CPU, QuantisedOperations(bits, torch.float32))


def checkpoint(tmp_path: Path, form: Format) -> tuple[Path, Path]:
    """Return the quantised one, and the plain one that it stands for."""
    plain = write_tiny_llama(tmp_path / "plain")
    return write_quantised(plain, tmp_path / "quantised", form), plain


@pytest.mark.parametrize("name", KEPT)
def test_layers_hold_the_values_of_the_file(name: str, tmp_path: Path) -> None:
    path, plain = checkpoint(tmp_path, KEPT[name])
    loaded = load(path, 8)
    assert loaded.dequantised is None
    model, weights = loaded.model, load_file(plain / "model.safetensors")
    assert isinstance(model, Llama)
    for number, layer in enumerate(model._layers):
        base = f"model.layers.{number}"
        qkv = torch.cat([weights[f"{base}.self_attn.{part}_proj.weight"] for part in "qkv"])
        for linear, weight in (
            (layer.qkv, qkv),
            (layer.mlp.down, weights[f"{base}.mlp.down_proj.weight"]),
        ):
            # 1 alone in its row stays 1 when rows are rounded to 8 bits.
            found = linear(torch.eye(weight.shape[1])).T
            torch.testing.assert_close(found, weight, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["awq", "int8"])
def test_logits_are_off_by_the_rounding_of_hidden_states_alone(name: str, tmp_path: Path) -> None:
    path, plain = checkpoint(tmp_path, KEPT[name])
    expected = all_logits(load_model(plain, torch.float32, CPU).model, PROMPT)
    found = all_logits(load(path, 8).model, PROMPT)
    assert (found - expected).norm() < 0.03 * expected.norm()


def test_they_take_the_bytes_of_their_bits(tmp_path: Path) -> None:
    path, _ = checkpoint(tmp_path, gptq(group_size=32))
    in_layers = 2 * (64 * 128 + 64 * 64 + 3 * 64 * 128)
    # The head of 8 bits, whose rows are laid out 32 at a time.
    others = 4 * (272 * 64 + 5 * 64) + 288 * 64 * 17 // 16
    # 4 bits and a scale of 16 bits for each 32: one zero point for all is no cost.
    assert load(path, 4).weight_bytes == in_layers * 9 // 16 + others
    assert load(path, 8).weight_bytes == load(path, 4).weight_bytes


@pytest.mark.parametrize("name", ["int8", "gptq in order of activations", "fp8"])
def test_what_does_not_fit_is_rounded_as_plain_weights_are(name: str, tmp_path: Path) -> None:
    path, plain = checkpoint(tmp_path, FORMATS[name])
    found = all_logits(load(path, 4).model, PROMPT)
    assert torch.equal(found, all_logits(load(plain, 4).model, PROMPT))
    assert load(path, 4).dequantised is not None


def test_ranks_keep_their_parts(tmp_path: Path) -> None:
    path, _ = checkpoint(tmp_path, awq(32))

    def run(group: ProcessGroup) -> tuple[torch.Tensor, bool]:
        operations = QuantisedOperations(4, torch.float32)
        loaded = load_model(path, torch.float32, CPU, operations, group)
        return all_logits(loaded.model, PROMPT), loaded.dequantised is None

    found, is_kept = on_all_ranks(2, run)[0]
    whole = all_logits(load(path, 4).model, PROMPT)
    assert is_kept
    torch.testing.assert_close(found, whole, atol=0.02 * float(whole.abs().max()), rtol=0)


def matrix(zeros: torch.Tensor, column_of: torch.Tensor) -> QuantisedMatrix:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 16, (6, len(column_of)), generator=generator, dtype=torch.uint8)
    scales = torch.rand(zeros.shape, generator=generator).half().float()
    return QuantisedMatrix(values, scales, zeros, torch.arange(6), column_of)


@pytest.mark.parametrize("zero", [0, 8, 15, 16, -3])
@pytest.mark.parametrize("columns", [32, 80, 100])
def test_values_are_kept_bit_for_bit(zero: int, columns: int) -> None:
    given = matrix(torch.full((6, 2), float(zero)), torch.arange(columns) // 64)
    kept = keep(given, 4)
    assert kept is not None
    kept.check()
    assert torch.equal(kept.dequantise(), given.dequantise(torch.float32))
    assert (kept.minimums is None) == (0 <= zero < 16)


def test_a_group_with_two_scales_is_not_kept() -> None:
    zeros = torch.full((6, 2), 8.0)
    assert keep(matrix(zeros, torch.arange(64) // 48), 4) is None
    assert keep(matrix(zeros, torch.arange(64) // 32), 4) is not None


def test_matrices_with_other_zero_points_stand_above_one_another() -> None:
    columns = torch.arange(64) // 32
    given = [matrix(torch.full((6, 2), zero), columns) for zero in (8.0, 7.0, 16.0)]
    kept = [keep(one, 4) for one in given]
    parts = [one for one in kept if isinstance(one, QuantisedWeight)]
    whole = torch.cat([one.dequantise(torch.float32) for one in given])
    assert torch.equal(stacked(parts).dequantise(), whole)
    assert stacked(parts[:1]).zero_point == 8
    linear = QuantisedLinear(stacked(parts), dtype=torch.float32)
    torch.testing.assert_close(linear(torch.eye(64)).T, whole, atol=1e-6, rtol=1e-6)
