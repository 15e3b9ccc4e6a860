"""Every part of the protocol says what it means."""

import sys
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from commands import run
from source_tree import ROOT

PROTOS = sorted((ROOT / "proto/pagemill/v1").glob("*.proto"))


def test_every_part_has_a_comment(tmp_path: Path) -> None:
    output = tmp_path / "descriptors"
    options = (f"-I{ROOT / 'proto'}", "--include_source_info", f"--descriptor_set_out={output}")
    run(sys.executable, "-m", "grpc_tools.protoc", *options, *PROTOS)
    files = FileDescriptorSet.FromString(output.read_bytes()).file
    assert len(files) == len(PROTOS)
    silent = [f"{file.name}: {name}" for file in files for name in _silent_parts(file)]
    assert silent == []


def _silent_parts(file: FileDescriptorProto) -> Iterator[str]:
    """Yield the services, RPCs, messages, fields and enums without a comment.

    A request or response needs none: its RPC speaks for it. Nor does the value of an enum,
    which often is a plain name.
    """
    commented = {
        tuple(location.path)
        for location in file.source_code_info.location
        if location.leading_comments or location.trailing_comments
    }
    for path, name in _parts(file):
        if path not in commented and not name.endswith(("Request", "Response")):
            yield name


# Field numbers of descriptor.proto, of which the paths of source locations are made.
MESSAGES, ENUMS, SERVICES = 4, 5, 6
FIELDS, METHODS = 2, 2


def _parts(file: FileDescriptorProto) -> Iterator[tuple[tuple[int, ...], str]]:
    for i, message in enumerate(file.message_type):
        yield (MESSAGES, i), message.name
        for j, field in enumerate(message.field):
            yield (MESSAGES, i, FIELDS, j), f"{message.name}.{field.name}"
    for i, enum in enumerate(file.enum_type):
        yield (ENUMS, i), enum.name
    for i, service in enumerate(file.service):
        yield (SERVICES, i), service.name
        for j, method in enumerate(service.method):
            yield (SERVICES, i, METHODS, j), f"{service.name}.{method.name}"
