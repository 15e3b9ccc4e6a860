"""Inputs become the fields of an EmbedRequest, and vectors arrays of float32."""

from typing import Any

import pytest

from pagemill.client import Client, InternalError, InvalidArgumentError
from pagemill.client.embedding import embed_request, embeddings
from pagemill.v1 import inference_pb2
from scripted_server import ScriptedServer


def request(inputs: Any, **changes: Any) -> inference_pb2.EmbedRequest:
    plain = {"pooling": "last", "normalize": False, "model": "", "request_id": ""}
    return embed_request(inputs, **{**plain, **changes})


def test_each_argument_lands_in_its_field() -> None:
    asked = request(["a", "b"], pooling="mean", normalize=True, model="m", request_id="r")
    assert list(asked.texts.texts) == ["a", "b"]
    assert (asked.pooling, asked.normalize) == (inference_pb2.POOLING_MEAN, True)
    assert (asked.model, asked.request_id) == ("m", "r")
    asked = request([[1, 2], (3,)])
    assert [list(each.ids) for each in asked.tokens.inputs] == [[1, 2], [3]]
    assert asked.pooling == inference_pb2.POOLING_LAST
    # The server says what is wrong with none.
    assert request([]).WhichOneof("input") == "texts"


@pytest.mark.parametrize(
    ("inputs", "changes", "words"),
    [
        ("one text", {}, "must be a list"),
        (["a", [1]], {}, "one kind"),
        ([[1], [2**40]], {}, r"inputs\[1\] has the id 1099511627776, must be in \["),
        ([7], {}, "cannot be sent"),
        (["a"], {"pooling": "max"}, "must be one of last, mean"),
    ],
)
def test_what_cannot_be_sent_is_named(inputs: Any, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        request(inputs, **changes)


def test_vectors_come_back_in_order(address: str, script: ScriptedServer) -> None:
    with Client(address) as client:
        found = client.embed(["a", "b"], pooling="mean")
    assert [vector.tolist() for vector in found.vectors] == [[0, 0.5], [1, 0.5]]
    assert (found.usage.prompt_tokens, found.usage.cached_tokens) == (5, 2)
    assert script.embeds[0].pooling == inference_pb2.POOLING_MEAN


def test_a_vector_that_is_cut_is_the_servers_fault() -> None:
    cut = inference_pb2.EmbedResponse(vectors=[inference_pb2.PooledVector(values=b"abc")])
    with pytest.raises(InternalError, match="3 bytes"):
        embeddings(cut)
