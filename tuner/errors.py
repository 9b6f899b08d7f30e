"""Every exception the tuner raises. Messages say what to do next.

TunerError
├── NoLegalCandidate     the space has no candidate for this problem and architecture
├── CompilerNotFound     neither the wheels' nvcc nor a system nvcc
├── CompileFailed        nvcc rejected a unit; carries the compiler's last lines
├── StoreError
│   ├── SchemaOutdated   run `gemmsmith db upgrade`
│   ├── SchemaTooNew     the database was written by a newer gemmsmith
│   ├── SchemaChanged    the database was migrated while this program had it open
│   ├── DatabaseCorrupt  not a database, or damaged
│   ├── DatabaseBusy     another program holds a transaction open; try again
│   ├── DatabaseInUse    another program has it open; nothing was changed
│   ├── NoSuchWinner     the problem has no winner on this device model
│   ├── NoSuchRevision   it has one, but not this revision
│   ├── NothingToUndo    not pinned, or nothing was served before
│   └── DiskFull         nothing was written; free space and try again
├── KeyNameTaken         an API key has or had this name
├── KeyNotFound          no active API key has this name
├── DeviceError
│   ├── NoGpu            no usable CUDA device
│   ├── NotRecorded      the recording does not hold this problem or candidate
│   ├── RecordingCorrupt a sweep file that cannot be read
│   ├── DoesNotFit       the problem's operands exceed the device's memory
│   └── ReferenceBroken  the FP32 reference itself is not finite
└── JobError
    ├── LeaseLost        another worker owns the job now; stop without writing
    ├── JobNotFound
    ├── QueueFull        as many jobs wait as may; try again later
    ├── NotRetryable     it is done, or has not ended yet
    ├── QuotaUsedUp      this key has as many jobs waiting or running as it may
    └── JobAborted       it was cancelled or stopped
"""

from __future__ import annotations

from gemmsmith.showing import line


class TunerError(Exception):
    """Root of every exception the tuner raises."""


class NoLegalCandidate(TunerError):
    """The space has no candidate for this problem and architecture."""


class CompilerNotFound(TunerError):
    """No nvcc: neither in the installed wheels nor on the system."""


class CompileFailed(TunerError):
    """nvcc rejected a translation unit; the message ends with the compiler's last lines."""


class StoreError(TunerError):
    """The database or the artifact store cannot be used. The message has no password of a URL."""

    def __str__(self) -> str:
        return line(super().__str__())


class SchemaOutdated(StoreError):
    """The database is older than this gemmsmith; run `gemmsmith db upgrade`."""


class SchemaTooNew(StoreError):
    """The database was written by a newer gemmsmith; upgrade gemmsmith."""


class SchemaChanged(StoreError):
    """The database was migrated while this program had it open; nothing was changed."""


class DatabaseCorrupt(StoreError):
    """The file is not a database, or is damaged; restore a backup."""


class DatabaseBusy(StoreError):
    """Another program's transaction lasted longer than ours waits; nothing was changed."""


class DatabaseInUse(StoreError):
    """Another program has the database open, which must be ours alone; nothing was changed."""


class NoSuchWinner(StoreError):
    """The problem has no winner on this device model; tune it first."""


class NoSuchRevision(StoreError):
    """The problem's winner has no such revision; the message lists those it has."""


class NothingToUndo(StoreError):
    """No revision is pinned, or none was served before this one; nothing was changed."""


class DiskFull(StoreError):
    """No space left; nothing was half-written."""


class KeyNameTaken(TunerError):
    """An API key has or had this name; choose another."""


class KeyNotFound(TunerError):
    """No active API key has this name."""


class DeviceError(TunerError):
    """The device cannot do what it was called for."""


class NoGpu(DeviceError):
    """No usable CUDA device on this machine."""


class NotRecorded(DeviceError):
    """The recording does not hold this problem or candidate."""


class RecordingCorrupt(DeviceError):
    """The sweep file cannot be read."""


class DoesNotFit(DeviceError):
    """The problem's operands exceed the device's memory."""


class ReferenceBroken(DeviceError):
    """The FP32 reference of fresh random inputs is not finite: suspect the device, not a kernel."""


class JobError(TunerError):
    """A job cannot go on."""


class LeaseLost(JobError):
    """Another worker owns the job now; stop without writing anything more."""


class JobNotFound(JobError):
    """No job with this identifier."""


class NotRetryable(JobError):
    """Only a failed or cancelled job is tried again; this one is done, or has not ended."""


class QueueFull(JobError):
    """As many jobs wait as may; nothing was enqueued."""


class QuotaUsedUp(JobError):
    """This key has as many jobs waiting or running as it may; nothing was enqueued."""


class JobAborted(JobError):
    """The job was cancelled or stopped before it had a winner."""
