"""On a GPU's kernels, here interpreted, a checkpoint's values of few bits multiply as they are."""

from collections.abc import Callable, Mapping
from operator import attrgetter
from pathlib import Path

import pytest
import torch

from kernels import reference_quantised
from launching import launching, reference_sampler
from paged_logits import CPU, all_logits
from plan_driver import PlanDriver, Sequence
from quantised_checkpoints import BLOCK, FORMATS, Format, awq, gptq, write_quantised
from thread_ranks import on_all_ranks
from tiny_families import SHAPE, VOCAB, write_family
from tiny_llama import write_tiny_llama
from worker_svc.model.kept_linear import KeptLinear
from worker_svc.model.llama import Llama
from worker_svc.model.operations import Linear
from worker_svc.model.other_ranks import OtherRanks, SummedLinear
from worker_svc.model.torch_operations import TorchLinear
from worker_svc.model.triton_operations import TritonOperations
from worker_svc.model.weights import LoadedModel, load_model
from worker_svc.runtime.start_up import RunnerLimits, make_runner
from worker_svc.service.process_group import ProcessGroup

PROMPT = [(7 * i * i + 3) % VOCAB for i in range(5)]
# Their groups of 40 inputs are no multiple of 16; real files have 128.
IN_BLOCKS = {name for name in FORMATS if name.endswith("in blocks")}
LINEARS = ("qkv", "output", "mlp.down")


def load(path: Path, ranks: OtherRanks | None = None) -> LoadedModel:
    return load_model(path, torch.float32, CPU, TritonOperations(), ranks)


def checkpoint(tmp_path: Path, form: Format) -> tuple[Path, Path]:
    """Return the quantised one, and the plain one that it stands for."""
    plain = write_tiny_llama(tmp_path / "plain")
    return write_quantised(plain, tmp_path / "quantised", form), plain


def weight_of(linear: Linear) -> torch.Tensor:
    """Return what a linear layer multiplies by, [O, I]."""
    part = linear._part if isinstance(linear, SummedLinear) else linear
    if isinstance(part, TorchLinear):
        return part.weight
    assert isinstance(part, KeptLinear)
    dense = reference_quantised.kept_weight(part.weight)
    return dense if part.order is None else dense[:, part.order.argsort()]


def weights_of(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    assert isinstance(loaded.model, Llama)
    return {
        f"{number} {name}": weight_of(attrgetter(name)(layer))
        for number, layer in enumerate(loaded.model._layers)
        for name in LINEARS
    }


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


@pytest.mark.parametrize("name", FORMATS.keys() - IN_BLOCKS)
def test_layers_hold_the_values_of_the_file(name: str, tmp_path: Path) -> None:
    path, plain = checkpoint(tmp_path, FORMATS[name])
    loaded = load(path)
    assert loaded.dequantised is None
    assert loaded.kept is not None
    assert (loaded.kept.num_matrices, loaded.kept.refused) == (14, {})
    assert_same(weights_of(loaded), weights_of(load(plain)))


def test_weights_take_the_bytes_of_their_bits(tmp_path: Path) -> None:
    path, plain = checkpoint(tmp_path, awq(32))
    in_layers = 2 * (64 * 128 + 64 * 64 + 3 * 64 * 128)
    others = 4 * (2 * 272 * 64 + 5 * 64)
    # Panels of 128 inputs are filled up where there are 64: all but `down`, half of the words.
    filled = 2 * (64 * 128 + 64 * 64 + 2 * 64 * 128)
    expected = (in_layers + filled) // 2 + (in_layers + filled) // 32 * 3
    loaded = load(path)
    assert loaded.kept is not None
    assert loaded.kept.num_bytes == expected
    assert loaded.weight_bytes == expected + others
    assert load(plain).weight_bytes == 4 * in_layers + others


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, Format], tuple[Path, Path]]:
    """Return what writes checkpoints of one layer whose heads GPU kernels serve."""
    monkeypatch.setitem(SHAPE, "head_dim", 64)
    monkeypatch.setitem(SHAPE, "num_hidden_layers", 1)

    def write(tmp_path: Path, form: Format) -> tuple[Path, Path]:
        plain = tmp_path / "plain"
        write_family("qwen3 with biases", plain)
        return write_quantised(plain, tmp_path / "quantised", form), plain

    return write


@pytest.mark.parametrize("name", ["awq", "gptq in order of activations", "int8", "fp8"])
def test_logits_are_those_of_the_dequantised_model(
    name: str, small: Callable[[Path, Format], tuple[Path, Path]], tmp_path: Path
) -> None:
    path, plain = small(tmp_path, FORMATS[name])
    expected = all_logits(load_model(plain, torch.float32, CPU).model, PROMPT)
    loaded = load(path)
    assert loaded.dequantised is None
    found = all_logits(loaded.model, PROMPT)
    torch.testing.assert_close(found, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-5)


def test_in_bf16_logits_are_as_near_as_those_of_dequantised_weights(
    small: Callable[[Path, Format], tuple[Path, Path]], tmp_path: Path
) -> None:
    path, plain = small(tmp_path, FORMATS["awq"])
    exact = all_logits(load_model(plain, torch.float32, CPU).model, PROMPT)
    rounded = all_logits(load_model(plain, torch.bfloat16, CPU).model, PROMPT)
    kept = load_model(path, torch.bfloat16, CPU, TritonOperations()).model
    error = (all_logits(kept, PROMPT) - exact).norm()
    # Weights are not rounded, but the interpreter truncates where torch rounds.
    assert error < 2 * (rounded - exact).norm()


def test_launched_steps_give_the_tokens_of_the_dequantised_model(
    small: Callable[[Path, Format], tuple[Path, Path]], tmp_path: Path
) -> None:
    path, plain = small(tmp_path, FORMATS["gptq"])
    loaded = load(path)
    limits = RunnerLimits(block_size=8, max_num_seqs=2, num_gpu_blocks_override=20)
    runner, report = make_runner(loaded, limits)
    assert report.weight_bytes == loaded.weight_bytes
    with reference_sampler():
        found = PlanDriver(launching(loaded, runner)).generate(Sequence(PROMPT), 3)
    tokens, model = list(PROMPT), load_model(plain, torch.float32, CPU).model
    for _ in range(3):
        tokens.append(int(all_logits(model, tokens)[-1].argmax()))
    assert found == tokens[len(PROMPT) :]


@pytest.mark.parametrize("name", sorted(IN_BLOCKS))
def test_what_does_not_fit_is_dequantised_and_the_reason_told(name: str, tmp_path: Path) -> None:
    assert BLOCK[1] % 16
    path, plain = checkpoint(tmp_path, FORMATS[name])
    loaded = load(path)
    assert loaded.dequantised is not None
    assert loaded.dequantised.num_matrices == 14
    assert loaded.kept is not None
    reason = "inputs that share a scale are not in whole groups of 16 or more"
    assert loaded.kept.refused == {reason: 14}
    assert_same(weights_of(loaded), weights_of(load(plain)))


def test_matrices_in_different_orders_are_dequantised_and_the_reason_told(tmp_path: Path) -> None:
    def reorder(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.1.self_attn.k_proj.g_idx"
        tensors[name] = tensors[name].roll(1)

    plain = write_tiny_llama(tmp_path / "plain")
    form = gptq(desc_act=True)
    loaded = load(write_quantised(plain, tmp_path / "quantised", form, reorder))
    assert loaded.kept is not None
    reason = "matrices of one layer have their inputs in different orders"
    assert loaded.kept.refused == {reason: 3}
    assert loaded.kept.num_matrices == 11


@pytest.mark.parametrize("name", ["awq", "gptq", "W8A16", "fp8 per channel"])
def test_ranks_keep_their_parts(name: str, tmp_path: Path) -> None:
    path, plain = checkpoint(tmp_path, FORMATS[name])

    def run(group: ProcessGroup) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        kept = load(path, group)
        assert kept.dequantised is None
        return weights_of(kept), weights_of(load(plain, group))

    parts = on_all_ranks(2, run)
    for found, expected in parts:
        assert_same(found, expected)
    assert not torch.equal(parts[0][0]["0 mlp.down"], parts[1][0]["0 mlp.down"])


def test_of_inputs_in_order_of_activations_ranks_keep_what_is_whole(tmp_path: Path) -> None:
    path, plain = checkpoint(tmp_path, FORMATS["gptq in order of activations"])

    def run(group: ProcessGroup) -> dict[str, int]:
        loaded = load(path, group)
        assert_same(weights_of(loaded), weights_of(load(plain, group)))
        assert loaded.kept is not None
        return dict(loaded.kept.refused)

    # Those whose inputs are split: a rank has an uneven part of each group.
    reason = "inputs that share a scale are not in whole groups of 16 or more"
    assert on_all_ranks(2, run) == [{reason: 4}] * 2


def test_experts_are_kept_too(tmp_path: Path) -> None:
    write_family("mixtral", tmp_path / "plain")
    path = write_quantised(tmp_path / "plain", tmp_path / "quantised", FORMATS["awq"])
    loaded = load(path)
    assert loaded.dequantised is None
    assert loaded.kept is not None
    assert loaded.kept.num_matrices == 3 * (4 + 3 * 4)
