"""Candidates and forks are enough for beams: played by hand, they give those of transformers."""

# mypy: allow-untyped-calls

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import GenerationConfig, LlamaForCausalLM

import transformers_oracle as oracle
from plan_driver import AnyRunner, int32, make_plan
from tiny_llama import VOCAB, write_tiny_llama
from worker_svc.model.weights import LoadedModel, load_model
from worker_svc.runtime.model_runner import ModelRunner
from worker_svc.runtime.start_up import RunnerLimits, make_runner
from worker_svc.runtime.step_plan import AdmittedRow, ForkedRow, SamplingParams

BLOCK_SIZE = 4


class Beam(NamedTuple):
    """A sequence whose last token is chosen, but not computed."""

    tokens: list[int]
    blocks: list[int]
    score: float
    parent_row: int


def expand(beams: dict[int, Beam], ids: list[int], logprobs: list[float], width: int) -> list[Beam]:
    """Return the best continuations. `ids` and `logprobs` are 2 * width for each row, ascending."""
    continued = [
        Beam([*beam.tokens, ids[place]], beam.blocks, beam.score + logprobs[place], row)
        for nth, (row, beam) in enumerate(sorted(beams.items()))
        for place in range(2 * width * nth, 2 * width * (nth + 1))
    ]
    return sorted(continued, key=lambda beam: -beam.score)[:width]


def search(runner: AnyRunner, prompt: list[int], width: int, count: int) -> list[Beam]:
    """Run a beam search of so many tokens. Every fork copies the block it will write to."""
    fresh = itertools.count(1)
    blocks = [next(fresh) for _ in range(-(-len(prompt) // BLOCK_SIZE))]
    entry = AdmittedRow(
        row=0,
        request_id="beams",
        tokens=int32(*prompt),
        num_prompt_tokens=len(prompt),
        num_computed_tokens=0,
        num_new_tokens=len(prompt),
        block_tables=(int32(*blocks),),
        sampling=SamplingParams(temperature=1.0),
        num_candidates=2 * width,
    )
    beams, plan = {0: Beam(prompt, blocks, 0.0, 0)}, make_plan(0, admitted=[entry])
    for step_id in range(1, count + 1):
        found = runner.run(plan).candidates
        assert found is not None
        best = expand(beams, found.ids.tolist(), found.logprobs.tolist(), width)
        forked, appended, copies = [], [], []
        full, rest = divmod(len(best[0].tokens) - 1, BLOCK_SIZE)
        # The best is in row 0 and so on, so that rows take over from each other at random.
        beams = {}
        for row, beam in enumerate(best):
            block = next(fresh)
            forked.append(ForkedRow(row, beam.parent_row, 0, beam.tokens[-1], full))
            appended.append((row, block))
            if rest:
                copies.append((beam.blocks[full], block))
            beams[row] = beam._replace(blocks=[*beam.blocks[:full], block])
        plan = make_plan(step_id, forked=forked, appended=appended, copies=copies)
    return list(beams.values())


@torch.inference_mode()
def beams_of_transformers(
    model: LlamaForCausalLM, prompt: list[int], width: int, count: int
) -> tuple[list[list[int]], list[float]]:
    """Return the sequences, best first, and their scores per token."""
    model.generation_config.eos_token_id = None
    settings = GenerationConfig(
        max_new_tokens=count,
        do_sample=False,
        num_beams=width,
        num_return_sequences=width,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    prompts = torch.tensor([prompt])
    output = model.generate(prompts, settings, attention_mask=torch.ones_like(prompts))
    assert not isinstance(output, torch.Tensor)
    return output.sequences.tolist(), output.sequences_scores.tolist()


@pytest.mark.parametrize("width", [2, 4])
def test_beams_of_forks_and_candidates_are_those_of_transformers(
    tmp_path: Path, width: int, kind: Callable[[LoadedModel, ModelRunner], AnyRunner]
) -> None:
    directory = write_tiny_llama(tmp_path / "tiny")
    loaded = load_model(directory, torch.float32, torch.device("cpu"))
    theirs = oracle.load_directory(directory)
    limits = RunnerLimits(block_size=BLOCK_SIZE, max_num_seqs=4, num_gpu_blocks_override=99)
    for prompt in ([3, 1, 4, 1, 5, 9, 2], [VOCAB - 1], [27, 18, 28, 18]):
        runner, _ = make_runner(loaded, limits)
        found = search(kind(loaded, runner), prompt, width, count=12)
        sequences, scores = beams_of_transformers(theirs, prompt, width, count=12)
        assert [beam.tokens for beam in found] == sequences
        assert [beam.score / 12 for beam in found] == pytest.approx(scores, abs=1e-4)
