"""The comparison with another scheduler reads both sides and divides the right way round."""

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "step_against_peer.py"
PEER = """
import json, sys
sizes = sys.argv[sys.argv.index("--batch") + 1 :]
for size in map(int, sizes):
    print(json.dumps({"bench": "decode", "batch": size, "step_us_p10": 1e9 * size}))
print("a word of its own")
print(json.dumps({"bench": "machine"}))
"""


def test_each_size_gets_the_ratio_of_the_peers_step_to_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peer = tmp_path / "peer.py"
    peer.write_text(PEER)
    main = runpy.run_path(str(SCRIPT))["main"]
    command = [sys.executable, str(peer)]
    assert main(["--requests", "1", "3", "--rounds", "2", "--", *command]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["requests"], line["peer_us_per_step"]) for line in lines] == [(1, 1e9), (3, 3e9)]
    for line in lines:
        assert line["ratio_least"] <= line["ratio"] <= line["ratio_most"]
        assert line["ratio"] > 1000
