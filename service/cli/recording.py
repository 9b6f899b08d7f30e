"""`gemmsmith record`: an exhaustive sweep of a real GPU, to be replayed elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gemmsmith.version import VERSION
from service.cli import completion
from service.cli.enumerating import level_of, predicted
from service.cli.options import (
    AsJson,
    Batch,
    Database,
    DeviceName,
    DTypeNames,
    LayoutName,
    LevelName,
    Limit,
    OptionalK,
    OptionalM,
    OptionalN,
    Packs,
    load_settings,
)
from service.cli.output import CommandError, MisuseError, emit, say, writable
from service.cli.progress import Reporter, reporter
from service.cli.session import StopFlag, TuningSession, local
from service.cli.tuning import tasks

if TYPE_CHECKING:
    from gemmsmith.core.candidate import Candidate
    from gemmsmith.core.problem import Problem
    from service.cli.tasks import Task
    from tuner.backends import Level
    from tuner.compile import Built
    from tuner.devices.cuda import CudaDevice
    from tuner.devices.recording import RecordedProblem


def record(
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", help="Sweep file to write: NAME.jsonl.zst.", callback=writable
        ),
    ],
    m: OptionalM = None,
    n: OptionalN = None,
    k: OptionalK = None,
    suite: Annotated[
        Path | None,
        typer.Option(
            "--suite",
            help="Every problem of this file instead of M N K.",
            autocompletion=completion.suites,
        ),
    ] = None,
    dtype: DTypeNames = None,
    layout: LayoutName = None,
    batch: Batch = 1,
    level: LevelName = "core",
    limit: Limit = None,
    candidates: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum number of candidates per problem, best predicted first."),
    ] = None,
    compiled_only: Annotated[
        bool,
        typer.Option("--compiled-only", help="Only kernels compiled before: no waiting for nvcc."),
    ] = False,
    device: DeviceName = None,
    database: Database = None,
    packs: Packs = None,
    as_json: AsJson = False,
) -> None:
    """Measure every candidate of the problems (at most --limit of them) and write a sweep file.

    After an interruption, the same command continues. The file appears when it is complete.
    """
    began = time.monotonic()
    _check_output(output)
    found = tasks(m, n, k, suite, dtype, layout, batch, limit)
    wanted = level_of(level)
    settings = load_settings(device=device, database=database, packs=packs)
    with StopFlag() as stop, local(settings) as session, reporter() as says:
        if session.device.replayed:
            raise CommandError(
                f"{session.device.name} is a recording itself; recording needs a GPU (--device "
                "cuda:0)"
            )
        recorder = _SweepRecorder(session, says, stop, compiled_only)
        recorder.run(found, wanted, candidates, output)
    if as_json:
        emit(
            {
                "file": str(output),
                "bytes": output.stat().st_size,
                "problems": recorder.problems,
                "trials": recorder.trials,
                "failed_trials": recorder.failed_trials,
                "failures": recorder.failures,
                "seconds": round(time.monotonic() - began, 1),
            }
        )
    else:
        say(
            f"{recorder.problems} problems, {recorder.trials} trials ({recorder.failed_trials} "
            f"failed) written to {output}, {output.stat().st_size / 1e6:.1f} MB"
        )
    if recorder.failures:
        raise typer.Exit(1)


def _check_output(output: Path) -> None:
    from tuner.devices.recording import SUFFIX

    if not output.name.endswith(SUFFIX) or output.name == SUFFIX:
        raise MisuseError(f"the output file must be called NAME{SUFFIX}, got {output.name!r}")


@dataclass
class _SweepRecorder:
    """Compiles everything, then measures problem after problem."""

    session: TuningSession
    says: Reporter
    stop: StopFlag
    compiled_only: bool
    problems: int = 0
    trials: int = 0
    failed_trials: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)

    def run(self, found: Sequence[Task], level: Level, most: int | None, output: Path) -> None:
        from tuner.devices.recording import SweepWriter
        from tuner.errors import DeviceError, NoGpu

        model = self.session.device.model
        wanted = {
            task.problem: [
                candidate
                for _, candidate in predicted(task.problem, model, level)
                if self._may_run(candidate)
            ][:most]
            for task in found
        }
        built = self._compile([c for listed in wanted.values() for c in listed])
        with SweepWriter(output, self._header()) as writer:
            for i, (problem, listed) in enumerate(wanted.items()):
                if problem in writer.done:
                    continue
                if self.stop():
                    raise KeyboardInterrupt
                self.says.overall(i, len(wanted), str(problem))
                self.says.update("sweep", 0, len(listed), message=f"{len(listed)} candidates")
                try:
                    recorded = self._sweep(problem, listed, built)
                except NoGpu:
                    raise
                except DeviceError as error:
                    self.failures.append({"problem": str(problem), "error": str(error)})
                    self.says.line(f"  {problem}: {error}")
                    continue
                writer.append(recorded)
                self.trials += len(recorded.trials)
                self.failed_trials += sum(t.failure is not None for t in recorded.trials)
            self.problems = len(writer.done)
            if not self.problems:
                raise CommandError(f"nothing could be recorded: {self.failures[0]['error']}")

    def _may_run(self, candidate: Candidate) -> bool:
        builder = self.session.builder
        return not self.compiled_only or builder is None or builder.has(candidate.kernel)

    def _compile(self, candidates: Sequence[Candidate]) -> dict[str, Built]:
        """All kernels of all problems at once, so that no core waits for the GPU."""
        builder = self.session.builder
        if builder is None:
            return {}
        kernels = {c.kernel.name: c.kernel for c in candidates}
        built: dict[str, Built] = {}
        self.says.update("compile", 0, len(kernels))
        for item in builder.build(list(kernels.values())):
            built[item.kernel.name] = item
            self.says.update("compile", len(built), len(kernels))
            if self.stop():
                raise KeyboardInterrupt
        return built

    def _sweep(
        self, problem: Problem, candidates: Sequence[Candidate], built: dict[str, Built]
    ) -> RecordedProblem:
        from tuner.devices.base import Contender
        from tuner.devices.recording import RecordedTrial
        from tuner.measure.policy import Policy

        device: CudaDevice = self.session.device  # type: ignore[assignment]
        contenders, failed = [], []
        for candidate in candidates:
            item = built.get(candidate.kernel.name)
            if item is not None and item.pack is not None:
                contenders.append(Contender(candidate=candidate, pack=item.pack.path))
            elif item is not None and item.failure is not None:
                failed.append(RecordedTrial(candidate=candidate, failure=item.failure))
        recorded = device.sweep(problem, contenders, Policy())
        trials = sorted((*recorded.trials, *failed), key=lambda trial: trial.candidate.key)
        return replace(recorded, trials=tuple(trials))

    def _header(self) -> Any:
        from tuner.devices.recording import SCHEMA, Header

        return Header(
            schema=SCHEMA,
            device=self.session.device.model,
            environment=self.session.device.environment,
            recorded_at=datetime.now(UTC).isoformat(timespec="seconds"),
            gemmsmith=VERSION,
        )
