"""`pagemill complete`: one generation, as text or as one JSON object."""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from pagemill.cli import options
from pagemill.cli.connection import connect
from pagemill.cli.exit_status import CliError, ExitStatus
from pagemill.cli.streaming import write_sequences, write_text
from pagemill.client import Completion, FinishReason, GenerateArguments, Output
from pagemill.client.events import PositionLogprobs

Prompt = Annotated[str | None, typer.Option(help="Text to continue, or the user's message.")]
PromptFile = Annotated[Path | None, typer.Option(help="File with the prompt. -: standard input.")]
Chat = Annotated[bool, typer.Option("--chat", help="Use the model's chat template.")]


# Options that are arguments of a generation as they are.
_PASSED_ON = (
    "model",
    "adapter",
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "bad_words",
    "beam_width",
    "length_penalty",
    "num_returned",
    "stop",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
    "echo",
)


def complete(
    context: typer.Context,
    prompt: Prompt = None,
    prompt_file: PromptFile = None,
    server: options.Server = options.DEFAULT_SERVER,
    chat: Chat = False,
    system: options.System = None,
    model: options.ServedModel = "",
    adapter: options.Adapter = "",
    max_tokens: options.MaxTokens = None,
    min_tokens: options.MinTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    n: options.N = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    repetition_penalty: options.RepetitionPenalty = None,
    logit_bias: options.LogitBias = None,
    allowed_token_ids: options.AllowedTokenIds = None,
    bad_words: options.BadWords = None,
    beam_width: options.BeamWidth = None,
    length_penalty: options.LengthPenalty = None,
    early_stopping: options.EarlyStopping = None,
    num_returned: options.NumReturned = None,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    logprobs: options.Logprobs = None,
    prompt_logprobs: options.PromptLogprobs = None,
    echo: options.Echo = False,
    timeout: options.Timeout = 300.0,
    as_json: options.Json = False,
) -> None:
    """Continue a prompt once.

    Exit status: 0 done, 2 wrong usage, 3 refused by the server, 4 no server or no room,
    130 interrupted, 1 anything else.
    """
    if not as_json and (logprobs is not None or prompt_logprobs is not None):
        raise CliError("log-probabilities are told with --json only", ExitStatus.USAGE)
    text = read_prompt(prompt, prompt_file)
    arguments = GenerateArguments(
        **{name: context.params[name] for name in _PASSED_ON},  # type: ignore[typeddict-item]
        early_stopping=_early_stopping(early_stopping),
        logit_bias=_logit_bias(logit_bias or []),
        # Typer gives an empty list for what nobody said.
        allowed_token_ids=allowed_token_ids or None,
    )
    if chat or system is not None:
        turns = [] if system is None else [{"role": "system", "content": system}]
        arguments["messages"] = [*turns, {"role": "user", "content": text}]
    else:
        arguments["prompt"] = text
    many = n is not None or beam_width is not None
    completion = asyncio.run(_complete(server, timeout, arguments, as_json=as_json, many=many))
    if as_json:
        sys.stdout.write(json.dumps(as_object(completion, many=many)) + "\n")
    for sequence in completion.sequences:
        if sequence.finished.reason is FinishReason.ERROR:
            raise CliError(f"the output could not be computed: {sequence.finished.error}")


def _logit_bias(entries: Sequence[str]) -> dict[int, float]:
    """Read ID=VALUE entries. Raises: CliError."""
    biases = {}
    for entry in entries:
        id_, _, value = entry.partition("=")
        try:
            biases[int(id_)] = float(value)
        except ValueError:
            raise CliError(f"logit-bias is {entry}, must be ID=VALUE", ExitStatus.USAGE) from None
    return biases


def as_object(completion: Completion, *, many: bool = False) -> dict[str, Any]:
    """Return a completion as `--json` prints it; `many`: with all sequences, not the first only."""
    usage, timing = completion.usage, completion.timing
    sequences = [_sequence(sequence) for sequence in completion.sequences] if many else []
    return {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason.value,
        **_told(completion.sequences[0]),
        **({"sequences": sequences} if many else {}),
        **_prompt_told(completion),
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
        },
        "timing": {
            "queue_s": timing.queue_s,
            "ttft_s": timing.ttft_s,
            "total_s": timing.total_s,
        },
    }


def _sequence(sequence: Output) -> dict[str, Any]:
    """Return one sequence of several; `score` is of beams."""
    ended = sequence.finished
    scores = {"score": ended.score, "cumulative_logprob": ended.cumulative_logprob}
    return {
        "text": sequence.text,
        "token_ids": list(sequence.token_ids),
        "finish_reason": ended.reason.value,
        **{name: value for name, value in scores.items() if value is not None},
        **_told(sequence),
    }


def _told(sequence: Output) -> dict[str, Any]:
    """Return the log-probabilities of a sequence, if it has any."""
    if not sequence.logprobs:
        return {}
    return {"logprobs": [_position(position) for position in sequence.logprobs]}


def _prompt_told(completion: Completion) -> dict[str, Any]:
    positions = completion.summary.prompt_logprobs
    if not positions:
        return {}
    return {"prompt_logprobs": [_position(position) for position in positions]}


def _position(position: PositionLogprobs) -> list[dict[str, Any]]:
    return [
        {
            "token_id": entry.token_id,
            "logprob": entry.logprob,
            "rank": entry.rank,
            # A token may be part of a character.
            "text": entry.text.decode(errors="replace"),
        }
        for entry in position
    ]


async def _complete(
    server: str, timeout_s: float, arguments: GenerateArguments, *, as_json: bool, many: bool
) -> Completion:
    async with connect(server, timeout_s) as client:
        if as_json:
            return await client.complete(**arguments)
        write = write_sequences if many else write_text
        return await write(client.generate(**arguments), sys.stdout)


def _early_stopping(said: str | None) -> bool | Literal["never"] | None:
    match said:
        case None | "never":
            return said
        case "true" | "false":
            return said == "true"
    raise CliError(f"early-stopping is {said}, must be one of false, true, never", ExitStatus.USAGE)


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """Return the prompt from wherever it is."""
    if prompt is not None and file is None:
        return prompt
    if prompt is not None or file is None:
        raise CliError("exactly one of --prompt and --prompt-file is needed", ExitStatus.USAGE)
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CliError(
            f"prompt-file is {file}, which cannot be read: {error}", ExitStatus.USAGE
        ) from error
