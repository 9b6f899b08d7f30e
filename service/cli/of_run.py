"""What `gemmsmith run` does with captured products: tunes them, or reports what lacks winners."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread

from gemmsmith.answers.snapshot import Row, Snapshot
from gemmsmith.core.neighbours import NEIGHBOURS, run_reach
from gemmsmith.core.problem import Problem
from gemmsmith.errors import GemmsmithError
from gemmsmith.files import private_folder
from gemmsmith.program.captured import Captured, tune_command
from gemmsmith.winners.bundle import Bundle
from service import documents
from service.cli import bake, runner
from service.cli.output import CommandError, counted, note
from service.cli.session import connect, made_store, model_of, signed_store
from service.cli.tasks import Task, TuningOptions
from service.settings import Settings
from service.worker.process import open_worker_device
from tuner.devices import local_gpu
from tuner.devices.base import Device
from tuner.errors import TunerError
from tuner.search import demand
from tuner.store import Store
from tuner.trial import Winner

MATTERS = 0.01
"""Share of the time of all captured products from which a product without a winner is reported."""

_MEASURED = 8
"""Winners near a problem from which the time of its default is guessed."""


@dataclass(frozen=True, slots=True)
class ProgramWinners:
    """Where the winners of programs are: at the service `url`, else in the database and a bundle.

    The bundle is the file that the next run reads.
    """

    settings: Settings
    bundle: Path
    url: str | None


def _model() -> str | None:
    model = local_gpu()
    return None if model is None else model.slug


def prepare(settings: Settings) -> Device:
    """Make the database, and start the processes that measure. Takes seconds, and no GPU memory.

    Raises:
        TunerError, SettingsError: nothing can be tuned here.
    """
    device = open_worker_device(settings)
    device.warm()
    try:
        with signed_store(settings):
            pass
    except BaseException:
        device.close()
        raise
    return device


def tune(
    winners: ProgramWinners,
    captured: Captured,
    effort: str,
    time_limit: float | None,
    device: Device | None = None,
) -> int:
    """Tune what was captured, and add the winners to the bundle; the status.

    A service tunes and keeps them itself. What takes most time, by its calls and what tuning is
    expected to save in each, is tuned first. Problems with a current winner are not tuned again,
    and problems that a fused winner replaces are not tuned at all. `device` is that of `prepare`.

    Raises:
        TunerError, GemmsmithError: nothing can be tuned.
    """
    tuning = TuningOptions(effort=effort, time_limit=time_limit)
    if winners.url:
        with connect(winners.url) as client:
            stored = client.snapshot(_model())
        tasks = _tasks(captured, stored)
        place = runner.service(replace(tuning, url=winners.url, device=_model()))
        return runner.run(place, tasks, whole=True, as_json=False)
    settings, bundle = winners.settings, winners.bundle
    with signed_store(settings) as store:
        slug = model_of(settings, None, store).slug
        known = near(store, slug, _problems(captured, bundle))
        stored = documents.snapshot(slug, known, pack_of=lambda _: None)
        tasks = _tasks(captured, stored)
        with _winners_compiled(settings, store, list(captured.problems)):
            place = runner.on_device(settings, store, tuning, device)
            status = runner.run(place, tasks, whole=True, as_json=False)
        private_folder(bundle.parent)
        problems = _problems(captured, bundle)  # another run may have written it meanwhile
        known = near(store, slug, problems)
        try:
            baked = bake.write(bundle, settings, store, slug, known, problems=problems)
        except CommandError as error:
            note(f"gemmsmith: no winners for the next run: {error}")
            return status or 1
    rows = baked.snapshot.rows
    new = len({*map(_measurement, rows)} - {*map(_measurement, stored.rows)})
    note(f"gemmsmith: winners for the next run: {len(rows)}, {new} of them new, in {bundle}")
    return status


def _problems(captured: Captured, bundle: Path) -> list[Problem]:
    snapshot = _read(bundle)
    rows = () if snapshot is None else snapshot.rows
    return list(dict.fromkeys([*captured.problems, *(row.problem for row in rows)]))


def near(store: Store, slug: str, problems: Iterable[Problem]) -> list[Winner]:
    """The winners that decide about `Snapshot.row_for` of the problems, each once."""
    # The database may have hundreds of thousands of others, which need not be read.
    winners: dict[Problem, Winner] = {}
    for problem in problems:
        winner = store.winner(problem, slug)
        if winner is not None:
            winners[problem] = winner
        elif reach := run_reach(problem):
            # Databases round logarithms in their own way: `row_for` decides what is within reach.
            neighbours = store.near_winners(problem, slug, NEIGHBOURS, reach + 0.01)
            winners |= {winner.problem: winner for winner in neighbours}
    return list(winners.values())


def _tasks(captured: Captured, stored: Snapshot) -> list[Task]:
    problems = needed(captured.problems, stored)
    if left_out := len(captured.problems) - len(problems):
        note(f"gemmsmith: {left_out} not tuned: the captured layers run fused winners instead")
    return [
        Task(problem=problem, origin="captured", calls=calls)
        for problem, calls in problems.most_common()
    ]


def _measurement(row: Row) -> tuple[object, ...]:
    # Without what changes when the kernel of the same winner is compiled.
    return row.problem, row.use, row.time_us, row.saving_us, row.environment


def needed(problems: Counter[Problem], stored: Snapshot) -> Counter[Problem]:
    """The captured problems that still run once the fused winners do."""
    # A layer is captured as what its steps run now, and as what one kernel could do instead. If
    # such a kernel has won, the layer's product no longer runs by itself, nor do those of gate and
    # up.
    replaced: Counter[tuple[object, ...]] = Counter()
    for problem, calls in problems.items():
        row = stored.row_for(problem) if _saves_steps(problem) else None
        if row is None or row.use.is_default:
            continue
        replaced[_product(problem, problem.n)] += calls
        if problem.operation.epilogue.is_gated and not problem.operation.is_grouped:
            replaced[_product(problem, problem.n // 2)] += 2 * calls
    return Counter(
        {
            problem: calls
            for problem, calls in problems.items()
            if _saves_steps(problem) or calls > replaced[_product(problem, problem.n)]
        }
    )


def _saves_steps(problem: Problem) -> bool:
    # torch adds the bias of a linear layer in the product as well.
    return not problem.operation.epilogue.is_torchs


def _product(problem: Problem, n: int) -> tuple[object, ...]:
    operation = problem.operation
    return (operation.types, operation.layout, problem.m, n, problem.k, problem.batch)


@contextmanager
def _winners_compiled(
    settings: Settings, store: Store, problems: Sequence[Problem]
) -> Iterator[None]:
    """Meanwhile, compile the kernels of winners that are known already."""
    # Else the bundle would have to wait for them. Failures are left to the bundle, which reports
    # them.
    from service.worker.builder import open_builder

    if _model() is None:  # a recording runs no kernel
        yield
        return
    slug = model_of(settings, None, store).slug
    winners = [store.winner(problem, slug) for problem in problems]
    kernels = [
        winner.runs.kernel for winner in winners if winner is not None and winner.runs is not None
    ]
    builder = open_builder(settings, store)

    def compile_() -> None:
        with suppress(TunerError, OSError):
            for _ in builder.build(kernels):
                pass

    thread = Thread(target=compile_, name="known winners", daemon=True)
    thread.start()
    try:
        yield
    except BaseException:
        builder.stop()
        raise
    finally:
        thread.join()


def summary(winners: ProgramWinners, captured: Captured) -> list[str]:
    """What share of a program's products has winners, and which lack one, by name.

    Each line has the command that tunes it; the problem with the longest default time is first.

    Raises:
        TunerError, GemmsmithError: the database or the service does not answer.
    """
    ran, stored, times = known(winners, captured)
    without = [problem for problem in times if ran is None or ran.row_for(problem) is None]
    lacking = [problem for problem in without if stored.row_for(problem) is None]
    whole = sum(times.values())
    with_winners = 1 - sum(times[problem] for problem in without) / whole
    lines = [
        f"gemmsmith: captured {counted(captured.problems.total(), 'product')} of "
        f"{counted(len(times), 'problem')}; winners cover {with_winners:.0%} of their time"
    ]
    for problem in sorted(lacking, key=lambda problem: (-times[problem], problem)):
        if times[problem] >= MATTERS * whole:
            share = f"{times[problem] / whole:.0%}"
            command = tune_command(problem, winners.url)
            lines.append(f"  {problem} has no winner, {share}: {command}")
    if len(without) > len(lacking):
        waiting = len(without) - len(lacking)
        lines.append(
            f"  {waiting} have winners in the database that are not in {winners.bundle} yet"
        )
    if without:
        options = "--tune" if winners.url is None else f"--tune --url {winners.url}"
        lines.append(f"  `gemmsmith run {options} -- …` tunes them for the next run")
    return lines


def known(
    winners: ProgramWinners, captured: Captured
) -> tuple[Snapshot | None, Snapshot, Mapping[Problem, float]]:
    """The winners it ran with, all that are stored, and each problem's µs by default."""
    problems = captured.problems
    if winners.url:
        with connect(winners.url) as client:
            stored = client.snapshot(_model())
        times = {p: calls * demand.default_us(p, None, []) for p, calls in problems.items()}
        return stored, stored, times
    settings = winners.settings
    settings.create_folders()
    with made_store(settings) as store:
        model = model_of(settings, None, store)
        winners_near = near(store, model.slug, problems)
        stored = documents.snapshot(model.slug, winners_near, pack_of=lambda _: None)
        times = {}
        for problem, calls in problems.items():
            measured = store.near_winners(problem, model.slug, _MEASURED)
            times[problem] = calls * demand.default_us(problem, model, measured)
    return _read(winners.bundle), stored, times


def _read(bundle: Path) -> Snapshot | None:
    """The winners of a bundle; None if it is missing or cannot be read."""
    try:
        return Bundle.open(bundle).snapshot
    except (OSError, GemmsmithError):
        return None
