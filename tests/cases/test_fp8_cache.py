"""Area e of the public cases, with the whole product: a cache in fp8."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cases.stack import RecordingHost, RunningWorker, serving, start_worker, until
from pagemill.client import Completion
from tiny_llama import LAYERS, write_tiny_llama
from worker_svc.service.exit_status import ExitStatus

LOUD = range(200, 216)
L, Q = [*LOUD], [*range(20, 36)]


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of bench R, in which the embeddings of some ids are 50 times as long."""
    model = write_tiny_llama(tmp_path_factory.mktemp("uneven") / "model")
    return changed(model, {"model.embed_tokens.weight": louder})


def louder(embeddings: torch.Tensor) -> torch.Tensor:
    embeddings = embeddings.clone()
    embeddings[list(LOUD)] *= 50
    return embeddings


def changed(model: Path, changes: dict[str, Any]) -> Path:
    """Change tensors of a model by functions of them, or add tensors."""
    tensors = load_file(model / "model.safetensors")
    for name, change in changes.items():
        tensors[name] = change(tensors[name]) if callable(change) else change
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return model


def with_scales(folder: Path, scale: float) -> Path:
    names = [
        f"model.layers.{layer}.self_attn.{kind}_scale" for layer in range(LAYERS) for kind in "kv"
    ]
    scales = dict.fromkeys(names, 1.0) | {names[-1]: scale}
    return changed(
        write_tiny_llama(folder / "model"),
        {name: torch.tensor(value) for name, value in scales.items()},
    )


async def ends(worker: RunningWorker) -> ExitStatus:
    await until(lambda: bool(worker.status))
    return worker.status[0]


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
async def test_case_E_05_a_checkpoint_with_a_bad_scale_is_refused_at_load(
    tmp_path: Path, scale: float
) -> None:
    model = with_scales(tmp_path, scale)
    async with serving(model, join=False) as stack:
        worker = start_worker(
            RecordingHost(model, 64, 0.0, kv_cache_dtype="fp8"), stack.worker_address
        )
        assert await ends(worker) is ExitStatus.IMPOSSIBLE
        assert "must be positive and finite" in worker.log.getvalue()
        assert not stack.engine.serving


@pytest.mark.parametrize(
    ("scale", "told"),
    [(None, "static scales per head, calibrated"), (2.0, "static scales of the checkpoint")],
)
async def test_case_E_05_scales_are_told_once_wherever_they_come_from(
    tmp_path: Path, scale: float | None, told: str
) -> None:
    model = write_tiny_llama(tmp_path / "model") if scale is None else with_scales(tmp_path, scale)
    async with serving(model, kv_cache_dtype="fp8") as stack:
        await stack.client.complete(prompt=Q, temperature=0, max_tokens=1)
        log = stack.workers[0].log.getvalue()
    assert log.count("scales") == log.count(told) == 1


async def test_case_E_05_missing_scales_are_1_with_one_warning_where_none_are_measured(
    tmp_path: Path,
) -> None:
    """And what is answered then is what a checkpoint with scales of 1 answers."""
    models = (write_tiny_llama(tmp_path / "plain"), with_scales(tmp_path, 1.0))
    found = []
    for model in models:
        async with serving(model, kv_cache_dtype="fp8", calculate_kv_scales=False) as stack:
            completion = await stack.client.complete(
                prompt=Q, temperature=0, max_tokens=8, ignore_eos=True, logprobs=1
            )
            found.append((completion.token_ids, logprobs(completion)))
            log = stack.workers[0].host.log.getvalue()
        warnings = [line for line in log.splitlines() if "scale" in line]
        assert all("level=warning" in line for line in warnings)
        assert len(warnings) == (model == models[0])
        assert all("scales of 1" in line for line in warnings)
    assert found[0] == found[1]


async def answer(stack: Any, prompt: list[int], salt: str = "") -> tuple[int, Completion]:
    more = {"salt": salt} if salt else {}
    found = await stack.client.complete(
        prompt=prompt, temperature=0, max_tokens=8, ignore_eos=True, logprobs=1, **more
    )
    return found.usage.cached_tokens, found


def logprobs(found: Completion) -> list[float]:
    return [position[0].logprob for position in found.sequences[0].logprobs]


ORDERS = {
    "ordinary first": ((Q, "", 0), (L, "", 0), (Q, "", 12), (Q, "other", 0), (L, "", 12)),
    "loud first": ((L, "", 0), (Q, "", 0), (L, "", 12), (Q, "other", 0), (Q, "", 12)),
}


async def test_case_E_06_no_order_hit_or_chunk_changes_what_an_fp8_cache_answers(
    uneven: Path,
) -> None:
    found: dict[int, list[Completion]] = {L[0]: [], Q[0]: []}
    for chunk in (64, 5):
        for order in ORDERS.values():
            async with serving(
                uneven, kv_cache_dtype="fp8", max_num_batched_tokens=chunk, max_num_seqs=4
            ) as stack:
                for prompt, salt, cached in order:
                    hits, completion = await answer(stack, prompt, salt)
                    assert hits == cached
                    found[prompt[0]].append(completion)
                both = await asyncio.gather(answer(stack, L, "x"), answer(stack, Q, "y"))
                for prompt, (_, completion) in zip((L, Q), both, strict=True):
                    found[prompt[0]].append(completion)
                await stack.idle()
    for completions in found.values():
        assert len(completions) >= 10
        first = completions[0]
        for other in completions[1:]:
            assert other.token_ids == first.token_ids
            assert logprobs(other) == pytest.approx(logprobs(first), abs=1e-4)
