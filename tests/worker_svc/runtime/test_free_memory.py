"""What is free is what the tightest group leaves, of either version of control groups."""

from pathlib import Path

import psutil

from worker_svc.runtime.free_memory import available_memory_bytes, total_memory_bytes


def write_group(folder: Path, limit: str, used: int, inactive: int) -> None:
    """Write the files of a group of version 2."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")


def test_a_container_has_what_its_limit_leaves(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"

    def left(limit: str, used: int, inactive: int) -> int:
        write_group(tmp_path, limit, used, inactive)
        return available_memory_bytes(tmp_path, nowhere)

    assert left("1000000", used=300000, inactive=100000) == 800000
    assert left("1000000", used=2000000, inactive=0) == 0
    assert left(str(1 << 60), used=0, inactive=0) < 1 << 50
    assert left("max", used=0, inactive=0) > 1 << 20
    assert available_memory_bytes(tmp_path / "gone", nowhere) > 1 << 20


def test_the_tightest_of_nested_groups_decides(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    membership.write_text("0::/system.slice/pagemill.service\n")
    root = tmp_path / "cgroup"
    write_group(root / "system.slice/pagemill.service", "max", 100, 0)
    write_group(root / "system.slice", "5000", 1000, 0)
    assert available_memory_bytes(root, membership) == 4000
    write_group(root / "system.slice/pagemill.service", "3000", 100, 0)
    assert available_memory_bytes(root, membership) == 2900


def test_groups_of_version_1_have_other_names(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    membership.write_text("7:cpu,cpuacct:/other\n4:memory:/docker/abc\n")
    folder = tmp_path / "cgroup/memory/docker/abc"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("9000\n")
    (folder / "memory.usage_in_bytes").write_text("2000\n")
    (folder / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 500\n")
    assert available_memory_bytes(tmp_path / "cgroup", membership) == 7500


def test_a_path_out_of_the_root_is_not_followed(tmp_path: Path) -> None:
    """Seen from inside a container, a group outside of it is `/../name`."""
    membership = tmp_path / "membership"
    membership.write_text("0::/../outside\n")
    write_group(tmp_path / "outside", "10", 0, 0)
    assert available_memory_bytes(tmp_path / "cgroup", membership) > 1 << 20


def test_what_there_is_in_all_is_the_tightest_limit(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    membership.write_text("0::/system.slice/pagemill.service\n")
    root = tmp_path / "cgroup"
    write_group(root / "system.slice/pagemill.service", "max", 100, 0)
    write_group(root / "system.slice", "5000", 4900, 0)
    assert total_memory_bytes(root, membership) == 5000
    write_group(root / "system.slice", "max", 4900, 0)
    assert total_memory_bytes(root, membership) == psutil.virtual_memory().total
