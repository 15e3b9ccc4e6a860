"""A name stands for its block, all before it, and everything that separates audiences."""

import subprocess
import sys
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.block_hash import BlockHash, ExtraKeys, hash_full_blocks, root_hash

ROOT = root_hash(seed=b"", fingerprint="f", kv_dtype="bf16", block_size=4, layout="NSGD")


def names(
    tokens: list[int], block_size: int = 4, parent: BlockHash = ROOT, extra: bytes = b""
) -> list[BlockHash]:
    return list(hash_full_blocks(memoryview(array("i", tokens)), block_size, parent, extra))


@given(tokens=st.lists(st.integers(0, 2**31 - 1), max_size=40), cut=st.integers(0, 10))
def test_names_can_be_extended_block_by_block(tokens: list[int], cut: int) -> None:
    whole = names(tokens)
    assert len(whole) == len(tokens) // 4
    first = whole[:cut]
    rest = names(tokens[4 * len(first) :], parent=first[-1] if first else ROOT)
    assert first + rest == whole


@given(
    tokens=st.lists(st.integers(0, 9), min_size=8, max_size=8),
    place=st.integers(0, 7),
)
def test_any_token_changes_its_block_and_all_behind(tokens: list[int], place: int) -> None:
    changed = tokens.copy()
    changed[place] += 1
    same = [a == b for a, b in zip(names(tokens), names(changed), strict=True)]
    assert same == [place >= 4, False]


def test_everything_that_separates_content_separates_names() -> None:
    def root(**changes: object) -> BlockHash:
        facts = {
            "seed": b"",
            "fingerprint": "f",
            "kv_dtype": "bf16",
            "block_size": 4,
            "layout": "NSGD",
        }
        return root_hash(**(facts | changes))  # type: ignore[arg-type]

    tokens = list(range(16))
    variants = [
        names(tokens),
        names(tokens, extra=ExtraKeys(b"a").first_block()),
        names(tokens, extra=ExtraKeys(b"", b"a").first_block()),
        names(tokens, extra=ExtraKeys(b"a", b"a").first_block()),
        names([12, 3, *tokens[2:]]),
        names([1, 23, *tokens[2:]]),
        names(tokens, block_size=8),
        names(tokens, parent=root(seed=b"s")),
        names(tokens, parent=root(fingerprint="g")),
        names(tokens, parent=root(kv_dtype="fp8")),
        names(tokens, parent=root(block_size=8)),
    ]
    lasts = [variant[-1] for variant in variants]
    assert len(set(lasts)) == len(variants)
    assert all(len(name) == 32 for name in lasts)


@pytest.mark.parametrize("seed", ["", "123"])
def test_processes_agree_whatever_seeds_their_own_hashes(seed: str) -> None:
    code = (
        "from array import array\n"
        "from scheduler_svc.core.block_hash import *\n"
        "root = root_hash(seed=b'', fingerprint='f', kv_dtype='bf16', block_size=4,"
        " layout='NSGD')\n"
        "print(hash_full_blocks(memoryview(array('i', range(16))), 4, root)[-1].hex())"
    )
    environment = {"PYTHONHASHSEED": seed} if seed else {}
    printed = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert printed.stdout.strip() == names(list(range(16)))[-1].hex()
