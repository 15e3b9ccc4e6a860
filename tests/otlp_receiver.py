"""A real OTLP receiver over gRPC that keeps the spans it is sent."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from grpc import aio
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

Value = str | int | float | bool | list[str]


def attributes(pairs: list[KeyValue]) -> dict[str, Value]:
    """Return OTLP's attributes as a dictionary."""
    found: dict[str, Value] = {}
    for pair in pairs:
        kind = pair.value.WhichOneof("value")
        if kind == "array_value":
            found[pair.key] = [value.string_value for value in pair.value.array_value.values]
        elif kind is not None:
            found[pair.key] = getattr(pair.value, kind)
    return found


@dataclass(slots=True)
class Receiver(TraceServiceServicer):
    """Everything that was exported so far."""

    endpoint: str = ""
    spans: list[Span] = field(default_factory=list)
    resources: list[dict[str, Value]] = field(default_factory=list)

    async def Export(
        self, request: ExportTraceServiceRequest, context: object
    ) -> ExportTraceServiceResponse:
        """Keep the spans of a request."""
        for resource_spans in request.resource_spans:
            self.resources.append(attributes(list(resource_spans.resource.attributes)))
            for scope_spans in resource_spans.scope_spans:
                self.spans.extend(scope_spans.spans)
        return ExportTraceServiceResponse()

    def named(self, name: str) -> list[Span]:
        """Return the spans of a name, in order of their begin."""
        found = [span for span in self.spans if span.name == name]
        return sorted(found, key=lambda span: span.start_time_unix_nano)

    def children(self, parent: Span) -> list[Span]:
        """Return the spans right below one, in order of their begin."""
        found = [span for span in self.spans if span.parent_span_id == parent.span_id]
        return sorted(found, key=lambda span: (span.start_time_unix_nano, span.end_time_unix_nano))


@asynccontextmanager
async def otlp_receiver() -> AsyncIterator[Receiver]:
    """Listen for spans on a free port of loopback."""
    receiver, server = Receiver(), aio.server()
    # The collector's stubs come without types.
    add_TraceServiceServicer_to_server(receiver, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    receiver.endpoint = f"http://127.0.0.1:{port}"
    try:
        await server.start()
        yield receiver
    finally:
        await server.stop(None)
