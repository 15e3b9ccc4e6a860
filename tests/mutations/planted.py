"""Planted bugs, read from the list beside this file."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

LIST = Path(__file__).parent / "mutations.toml"


@dataclass(frozen=True, slots=True)
class Mutation:
    """One bug: a text of a file that is replaced by another."""

    bug: str
    """What is wrong then, in a line."""
    file: str
    """From the root of the repository."""
    old: str
    """It occurs once."""
    new: str
    trap: int = 0
    """Number among the twelve traps of a re-implementation of the reference engine. 0: none."""
    proof: str = "core"
    """Whose tests must see it: `core`, `worker` or `kernels`."""
    hint: str = ""
    """Tests to look at early, below tests/: they see it, and the simulation does not."""

    @property
    def is_native(self) -> bool:
        """It is in code that is compiled before tests can see it."""
        return self.file.startswith("kernels/cpu/")

    def apply(self, root: Path) -> None:
        """Change the file. Raises: AssertionError if the text is not there exactly once."""
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        assert text.count(self.old) == 1, (
            f"{self.file} has {self.old!r} {text.count(self.old)} times"
        )
        self.write(root, text.replace(self.old, self.new))

    def write(self, root: Path, text: str) -> None:
        path = root / self.file
        path.write_text(text, encoding="utf-8")
        # Compiled files are told apart by whole seconds and by size, which is too coarse here.
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            compiled.unlink()


def mutations() -> list[Mutation]:
    return [Mutation(**entry) for entry in tomllib.loads(LIST.read_text("utf-8"))["mutation"]]
