"""The status and the events of tuning jobs, as the service reports them."""

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
    """The status of a job when the service answered.

    Attributes:
        calls: how often the problem is run, the sum of all requests.
        expected_saving_us: microseconds that tuning is expected to save in all these calls; None
            if no request gave a number of calls.
        phase: step of the tuning run; empty while waiting.
        done, total: candidates of this phase (kernels while compiling).
        best_us, best: microseconds per launch of the fastest candidate so far, and its key, or the
            default's name; of the finals once they have begun, before that of the screening.
        recorded: name of the GPU model whose recorded times these are; empty if a GPU measures.
        winner_revision: revision of the promoted winner, once done.
        deadline_at: time after which a job without a winner fails; None for no deadline.
        ordered_by: name of the API key that requested it.
        waits: a text that says what a waiting job waits for, and whether a worker that can take it
            is alive; empty if the service did not say.
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
        """The status after an event. Fields that the event lacks keep their values."""
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
        return "" if self.best_us is None else time_text(self.best_us, self.recorded, 1)

    @property
    def line(self) -> str:
        """A line of text with the job's identifier, problem, state and progress."""
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
FINAL_EVENTS = frozenset({"finished", "failed", "cancelled"})


class _Progress(msgspec.Struct):
    """The fields of a job's status that an event may have."""

    phase: str = ""
    done: int = 0
    total: int = 0
    best_us: float | None = None
    best: str | None = None
    recorded: str | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class JobEvent:
    """An event of a job. `id` orders the events, and a stream can be resumed after it.

    Attributes:
        kind: created, started, progress, trial, winner, finished, failed or cancelled; newer
            services may have further kinds.
    """

    id: str
    kind: str
    data: dict[str, Any] = field(default_factory=dict)
