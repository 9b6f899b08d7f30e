"""Structured logs: one line per event, key=value on a terminal, JSON for machines.

Every line of a request has the request's id (the caller's `X-Request-Id`, or a new one) and the
name of its API key. Every line about a job has the job's id and its problem, in the service and in
the worker. No line has headers, bodies or local variables, so no line has a secret. Lookups that
are answered from memory, thousands a second, are not logged unless the caller sent an id.
Standard-library loggers (uvicorn, SQLAlchemy, Alembic) use the same renderer. Text that clients
sent can neither begin a new line nor control a terminal, and passwords are removed from URLs.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import MutableMapping
from io import StringIO
from typing import Any, TextIO

import structlog

from gemmsmith.showing import line, lines


def configure(*, json: bool = False) -> None:
    """Send all logs to standard error; standard output is for results."""
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        structlog.processors.StackInfoRenderer(),
    ]
    # Plain tracebacks: the other formatters print local variables, and so a request's API key.
    console = structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty() and not os.environ.get("NO_COLOR"),
        timestamp_key="time",
        exception_formatter=_traceback,
    )
    rendering: list[structlog.types.Processor] = (
        [
            structlog.processors.format_exc_info,
            _harmless,
            structlog.processors.JSONRenderer(ensure_ascii=False),
        ]
        if json
        else [_harmless, console]
    )
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, _drop_colour],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.INFO)
    # Our own middleware logs requests, and Alembic logs two lines at every start.
    logging.getLogger("uvicorn.access").disabled = True
    logging.getLogger("alembic").setLevel(logging.WARNING)


def _harmless(
    _logger: Any, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = (lines if name == "exception" else line)(value)
    return event


def _traceback(stream: TextIO, error: structlog.typing.ExcInfo) -> None:
    text = StringIO()
    structlog.dev.plain_traceback(text, error)
    stream.write(lines(text.getvalue()))


def _drop_colour(
    _logger: Any, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    # uvicorn repeats its message with terminal colours in an extra field.
    event.pop("color_message", None)
    return event
