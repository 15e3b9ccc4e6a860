"""A GGUF file gives the weights it was made of, and the tokens that `transformers` gives."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from gguf_writer import write_tiny_gguf
from tiny_llama import HEAD_DIM, tiny_weights
from worker_svc.errors import ModelError
from worker_svc.model.checkpoint import read_model_config
from worker_svc.model.gguf_config import config_from_gguf
from worker_svc.model.gguf_file import read_gguf
from worker_svc.model.gguf_weights import GgufWeights
from worker_svc.model.model_config import RopeScaling
from worker_svc.model.rope import inverse_frequencies
from worker_svc.model.weights import load_model

CPU = torch.device("cpu")
Kind = gguf.GGMLQuantizationType


def read_all(path: Path) -> dict[str, torch.Tensor]:
    file = read_gguf(path)
    with GgufWeights(file, config_from_gguf(file)) as weights:
        return {name: weights.read(name, torch.float32) for name in weights.names}


def test_unpacked_weights_come_back_exactly(tmp_path: Path) -> None:
    found = read_all(write_tiny_gguf(tmp_path / "tiny.gguf"))
    expected = tiny_weights(0)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("kind", "error"),
    # The largest error relative to a block's largest weight: half a step of what is stored.
    [(Kind.F16, 2**-11), (Kind.BF16, 2**-8), (Kind.Q8_0, 0.6 / 127), (Kind.Q4_1, 1.2 / 15)],
)
def test_packed_weights_come_back_nearly(kind: Kind, error: float, tmp_path: Path) -> None:
    found = read_all(write_tiny_gguf(tmp_path / "tiny.gguf", kind))
    for name, expected in tiny_weights(0).items():
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(
            found[name], expected, rtol=0, atol=error * float(expected.abs().max())
        )


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0, Kind.Q4_1])
def test_a_part_is_that_of_the_whole(kind: Kind, tmp_path: Path) -> None:
    file = read_gguf(write_tiny_gguf(tmp_path / "tiny.gguf", kind))
    rows, columns = range(HEAD_DIM, 2 * HEAD_DIM), range(5, 23)
    with GgufWeights(file, config_from_gguf(file)) as weights:
        for name in sorted(weights.names):
            whole = weights.read(name, torch.float32)
            assert weights.shape(name) == list(whole.shape)
            assert torch.equal(
                weights.read(name, torch.float32, rows), whole[rows.start : rows.stop]
            )
            if whole.dim() == 2:
                part = whole[rows.start : rows.stop, columns.start : columns.stop]
                assert torch.equal(weights.read(name, torch.float32, rows, columns), part)


@pytest.mark.parametrize(
    "kind",
    [
        *(Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.IQ4_NL, Kind.IQ4_XS),
        *(Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K),
    ],
    ids=lambda kind: kind.name,
)
def test_a_slab_at_a_time_gives_what_the_package_gives_at_once(
    kind: gguf.GGMLQuantizationType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker_svc.model.gguf_weights._SLAB_ELEMENTS", 3 * 512)
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    packed = np.random.default_rng(0).integers(0, 256, (35, 512 // block * block_bytes), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("output.weight", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = config_from_gguf(read_gguf(write_tiny_gguf(tmp_path / "tiny.gguf")))
    one = read_gguf(tmp_path / "one.gguf")
    # Random bytes are sometimes scales that are no numbers.
    with GgufWeights(one, config) as weights, np.errstate(all="ignore"):
        found = weights.read("lm_head.weight", torch.float32)
        expected = torch.from_numpy(gguf.dequantize(packed, kind))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_a_kind_that_cannot_be_unpacked_is_named(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", Kind.Q8_0)
    # Another kind with a row of the same number of bytes.
    data = bytearray(path.read_bytes())
    name = b"blk.0.attn_q.weight"
    kind_at = data.index(name) + len(name) + 4 + 2 * 8
    assert data[kind_at] == Kind.Q8_0
    data[kind_at] = Kind.Q8_1
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"blk.0.attn_q.weight is packed as Q8_1"):
        load_model(path, torch.float32, CPU)


def test_rope_divisors_stretch_as_llama3_does(tmp_path: Path) -> None:
    """Converters write llama3's stretching as a tensor of divisors, not as metadata."""
    scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 64)
    plain = inverse_frequencies(HEAD_DIM, 10000.0, None)
    stretched = inverse_frequencies(HEAD_DIM, 10000.0, scaling)
    assert not torch.equal(plain, stretched)
    path = write_tiny_gguf(tmp_path / "tiny.gguf", tensors={"rope_freqs.weight": plain / stretched})
    model = load_model(path, torch.bfloat16, CPU).model
    torch.testing.assert_close(model._inverse_frequencies[0], stretched)


def test_linear_scaling_is_read(tmp_path: Path) -> None:
    path = write_tiny_gguf(
        tmp_path / "tiny.gguf",
        metadata={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
    )
    assert read_model_config(path).rope_scaling == RopeScaling("linear", 4.0)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "gemma"}, "architecture is 'gemma'.*known: llama, qwen2, qwen3"),
        ({"split.count": 2}, "one part of a split GGUF"),
        ({"llama.attention.sliding_window": 8}, "sliding_window is 8, which is not supported"),
        (
            {"llama.expert_count": 8, "llama.expert_used_count": 9},
            "num_experts_per_tok is 9, must be at most",
        ),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn'.*none, linear"),
        ({"llama.rope.dimension_count": 8}, "dimension_count is 8, must be 16"),
        ({"llama.attention.head_count": 3}, "must divide"),
    ],
)
def test_what_would_change_the_numbers_is_refused(
    metadata: dict[str, int | float | str], message: str, tmp_path: Path
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", metadata=metadata)
    with pytest.raises(ModelError, match=message):
        load_model(path, torch.float32, CPU)
