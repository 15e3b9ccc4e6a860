"""Extra keys decide who hits whose blocks, and hashing is done once or not at all.

Scenarios are numbered as in the reference, section 11.2.
"""

from array import array
from collections import Counter, deque
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_worker import FakeWorker
from scheduler_svc.core.block_hash import (
    NO_EXTRA_KEYS,
    Adapter,
    BlockHash,
    Chain,
    ContentSpan,
    ExtraKeys,
    HashAlgorithm,
    PoolIdentity,
    Salt,
    SpanPart,
)
from scheduler_svc.core.hash_algorithms import HASH_ALGORITHMS, SHA256
from scheduler_svc.core.limits import Limits
from scheduler_svc.core.request import Request, Sampling, Stopping
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step_plan import StepResult

POOL = PoolIdentity(fingerprint="f", kv_dtype="bf16", block_size=4, layout="")

every_algorithm = pytest.mark.parametrize(
    "algorithm", HASH_ALGORITHMS.values(), ids=lambda a: a.name
)


class CountingHash:
    """SHA-256 that counts the full-block tokens it hashes, by request: each has its own salt."""

    name = "counting"
    resists_collisions = True

    def __init__(self) -> None:
        self.num_tokens: Counter[bytes] = Counter()

    def root(self, seed: str, pool: PoolIdentity) -> BlockHash:
        return SHA256.root(seed, pool)

    def hash_full_blocks(
        self,
        tokens: memoryview,
        block_size: int,
        parent: BlockHash,
        extra: ExtraKeys = NO_EXTRA_KEYS,
        start: int = 0,
    ) -> list[BlockHash]:
        names = SHA256.hash_full_blocks(tokens, block_size, parent, extra, start)
        self.num_tokens[extra.salt] += len(names) * block_size
        return names

    def hash_next_blocks(
        self, tokens: memoryview, block_size: int, chains: Sequence[Chain]
    ) -> list[BlockHash]:
        for _, extra, _ in chains:
            self.num_tokens[extra.salt] += block_size
        return SHA256.hash_next_blocks(tokens, block_size, chains)


def request(
    name: str, tokens: list[int], extra: ExtraKeys = NO_EXTRA_KEYS, max_output: int = 1
) -> Request:
    return Request(
        name, array("i", tokens), Sampling(temperature=0.0), Stopping(max_output), extra=extra
    )


class Bench:
    """A scheduler and a fake worker."""

    def __init__(
        self,
        algorithm: HashAlgorithm = SHA256,
        *,
        caching: bool = True,
        block_size: int = 16,
        num_blocks: int = 32,
        depth: int = 1,
    ) -> None:
        limits = Limits(block_size, 4, 256, 256, 64, depth)
        self.scheduler = Scheduler(limits, enable_prefix_caching=caching, hash_algorithm=algorithm)
        self.scheduler.start_epoch(num_blocks, algorithm.root("", POOL), 0)
        self._worker = FakeWorker(block_size, num_blocks)

    def run(self, *requests: Request) -> None:
        """Run requests to their ends."""
        scheduler = self.scheduler
        for each in requests:
            scheduler.add(each, 0)
        results: deque[StepResult] = deque()
        while scheduler.has_work or results:
            while (plan := scheduler.schedule(0)) is not None:
                results.append(self._worker.run(plan))
            scheduler.apply(results.popleft(), 0)
            scheduler.check()

    def num_hit_blocks(self, tokens: list[int], extra: ExtraKeys) -> int:
        """Run a request and return how many blocks it found."""
        asked = request("asked", tokens, extra)
        self.run(asked)
        return asked.num_cached_tokens // self.scheduler.limits.block_size


@every_algorithm
def test_scenario_20_a_salt_enters_the_first_block_and_parts_all(algorithm: HashAlgorithm) -> None:
    salted, other = ExtraKeys(salt=b"salt1"), ExtraKeys(salt=b"salt2")
    keys = [salted.of_block(start, start + 16) for start in (0, 16, 32)]
    assert keys == [(Salt(b"", b"salt1"),), (), ()]
    bench, tokens = Bench(algorithm), list(range(55))
    assert [bench.num_hit_blocks(tokens, extra) for extra in (salted, salted, other)] == [0, 3, 0]


@every_algorithm
def test_scenario_21_each_block_names_the_content_that_lies_over_it(
    algorithm: HashAlgorithm,
) -> None:
    extra = ExtraKeys(
        spans=(
            ContentSpan("aaa", 11, 10),
            ContentSpan("bbb", 30, 18),
            ContentSpan("ccc", 48, 4),
        )
    )
    assert [extra.of_block(start, start + 16) for start in (0, 16, 32, 48)] == [
        (SpanPart("aaa", 11),),
        (SpanPart("aaa", -5), SpanPart("bbb", 14)),
        (SpanPart("bbb", -2),),
        (SpanPart("ccc", 0),),
    ]
    # The fourth block is filled, and named, by decoding.
    decoded = request("first", list(range(59)), extra, max_output=8)
    bench = Bench(algorithm)
    bench.run(decoded)
    known = decoded.tokens.tolist()[:65]
    assert bench.num_hit_blocks(known, extra) == 4
    assert bench.num_hit_blocks(known, ExtraKeys(spans=extra.spans[:2])) == 3


@every_algorithm
def test_scenario_22_adapters_share_nothing(algorithm: HashAlgorithm) -> None:
    bench, tokens = Bench(algorithm), list(range(55))
    adapters = (Adapter("a", 1), Adapter("b", 1), Adapter("a", 2))
    for extra in [ExtraKeys(adapter=adapter) for adapter in adapters]:
        assert [extra.of_block(s, s + 16) for s in (0, 16)] == [(extra.adapter,)] * 2
        assert [bench.num_hit_blocks(tokens, extra) for _ in range(2)] == [0, 3]


@every_algorithm
def test_scenario_23_embeddings_part_equal_placeholders(algorithm: HashAlgorithm) -> None:
    bench, tokens = Bench(algorithm), [0] * 55
    extras = [ExtraKeys(spans=(ContentSpan(digest, 16, 20),)) for digest in ("d1", "d2", "d1")]
    # The block before them is shared; behind them the chain parts what they parted.
    assert [bench.num_hit_blocks(tokens, extra) for extra in extras] == [0, 1, 3]


@settings(deadline=None, max_examples=100)
@given(
    jobs=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=6),
    num_blocks=st.integers(8, 20),
    depth=st.integers(1, 2),
)
def test_each_token_is_hashed_once_per_request(
    jobs: list[tuple[int, int]], num_blocks: int, depth: int
) -> None:
    """However long it waits, and however often it loses its blocks."""
    counting = CountingHash()
    bench = Bench(counting, block_size=4, num_blocks=num_blocks, depth=depth)
    requests = [
        request(f"{number}", [number % 2] * length, ExtraKeys(b"%d" % number), max_output)
        for number, (length, max_output) in enumerate(jobs)
    ]
    bench.run(*requests)
    for each in requests:
        # The last token may end the request before its block is named.
        full = {(each.num_tokens - unnamed) // 4 * 4 for unnamed in (0, 1)}
        assert counting.num_tokens[each.extra.salt] in full


def test_preempted_requests_keep_their_names() -> None:
    counting = CountingHash()
    bench = Bench(counting, block_size=4, num_blocks=8)
    requests = [request(f"{n}", [n] * 12, ExtraKeys(b"%d" % n), 12) for n in range(2)]
    bench.run(*requests)
    assert bench.scheduler.counters.preemptions > 0
    assert counting.num_tokens == {b"0": 20, b"1": 20}


def test_without_prefix_caching_nothing_is_hashed() -> None:
    counting = CountingHash()
    bench = Bench(counting, caching=False, block_size=4)
    requests = [request(f"{n}", list(range(40)), max_output=9) for n in range(3)]
    bench.run(*requests)
    assert counting.num_tokens.total() == 0
    assert all(each.hashes == [] and each.num_cached_tokens == 0 for each in requests)
