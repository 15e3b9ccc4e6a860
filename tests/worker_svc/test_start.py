"""A worker imports nothing that it does not run, and looks for no garbage while it imports."""

import json
import signal
import sys
from pathlib import Path

from commands import run
from interrupted_start import interrupted
from tiny_llama import write_tiny_llama

# Each of them takes a tenth of a second or more, or brings one that does.
NOT_ON_A_CPU = (
    "triton",
    "torch._dynamo",
    "torch._inductor",
    "sympy",
    "transformers",
    "huggingface_hub",
    "scipy",
    "networkx",
)
PROGRAM = f"""
import gc, io, json, sys
from worker_svc import __main__ as program
sys.stdin = io.StringIO('{{"num_seqs": 2, "input_len": 3, "output_len": 4}}')
program.main()
print(json.dumps([name for name in {NOT_ON_A_CPU} if name in sys.modules]))
print(json.dumps([gc.isenabled(), gc.get_freeze_count()]))
"""


def test_a_start_and_a_run_on_a_cpu_import_nothing_for_a_gpu_or_a_compiler(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "tiny")
    flags = ("--device=cpu", "--threads=1", "--bench-forward")
    printed = run(sys.executable, "-c", PROGRAM, model, *flags)
    ready, _, imported, (collects, num_frozen) = map(json.loads, printed.splitlines())
    assert ready == {"ready": True}
    assert imported == []
    # Looked at never again: what has been imported. Everything else is, as ever.
    assert collects
    assert num_frozen > 100_000


def test_ctrl_c_while_it_imports_ends_it_without_a_word() -> None:
    program = "from worker_svc.__main__ import main; main()"
    assert interrupted(program, "worker_svc.config") == (-signal.SIGINT, "", "")
