"""The metrics that Prometheus scrapes: this process's counters, and figures from the database.

One registry per application, so that two applications in one process do not mix. Figures from the
database are the same in every service on it: take their maximum over instances, not their sum.
`docs/operation.md` lists all metrics, which a test checks.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gemmsmith.core.config import Match
from gemmsmith.version import VERSION
from service.metrics.database import Figures

# Time stamps of when each series began would double the series, and Prometheus does not use them.
disable_created_metrics()  # type: ignore[no-untyped-call]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# From an answer from memory (0.1 ms) to an export of the whole database (seconds).
_LATENCY_BUCKETS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1, 5, 30),
)

UNKNOWN = "unknown"
"""The `match` label of a lookup without an answer."""


class AnswerSource(StrEnum):
    """Where an answer came from."""

    MEMORY = "memory"  # read before, and still current
    DATABASE = "database"


class Metrics:
    """The service's metrics.

    Args:
        figures: read at each scrape.
        volumes: folders whose free space is reported, by purpose.
    """

    def __init__(self, figures: Figures, volumes: Mapping[str, Path]) -> None:
        self._figures = figures
        self.registry = CollectorRegistry()
        self._requests = self._series(
            Counter, "requests", "HTTP requests answered", "method", "route", "status"
        )
        self._latency = self._series(
            functools.partial(Histogram, buckets=_LATENCY_BUCKETS),
            "request_seconds",
            "Time from a request to the end of its answer, without event streams",
            "route",
        )
        self._lookups = self._series(
            Counter, "lookups", "Lookups by match: exact, nearest, predicted or unknown", "match"
        )
        self._answers = self._series(
            Counter, "answers", "Answers by their source: memory or database", "source"
        )
        self.answers_kept = Gauge(
            "gemmsmith_answers_kept", "Answers held in memory", registry=self.registry
        )
        for match in (*Match, UNKNOWN):
            self._lookups(match)  # series that exist from the start can be alerted on
        for source in AnswerSource:
            self._answers(source)
        Info("gemmsmith_build", "This gemmsmith", registry=self.registry).info({"version": VERSION})
        ProcessCollector(registry=self.registry)
        self.registry.register(_FromDatabase(figures))
        self.registry.register(_Volumes(volumes))

    def _series(self, kind: Any, name: str, documentation: str, *labels: str) -> Callable[..., Any]:
        metric = kind(f"gemmsmith_{name}", documentation, labels, registry=self.registry)
        # Series are cached by their labels, because looking one up costs more than counting.
        return functools.cache(metric.labels)

    def request(self, method: str, route: str, status: int, seconds: float | None) -> None:
        """Count an answered request; `seconds` is None for an event stream."""
        self._requests(method, route, str(status)).inc()
        if seconds is not None:
            self._latency(route).observe(seconds)

    def lookup(self, match: str, source: AnswerSource, number: int = 1) -> None:
        """Count lookups that were answered with that `Match` or `UNKNOWN`."""
        self._lookups(match).inc(number)
        self._answers(source).inc(number)

    def render(self) -> bytes:
        self._figures.refresh()
        return generate_latest(self.registry)

    def close(self) -> None:
        self._figures.close()


_FAMILIES = (
    (
        GaugeMetricFamily, "jobs", "Tuning jobs that have not ended",
        ("state",), "jobs", "states",
    ),
    (
        GaugeMetricFamily, "oldest_waiting_job_seconds",
        "Time since the oldest waiting job was requested; 0 if no job waits",
        (), "jobs", "oldest_waiting_s",
    ),
    (
        GaugeMetricFamily, "abandoned_jobs",
        "Running jobs whose worker has stopped renewing its lease",
        (), "jobs", "abandoned",
    ),
    (
        CounterMetricFamily, "jobs_ended", "Jobs that have ended",
        ("outcome",), "jobs", "ended",
    ),
    (
        CounterMetricFamily, "job_phase_seconds",
        "Time of jobs by phase: waiting, enumerate, compile, screen, finals or promote",
        ("phase",), "jobs", "phase_seconds",
    ),
    (
        CounterMetricFamily, "device_busy_seconds", "Time in which a worker's device measured",
        ("host",), "jobs", "busy_seconds",
    ),
    (
        CounterMetricFamily, "job_kernels",
        "Kernels that jobs needed: found in a pack, compiled, or failed to compile",
        ("how",), "jobs", "kernels",
    ),
    (
        CounterMetricFamily, "compile_seconds", "Time of all compiler runs of jobs; they overlap",
        (), "jobs", "compile_seconds",
    ),
    (
        GaugeMetricFamily, "records", "Records in the database",
        ("kind",), "records", "records",
    ),
    (
        GaugeMetricFamily, "pack_bytes", "Size of the recorded packs",
        (), "records", "pack_bytes",
    ),
    (
        CounterMetricFamily, "trials",
        "Trials by phase and outcome: measured, or the kind of failure",
        ("phase", "outcome"), "records", "trials",
    ),
    (
        CounterMetricFamily, "trial_seconds",
        "Time of trials on the device, with verification",
        ("phase", "outcome"), "records", "trial_seconds",
    ),
)  # fmt: skip
"""Figures from the database: name and documentation of a family, its labels, where it is read."""


class _FromDatabase(Collector):
    """The figures of the last reading. Those that were never read are absent."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        for family, name, documentation, labels, figures, figure in _FAMILIES:
            read = getattr(self._figures, figures)
            if read is None:
                continue
            metric = family(f"gemmsmith_{name}", documentation, labels=labels)
            values = getattr(read, figure)
            for of, number in values.items() if labels else [((), values)]:
                metric.add_metric([of] if isinstance(of, str) else of, number)
            yield metric
        yield GaugeMetricFamily(
            "gemmsmith_figures_read_timestamp_seconds",
            "Unix time of the last reading of the database; 0 before the first",
            self._figures.read_at or 0.0,
        )


class _Volumes(Collector):
    def __init__(self, volumes: Mapping[str, Path]) -> None:
        self._volumes = volumes

    def collect(self) -> Iterator[Metric]:
        free = GaugeMetricFamily(
            "gemmsmith_disk_free_bytes",
            "Free space for the database and for packs; absent if the folder does not exist",
            labels=["volume"],
        )
        for name, folder in self._volumes.items():
            if folder.is_dir():
                free.add_metric([name], shutil.disk_usage(folder).free)
        yield free
