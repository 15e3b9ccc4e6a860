"""The _cbor algorithms give vLLM's names, byte for byte, for all that both can say.

The vectors are what vLLM's own request hasher computed; the file says under which version.
"""

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.block_hash import Adapter, BlockHash, ContentSpan, ExtraKeys, PoolIdentity
from scheduler_svc.core.cbor_hash import CborHash
from scheduler_svc.core.hash_algorithms import HASH_ALGORITHMS
from source_tree import ROOT

DOCUMENT: dict[str, Any] = json.loads(
    (Path(ROOT) / "tests/data/hash_vectors.json").read_text(encoding="utf-8")
)
VECTORS: list[dict[str, Any]] = DOCUMENT["vectors"]
SEED: str = DOCUMENT["PYTHONHASHSEED"]
ANY_POOL = PoolIdentity(fingerprint="f", kv_dtype="bf16", block_size=4, layout="NSGD")

both = pytest.mark.parametrize("name", ["sha256_cbor", "xxhash_cbor"])
plain = [vector for vector in VECTORS if "lora" not in vector]
adapted = [vector for vector in VECTORS if "lora" in vector]


def title(vector: dict[str, Any]) -> str:
    return f"{vector['name']}, {vector['block_size']}"


def extra_of(vector: dict[str, Any]) -> ExtraKeys:
    lora = vector.get("lora")
    return ExtraKeys(
        salt=vector.get("cache_salt", "").encode(),
        adapter=Adapter(lora["name"], 1) if lora else None,
        spans=tuple(
            ContentSpan(item["identifier"], item["offset"], item["length"])
            for item in vector.get("mm", ())
        ),
    )


def names_of(vector: dict[str, Any], algorithm: str) -> list[str]:
    hasher = HASH_ALGORITHMS[algorithm]
    names = hasher.hash_full_blocks(
        memoryview(array("i", vector["tokens"])),
        vector["block_size"],
        hasher.root(SEED, ANY_POOL),
        extra_of(vector),
    )
    return [name.hex() for name in names]


def test_the_vectors_are_there() -> None:
    assert (len(plain), len(adapted)) == (14, 4)


@both
@pytest.mark.parametrize("vector", plain, ids=title)
def test_every_vector_without_an_adapter_is_equal(name: str, vector: dict[str, Any]) -> None:
    assert names_of(vector, name) == vector["hashes"][name]


@both
def test_the_root_is_that_of_pythonhashseed(name: str) -> None:
    assert HASH_ALGORITHMS[name].root(SEED, ANY_POOL).hex() == DOCUMENT["none_hash"][name]


def test_an_empty_seed_is_that_of_pythonhashseed_unset() -> None:
    for name, expected in DOCUMENT["none_hash_without_PYTHONHASHSEED"].items():
        assert HASH_ALGORITHMS[name].root("", ANY_POOL).hex() == expected


@both
@pytest.mark.parametrize("vector", adapted, ids=title)
def test_adapters_are_named_by_generation_and_so_not_equal(
    name: str, vector: dict[str, Any]
) -> None:
    assert not set(names_of(vector, name)) & set(vector["hashes"][name])


class Heard:
    """A hash that keeps what it is given."""

    def __init__(self) -> None:
        self.inputs: list[bytes] = []

    def __call__(self, content: bytes) -> "Heard":
        self.inputs.append(content)
        return self

    def digest(self) -> bytes:
        return b"parent"


@pytest.mark.parametrize("vector", adapted, ids=title)
def test_only_the_entry_of_the_adapter_differs(vector: dict[str, Any]) -> None:
    """Order and all other bytes of the input are vLLM's."""
    lora = vector["lora"]
    theirs = b"\x83" + b"".join(map(text, ("lora", lora["name"], lora["path"])))
    ours = text(f"lora:{lora['name']}@1")
    heard = Heard()
    CborHash("heard", resists_collisions=False, function=heard).hash_full_blocks(
        memoryview(array("i", vector["tokens"])),
        vector["block_size"],
        BlockHash(bytes.fromhex(DOCUMENT["none_hash"]["sha256_cbor"])),
        extra_of(vector),
    )
    expected = bytes.fromhex(vector["first_block_input"])
    assert expected.count(theirs) == 1
    assert heard.inputs[0] == expected.replace(theirs, ours)


def text(value: str) -> bytes:
    """Return a text of fewer than 24 bytes as CBOR."""
    return bytes([0x60 | len(value)]) + value.encode()


edges = [edge + step for edge in (24, 2**8, 2**16, 2**31 - 1) for step in (-1, 0)]


@given(
    blocks=st.lists(
        st.lists(st.sampled_from(edges) | st.integers(0, 2**31 - 1), min_size=3, max_size=3),
        min_size=4,
        max_size=9,
    )
)
def test_many_blocks_at_once_are_encoded_like_one_by_one(blocks: list[list[int]]) -> None:
    """Numpy encodes the many, a plain loop the few."""
    together, apart = Heard(), Heard()
    algorithm = CborHash("heard", resists_collisions=False, function=together)
    view = memoryview(array("i", [token for block in blocks for token in block]))
    algorithm.hash_full_blocks(view, 3, BlockHash(b"parent"))
    algorithm = CborHash("heard", resists_collisions=False, function=apart)
    for start in range(0, len(view), 3):
        algorithm.hash_full_blocks(view[start : start + 3], 3, BlockHash(b"parent"), start=start)
    assert together.inputs == apart.inputs
