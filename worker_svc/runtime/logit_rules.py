"""What rows change in their logits before a token is drawn: biases, penalties and bans.

In this order, as in vLLM: biases are added, tokens seen are penalised, and what may not be drawn
becomes -inf. A row without any of it has no rules, and costs nothing here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from worker_svc.runtime.step_plan import (
    AdmittedRow,
    Float32Array,
    Int32Array,
    Int64Array,
    SamplingParams,
    no_int32,
)


@dataclass(frozen=True, slots=True, eq=False)
class LogitRules:
    """The rules of one row. They do not change while it runs."""

    params: SamplingParams
    num_prompt_tokens: int

    prompt_ids: Int32Array
    """Ids in the prompt, each once; none if repetition is not penalised."""

    @property
    def has_penalty(self) -> bool:
        """Tokens seen are penalised."""
        params = self.params
        return bool(
            params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
        )


def read_rules(entry: AdmittedRow) -> LogitRules | None:
    """Return the rules of a row. None: it has none."""
    params = entry.sampling
    penalises_repetition = params.repetition_penalty != 1.0
    if not (
        penalises_repetition
        or params.presence_penalty
        or params.frequency_penalty
        or (params.min_tokens and len(params.stop_token_ids))
        or len(params.bias_token_ids)
        or len(params.allowed_token_ids)
        or params.bad_words
    ):
        return None
    prompt = np.unique(entry.tokens[: entry.num_prompt_tokens])
    return LogitRules(
        params, entry.num_prompt_tokens, prompt if penalises_repetition else no_int32()
    )


def names_only(params: SamplingParams, vocab_size: int) -> bool:
    """Whether every id that the rules name is one of the vocabulary."""
    columns = (
        params.stop_token_ids,
        params.bias_token_ids,
        params.allowed_token_ids,
        *params.bad_words,
    )
    return all(int(ids.min()) >= 0 and int(ids.max()) < vocab_size for ids in columns if len(ids))


@torch.inference_mode()
def apply_rules(
    logits: torch.Tensor,
    rows: Int64Array,
    tokens: Int32Array,
    num_tokens: Int32Array,
    rules: Mapping[int, LogitRules],
) -> None:
    """Change the logits of those rows that have rules, in place.

    Shapes: logits [S, V] fp32, rows [S]; tokens [all rows, L] and num_tokens [all rows]: what is
        known of each row, prompt and output. A resumed row's output counts as before.

    Numerics: fp32. A token that may not be drawn has -inf; so may all of a row.

    Cost: a sort of the output tokens of rows with penalties; no history over the vocabulary.
    """
    ruled = [
        (place, rules[row], tokens[row, : num_tokens[row]])
        for place, row in enumerate(rows.tolist())
        if row in rules
    ]
    _add_biases(logits, ruled)
    _penalise(logits, [each for each in ruled if each[1].has_penalty])
    for place, rule, _ in ruled:
        if len(allowed := rule.params.allowed_token_ids):
            _keep_only(logits[place], allowed)
    banned = [(place, ids) for place, rule, known in ruled for ids in _banned(rule, known)]
    if banned:
        logits[_places(logits, banned)] = -torch.inf


_Ruled = tuple[int, LogitRules, Int32Array]
"""Place in the logits, the rules, and the tokens that the row knows."""


def _places(
    logits: torch.Tensor, ids_by_place: list[tuple[int, Int32Array]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where ids of places lie in the logits."""
    counts = [len(ids) for _, ids in ids_by_place]
    places = np.repeat([place for place, _ in ids_by_place], counts)
    ids = np.concatenate([ids for _, ids in ids_by_place]).astype(np.int64)
    return torch.from_numpy(places).to(logits.device), torch.from_numpy(ids).to(logits.device)


def _add_biases(logits: torch.Tensor, ruled: list[_Ruled]) -> None:
    biased = [(place, rule.params) for place, rule, _ in ruled if len(rule.params.bias_token_ids)]
    if not biased:
        return
    where = _places(logits, [(place, params.bias_token_ids) for place, params in biased])
    values = np.concatenate([params.bias_values for _, params in biased]).astype(np.float32)
    logits[where] += torch.from_numpy(values).to(logits.device)


def _penalise(logits: torch.Tensor, ruled: list[_Ruled]) -> None:
    """Lower the logits of tokens that rows have seen: repetition first, then the other two."""
    if not ruled:
        return
    width = logits.shape[1]
    # One number for each pair of place and id: an output's tokens are counted by sorting these.
    outputs = np.concatenate(
        [
            place * width + known[rule.num_prompt_tokens :].astype(np.int64)
            for place, rule, known in ruled
        ]
    )
    prompts = np.concatenate(
        [place * width + rule.prompt_ids.astype(np.int64) for place, rule, _ in ruled]
    )
    drawn, counts = np.unique(outputs, return_counts=True)
    if len(drawn):
        nearest = np.searchsorted(drawn, prompts).clip(max=len(drawn) - 1)
        prompts = prompts[drawn[nearest] != prompts]
    seen = np.concatenate([drawn, prompts])
    counts = np.concatenate([counts, np.zeros(len(prompts), dtype=counts.dtype)])
    places, ids = np.divmod(seen, width)

    params = {place: rule.params for place, rule, _ in ruled}
    by_place = np.zeros((3, max(params) + 1), dtype=np.float32)
    for place, each in params.items():
        by_place[:, place] = (
            each.repetition_penalty,
            each.frequency_penalty,
            each.presence_penalty,
        )
    repetition, frequency, presence = by_place[:, places]
    where = (
        torch.from_numpy(places).to(logits.device),
        torch.from_numpy(ids).to(logits.device),
    )
    values: Float32Array = logits[where].cpu().numpy()
    values = np.where(values > 0, values / repetition, values * repetition)
    values -= frequency * counts.astype(np.float32)
    values -= presence * (counts > 0)
    logits[where] = torch.from_numpy(values).to(logits.device)


def _keep_only(row_logits: torch.Tensor, allowed: Int32Array) -> None:
    """Forbid all but some tokens. Shapes: row_logits [V], allowed [A]."""
    ids = torch.from_numpy(allowed.astype(np.int64)).to(row_logits.device)
    kept = row_logits[ids]
    row_logits.fill_(-torch.inf)
    row_logits[ids] = kept


def _banned(rule: LogitRules, known: Int32Array) -> Iterator[Int32Array]:
    """Yield ids that may not come next: stop ids too early, and last tokens of bad words."""
    params, output = rule.params, known[rule.num_prompt_tokens :]
    if len(output) < params.min_tokens and len(params.stop_token_ids):
        yield params.stop_token_ids
    for word in params.bad_words:
        before = len(word) - 1
        if before <= len(output) and np.array_equal(output[len(output) - before :], word[:-1]):
            yield word[-1:]
