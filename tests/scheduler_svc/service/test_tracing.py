"""OpenTelemetry's own variables decide on the export, and a collector that is down is no burden."""

import os
import time

import pytest

from otlp_receiver import otlp_receiver
from scheduler_svc.errors import ConfigError
from scheduler_svc.service.tracing import is_tracing_wanted, tracing
from step_records import step_record


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4317"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x:4317"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, False),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "true"}, False),
    ],
)
async def test_the_environment_says_whether_to_trace(environ: dict[str, str], wanted: bool) -> None:
    assert is_tracing_wanted(environ) == wanted
    if not wanted:
        async with tracing(environ, version="1", steps_every=1) as traces:
            assert traces is None


@pytest.mark.parametrize(
    "environ",
    [
        {"OTEL_TRACES_EXPORTER": "zipkin"},
        {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
    ],
)
def test_an_exporter_that_is_not_built_in_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"is '[a-z/]+', must be"):
        is_tracing_wanted(environ)


async def test_a_collector_that_is_down_holds_up_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with otlp_receiver() as gone:
        endpoint = gone.endpoint
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "512")
    async with tracing(os.environ, version="1", steps_every=1) as traces:
        assert traces is not None
        began = time.monotonic()
        for step_id in range(300):
            traceparent = traces.steps.traceparent(step_id)
            traces.steps.step(step_record(step_id, traceparent=traceparent))
        # Each would wait for its export, which pauses for a second before it tries again.
        assert time.monotonic() - began < 30
        began = time.monotonic()
    assert time.monotonic() - began < 8
