"""Progress on stderr: bars on a terminal, plain lines elsewhere, nothing but errors when quiet.

Every reporter is a context manager and takes the same calls, so commands never ask which it is.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from service.cli.output import note

if TYPE_CHECKING:
    from rich.progress import TaskID

EVERY_S = 5.0
"""Seconds between plain lines of one phase: a log of a long suite stays readable."""


class Reporter(Protocol):
    """Tells people how far a long command is."""

    def overall(self, done: int, total: int, title: str) -> None:
        """Say which of several problems is worked on."""
        ...

    def update(
        self,
        phase: str,
        done: int,
        total: int,
        *,
        best_us: float | None = None,
        message: str = "",
    ) -> None:
        """Say how far the work on one problem is."""
        ...

    def line(self, text: str) -> None:
        """Say something that stays on the screen."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


def reporter() -> Reporter:
    """The reporter that suits stderr."""
    return Bars() if sys.stderr.isatty() else Lines()


class Lines:
    """Plain lines: at every change of phase, at its end, and every few seconds between."""

    def __init__(self) -> None:
        self._title = ""
        self._phase = ""
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

    def overall(self, done: int, total: int, title: str) -> None:
        """Begin the next problem."""
        self._phase = ""
        self._title = title
        note(f"[{done + 1}/{total}] {title}")

    def update(
        self,
        phase: str,
        done: int,
        total: int,
        *,
        best_us: float | None = None,
        message: str = "",
    ) -> None:
        """Print a line if it is time for one."""
        now = time.monotonic()
        fresh = phase != self._phase
        if fresh:
            self._phase, self._began = phase, now
        elif now - self._spoke < EVERY_S and done < total and not message:
            return
        self._spoke = now
        parts = [f"{phase} {done}/{total}"]
        if best_us is not None:
            parts.append(f"best {best_us:.2f} µs")
        if 0 < done < total and not fresh:
            parts.append(f"{(now - self._began) / done * (total - done):.0f} s left")
        if message:
            parts.append(message)
        note("  " + ", ".join(parts))

    def line(self, text: str) -> None:
        """Print the text."""
        note(text)


class Bars:
    """Rich bars: one for the problem at hand, one for the whole list if there is one."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[best]}", markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True, highlight=False),
            transient=True,
        )
        self._whole: TaskID | None = None
        self._part: TaskID | None = None
        self._phase = ""

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

    def overall(self, done: int, total: int, title: str) -> None:
        """Move the lower bar, and start the upper one anew."""
        if self._whole is None:
            self._whole = self._progress.add_task(title, total=total, best="")
        self._progress.update(self._whole, completed=done, total=total, description=title)
        self._phase = ""

    def update(
        self,
        phase: str,
        done: int,
        total: int,
        *,
        best_us: float | None = None,
        message: str = "",
    ) -> None:
        """Move the upper bar; a new phase starts its clock anew."""
        text = message if best_us is None else f"best {best_us:.2f} µs"
        if self._part is None:
            self._part = self._progress.add_task(phase, total=total, best=text)
        if phase != self._phase:
            self._phase = phase
            self._progress.reset(self._part, description=phase, total=total, best=text)
        self._progress.update(self._part, completed=done, total=total, best=text)

    def line(self, text: str) -> None:
        """Print above the bars."""
        self._progress.console.print(text, markup=False)
