"""Progress on stderr: a bar on a terminal, plain lines elsewhere, nothing but errors when quiet.

Every reporter is a context manager with the same methods, so no command depends on its kind.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from gemmsmith.showing import line
from service.cli.output import note

if TYPE_CHECKING:
    from rich.progress import TaskID

EVERY_S = 5.0
"""Seconds between plain lines of one phase: a log of a long suite stays readable."""


class Reporter(Protocol):
    """Shows the progress of a long command."""

    def span(self, low: float, high: float) -> None:
        """Set the part of the whole, in 0 … 1, that the next list of problems takes."""
        ...

    def overall(self, done: int, total: int, title: str) -> None:
        """Begin the next of `total` problems, of which `done` are done."""
        ...

    def update(
        self,
        phase: str,
        done: int,
        total: int,
        *,
        best: str = "",
        message: str = "",
    ) -> None:
        """Show the progress of the current problem: `done` of `total` in this phase."""
        ...

    def line(self, text: str) -> None:
        """Print a line that stays on the screen."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


Stages = Mapping[str, tuple[float, float]]
"""The parts of a problem's bar, in 0 … 1, that its phases take; they may overlap."""

ALONE: Stages = {}
"""A command with a single phase."""

TUNING: Stages = {
    "enumerate": (0.0, 0.02),
    "compile": (0.02, 0.6),
    "screen": (0.02, 0.85),  # what is built is measured while the rest compiles
    "finals": (0.85, 0.85),
    "promote": (1.0, 1.0),
}
"""A tuning run. When a problem is tuned again, its part of the bar is already filled."""


def reporter(stages: Stages = ALONE) -> Reporter:
    return Bars(stages) if sys.stderr.isatty() else Lines()


def _counted(phase: str, done: int, total: int) -> str:
    """`screen 3/8`; the phase alone if there is no count, such as for a waiting job."""
    return f"{phase} {done}/{total}" if total else phase


class Lines:
    """Plain lines: when a phase begins and ends, and every few seconds in between."""

    def __init__(self) -> None:
        self._title = ""
        self._phase = ""
        self._said = ""
        self._began = self._spoke = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pass

    def span(self, low: float, high: float) -> None:
        pass  # lines have no length

    def overall(self, done: int, total: int, title: str) -> None:
        self._phase = self._said = ""
        if title == self._title:  # the next kernel of the same list
            return
        self._title = title
        note(f"[{done + 1}/{total}] {title}")

    def update(
        self,
        phase: str,
        done: int,
        total: int,
        *,
        best: str = "",
        message: str = "",
    ) -> None:
        now = time.monotonic()
        fresh = phase != self._phase
        if fresh:
            self._phase, self._began = phase, now
        elif now - self._spoke < EVERY_S and done < total and not message:
            return
        parts = [_counted(phase, done, total)]
        if best:
            parts.append(f"best {best}")
        if 0 < done < total and not fresh:
            parts.append(f"{(now - self._began) / done * (total - done):.0f} s left")
        if message:
            parts.append(message)
        line = ", ".join(parts)
        if line != self._said:
            self._said, self._spoke = line, now
            note(f"  {line}")

    def line(self, text: str) -> None:
        note(text)


class Bars:
    """One bar for the whole command, which only grows, with the current step beside it."""

    def __init__(self, stages: Stages = ALONE) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
        from rich.progress import TimeElapsedColumn as Elapsed

        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            TaskProgressColumn(),
            TextColumn("{task.fields[doing]}", markup=False),
            Elapsed(),
            console=Console(stderr=True, highlight=False),
            transient=True,
        )
        self._stages = stages
        self._low, self._high = 0.0, 1.0  # the part of the bar for the current list of problems
        self._problems = (0, 1)  # done, of
        self._filled = 0.0
        self._task: TaskID | None = None
        self._title = ""

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def span(self, low: float, high: float) -> None:
        self._low, self._high = low, high

    def overall(self, done: int, total: int, title: str) -> None:
        self._problems = (done, max(total, 1))
        self._title = title if total == 1 else f"[{done + 1}/{total}] {title}"
        self._draw(0.0, "")

    def update(
        self,
        phase: str,
        done: int,
        total: int,
        *,
        best: str = "",
        message: str = "",
    ) -> None:
        low, high = self._stages.get(phase, (0.0, 0.0) if self._stages else (0.0, 1.0))
        share = min(done / total, 1.0) if total else 0.0
        doing = f"best {best}" if best else message
        self._draw(low + (high - low) * share, f"{_counted(phase, done, total)}  {doing}".rstrip())

    def line(self, text: str) -> None:
        self._progress.console.print(line(text), markup=False)

    def _draw(self, within: float, doing: str) -> None:
        """Fill the bar up to `within` the current problem; it never shrinks."""
        done, total = self._problems
        reached = self._low + (self._high - self._low) * (done + within) / total
        self._filled = max(self._filled, min(reached, 1.0))
        if self._task is None:
            self._task = self._progress.add_task(self._title, total=1.0, doing=doing)
        self._progress.update(
            self._task, completed=self._filled, description=self._title, doing=line(doing)
        )
