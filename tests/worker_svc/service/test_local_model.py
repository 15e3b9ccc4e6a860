"""The model of a worker says at loading what its quantised weights cost."""

import io
import json
from pathlib import Path

from quantised_checkpoints import awq, write_quantised
from tiny_llama import write_tiny_llama
from worker_svc.service.local_model import LocalModel, LocalSettings
from worker_svc.service.logs import make_logger


def lines_of_loading(path: Path, quantization: str = "none") -> list[dict[str, object]]:
    """Return the log lines that speak of weights of few bits."""
    stream = io.StringIO()
    settings = LocalSettings(
        model_path=str(path),
        device="cpu",
        dtype="bfloat16",
        kv_cache_dtype="auto",
        attention_backend="auto",
        kv_cache_memory_bytes=None,
        gpu_memory_utilization=0.92,
        num_gpu_blocks_override=None,
        quantization=quantization,
    )
    LocalModel(settings, make_logger(stream, "json", "info")).load()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    return [line for line in lines if line["event"].startswith("quantised weights")]


def test_memory_of_dequantised_and_of_kept_weights_is_told(tmp_path: Path) -> None:
    plain = write_tiny_llama(tmp_path / "plain")
    path = write_quantised(plain, tmp_path / "quantised", awq(32))
    num_weights = 2 * (64 * 128 + 64 * 64 + 3 * 64 * 128)
    [line] = lines_of_loading(path)
    assert line["quant_method"] == "awq"
    assert line["matrices"] == 14
    assert line["bytes_in_file"] == num_weights // 2
    assert line["bytes_if_dequantised"] == num_weights * 2
    assert line["dtype"] == "bfloat16"
    assert line["reasons"] == ""
    [line] = lines_of_loading(path, "int4")
    assert line["event"] == "quantised weights are kept"
    assert line["matrices"] == 14
    # 4 bits, and for each 32 weights a scale and a minimum in fp32.
    assert line["bytes"] == num_weights * 3 // 4
    assert line["bytes_if_plain"] == num_weights * 2
    assert lines_of_loading(plain) == []


def test_why_values_could_not_be_kept_is_told(tmp_path: Path) -> None:
    plain = write_tiny_llama(tmp_path / "plain")
    path = write_quantised(plain, tmp_path / "quantised", awq(16))
    [line] = lines_of_loading(path, "int4")
    assert "dequantised" in str(line["event"])
    reason = "inputs that share a scale are not in whole groups of 32"
    assert line["reasons"] == f"14 since {reason}"
