"""`python -m worker_svc.bench_read MODEL`: bytes of a model's weights, and read bandwidth here.

What `pagemill bench throughput` sets a step of one row against.
"""

import argparse
import ctypes
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Final

import torch

from kernels.cpu_build import native_code, why_no_native_code
from kernels.huge_pages import huge_tensor
from worker_svc.errors import ConfigError
from worker_svc.model.checkpoint import read_model_config
from worker_svc.model.model_config import ModelConfig
from worker_svc.service.devices import choose_device, choose_dtype
from worker_svc.service.local_model import set_threads

READ_BYTES: Final = 256 << 20
"""What one turn reads: several times the caches."""

BYTES_OF_WEIGHT: Final = {"int8": 34 / 32, "int4": 20 / 32}
"""With the scales of each 32 weights in fp16, and with 4 bits their minimums."""

BYTES_OF_HEAD: Final = {"int8": 34 / 32, "int4": 34 / 32}
"""The matrix that makes logits has 8 bits in both."""

_TURNS: Final = 7


def read_bytes_of_step(config: ModelConfig, itemsize: int, quantization: str = "none") -> int:
    """Return the bytes of all weights that a step of one row reads.

    Of the embedding it reads one row; the matrix that makes logits it reads whole, also where
    that is the embedding.
    """
    hidden, head = config.hidden_size, config.head_dim
    queries, keys = config.num_heads * head, config.num_kv_heads * head
    attention = hidden * (queries + 2 * keys) + queries * hidden
    matrices = config.num_layers * (attention + 3 * hidden * config.intermediate_size)
    matrices_bytes = matrices * BYTES_OF_WEIGHT.get(quantization, itemsize)
    head_bytes = config.vocab_size * hidden * BYTES_OF_HEAD.get(quantization, itemsize)
    vectors = (2 * config.num_layers + 2) * hidden
    return int(matrices_bytes + head_bytes) + vectors * itemsize


def read_bandwidth(code: ctypes.CDLL, num_threads: int) -> float:
    """Return bytes per second, the median of some turns, each thread reading its part.

    The memory lies in large pages where the system has them, as a worker's weights do.
    """
    memory = huge_tensor((READ_BYTES // 4,), torch.float32).fill_(1.0)
    count = memory.numel() // num_threads // 256 * 256
    seconds = []
    for _ in range(_TURNS + 1):
        started = time.perf_counter()
        code.pagemill_read(
            ctypes.c_void_p(memory.data_ptr()),
            ctypes.c_int64(count),
            ctypes.c_int64(num_threads),
        )
        seconds.append(time.perf_counter() - started)
    return count * num_threads * 4 / statistics.median(seconds[1:])


def main(argv: list[str]) -> int:
    """Print one JSON object; return the exit status."""
    parser = argparse.ArgumentParser(prog="worker_svc.bench_read", description=__doc__)
    parser.add_argument("model_path", type=Path, help="a GGUF file or a model's directory")
    parser.add_argument("--dtype", default="auto", help="type of the weights")
    parser.add_argument("--threads", type=int, default=None, help="threads that read")
    parser.add_argument("--quantization", default="none", help="none, int8 or int4")
    given = parser.parse_args(argv)
    try:
        config = read_model_config(given.model_path)
        dtype = choose_dtype(given.dtype, choose_device("cpu"))
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    code = native_code()
    if code is None:
        sys.stderr.write(f"error: no native code: {why_no_native_code()}\n")
        return 2
    set_threads(given.threads)
    speed = read_bandwidth(code, torch.get_num_threads())
    answer = {
        "weight_bytes": read_bytes_of_step(config, dtype.itemsize, given.quantization),
        "read_bandwidth_gb_s": round(speed / 1e9, 2),
    }
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
