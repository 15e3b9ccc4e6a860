"""Native code is built once, by whoever comes first, and its absence has a reason."""

import threading
from pathlib import Path

import pytest
import torch

from kernels import cpu_build
from kernels.cpu_build import (
    FLAGS,
    NoNativeCodeError,
    build_and_load,
    cache_folder,
    runs_natively,
)

# No optimisation: these tests only build.
QUICK = tuple("-O0" if flag == "-O3" else flag for flag in FLAGS)


def test_it_is_built_once_even_if_several_come_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[object] = []
    threads = [
        threading.Thread(target=lambda: loaded.append(build_and_load(tmp_path, QUICK)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(loaded) == 2
    assert [path.suffix for path in tmp_path.iterdir()] == [".so"]
    monkeypatch.setattr(cpu_build, "_compile", None)
    build_and_load(tmp_path, QUICK)


def test_without_a_compiler_the_reason_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(NoNativeCodeError, match="no C\\+\\+ compiler"):
        build_and_load(tmp_path)


def test_a_compiler_that_fails_is_named_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NoNativeCodeError, match=r"g\+\+ failed: .*no-such-flag"):
        build_and_load(tmp_path, (*QUICK, "-fno-such-flag"))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(NoNativeCodeError, match="false failed"):
        build_and_load(tmp_path, QUICK)


def test_a_damaged_or_unwritable_cache_has_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NoNativeCodeError, match="cannot be written"):
        build_and_load(tmp_path / "file", QUICK)
    monkeypatch.setattr(cpu_build, "_compile", lambda _compiler, _flags, path: path.write_text(""))
    with pytest.raises(NoNativeCodeError, match="cannot be loaded"):
        build_and_load(tmp_path, QUICK)


def test_other_flags_are_another_file() -> None:
    compiler = "/usr/bin/g++"
    names = {cpu_build._fingerprint(compiler, flags) for flags in (FLAGS, QUICK, (*FLAGS, "-g"))}
    assert len(names) == 3


def test_it_lies_where_everything_we_keep_lies() -> None:
    assert cache_folder({"PAGEMILL_CACHE": "/there"}) == Path("/there/kernels")
    assert cache_folder({}) == Path.home() / ".cache/pagemill/kernels"


def test_the_interpreter_keeps_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not runs_natively(cpu)
    monkeypatch.delenv("TRITON_INTERPRET")
    assert runs_natively(cpu)
    assert not runs_natively(torch.device("cuda"))
