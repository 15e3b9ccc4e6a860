"""Finds the text field whose bytes are not UTF-8, in a message that does not parse for it."""

from collections.abc import Iterable, Iterator
from itertools import islice

from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

# A message may hold millions of values; an answer is not worth looking at them all.
_MAX_VALUES = 10_000


def field_without_utf8(descriptor: Descriptor, data: bytes) -> str | None:
    """Return the path of the first text in `data` that is not UTF-8, as `stopping.stop[1]`.

    None: the message is unreadable for another reason, or that text stands too far behind.

    Cost: a millisecond, for a twin of the message type whose texts are bytes. Only broken
        clients send such messages.
    """
    pool = DescriptorPool()
    _add_twin(pool, descriptor.file)
    twin = GetMessageClass(pool.FindMessageTypeByName(descriptor.full_name))
    try:
        message = twin.FromString(data)
    except DecodeError:
        return None
    values = islice(_values(descriptor, message, ""), _MAX_VALUES)
    return next((path for path, value in values if not _is_utf8(value)), None)


def _add_twin(pool: DescriptorPool, file: FileDescriptor) -> None:
    """Add a file and those it imports, with bytes in place of texts."""
    for imported in file.dependencies:
        _add_twin(pool, imported)
    twin = FileDescriptorProto()
    file.CopyToProto(twin)
    _forget_texts(twin.message_type)
    pool.Add(twin)


def _forget_texts(messages: Iterable[DescriptorProto]) -> None:
    for message in messages:
        _forget_texts(message.nested_type)
        for field in message.field:
            if field.type == FieldDescriptorProto.TYPE_STRING:
                field.type = FieldDescriptorProto.TYPE_BYTES


def _values(descriptor: Descriptor, twin: Message, prefix: str) -> Iterator[tuple[str, bytes]]:
    """Yield path and bytes of each text of a message; b"" for a message inside."""
    for twin_field, content in twin.ListFields():
        field = descriptor.fields_by_name[twin_field.name]
        inner = field.message_type
        if inner is not None and inner.GetOptions().map_entry:
            continue  # no map of this protocol holds a text
        for index, value in enumerate(content if field.is_repeated else [content]):
            path = f"{prefix}{field.name}[{index}]" if field.is_repeated else prefix + field.name
            if inner is not None:
                yield path, b""
                yield from _values(inner, value, path + ".")
            elif field.type == FieldDescriptor.TYPE_STRING:
                yield path, value


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
