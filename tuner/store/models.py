"""The tables, as SQLAlchemy classes. Nothing outside the tuner sees them.

Dictionary rows (devices, environments, problems, kernels) are written once and never changed or
deleted, so that their ids may be remembered; only a kernel's description that does not belong to
its name is corrected (`tuner.store.dictionary`). Everything that a query filters or sorts by is a
column; the rest is JSON. Times are seconds since the epoch by the database's clock. Any change here
needs a migration: `tests/migration` compares both.
"""

from __future__ import annotations

from typing import Any, ClassVar

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

# SQLite assigns ids itself only if the column's type is spelt INTEGER.
Id = BigInteger().with_variant(Integer, "sqlite")
Document = JSON(none_as_null=True)


class Base(DeclarativeBase):
    """Root of all tables; constraint names are fixed, so that migrations can refer to them."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar = {float: Double, dict[str, Any]: Document, list[float]: Document}


class DeviceRow(Base):
    """A GPU model."""

    __tablename__ = "devices"

    id: Mapped[int] = mapped_column(Id, primary_key=True)
    slug: Mapped[str] = mapped_column(String(200), unique=True)
    name: Mapped[str] = mapped_column(String(200))
    arch: Mapped[str] = mapped_column(String(20))
    sm_count: Mapped[int]
    memory_bytes: Mapped[int] = mapped_column(BigInteger)
    l2_bytes: Mapped[int] = mapped_column(BigInteger)
    max_clock_mhz: Mapped[int]
    memory_bandwidth: Mapped[int] = mapped_column(BigInteger)


class EnvironmentRow(Base):
    """Software and GPU that trials ran on; `digest` covers all fields of `description`."""

    __tablename__ = "environments"

    id: Mapped[int] = mapped_column(Id, primary_key=True)
    digest: Mapped[str] = mapped_column(String(64), unique=True)
    description: Mapped[dict[str, Any]]


class GpuRow(Base):
    """One physical GPU, and the environment that its worker last ran in; see `tuner.store.gpus`."""

    __tablename__ = "gpus"

    uuid: Mapped[str] = mapped_column(String(80), primary_key=True)
    device_id: Mapped[int] = mapped_column(ForeignKey("devices.id"))
    environment_id: Mapped[int] = mapped_column(ForeignKey("environments.id"))
    seen_at: Mapped[float]


class ProblemRow(Base):
    """A problem; `lg_*` are log2 of the extents, because SQLite has no logarithm everywhere.

    `operation` is `Operation.key` and, with the sizes, identifies the problem. `dtype` and
    `layout` are its two words, for searches by one of them.
    """

    __tablename__ = "problems"
    __table_args__ = (
        UniqueConstraint("operation", "batch", "m", "n", "k", name="uq_problems_identity"),
        Index("ix_problems_near", "operation", "batch", "lg_m"),
    )

    id: Mapped[int] = mapped_column(Id, primary_key=True)
    operation: Mapped[str] = mapped_column(String(120))
    dtype: Mapped[str] = mapped_column(String(120))
    layout: Mapped[str] = mapped_column(String(4))
    batch: Mapped[int]
    m: Mapped[int]
    n: Mapped[int]
    k: Mapped[int]
    lg_m: Mapped[float]
    lg_n: Mapped[float]
    lg_k: Mapped[float]


class KernelRow(Base):
    """A kernel's description under its unique name."""

    __tablename__ = "kernels"

    id: Mapped[int] = mapped_column(Id, primary_key=True)
    name: Mapped[str] = mapped_column(String(300), unique=True)
    description: Mapped[dict[str, Any]]


class PackRow(Base):
    """A compiled kernel pack in the artifact store."""

    __tablename__ = "packs"
    __table_args__ = ({"sqlite_autoincrement": True},)

    id: Mapped[int] = mapped_column(Id, primary_key=True)
    hash: Mapped[str] = mapped_column(String(128), unique=True)
    toolchain: Mapped[str] = mapped_column(String(128))
    bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[float]


class PackKernelRow(Base):
    """Which kernels a pack holds, and where."""

    __tablename__ = "pack_kernels"

    pack_id: Mapped[int] = mapped_column(
        ForeignKey("packs.id", ondelete="CASCADE"), primary_key=True
    )
    position: Mapped[int] = mapped_column(primary_key=True)
    kernel_id: Mapped[int] = mapped_column(ForeignKey("kernels.id"), index=True)


TRIAL_KEY = ("problem_id", "device_id", "kernel_id", "launch_key", "phase", "environment_id", "job")
"""Columns of which no two trials have the same values."""


class TrialRow(Base):
    """One candidate's outcome. `job` is "" if no job ordered it: NULLs would not be unique.

    `job` is not a foreign key: trials made without a queue have an identifier of their own.
    """

    __tablename__ = "trials"
    __table_args__ = (
        UniqueConstraint(*TRIAL_KEY, name="uq_trials_identity"),
        Index("ix_trials_job", "job", "id"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(Id, primary_key=True)
    created_at: Mapped[float]
    problem_id: Mapped[int] = mapped_column(ForeignKey("problems.id"))
    device_id: Mapped[int] = mapped_column(ForeignKey("devices.id"))
    environment_id: Mapped[int] = mapped_column(ForeignKey("environments.id"))
    kernel_id: Mapped[int] = mapped_column(ForeignKey("kernels.id"))
    launch_key: Mapped[str] = mapped_column(String(100))
    launch: Mapped[dict[str, Any]]
    phase: Mapped[str] = mapped_column(String(20))
    job: Mapped[str] = mapped_column(String(100))
    median_us: Mapped[float | None]
    ci_low_us: Mapped[float | None]
    ci_high_us: Mapped[float | None]
    samples: Mapped[int | None]
    samples_us: Mapped[list[float]]
    failure_kind: Mapped[str | None] = mapped_column(String(20))
    failure_message: Mapped[str | None] = mapped_column(Text)
    correctness: Mapped[dict[str, Any] | None] = mapped_column(Document)
    conditions: Mapped[dict[str, Any] | None] = mapped_column(Document)
    workspace_bytes: Mapped[int] = mapped_column(BigInteger)
    cost_s: Mapped[float]
    replayed: Mapped[bool]


class WinnerRow(Base):
    """One promotion. Rows are history; exactly one per (problem, device) is current.

    Attributes:
        revision: grows with every promotion of this problem and device.
        sequence: grows over the whole table each time a row becomes current, so the greatest
            one shows whether any answer has changed; 0 for a row that never was current.
        origin: measured here, imported, replayed, or from a file without a trusted signature: see
            `tuner.store.winners`.
        digest: of the winner's statement, see `tuner.store.statement`.
        signature: of the statement, by the installation that measured it; NULL if unsigned.
    """

    __tablename__ = "winners"
    __table_args__ = (
        UniqueConstraint("problem_id", "device_id", "revision", name="uq_winners_revision"),
        Index(
            "uq_winners_current",
            "problem_id",
            "device_id",
            unique=True,
            sqlite_where=text("is_current"),
            postgresql_where=text("is_current"),
        ),
        Index("ix_winners_sequence", "sequence"),
        Index(
            "ix_winners_gain",
            "device_id",
            "speedup",
            sqlite_where=text("is_current"),
            postgresql_where=text("is_current"),
        ),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(Id, primary_key=True)
    problem_id: Mapped[int] = mapped_column(ForeignKey("problems.id"))
    device_id: Mapped[int] = mapped_column(ForeignKey("devices.id"), index=True)
    environment_id: Mapped[int] = mapped_column(ForeignKey("environments.id"))
    kernel_id: Mapped[int | None] = mapped_column(ForeignKey("kernels.id"))
    revision: Mapped[int]
    sequence: Mapped[int] = mapped_column(BigInteger)
    is_current: Mapped[bool] = mapped_column(Boolean)
    pinned: Mapped[bool] = mapped_column(Boolean)
    origin: Mapped[str] = mapped_column(String(20))
    digest: Mapped[str] = mapped_column(String(64))
    use: Mapped[str] = mapped_column(String(20))
    median_us: Mapped[float | None]
    speedup: Mapped[float | None]
    launch: Mapped[dict[str, Any] | None] = mapped_column(Document)
    record: Mapped[dict[str, Any]]
    replayed: Mapped[bool]
    pack: Mapped[str | None] = mapped_column(String(128))
    promoted_at: Mapped[str] = mapped_column(String(40))
    job: Mapped[str | None] = mapped_column(String(100))
    signature: Mapped[dict[str, Any] | None] = mapped_column(Document)


CURRENT = text("winners.is_current")
"""A condition: the winner is current, in the text of the partial indexes. `WinnerRow.is_current`
compiles to `= 1` on SQLite, which then does not use those indexes; for reading most rows that is
the better plan."""


class JobRow(Base):
    """A tuning job and its lease.

    Attributes:
        public_id: its identifier outside the database; `id` only orders.
        calls: how often its callers run the problem, added up over the requests that joined.
        saving_us: expected saving of one call in microseconds, see `tuner.search.demand`.
        active_key: problem, device and effort while further requests may join the job; NULL
            once it is cancelled or over. Unique, so that two requests at once make one job.
        attempt: grows with every lease and, with `owner`, fences every write of a worker.
        handed_back: leases given back unharmed; they do not count against `max_attempts`.
        available_at: earliest time for the next lease, so that a retry waits a little.
        last_event: number of the newest event.
        ordered_by: name of the API key that ordered it; NULL without keys.
        deadline_at: time after which the answer is of no use; NULL for never.
    """

    __tablename__ = "jobs"
    __table_args__ = (
        Index("ix_jobs_lease", "state", "priority", "id"),
        Index("ix_jobs_ordered_by", "ordered_by", "state"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(Id, primary_key=True)
    public_id: Mapped[str] = mapped_column(String(40), unique=True)
    problem_id: Mapped[int] = mapped_column(ForeignKey("problems.id"))
    effort: Mapped[str] = mapped_column(String(20))
    device: Mapped[str] = mapped_column(String(200))
    priority: Mapped[int]
    calls: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    saving_us: Mapped[float] = mapped_column(server_default=text("0"))
    active_key: Mapped[str | None] = mapped_column(String(300), unique=True)
    state: Mapped[str] = mapped_column(String(20))
    phase: Mapped[str] = mapped_column(String(40))
    done: Mapped[int]
    total: Mapped[int]
    best_us: Mapped[float | None]
    best: Mapped[str | None] = mapped_column(Text)
    error: Mapped[str | None] = mapped_column(Text)
    winner_revision: Mapped[int | None]
    cancel_requested: Mapped[bool]
    owner: Mapped[str | None] = mapped_column(String(200))
    attempt: Mapped[int]
    handed_back: Mapped[int]
    max_attempts: Mapped[int]
    lease_expires_at: Mapped[float | None]
    available_at: Mapped[float]
    created_at: Mapped[float]
    started_at: Mapped[float | None]
    finished_at: Mapped[float | None]
    last_event: Mapped[int]
    ordered_by: Mapped[str | None] = mapped_column(String(200))
    deadline_at: Mapped[float | None]


class JobEventRow(Base):
    """An event of a job; numbered from 1 within the job, without gaps."""

    __tablename__ = "job_events"

    job_id: Mapped[int] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[float]
    kind: Mapped[str] = mapped_column(String(40))
    data: Mapped[dict[str, Any]]


class WorkerRow(Base):
    """A worker's last report that it lives; see `tuner.jobs.workers`. `devices` are names."""

    __tablename__ = "workers"

    owner: Mapped[str] = mapped_column(String(200), primary_key=True)
    devices: Mapped[list[str]] = mapped_column(Document)
    seen_at: Mapped[float]


class IdempotencyKeyRow(Base):
    """An Idempotency-Key and the job that answered it.

    `owner` is the API key that sent it: each key has its own; empty if keys are not in use.
    """

    __tablename__ = "idempotency_keys"

    owner: Mapped[str] = mapped_column(String(200), primary_key=True, server_default=text("''"))
    key: Mapped[str] = mapped_column(String(255), primary_key=True)
    job_id: Mapped[int] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), index=True)
    created_at: Mapped[float]


class ApiKeyRow(Base):
    """A client's key, by its hash only.

    Attributes:
        prefix: the key's first characters, by which people tell keys apart.
        scopes: names of `Scope`, separated by spaces.
        job_limit: jobs of this key that may wait or run at once; NULL for the service's default.
    """

    __tablename__ = "api_keys"

    id: Mapped[int] = mapped_column(Id, primary_key=True)
    name: Mapped[str] = mapped_column(String(200))
    key_hash: Mapped[str] = mapped_column(String(128), unique=True)
    scopes: Mapped[str] = mapped_column(String(200))
    created_at: Mapped[float]
    last_used_at: Mapped[float | None]
    revoked_at: Mapped[float | None]
    prefix: Mapped[str] = mapped_column(String(20), server_default=text("''"))
    expires_at: Mapped[float | None]
    job_limit: Mapped[int | None]


class AuditRow(Base):
    """A change of what is served or of who has access, and who made it; rows are only ever added.

    `hash` is of all of it and of `previous`, the hash before: see `tuner.store.audit`.
    """

    __tablename__ = "audit"
    __table_args__ = ({"sqlite_autoincrement": True},)

    id: Mapped[int] = mapped_column(Id, primary_key=True)
    at: Mapped[float]
    actor: Mapped[str] = mapped_column(String(200))
    action: Mapped[str] = mapped_column(String(40))
    subject: Mapped[str] = mapped_column(String(300))
    detail: Mapped[dict[str, Any]]
    previous: Mapped[str] = mapped_column(String(64), server_default=text("''"))
    hash: Mapped[str] = mapped_column(String(64), server_default=text("''"))


class AuditHeadRow(Base):
    """The newest entry of the audit, and how many there are: one row, once there is an entry."""

    __tablename__ = "audit_head"

    id: Mapped[int] = mapped_column(Id, primary_key=True, autoincrement=False)
    entries: Mapped[int] = mapped_column(BigInteger)
    hash: Mapped[str] = mapped_column(String(64))
