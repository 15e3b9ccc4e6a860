"""Presses Ctrl-C in the middle of a program's imports, where an exception would be lost."""

import subprocess
import sys

_PROGRAM = """
import os, signal, sys, weakref
from importlib.abc import MetaPathFinder

class Interrupted(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            gone = Interrupted()
            watched = weakref.ref(gone, lambda _: os.kill(os.getpid(), signal.SIGINT))
            del gone

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupted())
{program}
print("it went on")
"""


def interrupted(program: str, module: str) -> tuple[int, str, str]:
    """Interrupt a program when it imports a module; return its status and what it said."""
    command = [sys.executable, "-c", _PROGRAM.format(program=program, module=module)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    return ended.returncode, ended.stdout, ended.stderr
