"""A name stands for its block, all before it, and everything that separates audiences."""

import subprocess
import sys
from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.block_hash import (
    NO_EXTRA_KEYS,
    Adapter,
    BlockHash,
    Chain,
    ContentSpan,
    ExtraKeys,
    HashAlgorithm,
    PoolIdentity,
    SpanPart,
)
from scheduler_svc.core.hash_algorithms import HASH_ALGORITHMS, SHA256

POOL = PoolIdentity(fingerprint="f", kv_dtype="bf16", block_size=4, layout="NSGD")

every_algorithm = pytest.mark.parametrize(
    "algorithm", HASH_ALGORITHMS.values(), ids=lambda a: a.name
)
algorithms = st.sampled_from(sorted(HASH_ALGORITHMS)).map(HASH_ALGORITHMS.__getitem__)
token_ids = st.integers(0, 2**31 - 1)


@st.composite
def extra_keys(draw: st.DrawFn) -> ExtraKeys:
    start, spans = 0, []
    for gap, length in draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=4)):
        spans.append(ContentSpan(draw(st.sampled_from(["a", "é"])), start + gap, length))
        start = spans[-1].end
    return ExtraKeys(
        salt=draw(st.binary(max_size=3)),
        cache_domain=draw(st.binary(max_size=3)),
        adapter=draw(
            st.none() | st.builds(Adapter, st.text(max_size=3), st.integers(0, 2**64 - 1))
        ),
        spans=tuple(spans),
    )


def names(
    tokens: list[int],
    extra: ExtraKeys = NO_EXTRA_KEYS,
    *,
    algorithm: HashAlgorithm = SHA256,
    block_size: int = 4,
    parent: BlockHash | None = None,
    start: int = 0,
) -> list[BlockHash]:
    parent = parent or algorithm.root("", POOL)
    view = memoryview(array("i", tokens))
    return algorithm.hash_full_blocks(view, block_size, parent, extra, start)


@given(
    algorithm=algorithms,
    tokens=st.lists(token_ids, max_size=40),
    cut=st.integers(0, 10),
    extra=extra_keys(),
)
def test_names_can_be_extended_block_by_block(
    algorithm: HashAlgorithm, tokens: list[int], cut: int, extra: ExtraKeys
) -> None:
    whole = names(tokens, extra, algorithm=algorithm)
    assert len(whole) == len(tokens) // 4
    first = whole[:cut]
    start = 4 * len(first)
    parent = first[-1] if first else None
    rest = names(tokens[start:], extra, algorithm=algorithm, parent=parent, start=start)
    assert first + rest == whole


@given(
    algorithm=algorithms,
    tokens=st.lists(token_ids, min_size=8, max_size=8),
    place=st.integers(0, 7),
    bit=st.integers(0, 30),
)
def test_any_token_changes_its_block_and_all_behind(
    algorithm: HashAlgorithm, tokens: list[int], place: int, bit: int
) -> None:
    changed = tokens.copy()
    changed[place] ^= 1 << bit
    pairs = zip(
        names(tokens, algorithm=algorithm), names(changed, algorithm=algorithm), strict=True
    )
    assert [a == b for a, b in pairs] == [place >= 4, False]


@every_algorithm
def test_everything_that_separates_content_separates_names(algorithm: HashAlgorithm) -> None:
    tokens = list(range(16))
    variants = [
        *(names(each, algorithm=algorithm) for each in (tokens, [12, 3, *tokens[2:]])),
        names([1, 23, *tokens[2:]], algorithm=algorithm),
        names(tokens, algorithm=algorithm, block_size=8),
        names(tokens, algorithm=algorithm, parent=algorithm.root("s", POOL)),
        *(
            names(tokens, extra, algorithm=algorithm)
            for extra in (
                ExtraKeys(salt=b"a"),
                ExtraKeys(cache_domain=b"a"),
                ExtraKeys(salt=b"a", cache_domain=b"a"),
                ExtraKeys(salt=b"aa"),
                ExtraKeys(adapter=Adapter("a", 1)),
                ExtraKeys(adapter=Adapter("a", 2)),
                ExtraKeys(adapter=Adapter("a1", 1)),
                ExtraKeys(spans=(ContentSpan("a", 0, 1),)),
                ExtraKeys(spans=(ContentSpan("a", 1, 1),)),
                ExtraKeys(spans=(ContentSpan("b", 1, 1),)),
                ExtraKeys(spans=(ContentSpan("a", 1, 1), ContentSpan("b", 2, 1))),
                ExtraKeys(salt=b"a", spans=(ContentSpan("a", 1, 1),)),
            )
        ),
    ]
    lasts = [variant[-1] for variant in variants]
    assert len(set(lasts)) == len(variants)
    assert {len(name) for name in lasts} == {16 if "xxhash" in algorithm.name else 32}


@pytest.mark.parametrize("name", ["sha256", "xxhash"])
def test_our_own_names_hold_the_identity_of_the_pool(name: str) -> None:
    pools = [
        POOL,
        replace(POOL, fingerprint="g"),
        replace(POOL, kv_dtype="fp8"),
        replace(POOL, block_size=8),
        replace(POOL, layout="NGSD"),
    ]
    roots = {HASH_ALGORITHMS[name].root(seed, pool) for pool in pools for seed in ("", "0")}
    assert len(roots) == 2 * len(pools)


@given(extra=extra_keys(), block=st.integers(0, 20))
def test_a_block_sees_the_spans_that_lie_over_it(extra: ExtraKeys, block: int) -> None:
    start, end = 4 * block, 4 * block + 4
    parts = [key for key in extra.of_block(start, end) if isinstance(key, SpanPart)]
    assert parts == [
        SpanPart(span.content_id, span.start - start)
        for span in extra.spans
        if {*range(span.start, span.end)} & {*range(start, end)}
    ]


@pytest.mark.parametrize(
    "spans",
    [
        (ContentSpan("a", 3, 0),),
        (ContentSpan("a", 3, 2), ContentSpan("b", 4, 1)),
        (ContentSpan("a", 3, 2), ContentSpan("b", 0, 1)),
    ],
)
def test_spans_that_say_nothing_clear_are_refused(spans: tuple[ContentSpan, ...]) -> None:
    with pytest.raises(ValueError, match="content span"):
        ExtraKeys(spans=spans)


@every_algorithm
@pytest.mark.parametrize("seed", ["", "0"])
def test_scenario_27_processes_agree_by_our_seed_and_not_by_pythons(
    algorithm: HashAlgorithm, seed: str
) -> None:
    """Where the reference draws a random seed, ours is empty: ADR 0014."""
    program = (
        "import sys\n"
        "from array import array\n"
        "from scheduler_svc.core.block_hash import PoolIdentity\n"
        "from scheduler_svc.core.hash_algorithms import HASH_ALGORITHMS\n"
        "algorithm = HASH_ALGORITHMS[sys.argv[1]]\n"
        "root = algorithm.root(sys.argv[2], PoolIdentity('f', 'bf16', 4, 'NSGD'))\n"
        "print(algorithm.hash_full_blocks(memoryview(array('i', range(16))), 4, root)[-1].hex())"
    )
    tokens = list(range(16))
    parent = algorithm.root(seed, POOL)
    expected = names(tokens, algorithm=algorithm, parent=parent)[-1].hex()
    for environment in ({}, {"PYTHONHASHSEED": "123"}):
        printed = subprocess.run(
            [sys.executable, "-c", program, algorithm.name, seed],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert printed.stdout.strip() == expected


@given(
    algorithm=algorithms,
    requests=st.lists(
        st.tuples(extra_keys(), st.lists(token_ids, min_size=8, max_size=8), st.booleans()),
        min_size=1,
        max_size=7,
    ),
)
def test_the_next_blocks_of_many_are_named_like_those_of_each(
    algorithm: HashAlgorithm, requests: list[tuple[ExtraKeys, list[int], bool]]
) -> None:
    chains: list[Chain] = []
    tokens: list[int] = []
    expected = []
    for extra, ids, is_first in requests:
        first, second = names(ids, extra, algorithm=algorithm)
        root = algorithm.root("", POOL)
        chains.append((root, extra, 0) if is_first else (first, extra, 4))
        tokens += ids[:4] if is_first else ids[4:]
        expected.append(first if is_first else second)
    view = memoryview(array("i", tokens))
    assert algorithm.hash_next_blocks(view, 4, chains) == expected


@pytest.mark.parametrize("algorithm", HASH_ALGORITHMS.values(), ids=lambda each: each.name)
def test_an_adapter_enters_every_block_and_not_the_first_alone(algorithm: HashAlgorithm) -> None:
    tokens, parent = memoryview(array("i", [1, 2, 3, 4])), BlockHash(bytes(32))
    names = [
        algorithm.hash_full_blocks(tokens, 2, parent, ExtraKeys(adapter=adapter), start=2)
        for adapter in (None, Adapter("a", 1), Adapter("a", 2), Adapter("b", 1))
    ]
    assert len({name for each in names for name in each}) == 8
