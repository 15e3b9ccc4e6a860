"""Replays give the published utilisations, the same for the same seed, and true counts.

Expected shares are those that another simulator gave for the same lengths and pool.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from scheduler_svc.simulate.options import read_options
from scheduler_svc.simulate.replay import make_load, replay
from scheduler_svc.simulate.report import Report
from scheduler_svc.simulate.step_cost import StepCost
from scheduler_svc.simulate.workload import Arrival

POINT = 0.01


@cache
def report(*flags: str) -> Report:
    options = read_options(flags)
    return replay(options, make_load(options), StepCost())


def sharegpt(allocator: str, requests: int, *flags: str) -> Report:
    count = ("--requests", str(requests))
    return report("--lengths", "sharegpt", "--allocator", allocator, *count, *flags)


def test_pages_fill_the_pool() -> None:
    paged = sharegpt("paged", 400)
    assert paged.utilisation_of_pool >= 0.955
    assert paged.utilisation_of_allocated >= 0.97
    assert paged.mean_batch >= 4.3 * sharegpt("max", 1000).mean_batch
    assert paged.mean_batch >= 2.2 * sharegpt("oracle", 1000).mean_batch


@pytest.mark.parametrize(
    ("allocator", "utilisation"), [("max", 0.182), ("pow2", 0.265), ("oracle", 0.355)]
)
def test_reservations_waste_the_pool(allocator: str, utilisation: float) -> None:
    assert sharegpt(allocator, 1000).utilisation_of_pool == pytest.approx(
        utilisation, abs=2 * POINT
    )


@pytest.mark.parametrize(
    ("block_size", "utilisation"), [(32, 0.951), (64, 0.917), (128, 0.854), (256, 0.760)]
)
def test_larger_blocks_waste_more(block_size: int, utilisation: float) -> None:
    paged = sharegpt("paged", 400, "--block-size", str(block_size))
    assert paged.utilisation_of_pool == pytest.approx(utilisation, abs=1.5 * POINT)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_the_shares_hold_for_other_seeds_and_longer_loads(seed: int) -> None:
    flags = ("--seed", str(seed))
    assert sharegpt("paged", 4000, *flags).utilisation_of_pool >= 0.955
    for block_size, share in [(32, 0.951), (64, 0.917), (128, 0.854), (256, 0.760)]:
        paged = sharegpt("paged", 2000, *flags, "--block-size", str(block_size))
        assert paged.utilisation_of_pool == pytest.approx(share, abs=1.5 * POINT)
    mean_batch = sharegpt("paged", 4000, *flags).mean_batch
    assert mean_batch >= 4.3 * sharegpt("max", 4000, *flags).mean_batch


@pytest.mark.parametrize("allocator", ["paged", "oracle"])
def test_a_seed_repeats_a_replay(allocator: str) -> None:
    flags = ("--lengths", "alpaca", "--rate", "20", "--requests", "150", "--allocator", allocator)
    first, again, other = (
        replay(options, make_load(options), StepCost())
        for options in (read_options([*flags, "--seed", seed]) for seed in ("1", "1", "2"))
    )
    assert first == again != other


def test_preemption_at_either_depth_loses_no_token() -> None:
    load = [Arrival(0.0, 40 + i, 1 + i % 70) for i in range(60)]
    for depth in ("1", "2"):
        flags = ["--lengths", "alpaca", "--slots", "640", "--pipeline-depth", depth]
        result = replay(read_options(flags), load, StepCost())
        assert result.generation_tokens == sum(arrival.output_length for arrival in load)
        assert result.prompt_tokens == sum(arrival.input_length for arrival in load)
        assert result.requests == 60
        assert result.preemptions > 0
        assert result.recomputed_tokens > 0


def test_times_follow_the_formula() -> None:
    """One request alone: a prefill of 100 tokens, then steps of one token each."""
    cost = StepCost(fixed_ns=1000, weights_ns=50_000, token_ns=1000.0, context_token_ns=10.0)
    options = read_options(["--lengths", "alpaca", "--pipeline-depth", "1"])
    result = replay(options, [Arrival(3.0, 100, 3)], cost)
    assert result.ttft_s.p50 == pytest.approx((1000 + 100 * 1000 + 100 * 10) / 1e9)
    assert result.itl_s.p50 == pytest.approx((1000 + 50_000 + 101 * 10) / 1e9)
    assert result.itl_s.p99 == pytest.approx((1000 + 50_000 + 102 * 10) / 1e9)
    assert result.virtual_s == pytest.approx(102_000e-9 + 52_010e-9 + 52_020e-9)
    reserved = replay(
        read_options(["--lengths=alpaca", "--allocator=oracle"]), [Arrival(3.0, 100, 3)], cost
    )
    assert (reserved.ttft_s, reserved.itl_s) == (result.ttft_s, result.itl_s)
    assert reserved.virtual_s == result.virtual_s


def test_what_never_fits_is_counted_and_not_run() -> None:
    load = [Arrival(0.0, 30, 4), Arrival(0.0, 5000, 4), Arrival(0.0, 20, 4)]
    for allocator in ("paged", "oracle", "pow2", "max"):
        options = read_options(["--lengths", "alpaca", "--allocator", allocator])
        result = replay(options, load, StepCost())
        assert (result.requests, result.refused) == (2, 1)


def _conversations() -> Iterator[dict[str, object]]:
    """Yield turns of conversations that share a system prompt, each longer than the one before."""
    for number in range(60):
        conversation, turn = number % 12, number // 12
        chunks = [0, 1, *(100 * conversation + i for i in range(2, 3 + turn))]
        length = 64 * len(chunks) - number % 17
        yield {
            "arrival_s": 30.0 * number,
            "input_length": length,
            "output_length": 4,
            "hash_ids": chunks,
        }


def _hits_without_eviction(load: list[Arrival], block_size: int, chunk: int) -> tuple[int, int]:
    """Count tokens looked up, and those whose whole prefix an earlier prompt had."""
    seen: set[tuple[int, ...]] = set()
    queries = hits = 0
    for arrival in load:
        ids = [hash_id for hash_id in arrival.hash_ids for _ in range(chunk)]
        ids = ids[: arrival.input_length]
        prefixes = [tuple(ids[:end]) for end in range(block_size, len(ids) + 1, block_size)]
        found = 0
        while (found + 1) * block_size < len(ids) and prefixes[found] in seen:
            found += 1
        queries += len(ids)
        hits += found * block_size
        seen.update(prefixes)
    return queries, hits


@pytest.mark.parametrize("block_size", [16, 48])
def test_a_trace_hits_as_often_as_its_prefixes_return(tmp_path: Path, block_size: int) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in _conversations()), "utf-8")
    flags = ["--trace", str(trace), "--chunk-tokens", "64", "--block-size", str(block_size)]
    options = read_options([*flags, "--slots", "60000"])
    load = make_load(options)
    result = replay(options, load, StepCost())
    queries, hits = _hits_without_eviction(load, block_size, 64)
    assert 0.3 < hits / queries < 0.9
    assert result.hit_rate == hits / queries
    assert result.preemptions == 0
    blind = replay(read_options([*flags, "--no-enable-prefix-caching"]), load, StepCost())
    assert blind.hit_rate == 0


def test_requests_that_share_a_prefix_save_its_blocks() -> None:
    shared = [Arrival(0.0, 512, 20, (1,)) for _ in range(4)]
    options = read_options(["--lengths", "alpaca", "--slots", "4096"])
    result = replay(options, [*shared, Arrival(0.0, 200, 1)], StepCost())
    assert result.blocks_saved_share > 0.5
    assert 0.5 < result.utilisation_of_allocated <= 1


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (
            ["--lengths", "sharegpt", "--n", "2", "--allocator", "max"],
            "--n is 2, which --allocator max cannot",
        ),
        (["--lengths", "sharegpt", "--n", "300"], "--n is 300, must be at most --max-num-seqs"),
        (["--trace", "x", "--own-lengths"], "--own-lengths draws lengths, so it needs --lengths"),
        (["--lengths", "sharegpt", "--rate", "0"], "'0', must be above 0, or saturate"),
        (["--lengths", "sharegpt", "--block-size", "0"], "'0', must be an integer from 1"),
        (["--lengths", "sharegpt", "--slots", "8"], "--block-size is 16, must be at most --slots"),
        (["--lengths", "sharegpt", "--trace", "x"], "not allowed with"),
        ([], "is required"),
    ],
)
def test_an_impossible_command_line_ends_with_a_sentence(
    flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        read_options(flags)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert said.count("\n") == 1
