"""What came of tasks: for each a line, a row of a table or a JSON document, and totals."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from gemmsmith.answers.answer import Answer, Statistics
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.config import Config, Use
from gemmsmith.core.device import recording_of, time_text
from gemmsmith.core.problem import Problem
from service.cli.output import TIMES, emit, say, table, times
from service.cli.tasks import Task
from service.report.verdict import why_cublas_stays
from tuner.trial import Winner

_LISTED = 3
"""Problems named in a line that may be about hundreds."""


class Status(StrEnum):
    """What came of a task."""

    TUNED = "tuned"  # a winner was promoted
    CURRENT = "current"  # it already had a winner of this very environment
    UNRECORDED = "unrecorded"  # the recorded GPU does not hold it
    FAILED = "failed"  # see `error`
    SKIPPED = "skipped"  # stopped or out of time before its turn, or in the middle of it


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskOutcome:
    """What came of one task.

    Attributes:
        result: the winner, or the service's answer.
        seconds: how long it took; `answered` is how long it took to a first winner.
        kept: says that the new winner is not the one that is served, and why.
    """

    task: Task
    status: Status
    result: Winner | Answer | None = None
    error: str | None = None
    job: str | None = None
    seconds: float = 0.0
    answered: float | None = None
    kept: str = ""

    @classmethod
    def without_winner(
        cls, task: Task, status: Status, error: str, began: float, job: str | None = None
    ) -> TaskOutcome:
        """An outcome without a result; `began` is the monotonic time at which its work began."""
        seconds = time.monotonic() - began
        return cls(task=task, status=status, error=error, job=job, seconds=seconds)

    @property
    def chosen(self) -> Candidate | Config | None:
        """The best CUTLASS candidate; None if there is no result, or no candidate in it."""
        if isinstance(self.result, Winner):
            return self.result.candidate
        return self.result.config if self.result else None

    def document(self) -> dict[str, Any]:
        return {
            "problem": msgspec.to_builtins(self.task.problem),
            "origin": self.task.origin,
            "status": self.status,
            "result": msgspec.to_builtins(self.result),
            "error": self.error,
            "job": self.job,
            "seconds": round(self.seconds, 3),
            "answered": None if self.answered is None else round(self.answered, 3),
        }

    def line(self) -> str:
        if self.result is None:
            return f"{self.task.problem}: {self.status}{f': {self.error}' if self.error else ''}"
        return f"{self.task.problem}: {summary(self.result)}"


def summary(result: Winner | Answer) -> str:
    """A winner or an answer in one line."""
    default = result.problem.operation.default
    gain = f"{result.speedup.median:.3f} × {default}" if result.speedup else "not compared"
    recorded = result.device.name if result.replayed else ""

    def measured(statistics: Statistics | None) -> str:
        return time_text(statistics.median_us, recorded) if statistics else "no time"

    if result.use.is_default:
        stays = why_cublas_stays(Use.CUBLAS, result.speedup, result.power_penalty)
        lost = f"best CUTLASS kernel {gain}{f', {stays}' if stays else ''}"
        return f"keep {default}, {measured(result.baseline)}; {lost}"
    chosen = result.candidate if isinstance(result, Winner) else result.config
    name = chosen.kernel.name if chosen else "no kernel"
    return f"{measured(result.statistics)}, {gain}, {name}"


def _device(result: Winner | Answer) -> str:
    name = result.device.name
    return recording_of(name) if result.replayed else name.removeprefix("NVIDIA ")


def not_served(revision: int | None, served: Winner | Answer | None) -> str:
    """Why the new winner `revision` is kept while another is served; empty if it is served."""
    # Without this line, users who tune on a recorded GPU would expect their new winner to be
    # served.
    if served is None or revision is None or served.revision in (None, revision):
        return ""
    reason = ", which is pinned," if served.pinned else ""
    if not (reason or served.replayed):
        reason = ", which a GPU has measured,"
    return (
        f"kept as revision {revision}; revision {served.revision}{reason} stays served: "
        f"{summary(served)}"
    )


def report(outcomes: Sequence[TaskOutcome], *, whole: bool, as_json: bool, seconds: float) -> int:
    """Print the outcomes; the exit status.

    With `whole`, they are a suite's: a table, or one document of all outcomes, with totals.
    """
    if as_json:
        documents = [outcome.document() for outcome in outcomes]
        if whole or len(documents) != 1:
            emit({"outcomes": documents, "totals": totals(outcomes), "seconds": round(seconds, 1)})
        else:
            emit(documents[0])
    elif whole:
        _print(outcomes, seconds)
    else:
        for outcome in outcomes:
            say(outcome.line())
            if outcome.chosen is not None:
                say(f"  launch {outcome.chosen.launch.key}")
            if outcome.kept:
                say(f"  {outcome.kept}")
    return 1 if any(outcome.status is Status.FAILED for outcome in outcomes) else 0


def totals(outcomes: Sequence[TaskOutcome]) -> dict[str, Any]:
    """Counts by status, and the speed-up over the default of what callers will run."""
    counts = {status.value: 0 for status in Status}
    for outcome in outcomes:
        counts[outcome.status] += 1
    gains = [
        outcome.result.speedup.median if not outcome.result.use.is_default else 1.0
        for outcome in outcomes
        if outcome.result is not None and outcome.result.speedup is not None
    ]
    stays = sum(o.result.use.is_default for o in outcomes if o.result is not None)
    return counts | {
        "cublas_stays": stays,
        "speedup_geometric_mean": statistics.geometric_mean(gains) if gains else None,
        "speedup_median": statistics.median(gains) if gains else None,
        "speedup_max": max(gains, default=None),
    }


def _some(problems: Sequence[Problem]) -> str:
    left = len(problems) - _LISTED
    return "; ".join(map(str, problems[:_LISTED])) + (f"; and {left} more" if left > 0 else "")


def _print(outcomes: Sequence[TaskOutcome], seconds: float) -> None:
    rows = []
    unrecorded = [o.task.problem for o in outcomes if o.status is Status.UNRECORDED]
    for outcome in outcomes:
        if outcome.status is Status.UNRECORDED:
            continue
        result = outcome.result
        winner = outcome.status.value  # the reason of a failure was printed when it happened
        if result is not None:
            kernel = outcome.chosen.kernel.name if outcome.chosen else "–"
            winner = result.problem.operation.default if result.use.is_default else kernel
        rows.append(
            (
                outcome.task.problem,
                outcome.task.origin,
                winner,
                _device(result) if result else None,
                *times(result),
            )
        )
    if rows:
        table("", ("problem", "origin", "winner", "on", *TIMES), rows, left=4)
    if unrecorded:
        say(
            f"not recorded, so not tuned: {_some(unrecorded)} "
            "(`gemmsmith demo` lists the recorded problems)"
        )
    sums = totals(outcomes)
    counted = ", ".join(f"{sums[status]} {status}" for status in Status if sums[status])
    mean = sums["speedup_geometric_mean"]
    median = f", median {sums['speedup_median']:.3f}" if mean else ""
    tail = f"; geometric mean {mean:.3f} × the default{median}" if mean else ""
    say(f"{counted or 'nothing to do'} in {seconds:.0f} s{tail}")
