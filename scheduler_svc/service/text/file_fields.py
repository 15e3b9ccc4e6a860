"""Typed reading of what a model's file says; every complaint names the file and the field."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeGuard, TypeVar

from scheduler_svc.errors import ConfigError

T = TypeVar("T")


class FileFields:
    """The fields of one file, whose kinds are checked when they are read.

    A field that is absent or null reads as None; one of another kind than the one asked
    for raises ConfigError.
    """

    __slots__ = ("_values", "path")

    def __init__(self, path: Path, values: Mapping[str, object]) -> None:
        self.path = path
        self._values = values

    def get(self, key: str) -> object:
        """Return a value of any kind, or None."""
        return self._values.get(key)

    def text(self, key: str) -> str | None:
        """Return a text."""
        value = self.get(key)
        if value is None or isinstance(value, str):
            return value
        raise self._wrong(key, "a text")

    def flag(self, key: str) -> bool | None:
        """Return a truth value."""
        value = self.get(key)
        if value is None or isinstance(value, bool):
            return value
        raise self._wrong(key, "true or false")

    def integer(self, key: str) -> int | None:
        """Return a whole number."""
        value = self.get(key)
        if value is None or _is_integer(value):
            return value
        raise self._wrong(key, "a whole number")

    def number(self, key: str) -> float | None:
        """Return a number."""
        value = self.get(key)
        if value is None or isinstance(value, float):
            return value
        if _is_integer(value):
            return self._float(key, value)
        raise self._wrong(key, "a number")

    def integers(self, key: str) -> list[int] | None:
        """Return a list of whole numbers. A single number counts as a list of one."""
        value = self.get(key)
        if value is None:
            return None
        values = value if isinstance(value, list) else [value]
        integers = [part for part in values if _is_integer(part)]
        if len(integers) == len(values):
            return integers
        raise self._wrong(key, "a whole number or a list of them")

    def numbers(self, key: str) -> list[float] | None:
        """Return a list of numbers."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, list):
            numbers = [
                self._float(key, part)
                for part in value
                if isinstance(part, float) or _is_integer(part)
            ]
            if len(numbers) == len(value):
                return numbers
        raise self._wrong(key, "a list of numbers")

    def texts(self, key: str) -> list[str] | None:
        """Return a list of texts."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, list):
            texts = [part for part in value if isinstance(part, str)]
            if len(texts) == len(value):
                return texts
        raise self._wrong(key, "a list of texts")

    def required(self, read: Callable[[str], T | None], key: str) -> T:
        """Return what `read`, a method of this object, finds under `key`.

        Raises: ConfigError if it finds nothing.
        """
        value = read(key)
        if value is None:
            raise ConfigError(f"{self.path}: {key} is missing")
        return value

    def _float(self, key: str, number: float) -> float:
        try:
            return float(number)
        except OverflowError as error:
            raise self._wrong(key, "a number that a float holds") from error

    def _wrong(self, key: str, kind: str) -> ConfigError:
        value = repr(self.get(key))
        return ConfigError(f"{self.path}: {key} is {value:.60}, must be {kind}")


def read_json_fields(path: Path) -> FileFields:
    """Read a file that holds a JSON object. A file that does not exist has no fields.

    Raises: ConfigError if it cannot be read, or holds something else.
    """
    if not path.exists():
        return FileFields(path, {})
    try:
        document = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        # The former is also that of a number of thousands of digits.
        raise ConfigError(f"{path}: not JSON ({error})") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: holds no JSON object")
    return FileFields(path, document)


def read_text(path: Path) -> str:
    """Read a UTF-8 file.

    Raises: ConfigError if that fails.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error})") from error


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
