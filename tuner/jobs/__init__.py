"""Tuning jobs: a durable queue with leases, and the worker's loop."""

from tuner.jobs.job import Job, RecordedEvent
from tuner.jobs.lease import LeasedJob, StopReason
from tuner.jobs.queue import Queue
from tuner.jobs.worker import Worker, unique_owner

__all__ = [
    "Job",
    "LeasedJob",
    "Queue",
    "RecordedEvent",
    "StopReason",
    "Worker",
    "unique_owner",
]
