"""A job's progress while somebody waits: a table in a notebook, one line of a terminal elsewhere.

In a file or a pipe, each new phase is a line of its own.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol, TextIO

from gemmsmith.http.jobs import JobStatus


class Display(Protocol):
    """Shows a job to somebody, again and again."""

    def show(self, status: JobStatus) -> None:
        """The job as it is now."""

    def close(self) -> None:
        """Nothing more will be shown."""


class NoDisplay:
    """Shows nothing."""

    def show(self, status: JobStatus) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class TerminalLine:
    """One line, written over itself in a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._width = 0
        self._shown = ""

    def show(self, status: JobStatus) -> None:
        """The line, unless it says what it said before."""
        text = status.line if self._terminal else f"{status.id} {status.state} {status.phase}"
        if text == self._shown:
            return
        self._shown = text
        if self._terminal:
            self._stream.write(f"\r{text.ljust(self._width)}")
            self._width = len(text)
        else:
            self._stream.write(f"{status.line}\n")
        self._stream.flush()

    def close(self) -> None:
        """End the line."""
        if self._terminal and self._shown:
            self._stream.write("\n")
            self._stream.flush()


class NotebookCell:
    """A table below a notebook's cell, which changes in its place."""

    def __init__(self, display: Any) -> None:
        self._display = display
        self._handle: Any = None

    def show(self, status: JobStatus) -> None:
        """The table."""
        if self._handle is None:
            self._handle = self._display(status, display_id=True)
        else:
            self._handle.update(status)

    def close(self) -> None:
        """The last table stays."""


def progress(wanted: bool, stream: TextIO | None = None) -> Display:
    """What shows a job here; nothing where that is not `wanted`."""
    if not wanted:
        return NoDisplay()
    ipython = sys.modules.get("IPython")  # who has a notebook has loaded it
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None and getattr(shell, "kernel", None) is not None:
        from IPython.display import display

        return NotebookCell(display)
    return TerminalLine(stream or sys.stderr)
