"""One argument into one field of a message, or an error that names it and what it may be."""

from typing import TypeVar

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


def one_field(kind: type[MessageT], field: str, value: object, name: str) -> MessageT:
    """Return a message with one field set, or name the argument that cannot be set."""
    try:
        return kind(**{field: value})
    except (TypeError, ValueError) as error:
        bounds = _INTEGERS.get(kind.DESCRIPTOR.fields_by_name[field].cpp_type)
        if bounds is not None and isinstance(value, int) and isinstance(error, ValueError):
            low, high = bounds
            raise InvalidArgumentError(
                f"{name} is {value}, must be in [{low}, {high}]", field=name
            ) from error
        # Text and lists can be long or secret; a number is what its caller needs to see.
        shown = f"{name} is {value!r}, which" if isinstance(value, int | float) else name
        raise InvalidArgumentError(f"{shown} cannot be sent: {error}", field=name) from error
