"""`gemmsmith enumerate`: a problem's candidates. `gemmsmith record`: measure all of them.

A record is an exhaustive sweep of a real GPU, to be replayed elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gemmsmith.core.choices import member, not_one_of
from gemmsmith.version import VERSION
from service.cli.options import (
    CompiledOnly,
    Database,
    DeviceName,
    DeviceSlug,
    LevelName,
    Limit,
    Packs,
    ProblemOptions,
    Sweeps,
    complete_architectures,
    load_settings,
)
from service.cli.output import (
    CommandError,
    MisuseError,
    Reporter,
    Result,
    reporter,
    say,
    table,
    writable,
)
from service.cli.session import TuningSession, model_of, signed_store, stop_flag, tuning_session
from service.cli.tasks import Task, TaskOptions

if TYPE_CHECKING:
    from gemmsmith.core.candidate import Candidate
    from gemmsmith.core.device import DeviceModel
    from gemmsmith.core.problem import Problem
    from tuner.backends import Level
    from tuner.compile import Built
    from tuner.devices.cuda import CudaDevice
    from tuner.devices.recording import RecordedProblem


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Where device models are looked up, besides the local GPU."""

    database: Database = None
    sweeps: Sweeps = None


def enumerate_(
    shape: ProblemOptions,
    level: LevelName = "core",
    device: DeviceSlug = None,
    arch: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="List kernels of this architecture instead of those of a device model: sm80, "
            "sm89, sm90, sm100 or sm120.",
            autocompletion=complete_architectures,
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="Candidates shown, fastest first.")] = 20,
    *,
    models: ModelOptions,
) -> Result:
    """List the legal kernels and launches for M N K, by predicted time. Compiles nothing.

    With --arch only the kernels, unordered: launches depend on the device model.
    """
    problem = shape.problem
    checked = level_of(level)
    if arch is not None:
        if device is not None:
            raise MisuseError("--device has an architecture: give it or --arch, not both")
        return _kernels(problem, arch, checked, limit)
    model = model_of(load_settings(**vars(models)), device)
    order = predicted(problem, model, checked)
    kernels = {candidate.kernel.name for _, candidate in order}
    document = {
        "problem": problem,
        "device": model.slug,
        "arch": model.arch,
        "level": level,
        "counts": {"kernels": len(kernels), "candidates": len(order)},
        "candidates": [
            {"kernel": c.kernel, "launch": c.launch, "key": c.key, "predicted_us": us}
            for us, c in order[:limit]
        ],
    }
    line = (
        f"{problem} on {model.name} ({model.arch}), level {level}: "
        f"{len(kernels)} kernels, {len(order)} candidates"
    )
    rows = [(c.kernel.name, c.launch.key, f"{us:.2f}") for us, c in order[:limit]]
    return Result(document, lambda: _print(line, ("kernel", "launch", "predicted µs"), rows))


def _print(line: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    say(line)
    if rows:
        table("", columns, rows, left=2)


def _kernels(problem: Problem, arch: str, level: Level, limit: int) -> Result:
    """The legal kernels of an architecture."""
    from tuner.arch import ARCHITECTURES
    from tuner.backends import kernels

    if arch not in ARCHITECTURES:
        raise not_one_of("arch", ARCHITECTURES, arch)
    legal = kernels(problem, arch, level=level)
    measured = ARCHITECTURES[arch].measured
    document = {
        "problem": problem,
        "arch": arch,
        "measured": measured,
        "level": level,
        "counts": {"kernels": len(legal)},
        "kernels": legal[:limit],
    }
    state = "measured" if measured else "can be compiled here, not measured"
    line = f"{problem} on {arch} ({ARCHITECTURES[arch].gpus}), {state}: {len(legal)} kernels"
    rows = [(kernel.name, kernel.source) for kernel in legal[:limit]]
    return Result(document, lambda: _print(line, ("kernel", "backend"), rows))


def level_of(name: str) -> Level:
    from tuner.backends import Level

    return member("level", Level, name)


def predicted(problem: Problem, model: DeviceModel, level: Level) -> list[tuple[float, Candidate]]:
    """Every legal candidate with its predicted microseconds, fastest first."""
    from tuner.backends import candidates
    from tuner.search.ranking import by_time, predictions

    legal = candidates(problem, model, level=level)
    times = predictions(problem, legal, model)
    return [(times[candidate.key], candidate) for candidate in by_time(legal, times)]


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """Which candidates are measured, and on which device."""

    level: LevelName = "core"
    limit: Limit = None
    candidates: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum number of candidates per problem, best predicted first."),
    ] = None
    compiled_only: CompiledOnly = False
    device: DeviceName = None
    database: Database = None
    packs: Packs = None


def record(
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", help="Sweep file to write: NAME.jsonl.zst.", callback=writable
        ),
    ],
    problems: TaskOptions,
    options: SweepOptions,
) -> Result:
    """Measure every candidate of the problems (at most --limit of them) and write a sweep file.

    After an interruption, the same command continues. The file appears when it is complete.
    """
    from tuner.devices.recording import SUFFIX

    began = time.monotonic()
    if not output.name.endswith(SUFFIX) or output.name == SUFFIX:
        raise MisuseError(f"the output file must be called NAME{SUFFIX}, got {output.name!r}")
    tasks = problems.tasks(options.limit)
    level = level_of(options.level)
    settings = load_settings(device=options.device, database=options.database, packs=options.packs)
    with (
        stop_flag() as stop,
        signed_store(settings) as store,
        tuning_session(settings, store) as session,
        reporter() as says,
    ):
        if session.device.replayed:
            raise CommandError(
                f"{session.device.name} is a recording itself; recording needs a GPU (--device "
                "cuda:0)"
            )
        recorder = _SweepRecorder(session, says, stop, options.compiled_only)
        recorder.run(tasks, level, options.candidates, output)
    size = output.stat().st_size
    document = {
        "file": str(output),
        "bytes": size,
        "problems": recorder.problems,
        "trials": recorder.trials,
        "failed_trials": recorder.failed_trials,
        "failures": recorder.failures,
        "seconds": round(time.monotonic() - began, 1),
    }
    trials = f"{recorder.trials} trials ({recorder.failed_trials} failed)"
    written = f"written to {output}, {size / 1e6:.1f} MB"
    line = f"{recorder.problems} problems, {trials} {written}"
    return Result(document, line, failed=bool(recorder.failures))


@dataclass
class _SweepRecorder:
    """Compiles all kernels, then measures problem after problem."""

    session: TuningSession
    says: Reporter
    stop: Callable[[], bool]
    compiled_only: bool
    problems: int = 0
    trials: int = 0
    failed_trials: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)

    def run(self, tasks: Sequence[Task], level: Level, most: int | None, output: Path) -> None:
        from tuner.devices.recording import SCHEMA, Header, SweepWriter
        from tuner.errors import DeviceError, NoGpu

        model = self.session.device.model
        candidates = {
            task.problem: [
                candidate
                for _, candidate in predicted(task.problem, model, level)
                if self._may_run(candidate)
            ][:most]
            for task in tasks
        }
        built = self._compile([c for listed in candidates.values() for c in listed])
        header = Header(
            schema=SCHEMA,
            device=model,
            environment=self.session.device.environment,
            recorded_at=datetime.now(UTC).isoformat(timespec="seconds"),
            gemmsmith=VERSION,
        )
        with SweepWriter(output, header) as writer:
            for i, (problem, listed) in enumerate(candidates.items()):
                if problem in writer.done:
                    continue
                if self.stop():
                    raise KeyboardInterrupt
                self.says.overall(i, len(candidates), str(problem))
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
