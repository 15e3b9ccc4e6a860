"""Log lines on standard error, one an event, whatever texts they carry."""

import logging
from typing import Literal, TextIO, TypeAlias, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from worker_svc.service.lossy_stream import LossyStream

Logger: TypeAlias = FilteringBoundLogger

LogFormat: TypeAlias = Literal["text", "json"]


def make_logger(stream: TextIO, log_format: LogFormat, log_level: str) -> Logger:
    """Return a logger that writes to `stream`. Lines that it cannot take are lost."""
    render: Processor = structlog.processors.JSONRenderer()
    if log_format == "text":
        render = structlog.processors.LogfmtRenderer(
            key_order=["timestamp", "level", "event"], drop_missing=True
        )
    threshold = logging.getLevelNamesMapping()[log_level.upper()]
    logger: Logger = structlog.wrap_logger(
        # A line in one write: `pagemill serve` lets two programs write to one standard error.
        structlog.WriteLogger(cast(TextIO, LossyStream(stream))),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            escape_values,
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        cache_logger_on_first_use=False,
        program="worker",
    )
    return logger


def escape_values(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Escape what is not printable: ids and reasons come from elsewhere, and may forge lines."""
    for key, value in event.items():
        if value is None or isinstance(value, bool | int | float):
            continue
        text = str(value)
        if not text.isprintable():
            text = text.encode("unicode_escape").decode("ascii")
        event[key] = text
    return event
