"""Tuning jobs: a durable queue with leases, and the worker's loop."""

from tuner.jobs.job import Job, RecordedEvent
from tuner.jobs.lease import LeasedJob, StopReason
from tuner.jobs.queue import Queue
from tuner.jobs.worker import Worker, unique_owner
from tuner.jobs.workers import LivingWorker, taker

__all__ = [
    "Job",
    "LeasedJob",
    "LivingWorker",
    "Queue",
    "RecordedEvent",
    "StopReason",
    "Worker",
    "taker",
    "unique_owner",
]
