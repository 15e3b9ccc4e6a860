"""The bytes that one row's step reads are those of the weights, the logits' matrix included."""

import json
from pathlib import Path

import pytest
import torch

from tiny_llama import write_tiny_llama
from worker_svc.bench_read import main, read_bytes_of_step
from worker_svc.model.checkpoint import read_model_config
from worker_svc.model.quantised_operations import QuantisedOperations
from worker_svc.model.weights import load_model


def test_a_step_reads_every_weight_of_a_tied_model(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    loaded = load_model(folder, torch.bfloat16, torch.device("cpu"))
    config = read_model_config(folder)
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size * 2
    row = 2 * config.hidden_size  # of the embedding, which is looked up
    assert read_bytes_of_step(config, 2) == loaded.weight_bytes - embedding + row


@pytest.mark.parametrize("bits", [4, 8])
def test_of_rounded_weights_a_step_reads_what_they_take(tmp_path: Path, bits: int) -> None:
    folder = write_tiny_llama(tmp_path)
    operations = QuantisedOperations(bits, torch.bfloat16)
    loaded = load_model(folder, torch.bfloat16, torch.device("cpu"), operations)
    config = read_model_config(folder)
    looked_up = (config.vocab_size - 1) * config.hidden_size * 2
    expected = loaded.weight_bytes - looked_up
    # Packed, so small a matrix is filled up to a whole number of panels and groups.
    assert read_bytes_of_step(config, 2, f"int{bits}") == pytest.approx(expected, rel=0.02)


def test_the_program_answers_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny_llama(tmp_path)
    assert main([str(folder), "--dtype", "bfloat16", "--threads", "1"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["weight_bytes"] == read_bytes_of_step(read_model_config(folder), 2)
    assert answer["read_bandwidth_gb_s"] > 0.1
