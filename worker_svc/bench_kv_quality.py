"""`python -m worker_svc.bench_kv_quality MODEL`: what an fp8 KV cache changes, in one process.

A part of `pagemill bench kv-quality`, which asks in JSON lines on standard input: first for `auto`,
which the others are compared with.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from pydantic import BaseModel, ConfigDict, Field

from worker_svc.errors import ConfigError
from worker_svc.model.checkpoint import read_model_config
from worker_svc.model.weights import LoadedModel, load_model
from worker_svc.runtime.kv_cache import block_bytes
from worker_svc.runtime.kv_form import KV_DTYPES, choose_kv_form
from worker_svc.runtime.memory_budget import GIB
from worker_svc.runtime.plain_sequences import PlainSequences
from worker_svc.service.backends import choose_operations
from worker_svc.service.devices import DTYPES, choose_device, choose_dtype
from worker_svc.service.local_model import set_threads
from worker_svc.service.logs import make_logger


class Question(BaseModel):
    """One line of standard input. Unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kv_dtype: str
    """As `--kv-cache-dtype`."""

    prompts: list[list[int]] = Field(min_length=1)
    """Token ids. Continued together, and greedily."""

    output_len: int = Field(ge=1)
    """Tokens to generate behind each."""

    needles: list[list[int]] = []
    """Token ids of long prompts. Continued one by one."""

    needle_len: int = Field(default=24, ge=1)
    """Tokens to generate behind each of these."""


class Comparison:
    """A loaded model, and what it says with a cache of the run dtype."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._plain_outputs: list[list[int]] = []
        self._plain_logits = torch.empty(0)

    @torch.inference_mode()
    def answer(self, question: Question) -> dict[str, Any]:
        """Measure one type of cache.

        Raises: ConfigError if the type is none, or the first question is not for `auto`.
        """
        if question.kv_dtype not in {"auto", *KV_DTYPES}:
            raise ConfigError(f"kv_dtype is {question.kv_dtype!r}")
        model = self._loaded.model
        form = choose_kv_form(self._loaded, KV_DTYPES.get(question.kv_dtype, model.dtype))

        def fresh(prompts: Sequence[Sequence[int]], output_len: int) -> PlainSequences:
            capacities = [len(prompt) + output_len for prompt in prompts]
            return PlainSequences(model, capacities, form.dtype, form.scales)

        prompts, count = question.prompts, question.output_len
        outputs = self._generate(fresh(prompts, count), prompts, count)
        if question.kv_dtype == "auto":
            self._plain_outputs = outputs
        elif not self._plain_outputs:
            raise ConfigError("the first kv_dtype must be auto")
        logits = self._force(fresh(prompts, count), prompts)
        if question.kv_dtype == "auto":
            self._plain_logits = logits
        needles = [
            self._generate(fresh([needle], question.needle_len), [needle], question.needle_len)[0]
            for needle in question.needles
        ]
        return {
            "kv_dtype": question.kv_dtype,
            "scales": form.origin,
            "tokens_per_gib": GIB // block_bytes(model.config, 1, form.dtype),
            **compare_outputs(self._plain_outputs, outputs),
            **compare_logits(self._plain_logits, logits),
            "needle_outputs": needles,
        }

    def _generate(
        self, sequences: PlainSequences, prompts: Sequence[Sequence[int]], count: int
    ) -> list[list[int]]:
        """Return the greedy continuation of each prompt."""
        model = self._loaded.model
        ends = torch.tensor([len(prompt) for prompt in prompts]).cumsum(0) - 1
        hidden = sequences.run(prompts)[ends]
        outputs: list[list[int]] = [[] for _ in prompts]
        for place in range(count):
            latest = model.logits(hidden).argmax(-1).tolist()
            for output, token in zip(outputs, latest, strict=True):
                output.append(token)
            if place + 1 < count:
                hidden = sequences.run([[token] for token in latest])
        return outputs

    def _force(self, sequences: PlainSequences, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the logits of each token that the run dtype's cache generated. Shape: [T, V]."""
        whole = [
            [*prompt, *output[:-1]]
            for prompt, output in zip(prompts, self._plain_outputs, strict=True)
        ]
        hidden = sequences.run(whole)
        ends = torch.tensor([len(one) for one in whole]).cumsum(0).tolist()
        places = [
            torch.arange(end - len(output), end)
            for end, output in zip(ends, self._plain_outputs, strict=True)
        ]
        return self._loaded.model.logits(hidden[torch.cat(places)])


def compare_outputs(
    plain: Sequence[Sequence[int]], other: Sequence[Sequence[int]]
) -> dict[str, float]:
    """Return how far greedy outputs agree: up to the first token that differs."""
    shares = []
    for one, two in zip(plain, other, strict=True):
        same = [a == b for a, b in zip(one, two, strict=True)]
        shares.append((same.index(False) if False in same else len(same)) / len(same))
    return {
        "greedy_agreement": sum(shares) / len(shares),
        "identical_outputs": sum(share == 1 for share in shares) / len(shares),
    }


def compare_logits(plain: torch.Tensor, other: torch.Tensor) -> dict[str, float]:
    """Return the error of logits [T, V] for the same tokens, and of the distributions they mean."""
    error = (other - plain).abs()
    expected, actual = plain.log_softmax(-1), other.log_softmax(-1)
    divergence = (expected.exp() * (expected - actual)).sum(-1)
    return {
        "same_best_token": float((plain.argmax(-1) == other.argmax(-1)).float().mean()),
        "logit_error_mean": float(error.mean()),
        "logit_error_max": float(error.max()),
        "logit_std": float(plain.std(-1).mean()),
        "kl_mean": float(divergence.mean()),
        "kl_max": float(divergence.max()),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Load a model, say so, and answer questions until they end."""
    parser = argparse.ArgumentParser(prog="worker_svc.bench_kv_quality", description=__doc__)
    parser.add_argument("model_path", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["auto", *DTYPES], default="auto")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args(argv)
    try:
        set_threads(options.threads)
        device = choose_device(options.device)
        comparison = Comparison(_load(options.model_path, options.dtype, device))
        _serve(comparison, sys.stdin, sys.stdout)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def _load(path: Path, dtype_name: str, device: torch.device) -> LoadedModel:
    dtype = choose_dtype(dtype_name, device)
    log = make_logger(sys.stderr, "text", "warning")
    head_dim = read_model_config(path).head_dim
    operations = choose_operations(
        "auto", device, dtype, head_dim, log, kv_dtype=torch.float8_e4m3fn
    )
    return load_model(path, dtype, device, operations)


def _serve(comparison: Comparison, questions: TextIO, answers: TextIO) -> None:
    answers.write(json.dumps({"ready": True}) + "\n")
    answers.flush()
    for line in questions:
        if line.strip():
            answer = comparison.answer(Question.model_validate_json(line))
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    sys.exit(main())
