"""What `gemmsmith run` does with captured products: tunes them, or reports what lacks winners."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

from gemmsmith.answers.snapshot import Row, Snapshot
from gemmsmith.core.operation import Epilogue
from gemmsmith.core.problem import Problem
from gemmsmith.core.tuning import Effort
from gemmsmith.errors import GemmsmithError
from gemmsmith.files import private_folder
from gemmsmith.program.captured import Captured, tune_command
from gemmsmith.winners.bundle import Bundle
from service.cli import bake, tune_local, tune_remote
from service.cli.options import connect
from service.cli.output import CommandError, counted, note
from service.cli.session import model_of, say_made
from service.cli.tasks import Task
from service.database import open_store
from service.http import documents
from service.settings import Settings
from tuner.devices import local_gpu
from tuner.errors import TunerError
from tuner.search import demand
from tuner.store import Store

MATTERS = 0.01
"""Share of the time of all captured products from which one without a winner is reported."""

NEIGHBOURS = 8
"""Winners near a problem, from which the time of its default is guessed."""


def _model() -> str | None:
    """Slug of the GPU that is here; None without one."""
    found = local_gpu()
    return None if found is None else found.slug


def tune(
    settings: Settings,
    found: Captured,
    bundle: Path | None,
    url: str | None,
    effort: Effort,
    time_limit: float | None,
) -> int:
    """Tune what was captured, and put the winners into `bundle` with those it has; the status.

    By the service at `url`, if there is one, which keeps them. What takes most time, by its calls
    and what tuning is expected to save of each, goes first; what is tuned already is not again,
    and what a fused winner takes the place of is not at all.

    Raises:
        TunerError, GemmsmithError: it cannot be tuned at all.
    """
    known = _stored(settings, url)
    wanted = needed(found.problems, known)
    if left_out := len(found.problems) - len(wanted):
        note(f"gemmsmith: {left_out} not tuned: the captured layers run fused winners instead")
    tasks = [
        Task(problem=one, origin="captured", calls=calls) for one, calls in wanted.most_common()
    ]
    if url or bundle is None:
        return tune_remote.run(
            str(url),
            tasks,
            effort=effort,
            priority=0,
            device=_model(),
            deadline_s=None,
            time_limit=time_limit,
            wait=True,
            as_json=False,
            whole=True,
        )
    with _winners_compiled(settings, list(found.problems)):
        status = tune_local.run(
            settings,
            tasks,
            effort=effort,
            skip_current=True,
            compiled_only=False,
            time_limit=time_limit,
            as_json=False,
            whole=True,
        )
    before = _read(bundle)
    problems = list(found.problems)
    if before is not None:
        problems += [row.problem for row in before.rows if row.problem not in found.problems]
    private_folder(bundle.parent)
    try:
        baked = bake.write(bundle, settings, model_of(settings, None).slug, problems=problems)
    except CommandError as error:
        note(f"gemmsmith: no winners for the next run: {error}")
        return status or 1
    rows = baked.snapshot.rows
    new = len({*map(_measurement, rows)} - {*map(_measurement, known.rows)})
    note(f"gemmsmith: winners for the next run: {len(rows)}, {new} of them new, in {bundle}")
    return status


def _measurement(row: Row) -> tuple[object, ...]:
    """What tells a new winner from the one before, wherever its kernel is compiled."""
    return row.problem, row.use, row.time_us, row.saving_us, row.environment


def needed(problems: Counter[Problem], stored: Snapshot) -> Counter[Problem]:
    """Those of captured problems that still run once the fused winners do.

    A layer is captured as what its steps run now, and as what one kernel could do instead. Where
    such a kernel has won, its product does not run by itself any more, nor do those of gate and up.
    """
    replaced: Counter[tuple[object, ...]] = Counter()
    for one, calls in problems.items():
        row = stored.row_for(one) if _saves_steps(one) else None
        if row is None or row.use.is_default:
            continue
        replaced[_product(one, one.n)] += calls
        if one.operation.epilogue.is_gated and not one.operation.is_grouped:
            replaced[_product(one, one.n // 2)] += 2 * calls
    return Counter(
        {
            one: calls
            for one, calls in problems.items()
            if _saves_steps(one) or calls > replaced[_product(one, one.n)]
        }
    )


def _saves_steps(problem: Problem) -> bool:
    """Whether it is more than a linear layer, whose bias torch adds in the product as well."""
    return problem.operation.epilogue not in (Epilogue.NONE, Epilogue.BIAS)


def _product(problem: Problem, n: int) -> tuple[object, ...]:
    """What is multiplied, whatever follows."""
    operation = problem.operation
    return (operation.types, operation.layout, problem.m, n, problem.k, problem.batch)


@contextmanager
def _winners_compiled(settings: Settings, problems: Sequence[Problem]) -> Iterator[None]:
    """Compile the kernels of winners that are known already, while the others are looked for.

    The bundle would have to wait for them. What does not compile, it finds out by itself.
    """
    from service.worker.builder import open_builder

    if _model() is None:  # a recording runs no kernel
        yield
        return
    settings.create_folders()
    with open_store(settings, on_made=say_made) as store:
        slug = model_of(settings, None).slug
        known = [store.winner(one, slug) for one in problems]
        kernels = [one.runs.kernel for one in known if one is not None and one.runs is not None]
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


def summary(settings: Settings, found: Captured, bundle: Path | None, url: str | None) -> list[str]:
    """What share of a program's products has winners, and which lack one, by name.

    Each with the command that tunes it, what takes most time by default first.

    Raises:
        TunerError, GemmsmithError: neither the database nor the service can be asked.
    """
    ran, stored, times = _known(settings, found, bundle, url)
    without = [one for one in times if ran is None or ran.row_for(one) is None]
    lacking = [one for one in without if stored.row_for(one) is None]
    whole = sum(times.values())
    with_winners = 1 - sum(times[one] for one in without) / whole
    lines = [
        f"gemmsmith: captured {counted(found.problems.total(), 'product')} of "
        f"{counted(len(times), 'problem')}; winners cover {with_winners:.0%} of their time"
    ]
    for one in sorted(lacking, key=lambda one: (-times[one], one)):
        if times[one] >= MATTERS * whole:
            share = f"{times[one] / whole:.0%}"
            lines.append(f"  {one} has no winner, {share}: {tune_command(one, url)}")
    if len(without) > len(lacking):
        waiting = len(without) - len(lacking)
        lines.append(f"  {waiting} have winners in the database that are not in {bundle} yet")
    if without:
        options = "--tune" if url is None else f"--tune --url {url}"
        lines.append(f"  `gemmsmith run {options} -- …` tunes them for the next run")
    return lines


def _known(
    settings: Settings, found: Captured, bundle: Path | None, url: str | None
) -> tuple[Snapshot | None, Snapshot, Mapping[Problem, float]]:
    """The winners it ran with, those there are, and the µs that each problem takes by default."""
    if url or bundle is None:
        stored = _stored(settings, url)
        calls = found.problems.items()
        times = {one: count * demand.default_us(one, None, []) for one, count in calls}
        return stored, stored, times
    settings.create_folders()
    with open_store(settings, on_made=say_made) as store:
        model = model_of(settings, None)
        stored = _snapshot(store, model.slug)
        times = {}
        for one, count in found.problems.items():
            near = store.near_winners(one, model.slug, NEIGHBOURS)
            times[one] = count * demand.default_us(one, model, near)
    return _read(bundle), stored, times


def _stored(settings: Settings, url: str | None) -> Snapshot:
    """The winners that the service at `url` has, or the database here, for the GPU that is here."""
    if url:
        with connect(url) as client:
            return client.snapshot(_model())
    settings.create_folders()
    with open_store(settings, on_made=say_made) as store:
        return _snapshot(store, model_of(settings, None).slug)


def _snapshot(store: Store, slug: str) -> Snapshot:
    """A device model's winners, whether their kernels are compiled or not."""
    return documents.snapshot(slug, store.winners(device=slug), pack_of=lambda _: None)


def _read(bundle: Path) -> Snapshot | None:
    """The winners of a bundle; None where there is none that can be read."""
    try:
        return Bundle.open(bundle).snapshot
    except (OSError, GemmsmithError):
        return None
