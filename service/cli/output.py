"""What commands print: results to stdout, everything else to stderr, also their progress.

With `--json` stdout holds exactly one JSON document (`results`: one a line) and nothing else, so
that it can be piped. A file that a command writes to stdout (`-`) is alone there too: then all that
the command prints goes to stderr. Errors are one line `error: …` on stderr, whatever the format.

Much of it comes from services, files and databases. `gemmsmith.showing` keeps such text from
controlling the terminal or beginning a new line, and leaves out passwords of URLs.
"""

from __future__ import annotations

import codecs
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO

from gemmsmith import showing
from gemmsmith.files import STDOUT, descriptor, is_stream

if TYPE_CHECKING:
    from rich.progress import TaskID

    from gemmsmith.answers.answer import Answer
    from tuner.trial import Winner


class Stdout:
    """What this command's stdout is for."""

    is_a_file = False
    """The command writes a file to stdout: nothing else may be printed there."""


_PLAIN = {
    "…": "...", "×": "x", "µ": "u", "–": "-", "→": "->", "≤": "<=", "≥": ">=", "±": "+-", "°": " "
}  # fmt: skip
"""Replacements for characters that the terminal's encoding lacks."""


class CommandError(Exception):
    """The command cannot go on; the message says what to do. Exit status 1."""

    exit_code = 1


class MisuseError(CommandError):
    """Wrong or missing arguments; the message names what is accepted. Exit status 2."""

    exit_code = 2


def writable(path: Path | None) -> Path | None:
    """Check the file of an option before the work that it is for; `-` is stdout.

    Raises:
        MisuseError: it cannot be written.
    """
    if path is None:
        return None
    if str(path) == "-":
        path = Path("/dev/stdout")
    try:
        if (number := descriptor(path)) is not None:
            os.fstat(number)
            Stdout.is_a_file |= number == STDOUT
        elif not is_stream(path):
            _check_folder(path, Path(os.path.realpath(path)).parents)
        elif not os.access(path, os.W_OK):
            raise MisuseError(f"cannot write {path}: no permission; name another place")
    except OSError as error:
        raise MisuseError(f"cannot write {path}: {error.strerror}; name a file") from None
    return path


def readable(paths: Sequence[Path]) -> list[Path]:
    return [Path("/dev/stdin") if str(path) == "-" else path for path in paths]


def writable_bytes(path: Path | None) -> Path | None:
    """As `writable`, for a binary file, which is not for a terminal."""
    path = writable(path)
    if Stdout.is_a_file and sys.stdout.isatty():
        raise MisuseError("the file is not for a terminal: name a file, or redirect")
    return path


def writable_folder(path: Path) -> Path:
    """As `writable`, for a folder, which may not exist yet."""
    real = Path(os.path.realpath(path))
    _check_folder(path, (real, *real.parents))
    return path


def _check_folder(path: Path, folders: Iterable[Path]) -> None:
    place = next(folder for folder in folders if folder.exists())
    if not place.is_dir():
        raise MisuseError(f"cannot write {path}: {place} is a file, not a folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise MisuseError(f"cannot write {path}: no permission in {place}; name another place")


def open_streams() -> None:
    """Make it safe to print on stdout and stderr."""
    # A character that the terminal's encoding lacks is printed in a plainer form. A closed stream
    # prints nothing. Left closed, its descriptor would go to the next file that is opened, such as
    # the database, and messages would be written into that file.
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    codecs.register_error("gemmsmith", _plainer)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="gemmsmith")


def _plainer(error: UnicodeError) -> tuple[str | bytes, int]:
    """Replace a character that the encoding lacks; keep the bytes of a path that is not text."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    character = error.object[error.start]
    if "\udc80" <= character <= "\udcff":
        return character.encode(errors="surrogateescape"), error.start + 1
    return _PLAIN.get(character, "?"), error.start + 1


def _out() -> TextIO:
    return sys.stderr if Stdout.is_a_file else sys.stdout


def emit(data: Any, *, line: bool = False) -> None:
    """Print a JSON document to stdout, on one `line` or indented."""
    import msgspec

    out = _out()
    try:
        encoded = msgspec.json.encode(data)
        if not line:
            encoded = msgspec.json.format(encoded, indent=2)
        text = encoded.decode()
        plain = text.isascii() or codecs.lookup(out.encoding or "utf-8").name == "utf-8"
    except UnicodeEncodeError:  # a path that is not text
        plain = False
    if not plain:
        text = json.dumps(msgspec.to_builtins(data), indent=None if line else 2)
    _print(showing.document(text), out)


def say(text: str) -> None:
    _print(showing.line(text), _out())


def note(text: str) -> None:
    """Print a line that is not the result to stderr."""
    _print(showing.line(text), sys.stderr)


@dataclass(frozen=True)
class Result:
    """What a command prints at its end: a JSON document with `--json`, else what is for people.

    Attributes:
        shown: lines, or a function that prints them.
        notes: lines on stderr, which go with them.
        failed: whether the exit status is 1.
    """

    document: Any
    shown: str | Sequence[str] | Callable[[], None]
    notes: Sequence[str] = ()
    failed: bool = False

    def print(self, as_json: bool) -> None:
        """Print the document, or the rest."""
        if as_json:
            emit(self.document)
            return
        if callable(self.shown):
            self.shown()
        else:
            for line in [self.shown] if isinstance(self.shown, str) else self.shown:
                say(line)
        for line in self.notes:
            note(line)


def counted_rows(rows: Sized, limit: int, thing: str) -> str:
    return f"{len(rows)} {thing}" + (f" (--limit {limit})" if len(rows) == limit else "")


def _print(text: str, stream: TextIO) -> None:
    # typer's own printing would write UTF-8 on a terminal with another encoding.
    stream.write(f"{text}\n")
    stream.flush()


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, left: int = 1
) -> None:
    """Print a table to stdout; the first `left` columns are text, the others figures."""
    from rich.console import Console
    from rich.table import Table

    drawn = Table(title=showing.line(title) or None, title_justify="left", box=None, pad_edge=False)
    for i, name in enumerate(columns):
        drawn.add_column(
            name, justify="left" if i < left else "right", overflow="fold", no_wrap=i >= left
        )
    for row in rows:
        drawn.add_row(*("–" if cell is None else showing.line(str(cell)) for cell in row))
    out = _out()
    width = None if out.isatty() else 200  # nothing is cut off in a file or a pipe
    Console(file=out, highlight=False, markup=False, width=width).print(drawn)


def counted(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def microseconds(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"


def ratio(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}"


TIMES = ("µs", "default µs", "speed-up")
"""The columns of `times`."""


def times(result: Winner | Answer | None) -> tuple[str | None, str | None, str | None]:
    """The medians of a winner or an answer, as cells of a table."""
    if result is None:
        return None, None, None
    return (
        microseconds(result.statistics.median_us if result.statistics else None),
        microseconds(result.baseline.median_us if result.baseline else None),
        ratio(result.speedup.median if result.speedup else None),
    )


EVERY_S = 5.0
"""Seconds between plain lines of one phase: a log of a long suite stays readable."""

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


class Reporter:
    """The progress of a long command in plain lines, on stderr.

    A line is printed when a phase begins and ends, and every few seconds in between.
    """

    def __init__(self) -> None:
        self._title = ""
        self._phase = ""
        self._printed = ""
        self._began = self._spoke = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def span(self, low: float, high: float) -> None:
        """Set the part of the whole, in 0 … 1, that the next list of problems takes."""

    def overall(self, done: int, total: int, title: str) -> None:
        """Begin the next of `total` problems, of which `done` are done."""
        self._phase = self._printed = ""
        if title == self._title:  # the next kernel of the same list
            return
        self._title = title
        note(f"[{done + 1}/{total}] {title}")

    def update(
        self, phase: str, done: int, total: int, *, best: str = "", message: str = ""
    ) -> None:
        """Show the progress of the current problem: `done` of `total` in this phase."""
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
        text = ", ".join(parts)
        if text != self._printed:
            self._printed, self._spoke = text, now
            note(f"  {text}")

    def line(self, text: str) -> None:
        note(text)


class Bars(Reporter):
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
        super().__init__()
        self._stages = stages
        self._low, self._high = 0.0, 1.0  # the part of the bar for the current list of problems
        self._problems = (0, 1)  # done, of
        self._filled = 0.0
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def span(self, low: float, high: float) -> None:
        self._low, self._high = low, high

    def overall(self, done: int, total: int, title: str) -> None:
        self._problems = (done, max(total, 1))
        self._title = title if total == 1 else f"[{done + 1}/{total}] {title}"
        self._draw(0.0, "")

    def update(
        self, phase: str, done: int, total: int, *, best: str = "", message: str = ""
    ) -> None:
        low, high = self._stages.get(phase, (0.0, 0.0) if self._stages else (0.0, 1.0))
        share = min(done / total, 1.0) if total else 0.0
        doing = f"best {best}" if best else message
        self._draw(low + (high - low) * share, f"{_counted(phase, done, total)}  {doing}".rstrip())

    def line(self, text: str) -> None:
        self._progress.console.print(showing.line(text), markup=False)

    def _draw(self, within: float, doing: str) -> None:
        """Fill the bar up to `within` the current problem; it never shrinks."""
        done, total = self._problems
        reached = self._low + (self._high - self._low) * (done + within) / total
        self._filled = max(self._filled, min(reached, 1.0))
        if self._task is None:
            self._task = self._progress.add_task(self._title, total=1.0, doing=doing)
        self._progress.update(
            self._task, completed=self._filled, description=self._title, doing=showing.line(doing)
        )


def reporter(stages: Stages = ALONE) -> Reporter:
    return Bars(stages) if sys.stderr.isatty() else Reporter()


def _counted(phase: str, done: int, total: int) -> str:
    """`screen 3/8`; the phase alone if there is no count, such as for a waiting job."""
    return f"{phase} {done}/{total}" if total else phase
