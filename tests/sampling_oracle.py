"""The textbook of logits rules: one row, one token at a time, dense and slow."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from transformers import LlamaForCausalLM

import transformers_oracle as oracle


@dataclass(frozen=True, slots=True)
class Rules:
    """What a request says of its logits; the names are those of its arguments."""

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed: Sequence[int] = ()
    bad_words: Sequence[Sequence[int]] = ()
    min_tokens: int = 0
    stop_ids: Sequence[int] = ()

    def apply(self, logits: torch.Tensor, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Change the logits [V] of the token that comes behind the output."""
        for id_, bias in self.logit_bias.items():
            logits[id_] += bias
        for id_ in {*prompt, *output}:
            score = float(logits[id_])
            logits[id_] = (
                score / self.repetition_penalty if score > 0 else score * self.repetition_penalty
            )
        for id_ in {*output}:
            logits[id_] -= self.presence_penalty + self.frequency_penalty * output.count(id_)
        if self.allowed:
            for id_ in range(len(logits)):
                if id_ not in self.allowed:
                    logits[id_] = -torch.inf
        if len(output) < self.min_tokens:
            logits[list(self.stop_ids)] = -torch.inf
        for word in self.bad_words:
            if [*output, word[-1]][-len(word) :] == [*word]:
                logits[word[-1]] = -torch.inf


def greedy_by(
    model: LlamaForCausalLM, prompt: Sequence[int], count: int, rules: Rules
) -> list[int]:
    """Return the likeliest tokens under the rules, until there are so many or one stops."""
    output: list[int] = []
    while len(output) < count:
        scores = oracle.logits(model, [*prompt, *output])[-1].clone()
        rules.apply(scores, prompt, output)
        output.append(int(scores.argmax()))
        if output[-1] in rules.stop_ids and len(output) >= rules.min_tokens:
            break
    return output
