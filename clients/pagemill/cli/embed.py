"""`pagemill embed`: texts into vectors, one JSON array a line or one JSON object."""

import asyncio
import json
import sys
from typing import Annotated, cast, get_args

import typer

from pagemill.cli import options
from pagemill.cli.connection import connect
from pagemill.cli.exit_status import CliError, ExitStatus
from pagemill.client import Embeddings
from pagemill.client.embedding import Pooling

Texts = Annotated[list[str], typer.Argument(metavar="TEXT...", help="What to embed.")]
PoolingName = Annotated[
    str, typer.Option("--pooling", metavar="KIND", help="last: of the last token; or mean.")
]
Normalize = Annotated[bool, typer.Option("--normalize", help="Vectors of length 1.")]


def embed(
    texts: Texts,
    server: options.Server = options.DEFAULT_SERVER,
    pooling: PoolingName = "last",
    normalize: Normalize = False,
    model: options.ServedModel = "",
    timeout: options.Timeout = 300.0,
    as_json: options.Json = False,
) -> None:
    """Print the vector of each text: the model's hidden states, pooled."""
    if pooling not in get_args(Pooling):
        raise CliError(f"pooling is {pooling}, must be last or mean", ExitStatus.USAGE)
    kind = cast("Pooling", pooling)
    found = asyncio.run(_embed(server, timeout, texts, kind, model, normalize=normalize))
    vectors = [vector.tolist() for vector in found.vectors]
    if as_json:
        usage = found.usage
        counts = {"prompt_tokens": usage.prompt_tokens, "cached_tokens": usage.cached_tokens}
        sys.stdout.write(json.dumps({"vectors": vectors, "usage": counts}) + "\n")
        return
    for vector in vectors:
        sys.stdout.write(json.dumps(vector) + "\n")


async def _embed(
    server: str,
    timeout_s: float,
    texts: list[str],
    pooling: Pooling,
    model: str,
    *,
    normalize: bool,
) -> Embeddings:
    async with connect(server, timeout_s) as client:
        return await client.embed(texts, pooling=pooling, normalize=normalize, model=model)
