"""Runs a user's program with what `gemmsmith.startup.hook` switches on in it and in all that it
starts.

The program is a child process with this terminal, which gets the signals that we get. Its products
are captured by every process of it, each into a file, and added up when it has ended.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from gemmsmith.program.captured import Captured
from gemmsmith.program.variables import (
    CAPTURE_VARIABLE,
    LOADED,
    PRODUCTS,
    SEEN,
    STEPS_VARIABLE,
    STOP_VARIABLE,
    STOPPED,
    VARIABLE,
)
from service.cli.output import MisuseError, note
from tuner.extras import library

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A program that has ended.

    Attributes:
        status: its exit status; 128 and the number of the signal that killed it.
        found: what it multiplied, in all of its processes.
        processes: how many of them did.
        stopped: it was ended after the steps that were to be captured.
        why: why nothing was captured; empty where something was.
    """

    status: int
    found: Captured
    processes: int
    stopped: bool
    why: str

    @property
    def unseen(self) -> list[str]:
        """Lines that name what may have run products that were not captured."""
        return [
            f"not captured: {what} ({count})" for what, count in sorted(self.found.unseen.items())
        ]

    def save(self, output: Path) -> None:
        """Write the suite. Where the program has failed, a failure to write it is only a line.

        Raises:
            OSError: the file cannot be written.
        """
        try:
            self.found.save(output)
        except OSError as error:
            if not self.status:
                raise
            note(f"{output} cannot be written: {error.strerror}")


def run(
    command: Sequence[str], *, winners: str | None = None, steps: int = 0, stop: bool = False
) -> Ended:
    """Run a command to its end, capturing.

    Args:
        command: the program and its arguments.
        winners: what `GEMMSMITH` is in it; None: as it is here.
        steps: how many are captured; 0: all.
        stop: end the program after them.

    Raises:
        MisuseError: there is no such program.
    """
    # Whatever the program leaves there: it is not ours, and may not be to take away.
    with tempfile.TemporaryDirectory(
        prefix="gemmsmith-capture-", ignore_cleanup_errors=True
    ) as folder:
        variables = {
            CAPTURE_VARIABLE: folder,
            STEPS_VARIABLE: str(steps),
            STOP_VARIABLE: "1" if stop else "0",
        }
        status = _run(command, variables | ({VARIABLE: winners} if winners else {}))
        return _ended(status, Path(folder))


def run_plainly(command: Sequence[str], winners: str | None) -> int:
    """Run a command with these winners, capturing nothing; its exit status.

    Raises:
        MisuseError: there is no such program.
    """
    return _run(command, {VARIABLE: winners} if winners else {})


def _run(command: Sequence[str], variables: dict[str, str]) -> int:
    environment = os.environ | variables
    if find_spec("torch") is not None:
        # `python` and `torchrun` are those of this environment, whether it was activated or not.
        scripts = str(Path(sys.executable).parent)
        environment["PATH"] = os.pathsep.join((scripts, environment.get("PATH", os.defpath)))
    words = list(command)
    program = shutil.which(words[0], path=environment.get("PATH"))
    if program is None and words[0].endswith(".py"):
        if not Path(words[0]).is_file():
            raise MisuseError(f"no script {words[0]}")
        program, words = sys.executable, [sys.executable, *words]
    if program is None:
        raise MisuseError(f"no program {words[0]}")
    with (
        _Forwarding() as forwarding,
        subprocess.Popen([program, *words[1:]], env=environment) as process,
    ):
        forwarding.to(process)
        status = process.wait()
    return status if status >= 0 else 128 - status


class _Forwarding:
    """Passes signals on, those too that come before there is a process to pass them to."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []

    def __enter__(self) -> _Forwarding:
        # What is ignored here (`nohup`) stays so there: a handler of ours would undo it.
        self._before = {
            number: signal.signal(number, self._pass)
            for number in _FORWARDED
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def to(self, process: subprocess.Popen[bytes]) -> None:
        """Pass to this process from now on."""
        self._process = process
        for number in self._early:
            process.send_signal(number)

    def _pass(self, number: int, _frame: types.FrameType | None) -> None:
        if number == signal.SIGINT and _at_terminal():
            return  # Ctrl-C reaches the program by itself
        if self._process is None:
            self._early.append(number)
        else:
            self._process.send_signal(number)


def _at_terminal() -> bool:
    """Whether this process is one of those that a terminal's keys signal."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False


def _ended(status: int, folder: Path) -> Ended:
    found, processes = Captured(), 0
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError:  # the program has taken it away
        names = []
    for name in names:
        if name.endswith(PRODUCTS):
            try:
                one = Captured.parse(_read(folder / name))
            except (OSError, ValueError):
                found.unseen["files in the folder of the capture that hold none"] += 1
                continue
            found.add(one)
            processes += bool(one.problems)
    with_torch, with_gemmsmith = (
        sum(name.endswith(ending) for name in names) for ending in (LOADED, SEEN)
    )
    return Ended(
        status=status,
        found=found,
        processes=processes,
        stopped=STOPPED in names,
        why="" if found.problems else _why(found, with_torch, with_gemmsmith),
    )


def _read(path: Path) -> bytes:
    """A file of the program's.

    Raises:
        OSError: it is no regular file, such as a pipe, which may never end; it cannot be read.
    """
    if not path.is_file():
        raise OSError(f"{path} is no file")
    return path.read_bytes()


def _why(found: Captured, with_torch: int, with_gemmsmith: int) -> str:
    """Why there is no product that a kernel is for."""
    if found.skipped:
        types = ", ".join(f"{count} of {name}" for name, count in found.skipped.most_common(3))
        return f"kernels are for none of the {found.skipped.total()} products that ran ({types})"
    if with_torch:
        return (
            f"no matrix product ran in the {with_torch} processes that imported torch, or they "
            "were killed"
        )
    if with_gemmsmith:
        return f"none of the {with_gemmsmith} Python processes has imported torch"
    return (
        f"no Python ran that has gemmsmith installed: `pip install {library()}` where the "
        "program's Python is (one started with -S or -I, or from a copied folder, does not count)"
    )
