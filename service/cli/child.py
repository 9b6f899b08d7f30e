"""A user's program as a child process, which gets the signals that we get."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import types
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from gemmsmith.program.variables import VARIABLE
from service.cli.output import MisuseError
from tuner.signals import handled

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def run_program(command: Sequence[str], winners: str | None, **variables: str) -> int:
    """Run a command with these winners and environment variables; its exit status.

    Raises:
        MisuseError: there is no such program.
    """
    environment = os.environ | variables | ({VARIABLE: winners} if winners else {})
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
    forwarding = _Forwarding()
    # An ignored signal (`nohup`) stays ignored in the program: a handler here would undo that.
    numbers = [number for number in _FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
    with (
        handled(numbers, forwarding.pass_on),
        subprocess.Popen([program, *words[1:]], env=environment) as process,
    ):
        forwarding.to(process)
        status = process.wait()
    return status if status >= 0 else 128 - status  # -N: signal N has killed it


class _Forwarding:
    """Passes signals on to the program, also those that come before it has started."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []

    def to(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        for number in self._early:
            process.send_signal(number)

    def pass_on(self, number: int, _frame: types.FrameType | None) -> None:
        if number == signal.SIGINT and _at_terminal():
            return  # the terminal sends Ctrl-C to the program itself
        if self._process is None:
            self._early.append(number)
        else:
            self._process.send_signal(number)


def _at_terminal() -> bool:
    """Whether this process belongs to the group that gets the signals of the terminal's keys."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False
