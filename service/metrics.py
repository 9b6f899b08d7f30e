"""What Prometheus scrapes: requests, lookups, latency, and jobs by state.

One registry per application, so that two applications in one process do not mix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Counts = Callable[[], Mapping[str, int]]

_LATENCY_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30)


class Metrics:
    """The service's own counters.

    `jobs` (by state) and `records` (by kind) are read when scraped, not kept: the database is the
    record.
    """

    def __init__(self, *, jobs: Counts, records: Counts) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "gemmsmith_requests",
            "HTTP requests answered",
            ["method", "route", "status"],
            registry=self.registry,
        )
        self.latency = Histogram(
            "gemmsmith_request_seconds",
            "Time from a request to the end of its answer, event streams excepted",
            ["route"],
            buckets=_LATENCY_BUCKETS,
            registry=self.registry,
        )
        self.lookups = Counter(
            "gemmsmith_lookups",
            "Lookups by how they were answered: exact, nearest, predicted or unknown",
            ["match"],
            registry=self.registry,
        )
        self.registry.register(_FromDatabase(jobs, records))

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)


class _FromDatabase(Collector):
    def __init__(self, jobs: Counts, records: Counts) -> None:
        self._jobs = jobs
        self._records = records

    def describe(self) -> Iterator[GaugeMetricFamily]:
        # Without this the registry would read the database at registration.
        yield GaugeMetricFamily("gemmsmith_jobs", "Tuning jobs by state")
        yield GaugeMetricFamily("gemmsmith_records", "Records in the database")

    def collect(self) -> Iterator[GaugeMetricFamily]:
        jobs = GaugeMetricFamily("gemmsmith_jobs", "Tuning jobs by state", labels=["state"])
        for state, number in self._jobs().items():
            jobs.add_metric([state], number)
        yield jobs
        records = GaugeMetricFamily("gemmsmith_records", "Records in the database", labels=["kind"])
        for kind, number in self._records().items():
            records.add_metric([kind], number)
        yield records
