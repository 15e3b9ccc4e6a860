"""A header is what the `gguf` package wrote; a broken file is told as the operator's fault."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from scheduler_svc.errors import ConfigError
from scheduler_svc.service.text.gguf_header import read_gguf_header


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("small", 200)
    writer.add_int8("small.signed", -100)
    writer.add_uint16("medium", 60_000)
    writer.add_int16("medium.signed", -30_000)
    writer.add_uint32("count", 4_000_000_000)
    writer.add_int32("count.signed", -2_000_000_000)
    writer.add_uint64("large", 2**63)
    writer.add_int64("large.signed", -(2**62))
    writer.add_float32("ratio", 0.5)
    writer.add_float64("ratio.exact", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "grüße")
    writer.add_array("texts", ["a", "", "日本"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_tensor("token_embd.weight", np.zeros((7, 4), dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.zeros(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_every_kind_of_value_is_read(file: Path) -> None:
    header = read_gguf_header(file)
    fields = header.fields
    integers = {
        "small": 200,
        "small.signed": -100,
        "medium": 60_000,
        "medium.signed": -30_000,
        "count": 4_000_000_000,
        "count.signed": -2_000_000_000,
        "large": 2**63,
        "large.signed": -(2**62),
    }
    assert {key: fields.integer(key) for key in integers} == integers
    assert (fields.number("ratio"), fields.number("ratio.exact")) == (0.5, 0.1)
    assert fields.number("small") == 200.0
    assert fields.flag("yes") is True
    assert fields.text("text") == "grüße"
    assert fields.texts("texts") == ["a", "", "日本"]
    assert fields.integers("numbers") == [1, 2, 3]
    assert fields.text("absent") is None
    assert header.tensor_shapes == {"token_embd.weight": (4, 7), "output_norm.weight": (4,)}


def test_the_demo_header_is_what_the_gguf_package_reads(demo_gguf: Path) -> None:
    header = read_gguf_header(demo_gguf)
    reader = gguf.GGUFReader(demo_gguf)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF."):
            assert header.fields.get(key) == field.contents(), key
    assert header.tensor_shapes == {
        tensor.name: tuple(tensor.shape.tolist()) for tensor in reader.tensors
    }


def test_a_file_cut_anywhere_in_its_header_is_refused(file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    cut = tmp_path / "cut.gguf"
    # The tensors' 128 bytes and padding stand at the end; the header needs all before.
    for length in range(len(whole) - 256):
        cut.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"cut\.gguf: no readable GGUF file"):
            read_gguf_header(cut)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"PK\x03\x04" + bytes(60), "it begins with b'PK"),
        (b"GGUF\x01\0\0\0" + bytes(60), r"version 1, must be one of \(2, 3\)"),
        (b"GGUF\x03\0\0\0" + bytes(8) + b"\xff" * 40, "inside its header"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=complaint):
        read_gguf_header(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.gguf: No such file"):
        read_gguf_header(tmp_path / "absent.gguf")


@pytest.mark.parametrize("method", ["flag", "integer", "number", "integers", "texts"])
def test_a_value_of_another_kind_is_refused(file: Path, method: str) -> None:
    fields = read_gguf_header(file).fields
    with pytest.raises(ConfigError, match="text is 'grüße', must be "):
        getattr(fields, method)("text")
    with pytest.raises(ConfigError, match="yes is True, must be a text"):
        fields.text("yes")
    with pytest.raises(ConfigError, match="absent is missing"):
        fields.required(fields.text, "absent")
