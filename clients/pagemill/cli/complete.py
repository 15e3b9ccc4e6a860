"""`pagemill complete`: one generation, as text or as one JSON object."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from pagemill.cli import options
from pagemill.cli.connection import connect
from pagemill.cli.exit_status import CliError, ExitStatus
from pagemill.cli.streaming import write_sequences, write_text
from pagemill.client import Completion, FinishReason, GenerateArguments, Output

Prompt = Annotated[str | None, typer.Option(help="Text to continue, or the user's message.")]
PromptFile = Annotated[Path | None, typer.Option(help="File with the prompt. -: standard input.")]
Chat = Annotated[bool, typer.Option("--chat", help="Use the model's chat template.")]


def complete(
    prompt: Prompt = None,
    prompt_file: PromptFile = None,
    server: options.Server = options.DEFAULT_SERVER,
    chat: Chat = False,
    system: options.System = None,
    model: options.ServedModel = "",
    adapter: options.Adapter = "",
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    n: options.N = None,
    beam_width: options.BeamWidth = None,
    length_penalty: options.LengthPenalty = None,
    early_stopping: options.EarlyStopping = None,
    num_returned: options.NumReturned = None,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    timeout: options.Timeout = 300.0,
    as_json: options.Json = False,
) -> None:
    """Continue a prompt once.

    Exit status: 0 done, 2 wrong usage, 3 refused by the server, 4 no server or no room,
    130 interrupted, 1 anything else.
    """
    text = read_prompt(prompt, prompt_file)
    arguments = GenerateArguments(
        model=model,
        adapter=adapter,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        n=n,
        beam_width=beam_width,
        length_penalty=length_penalty,
        early_stopping=_early_stopping(early_stopping),
        num_returned=num_returned,
        stop=stop,
        ignore_eos=ignore_eos,
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


def as_object(completion: Completion, *, many: bool = False) -> dict[str, Any]:
    """Return a completion as `--json` prints it; `many`: with all sequences, not the first only."""
    usage, timing = completion.usage, completion.timing
    sequences = [_sequence(sequence) for sequence in completion.sequences] if many else []
    return {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason.value,
        **({"sequences": sequences} if many else {}),
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
    """Return one sequence of several; `score` and `cumulative_logprob` are of beams."""
    ended = sequence.finished
    scores = {"score": ended.score, "cumulative_logprob": ended.cumulative_logprob}
    return {
        "text": sequence.text,
        "token_ids": list(sequence.token_ids),
        "finish_reason": ended.reason.value,
        **{name: value for name, value in scores.items() if value is not None},
    }


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
