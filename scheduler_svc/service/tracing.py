"""The export of spans over OTLP, set by OpenTelemetry's own environment variables."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from scheduler_svc.errors import ConfigError
from scheduler_svc.service.request_trace import RequestTracer
from scheduler_svc.service.step_trace import ChosenIds, StepSpans

_SERVICE = "pagemill-scheduler"
_UNKNOWN_SERVICE = "unknown_service"

# How long the end of the process waits for a collector that does not answer.
_FLUSH_S = 3.0


@dataclass(frozen=True, slots=True)
class Tracing:
    """The two writers of spans, and their way out."""

    requests: RequestTracer
    steps: StepSpans
    _processor: BatchSpanProcessor

    async def flush(self) -> None:
        """Export all spans that have ended."""
        await asyncio.to_thread(self._processor.force_flush)


def is_tracing_wanted(environ: Mapping[str, str]) -> bool:
    """Say whether the environment asks for traces: by an exporter, or an endpoint alone.

    Raises: ConfigError for an exporter or a protocol that is not built in.
    """
    exporter = environ.get("OTEL_TRACES_EXPORTER", "")
    endpoint = environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or environ.get(
        "OTEL_EXPORTER_OTLP_ENDPOINT"
    )
    if exporter not in {"", "otlp", "none"}:
        raise ConfigError(f"OTEL_TRACES_EXPORTER is {exporter!r}, must be otlp or none")
    protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"
    )
    wanted = exporter == "otlp" or (not exporter and bool(endpoint))
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or not wanted:
        return False
    if protocol != "grpc":
        raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}, must be grpc")
    return True


@asynccontextmanager
async def tracing(
    environ: Mapping[str, str], *, version: str, steps_every: int
) -> AsyncIterator[Tracing | None]:
    """Export spans while the block lasts; None if the environment asks for none.

    Requests are sampled as OTEL_TRACES_SAMPLER says, by default as their callers are. Of
    steps one in `steps_every` is traced, 0 for none, and those that are slow or preempt.
    At most OTEL_BSP_MAX_QUEUE_SIZE spans wait; further ones are dropped.

    Raises: ConfigError, as `is_tracing_wanted`.
    """
    if not is_tracing_wanted(environ):
        yield None
        return
    resource = _resource(version)
    exporter = OTLPSpanExporter()
    processor = BatchSpanProcessor(exporter)
    requests = TracerProvider(resource=resource, shutdown_on_exit=False)
    ids = ChosenIds()
    # Steps are chosen by StepSpans; a sampler for requests has no say in them.
    steps = TracerProvider(ALWAYS_ON, resource, shutdown_on_exit=False, id_generator=ids)
    for provider in (requests, steps):
        provider.add_span_processor(processor)
    request_tracer = RequestTracer(requests.get_tracer(__name__, version))
    try:
        yield Tracing(
            request_tracer,
            StepSpans(steps.get_tracer(__name__, version), ids, request_tracer.live, steps_every),
            processor,
        )
    finally:
        await _close(processor, exporter)


def _resource(version: str) -> Resource:
    """Return what the environment says of this process, with a name if it gives none."""
    resource = Resource.create({SERVICE_VERSION: version})
    if str(resource.attributes[SERVICE_NAME]).startswith(_UNKNOWN_SERVICE):
        return resource.merge(Resource({SERVICE_NAME: _SERVICE}))
    return resource


async def _close(processor: BatchSpanProcessor, exporter: OTLPSpanExporter) -> None:
    """Export what is left, in a bounded time."""
    closing = asyncio.create_task(asyncio.to_thread(processor.shutdown))
    done, _ = await asyncio.wait({closing}, timeout=_FLUSH_S)
    if not done:
        # Ends the export's retries, so that its thread ends as well.
        exporter.shutdown()
    await closing
