"""Nobody spins: a server without requests leaves the machine to others."""

import sys
import time
from pathlib import Path

import pytest

from e2e.serving import Served, serving
from pagemill.client import AsyncClient
from tiny_llama import write_tiny_llama

WINDOW_S = 3.0
MOST_OF_A_CORE = 0.01


def cpu_ns(served: Served) -> int:
    """Return the time that the threads of all programs have run, in nanoseconds."""
    programs = {served.process.pid, *served.children().values(), *served.workers()}
    threads = [task for pid in programs for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in threads)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.skipif(sys.platform != "linux", reason="Linux says how long each thread has run")
async def test_an_idle_server_takes_less_than_a_hundredth_of_a_core(
    tmp_path: Path, num_ranks: int
) -> None:
    flags = ("--speculation", "prompt-lookup", "--tensor-parallel-size", str(num_ranks))
    with serving(str(write_tiny_llama(tmp_path)), *flags) as served:
        assert len(served.workers()) == num_ranks
        async with AsyncClient(served.address) as client:
            await client.complete(prompt=[1, 2, 3], max_tokens=8, ignore_eos=True)
        shares: list[float] = []
        # What ends the request's work may fall into the first.
        while len(shares) < 3 and not (shares and shares[-1] < MOST_OF_A_CORE):
            before, began_ns = cpu_ns(served), time.monotonic_ns()
            time.sleep(WINDOW_S)
            shares.append((cpu_ns(served) - before) / (time.monotonic_ns() - began_ns))
    assert shares[-1] < MOST_OF_A_CORE, shares
