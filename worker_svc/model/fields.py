"""Named values of a model's files, read with their types checked."""

import sys
from collections.abc import Mapping
from typing import Final

from worker_svc.errors import ModelError

_MAX_COUNT: Final = 2**31 - 1
"""Of layers, heads, tokens and all that is counted: the protocol has 32 bits for these."""

_MAX: Final = sys.float_info.max


class Fields:
    """A flat mapping whose values are wanted as this or that type.

    Every reader raises ModelError, naming source, field and value, if the field is not of its
    type, or is absent and has no default. A null counts as absent.
    """

    __slots__ = ("_source", "_values")

    def __init__(self, values: Mapping[str, object], source: str) -> None:
        self._values = values
        self._source = source

    def has(self, name: str) -> bool:
        """Return whether the field is there and not null."""
        return self._values.get(name) is not None

    @property
    def names(self) -> tuple[str, ...]:
        """The fields there are, null or not."""
        return tuple(self._values)

    def integer(self, name: str) -> int:
        """Return an integer of either sign."""
        value = self._value(name, None)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._error(name, "an integer")
        return value

    def count(self, name: str, default: int | None = None, *, most: int = _MAX_COUNT) -> int:
        """Return a positive integer, of at most `most`."""
        value = self._value(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._error(name, "a positive integer", value)
        if value > most:
            raise self._error(name, f"at most {most}", value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a positive, finite number."""
        value = self._value(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= _MAX:
            raise self._error(name, "a positive number", value)
        return float(value)

    def flag(self, name: str, *, default: bool | None = None) -> bool:
        """Return a truth value."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self._error(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self._error(name, "a string")
        return value

    def texts(self, name: str) -> list[str]:
        """Return a list of strings."""
        value = self._value(name, None)
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise self._error(name, "a list of strings")
        return [str(entry) for entry in value]

    def indices(self, name: str) -> list[int]:
        """Return a list of integers from 0 on; an empty one if it is absent."""
        value = self._value(name, [])
        if not isinstance(value, list) or not all(
            type(entry) is int and entry >= 0 for entry in value
        ):
            raise self._error(name, "a list of integers from 0 on")
        return list(value)

    def group(self, name: str) -> "Fields":
        """Return a nested mapping; an empty one if it is absent."""
        value = self._value(name, {})
        if not isinstance(value, dict):
            raise self._error(name, "a mapping")
        return Fields({str(key): entry for key, entry in value.items()}, f"{self._source}: {name}")

    def _value(self, name: str, default: object) -> object:
        value = self._values.get(name)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{self._source}: {name} is missing")
        return value

    def _error(self, name: str, wanted: str, found: object = None) -> ModelError:
        """Return the error of what was found, which may be a default that makes no sense here."""
        found = self._values.get(name) if found is None else found
        return ModelError(f"{self._source}: {name} is {repr(found)[:100]}, must be {wanted}")
