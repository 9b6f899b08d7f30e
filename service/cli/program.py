"""`gemmsmith run` and `gemmsmith capture`: a user's program, with `gemmsmith.startup.hook` in it.

The program is a child process with this terminal, which gets the signals that we get. The hook
works in it and in all processes that it starts. Each of them captures its products into a file, and
these are added up when the program has ended.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

import typer

from gemmsmith.core.numerics import Numerics, demands_order
from gemmsmith.program.variables import (
    CAPTURE_VARIABLE,
    NUMERICS_VARIABLE,
    RAN_VARIABLE,
    STEPS_VARIABLE,
    STOP_VARIABLE,
    VARIABLE,
)
from service.cli.ended import Ended
from service.cli.options import DataOptions, DeviceName, NumericsName, Url, complete_efforts
from service.cli.output import CommandError, MisuseError, note, writable
from tuner.signals import handled

if TYPE_CHECKING:
    from service.settings import Settings
    from tuner.devices.base import Device

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

STEPS = 2
"""Steps captured: the second is like all that follow, and a capture costs time at each product."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How the program's products run, and how `run --tune` tunes them, and where."""

    effort: Annotated[
        str,
        typer.Option(
            help="With --tune: quick, default, exhaustive or recheck.",
            autocompletion=complete_efforts,
        ),
    ] = "default"
    time_limit: Annotated[
        float | None,
        typer.Option(min=0, help="With --tune: seconds after which no further problem is started."),
    ] = None
    numerics: Annotated[
        str | None,
        typer.Option(
            help="invariant: a row of a product has the same bits at every M, or the program ends "
            "with an error."
        ),
    ] = None
    report: Annotated[
        str | None,
        typer.Option(
            metavar="[=FILE]",
            help="When it has ended, print what its kernels gained and why torch ran the other "
            "products. With =FILE, also write it there as JSON.",
        ),
    ] = None
    url: Url = None
    device: DeviceName = None


def run(
    command: Annotated[
        list[str],
        typer.Argument(help="The program and its arguments: -- torchrun --nproc-per-node 8 x.py"),
    ],
    tune: Annotated[
        bool, typer.Option("--tune", help="When it has ended, tune its products for the next run.")
    ] = False,
    rehearse: Annotated[
        bool,
        typer.Option(
            "--rehearse",
            help="With --tune: end the program after the captured steps, tune, then run it again.",
        ),
    ] = False,
    steps: Annotated[
        int, typer.Option(min=1, help="Optimizer steps to capture in each process.")
    ] = STEPS,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="Also write the captured suite to this file.", callback=writable
        ),
    ] = None,
    *,
    options: RunOptions,
    data: DataOptions,
) -> None:
    """Run a program with tuned kernels, and report which of its products have no winner.

    The program is not changed. The variable GEMMSMITH makes all of its processes run tuned kernels,
    and its first steps are captured. With --tune, the captured products are tuned when the program
    has ended, the most expensive ones first. The winners are stored for the next run: in a file of
    the user's, or by the service of --url. Signals are passed on. The exit status is the program's
    own; if that is 0 and --tune failed or found nothing to tune, it is 1.
    """
    from gemmsmith.http.requests import effort_of
    from gemmsmith.winners.bundle import kept_bundle
    from tuner.devices import local_gpu

    effort_of(options.effort)  # refused before the program runs
    try:
        is_invariant = demands_order(options.numerics, "--numerics")
    except ValueError as error:
        raise MisuseError(str(error)) from None
    if rehearse and not tune:
        raise MisuseError("--rehearse goes with --tune")
    if output is not None:
        _check_folder(output)
    settings = data.settings(device=options.device)
    url = options.url
    gpu = None if url else local_gpu()
    kept = kept_bundle(settings.default_model if gpu is None else gpu.slug)

    def winners() -> str | None:
        return url or (str(kept) if kept.is_file() else None)

    has_winners = winners() is not None or bool(os.environ.get(VARIABLE))
    if is_invariant and not has_winners:
        if not tune:
            raise CommandError(
                "there are no winners yet: `gemmsmith run --tune --numerics invariant -- …` tunes "
                "them"
            )
        note("gemmsmith: there are no winners yet: this run is not invariant")
    report_file = writable(Path(options.report)) if options.report else None
    reporting = {} if options.report is None else {RAN_VARIABLE: "1"}
    demanded = {NUMERICS_VARIABLE: Numerics.INVARIANT} if is_invariant else {}

    def run_once(*, stop: bool, variables: Mapping[str, str]) -> Ended:
        ended = run_captured(
            command, winners=winners(), steps=steps, stop=stop, variables=variables
        )
        return ended.with_numerics(options.numerics)

    with _preparing(settings if rehearse and not url else None) as ready:
        ended = run_once(stop=rehearse, variables=reporting | (demanded if has_winners else {}))
        # Imported only now: a database and all that goes with it take a second.
        from gemmsmith.errors import GemmsmithError
        from service.cli import gained, of_run
        from tuner.errors import TunerError

        captured, kept_winners = ended.captured, of_run.ProgramWinners(settings, kept, url)
        if reporting and not ended.stopped:
            gained.report(ended, kept_winners, report_file)
        if output is not None and captured.problems:
            ended.save(output)
        if ended.status:
            raise typer.Exit(ended.status)
        for line in ended.unseen:
            note(f"gemmsmith: {line}")
        if ended.reason:
            note(f"gemmsmith: nothing was captured: {ended.reason}")
            raise typer.Exit(1 if tune else 0)
        if tune:
            status = of_run.tune(
                kept_winners, captured, options.effort, options.time_limit, ready()
            )
            if ended.stopped and reporting:
                again = run_once(stop=False, variables=reporting | demanded)
                gained.report(again, kept_winners, report_file)
                status = again.status or status
            elif ended.stopped:
                status = run_program(command, demanded, winners()) or status
            elif rehearse:
                note(f"gemmsmith: the program ended before step {steps}, and is not run again")
            raise typer.Exit(status)
        try:
            lines = of_run.summary(kept_winners, captured)
        except (GemmsmithError, TunerError, OSError) as error:
            # Only a line: the program has succeeded, whether its products have winners or not.
            lines = [f"gemmsmith: which products have winners is not known: {error}"]
        for line in lines:
            note(line)


@contextmanager
def _preparing(settings: Settings | None) -> Iterator[Callable[[], Device | None]]:
    """Meanwhile get ready to tune here. Yields a function that waits for the device.

    It returns None if nothing can be tuned here: tuning says why.
    """
    if settings is None:
        yield lambda: None
        return

    def prepare() -> Device:
        from service.cli import of_run

        return of_run.prepare(settings)

    def ready() -> Device | None:
        return None if prepared.exception() is not None else prepared.result()

    with ThreadPoolExecutor(1) as pool:
        prepared = pool.submit(prepare)
        try:
            yield ready
        finally:
            if (device := ready()) is not None:
                device.close()


def capture(
    command: Annotated[
        list[str],
        typer.Argument(
            help="The program and its arguments: -- torchrun --nproc-per-node 8 train.py --epochs 1"
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Suite file to write.", callback=writable)
    ] = Path("suite.toml"),
    steps: Annotated[
        int,
        typer.Option(min=0, help="Optimizer steps to capture in each process; 0: the whole run."),
    ] = 0,
    numerics: NumericsName = None,
) -> None:
    """Run a program, and write its matrix products and their counts to a suite file.

    Captures forward and backward products of all processes and threads on this machine, such as the
    ranks of torchrun or accelerate, also those of compiled functions. What cannot be captured runs
    as without it, and is named at the end. The exit status is the program's own, and the file is
    written even if the program fails. A capture without any product is an error.
    `gemmsmith tune --suite FILE` then tunes the products, most expensive first.
    """
    _check_folder(output)
    demands_order(numerics)  # refused before the program runs
    ended = run_captured(command, steps=steps).with_numerics(numerics)
    captured = ended.captured
    for line in ended.unseen:
        note(line)
    if ended.reason and not ended.status:
        raise CommandError(f"nothing was captured: {ended.reason}")
    if ended.reason:
        note(f"nothing was captured: {ended.reason}")
    else:
        ended.save(output)
        ranks = f" of {ended.processes} processes" if ended.processes > 1 else ""
        note(
            f"{output}: {len(captured.problems)} problems, {captured.problems.total()} products"
            f"{ranks}, {captured.skipped.total()} unsupported products"
        )
    raise typer.Exit(ended.status)


def _check_folder(suite: Path) -> None:
    if not suite.parent.is_dir():
        raise MisuseError(f"no folder {suite.parent} for the suite file")


def run_captured(
    command: Sequence[str],
    *,
    winners: str | None = None,
    steps: int = 0,
    stop: bool = False,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Ended:
    """Run a command to its end, with a capture of its products.

    Args:
        command: the program and its arguments.
        winners: the value of `GEMMSMITH` in it; None leaves the variable as it is.
        steps: how many are captured; 0 captures all.
        stop: end the program after them.
        variables: further environment variables.

    Raises:
        MisuseError: there is no such program.
    """
    # The program may leave files there that we are not allowed to delete.
    with tempfile.TemporaryDirectory(
        prefix="gemmsmith-capture-", ignore_cleanup_errors=True
    ) as folder:
        captures = {
            CAPTURE_VARIABLE: folder,
            STEPS_VARIABLE: str(steps),
            STOP_VARIABLE: "1" if stop else "0",
        }
        status = run_program(command, {**variables, **captures}, winners)
        return Ended.of(status, Path(folder))


def run_program(
    command: Sequence[str],
    variables: Mapping[str, str],
    winners: str | None = None,
    stdout: int | None = None,
) -> int:
    """Run a command with these environment variables and winners; its exit status.

    `stdout` is the descriptor for what it prints; None leaves it ours.

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
        subprocess.Popen([program, *words[1:]], env=environment, stdout=stdout) as process,
    ):
        forwarding.to(process)
        status = _wait(process)
    return status if status >= 0 else 128 - status  # -N: signal N has killed it


def _wait(process: subprocess.Popen[bytes]) -> int:
    # A signal just before a blocking call is handled only after it: so none blocks for long.
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=1)


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
