"""The head of a GGUF file is read as the `gguf` package does; damage is an error of ours."""

from contextlib import suppress
from pathlib import Path

import gguf
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gguf_writer import write_tiny_gguf
from worker_svc.errors import ModelError
from worker_svc.model.gguf_file import SkippedArray, read_gguf
from worker_svc.model.weights import load_model


def same_as_the_package(path: Path) -> None:
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    names = [name for name in theirs.fields if not name.startswith("GGUF.")]
    assert list(ours.metadata) == names
    for name in names:
        expected = theirs.fields[name].contents()
        found = ours.metadata[name]
        assert found == (SkippedArray(len(expected)) if isinstance(expected, list) else expected)
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        found_tensor = ours.tensors[tensor.name]
        assert found_tensor.shape == tuple(tensor.shape.tolist())[::-1]
        assert found_tensor.kind == tensor.tensor_type
        assert found_tensor.offset == tensor.data_offset
        assert found_tensor.num_bytes == tensor.n_bytes
    assert ours.data_start == theirs.data_offset


def test_a_small_file_is_read_as_the_package_reads_it(tmp_path: Path) -> None:
    same_as_the_package(write_tiny_gguf(tmp_path / "tiny.gguf"))


def test_the_demo_model_is_read_as_the_package_reads_it(demo_gguf: Path) -> None:
    same_as_the_package(demo_gguf)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf") / "damaged.gguf"


@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_short_is_refused(whole: Path, scratch: Path, share: float) -> None:
    data = whole.read_bytes()
    scratch.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelError, match=r"damaged.gguf"):
        read_gguf(scratch)


@given(place=st.integers(0, 3000), value=st.integers(0, 255))
def test_a_changed_byte_in_the_head_is_harmless_or_refused(
    whole: Path, scratch: Path, place: int, value: int
) -> None:
    data = bytearray(whole.read_bytes())
    data[place] = value
    scratch.write_bytes(data)
    with suppress(ModelError):
        load_model(scratch, torch.float32, torch.device("cpu"))


def test_other_files_are_told_what_they_lack(tmp_path: Path) -> None:
    path = tmp_path / "weights.gguf"
    for data, message in (
        (b"", "damaged"),
        (b"PK\x03\x04 a zip file", "does not begin with GGUF"),
        (b"GGUF\x01\0\0\0" + bytes(32), "version 1"),
        (b"GGUF\0\0\0\x03" + bytes(32), "little-endian"),
    ):
        path.write_bytes(data)
        with pytest.raises(ModelError, match=message):
            read_gguf(path)
