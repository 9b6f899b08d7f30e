"""Tuning jobs as the service reports them: their status and their events."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from gemmsmith.core.device import time_text
from gemmsmith.core.plain import Plain
from gemmsmith.core.problem import Problem
from gemmsmith.core.tuning import Effort, JobState
from gemmsmith.showing import bar, line, table


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class JobStatus(Plain):
    """A job as it was when the service answered.

    Attributes:
        calls: how often its callers run the problem, all requests together.
        expected_saving_us: microseconds that tuning is expected to save in these calls together;
            None if no caller gave a number.
        phase: step of the tuning run; empty while waiting.
        done, total: candidates (kernels while compiling) of this phase.
        best_us, best: microseconds per launch of what is ahead, and its key, or the default's
            name: by the finals as soon as there were any, else by the screening.
        recorded: name of the GPU model whose recorded times these are; empty if a GPU measures.
        winner_revision: revision of the promoted winner, once done.
        deadline_at: time after which it is given up unless it has a winner; None for never.
        ordered_by: name of the API key that requested it.
        waits: what a waiting job waits for, in words, and whether a worker is alive that can take
            it; empty if the service did not say.
    """

    id: str
    state: JobState
    problem: Problem
    effort: Effort = Effort.DEFAULT
    device: str = ""
    priority: int = 0
    calls: int = 0
    expected_saving_us: float | None = None
    phase: str = ""
    done: int = 0
    total: int = 0
    best_us: float | None = None
    best: str | None = None
    recorded: str = ""
    error: str | None = None
    attempt: int = 0
    created_at: str = ""
    started_at: str | None = None
    finished_at: str | None = None
    winner_revision: int | None = None
    deadline_at: str | None = None
    ordered_by: str | None = None
    waits: str = ""

    def updated(self, event: JobEvent) -> JobStatus:
        """The status with what an event says; fields the event lacks stay as they are."""
        names = _Progress.__struct_fields__
        values = {name: event.data[name] for name in names if name in event.data}
        try:
            msgspec.convert(values, _Progress)
        except msgspec.ValidationError:  # of another version, or of a broken service
            values = {}
        state = _STATE_OF.get(event.kind, self.state)
        waits = self.waits if state is JobState.WAITING else ""
        return replace(self, state=state, waits=waits, **values)

    @property
    def best_time(self) -> str:
        """`best_us` for people; empty while nothing was timed."""
        return "" if self.best_us is None else time_text(self.best_us, self.recorded, 1)

    @property
    def line(self) -> str:
        """The job in a line: which, of what, where it stands, how far it is."""
        parts = (
            self.state.value,
            f"{self.phase} {bar(self.done, self.total)}".strip() if self._runs else "",
            f"best {self.best_time}" if self.best_time else "",
            self.waits,
            self.error or "",
        )
        return line(f"{self.id} {self.problem}: {', '.join(part for part in parts if part)}")

    @property
    def _runs(self) -> bool:
        return self.state is JobState.RUNNING

    def __repr__(self) -> str:
        return f"<JobStatus {self.line}>"

    def _repr_html_(self) -> str:
        best = f"{self.best_time} {self.best or ''}" if self.best_time else None
        rows = {
            "job": self.id,
            "state": self.state.value,
            "phase": self.phase if self._runs else None,
            "progress": bar(self.done, self.total) if self._runs else None,
            "best so far": best,
            "device": self.device,
            "error": self.error,
        }
        return table(str(self.problem), rows.items())


_STATE_OF = {
    "started": JobState.RUNNING,
    "progress": JobState.RUNNING,
    "finished": JobState.DONE,
    "failed": JobState.FAILED,
    "cancelled": JobState.CANCELLED,
}
_Progress = msgspec.defstruct(
    "Progress",
    [
        ("phase", str, ""),
        ("done", int, 0),
        ("total", int, 0),
        ("best_us", float | None, None),
        ("best", str | None, None),
        ("recorded", str | None, None),
        ("error", str | None, None),
    ],
)
"""What an event says of a job's status."""
FINAL_EVENTS = frozenset({"finished", "failed", "cancelled"})


@dataclass(frozen=True, kw_only=True, slots=True)
class JobEvent:
    """Something that happened to a job. `id` orders events and is where a stream resumes.

    Attributes:
        kind: created, started, progress, trial, winner, finished, failed, cancelled; more may
            come.
    """

    id: str
    kind: str
    data: dict[str, Any] = field(default_factory=dict)
