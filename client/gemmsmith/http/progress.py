"""Shows the progress of a job: a table in a notebook, or a line in a terminal.

In a file or a pipe, each new phase is a line.
"""

from __future__ import annotations

import sys
from typing import Any, TextIO

from gemmsmith.http.jobs import JobStatus


class Display:
    """Shows nothing."""

    def show(self, status: JobStatus) -> None:
        """Show the current status."""

    def close(self) -> None:
        """Called after the last status."""


class TerminalLine(Display):
    """A line that is overwritten in a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._width = 0
        self._shown = ""

    def show(self, status: JobStatus) -> None:
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
        if self._terminal and self._shown:
            self._stream.write("\n")
            self._stream.flush()


class NotebookCell(Display):
    """A table below a notebook's cell, which is updated in place."""

    def __init__(self, display: Any) -> None:
        self._display = display
        self._handle: Any = None

    def show(self, status: JobStatus) -> None:
        if self._handle is None:
            self._handle = self._display(status, display_id=True)
        else:
            self._handle.update(status)


def progress(enabled: bool, stream: TextIO | None = None) -> Display:
    """The display for this program: a notebook's cell, or else a line on `stream` (stderr)."""
    if not enabled:
        return Display()
    ipython = sys.modules.get("IPython")  # a notebook's kernel has imported it
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None and getattr(shell, "kernel", None) is not None:
        from IPython.display import display

        return NotebookCell(display)
    return TerminalLine(stream or sys.stderr)
