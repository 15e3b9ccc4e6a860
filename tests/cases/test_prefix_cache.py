"""Area b of the public cases: the prefix cache."""

import asyncio
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from cases.conftest import Reference
from cases.raw_stream import messages
from cases.stack import Stack, serving
from pagemill.client import InvalidArgumentError as InvalidArgument
from scheduler_svc.core.hash_algorithms import HASH_ALGORITHMS


async def _send(stack: Stack, prompt: list[int], count: int, salt: str = "") -> Any:
    return await stack.client.complete(
        prompt=prompt, temperature=0, max_tokens=count, ignore_eos=True, salt=salt
    )


async def test_case_B_01_a_prompt_that_is_cached_whole_computes_its_last_block(
    bench_r: Path, reference: Reference
) -> None:
    # ADR 0003: the last block is computed again as a whole.
    expected = {8: 4, 4: 0, 9: 8}
    async with serving(bench_r, max_num_seqs=8) as stack:
        prompts = {length: list(range(10 + length, 10 + 2 * length)) for length in (4, 9)}
        prompts[8] = list(range(10, 18))
        for length, prompt in prompts.items():
            replies = [await _send(stack, prompt, 6)]
            begin = len(stack.steps)
            replies.append(await _send(stack, prompt, 6))
            (first,) = stack.steps[begin]
            assert (first.num_computed, first.num_new) == (
                expected[length],
                length - expected[length],
            )
            assert first.num_new >= 1
            assert [reply.usage.cached_tokens for reply in replies] == [0, expected[length]]
            for reply in replies:
                assert list(reply.token_ids) == reference(prompt, 6)

        together = [prompts[8], prompts[8], [*prompts[8], 77]]
        replies = await asyncio.gather(*(_send(stack, prompt, 6) for prompt in together))
        assert [list(reply.token_ids) for reply in replies] == [reference(p, 6) for p in together]
        assert [reply.usage.cached_tokens for reply in replies] == [4, 4, 8]
        for length, prompt in prompts.items():
            fourth = await _send(stack, prompt, 6)
            assert fourth.usage.cached_tokens == expected[length]
            assert list(fourth.token_ids) == reference(prompt, 6)
        await stack.idle()


SECRETS = ("s1-a8f3", "s2-77c1", "s1-a8f3 ")


async def test_case_B_05_a_salt_separates_prefixes_and_is_told_nowhere(
    bench_r: Path, reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = list(range(30, 62))
    first, second, spaced = SECRETS
    async with serving(bench_r, log_level="debug") as stack:
        found = []
        for salt in (first, first, second, "", ""):
            reply = await _send(stack, prompt, 4, salt)
            assert list(reply.token_ids) == reference(prompt, 4)
            found.append(reply.usage.cached_tokens)
        # An empty salt is none: it hits what a request without salt left.
        assert found == [0, 28, 0, 0, 28]
        with pytest.raises(InvalidArgument, match="salt"):
            await _send(stack, prompt, 4, "x" * 300)
        assert (await _send(stack, prompt, 4, spaced)).usage.cached_tokens == 0
        assert (await _send(stack, prompt, 4, first)).usage.cached_tokens == 28

        # Blocks 2 to 8 are no more reachable than the first: another first block, the rest equal.
        other = await _send(stack, [1, 2, 3, 4, *prompt[4:]], 4, second)
        assert other.usage.cached_tokens == 0
        names = list(stack.scheduler.pool._index) if stack.scheduler.pool else []
        assert len(names) == len(set(names)) == 4 * 8 + 8

        replies = await messages(
            stack.address, prompt=prompt, temperature=0, max_tokens=4, salt=first
        )
        page = generate_latest(stack.registry).decode()
        printed = capsys.readouterr()
        told = [*map(str, replies), page, printed.out, printed.err]
        told += [worker.log.getvalue() for worker in stack.workers]
        assert any("request ended" in text for text in told)
        for secret in SECRETS:
            assert not any(secret.strip() in text for text in told)
        assert not any(secret.strip() in name for secret in SECRETS for name in os.listdir())


# Prints the names of blocks under each variation, as JSON.
NAMES = """
import json
from array import array
from scheduler_svc.core.block_hash import Adapter, ExtraKeys, PoolIdentity
from scheduler_svc.core.hash_algorithms import SHA256

def names(tokens=range(16), extra=ExtraKeys(), size=4, fingerprint="A", kv_dtype="bf16"):
    root = SHA256.root("", PoolIdentity(fingerprint, kv_dtype, size, "NSGD"))
    view = memoryview(array("i", tokens))
    return [name.hex() for name in SHA256.hash_full_blocks(view, size, root, extra)]

print(json.dumps({
    "plain": names(),
    "salt": names(extra=ExtraKeys(salt=b"a")),
    "adapter": names(extra=ExtraKeys(adapter=Adapter("l", 1))),
    "12, 3": names([12, 3, *range(14)]),
    "1, 23": names([1, 23, *range(14)]),
    "blocks of 8": names(size=8),
    "fp8": names(kv_dtype="fp8"),
    "another model": names(fingerprint="B"),
}))
"""


def _names_in_a_process(seed: str | None) -> dict[str, list[str]]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONHASHSEED"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    printed = subprocess.run(
        [sys.executable, "-c", NAMES],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    found: dict[str, list[str]] = json.loads(printed.stdout)
    return found


def test_case_B_07_processes_agree_on_names_and_every_variation_has_its_own() -> None:
    first, second, third = map(_names_in_a_process, (None, None, "123"))
    assert first == second == third
    assert all(len(bytes.fromhex(name)) == 32 for each in first.values() for name in each)
    for one, other in itertools.combinations(first.values(), 2):
        assert not {*one} & {*other}


def test_case_B_07_there_is_no_hash_that_can_be_made_weaker() -> None:
    # Names are not cut anywhere, so there is no hook to refuse; the shortest has 128 bits. The weak
    # kind is for trusted input, says so, and is not the default.
    assert all(
        algorithm.resists_collisions == ("sha256" in name)
        for name, algorithm in HASH_ALGORITHMS.items()
    )


@pytest.mark.parametrize("token", [True, False])
async def test_case_B_07_truth_values_are_no_tokens(bench_r: Path, token: bool) -> None:
    async with serving(bench_r, join=False) as stack:
        with pytest.raises((InvalidArgument, TypeError)):
            await stack.client.complete(prompt=[token] * 4, max_tokens=1)
