"""One argument into one field of a message, or an error that names it and what it may be."""

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from pagemill.client.errors import InvalidArgumentError

MessageT = TypeVar("MessageT", bound=Message)

# What a field of this type can hold at all. The server's own bounds lie within.
_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def filled(kind: type[MessageT], **arguments: object) -> MessageT:
    """Return a message with each argument in the field of its name.

    Raises: InvalidArgumentError as `one_field`.
    """
    message = kind()
    for name, value in arguments.items():
        message.MergeFrom(one_field(kind, name, value, name))
    return message


def one_field(kind: type[MessageT], field: str, value: object, name: str) -> MessageT:
    """Return a message with one field set, or name the argument that cannot be set.

    Raises: InvalidArgumentError.
    """
    descriptor = kind.DESCRIPTOR.fields_by_name[field]
    if isinstance(value, str | bytes) and descriptor.is_repeated:
        # Each letter would be an entry.
        raise InvalidArgumentError(f"{name} is one text, must be a list", field=name)
    try:
        return kind(**{field: value})
    except (TypeError, ValueError) as error:
        if isinstance(error, ValueError):
            for number, (low, high) in _numbers(descriptor, value):
                if not low <= number <= high:
                    is_or_has = "has the id" if descriptor.is_repeated else "is"
                    raise InvalidArgumentError(
                        f"{name} {is_or_has} {number}, must be in [{low}, {high}]", field=name
                    ) from error
        # Text and lists can be long or secret; a number is what its caller needs to see.
        shown = f"{name} is {value!r}, which" if isinstance(value, int | float) else name
        raise InvalidArgumentError(f"{shown} cannot be sent: {error}", field=name) from error


def _numbers(descriptor: Any, value: object) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield the integers of an argument, and what their field holds: of a map those of its keys."""
    entry = descriptor.message_type
    if entry is not None and entry.GetOptions().map_entry:
        descriptor = entry.fields_by_name["key"]
    bounds = _INTEGERS.get(descriptor.cpp_type)
    if bounds is not None:
        for each in value if isinstance(value, Iterable) else (value,):
            if isinstance(each, int):
                yield each, bounds
