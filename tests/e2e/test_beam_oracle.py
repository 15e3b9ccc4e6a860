"""The core's beam search chooses as `transformers` does with `num_beams`."""

# mypy: allow-untyped-calls

from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from scheduler_svc.core.beam_options import BeamOptions, EarlyStopping
from scheduler_svc.core.beam_search import BeamSearch
from scheduler_svc.core.request import Hypothesis, Stopping
from scheduler_svc.core.step_plan import Float32Array, Int32Array

VOCABULARY, EOS, WIDTH, MAX_OUTPUT = 40, (3, 11), 4, 12
EARLY: dict[EarlyStopping, bool | str] = {
    EarlyStopping.NO: False,
    EarlyStopping.YES: True,
    EarlyStopping.NEVER: "never",
}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: LlamaForCausalLM = LlamaForCausalLM(config).eval()
    return model


def expected(model: LlamaForCausalLM, prompt: list[int], **options: Any) -> Any:
    config = GenerationConfig(
        num_beams=WIDTH,
        max_new_tokens=MAX_OUTPUT,
        do_sample=False,
        use_cache=False,
        pad_token_id=1,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    return model.generate(
        torch.tensor([prompt]),
        generation_config=config,
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
    )


def found(model: LlamaForCausalLM, prompt: list[int], beams: BeamSearch) -> list[Hypothesis]:
    running: list[list[int]] = [[]]
    while not beams.done:
        # As many rows as transformers runs at once, so that the arithmetic is the same.
        rows = running if len(running) == WIDTH else running * WIDTH
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *row] for row in rows])).logits[:, -1]
        logprobs = torch.log_softmax(logits.float(), dim=-1).numpy()[: len(running)]
        going = beams.advance([likeliest(each, beams.num_candidates) for each in logprobs])
        running = [[*running[parent], token] for parent, token in going]
    return beams.best()


def likeliest(logprobs: Float32Array, count: int) -> tuple[Int32Array, Float32Array]:
    ids = np.argsort(-logprobs, kind="stable")[:count].astype(np.int32)
    return ids, logprobs[ids]


@pytest.mark.parametrize("early", EarlyStopping)
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0, -1.0])
@pytest.mark.parametrize(("num_eos", "num_returned"), [(0, 1), (1, 3), (2, 4)])
def test_tokens_and_scores_equal_those_of_transformers(
    model: LlamaForCausalLM,
    early: EarlyStopping,
    penalty: float,
    num_eos: int,
    num_returned: int,
) -> None:
    eos = EOS[:num_eos]
    num_stopped = 0
    for seed in range(4):
        prompt = np.random.default_rng(seed).integers(12, VOCABULARY, 5).tolist()
        theirs = expected(
            model,
            prompt,
            eos_token_id=list(eos) or None,
            early_stopping=EARLY[early],
            length_penalty=penalty,
            num_return_sequences=num_returned,
        )
        beams = BeamSearch(
            BeamOptions(WIDTH, penalty, early, num_returned),
            Stopping(MAX_OUTPUT, frozenset(eos)),
            MAX_OUTPUT,
        )
        ours = found(model, prompt, beams)
        assert len(ours) == num_returned
        sequences = theirs.sequences[:, len(prompt) :].tolist()
        for hypothesis, sequence in zip(ours, sequences, strict=True):
            length = len(hypothesis.tokens)
            assert list(hypothesis.tokens) == sequence[:length]
            assert set(sequence[length:]) <= {1}
        scores = [hypothesis.score for hypothesis in ours]
        assert scores == theirs.sequences_scores.tolist()
        num_stopped += sum(hypothesis.tokens[-1] in eos for hypothesis in ours)
    assert num_stopped or not eos
