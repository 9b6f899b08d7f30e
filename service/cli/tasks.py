"""What a command was asked to do, one problem at a time, and what came of each."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from gemmsmith.answers.answer import Answer, Ratio, Statistics
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.config import Config, Use
from gemmsmith.core.device import recording_of, time_text
from gemmsmith.core.problem import Problem
from service.cli.output import emit, microseconds, ratio, say, table
from service.report.verdict import why_cublas_stays
from tuner.trial import Winner

_LISTED = 3
"""So many problems are named where there may be hundreds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A problem and where it comes from; `origin` is empty for one typed by hand.

    `calls` is how often the user runs it, 0 where nothing is said about that.
    """

    problem: Problem
    origin: str
    calls: int = 0


def by_stake(tasks: Sequence[Task], saving_us: Callable[[Problem], float]) -> list[Task]:
    """The tasks, most time at stake first: calls × what tuning is expected to save of one.

    Those with nothing at stake, as all are that say no calls, keep their order and come last.
    """

    def stake(task: Task) -> float:
        return task.calls * saving_us(task.problem) if task.calls else 0.0

    return sorted(tasks, key=stake, reverse=True)


class Status(StrEnum):
    """What came of a task."""

    TUNED = "tuned"  # a winner was promoted
    CURRENT = "current"  # it had a winner of this very environment already
    UNRECORDED = "unrecorded"  # the recorded GPU does not hold it
    FAILED = "failed"  # see `error`
    SKIPPED = "skipped"  # stopped or out of time before its turn, or in the middle of it


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskOutcome:
    """What came of one task; `result` is the winner, or the service's answer.

    `answered` is when a first winner was known, `seconds` when the last one was. `kept` says that
    what was found is not what is served, and why.
    """

    task: Task
    status: Status
    result: Winner | Answer | None = None
    error: str | None = None
    job: str | None = None
    seconds: float = 0.0
    answered: float | None = None
    kept: str = ""

    @property
    def chosen(self) -> Candidate | Config | None:
        """The best CUTLASS candidate, if there is one."""
        if isinstance(self.result, Winner):
            return self.result.candidate
        return self.result.config if self.result else None

    def document(self) -> dict[str, Any]:
        """The outcome as JSON."""
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
        """The outcome in one line, for a log."""
        if self.result is None:
            return f"{self.task.problem}: {self.status}{f': {self.error}' if self.error else ''}"
        return f"{self.task.problem}: {summary(self.result)}"


def summary(result: Winner | Answer) -> str:
    """A winner or an answer in one line."""
    default = result.problem.operation.default
    gain = f"{result.speedup.median:.3f} × {default}" if result.speedup else "not compared"
    recorded = result.device.name if result.replayed else ""

    def time(statistics: Statistics | None) -> str:
        return time_text(statistics.median_us, recorded) if statistics else "no time"

    if result.use.is_default:
        stays = why_cublas_stays(Use.CUBLAS, result.speedup, result.power_penalty)
        lost = f"best CUTLASS kernel {gain}{f', {stays}' if stays else ''}"
        return f"keep {default}, {time(result.baseline)}; {lost}"
    chosen = result.candidate if isinstance(result, Winner) else result.config
    name = chosen.kernel.name if chosen else "no kernel"
    return f"{time(result.statistics)}, {gain}, {name}"


def _device(result: Winner | Answer) -> str:
    """Where times are from: `H200`, or `recorded H200`."""
    name = result.device.name
    return recording_of(name) if result.replayed else name.removeprefix("NVIDIA ")


def not_served(found: int | None, served: Winner | Answer | None) -> str:
    """Why revision `found`, a new winner, is kept while another is served; empty if it is served.

    People who tune on a recorded GPU would else take the one for the other.
    """
    if served is None or found is None or served.revision in (None, found):
        return ""
    why = ", which is pinned," if served.pinned else ""
    if not (why or served.replayed):
        why = ", which a GPU has measured,"
    return (
        f"kept as revision {found}; revision {served.revision}{why} stays served: {summary(served)}"
    )


def report(outcomes: Sequence[TaskOutcome], *, whole: bool, as_json: bool, seconds: float) -> int:
    """Print what came of the tasks; the exit status.

    `whole` prints a suite: a table (or one document of all outcomes) with totals.
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
    """Counts by status, and the speed-up over cuBLAS of what callers are told to run."""
    counts = {status.value: 0 for status in Status}
    for outcome in outcomes:
        counts[outcome.status] += 1
    gains = [
        outcome.result.speedup.median if not outcome.result.use.is_default else 1.0
        for outcome in outcomes
        if outcome.result is not None and outcome.result.speedup is not None
    ]
    stays = sum(o.result.use.is_default for o in outcomes if o.result is not None)
    mean = math.exp(math.fsum(map(math.log, gains)) / len(gains)) if gains else None
    return counts | {
        "cublas_stays": stays,
        "speedup_geometric_mean": mean,
        "speedup_median": statistics.median(gains) if gains else None,
        "speedup_max": max(gains, default=None),
    }


def _some(problems: Sequence[Problem]) -> str:
    """The first few, and how many more there are."""
    left = len(problems) - _LISTED
    return "; ".join(map(str, problems[:_LISTED])) + (f"; and {left} more" if left > 0 else "")


def _print(outcomes: Sequence[TaskOutcome], seconds: float) -> None:
    rows = []
    unrecorded = [o.task.problem for o in outcomes if o.status is Status.UNRECORDED]
    for outcome in outcomes:
        if outcome.status is Status.UNRECORDED:
            continue
        result = outcome.result
        statistics: Statistics | None = result.statistics if result else None
        baseline: Statistics | None = result.baseline if result else None
        speedup: Ratio | None = result.speedup if result else None
        what = outcome.status.value  # why it failed was said when it did
        if result is not None:
            kernel = outcome.chosen.kernel.name if outcome.chosen else "–"
            what = result.problem.operation.default if result.use.is_default else kernel
        rows.append(
            (
                outcome.task.problem,
                outcome.task.origin,
                what,
                _device(result) if result else None,
                microseconds(statistics.median_us if statistics else None),
                microseconds(baseline.median_us if baseline else None),
                ratio(speedup.median if speedup else None),
            )
        )
    if rows:
        table(
            "", ("problem", "origin", "winner", "on", "µs", "default µs", "speed-up"), rows, left=4
        )
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
