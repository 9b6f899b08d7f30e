"""`gemmsmith compile`: build kernel packs ahead of time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.options import (
    AsJson,
    Batch,
    Database,
    DTypeNames,
    LayoutName,
    LevelName,
    Limit,
    OptionalK,
    OptionalM,
    OptionalN,
    Packs,
    Sweeps,
    load_settings,
)
from service.cli.output import MisuseError, emit, say
from service.cli.progress import reporter
from service.cli.session import StopFlag, model_of
from service.cli.space import level_of, predicted
from service.cli.tuning import tasks

if TYPE_CHECKING:
    from gemmsmith.device import DeviceModel
    from gemmsmith.kernel import Kernel
    from service.cli.tasks import Task
    from service.settings import Settings
    from tuner.compile import Built
    from tuner.space import Level
    from tuner.store import Store


def compile_(
    m: OptionalM = None,
    n: OptionalN = None,
    k: OptionalK = None,
    suite: Annotated[
        Path | None, typer.Option("--suite", help="For every problem of this file.")
    ] = None,
    winners: Annotated[
        bool, typer.Option("--winners", help="The kernels of the current winners.")
    ] = False,
    dtype: DTypeNames = None,
    layout: LayoutName = "tn",
    batch: Batch = 1,
    level: LevelName = "core",
    limit: Limit = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Compilers at once; default by cores and memory.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Slug of a device model; default: the local GPU, else the first known."),
    ] = None,
    database: Database = None,
    packs: Packs = None,
    sweeps: Sweeps = None,
    as_json: AsJson = False,
) -> None:
    """Compile kernels for M N K, a suite or the winners; `--limit` takes the best predicted ones.

    What is compiled already costs nothing. A kernel that does not compile is reported and the
    rest goes on; the status is then 1.
    """
    from tuner.store import Store

    settings = load_settings(database=database, packs=packs, sweeps=sweeps)
    settings.create_folders()
    wanted_level = level_of(level)
    with Store.open(settings.database, create=True) as store:
        if winners:
            if suite is not None or m is not None:
                raise MisuseError("give M N K, --suite FILE or --winners, one of them")
            kernels = _of_winners(store, device, limit)
        else:
            found = tasks(m, n, k, suite, dtype or ["bf16"], layout, batch, None)
            kernels = _of_problems(store, found, model_of(settings, device), wanted_level, limit)
        built = _build(settings, store, kernels, workers)
    code = _report(built, len(kernels), as_json)
    if code:
        raise typer.Exit(code)


def _of_problems(
    store: Store, found: Sequence[Task], model: DeviceModel, level: Level, limit: int | None
) -> list[Kernel]:
    """Kernels of all problems, each once; of each problem the `limit` most promising ones.

    As in a tuning run, winners of near problems come first, then what resembles cuBLAS's choice,
    where an earlier run recorded it, then the best predicted ones.
    """
    from tuner.search.hints import resembling
    from tuner.search.transfer import near_winners

    kernels: dict[str, Kernel] = {}
    for task in found:
        order = near_winners(store, task.problem, model.slug)
        by_time = [candidate for _, candidate in predicted(task.problem, model, level)]
        known = store.winner(task.problem, model.slug)
        if known is not None:
            order += resembling(by_time, known.baseline_kernels)
        order += by_time
        mine: dict[str, Kernel] = {}
        for candidate in order:
            mine.setdefault(candidate.kernel.name, candidate.kernel)
        kernels |= dict(list(mine.items())[:limit])
    return list(kernels.values())


def _of_winners(store: Store, device: str | None, limit: int | None) -> list[Kernel]:
    kernels = {
        winner.candidate.kernel.name: winner.candidate.kernel
        for winner in store.winners(device=device)
        if winner.candidate is not None
    }
    return list(kernels.values())[:limit]


def _build(
    settings: Settings, store: Store, kernels: Sequence[Kernel], workers: int | None
) -> list[Built]:
    """Build all; the builder records every finished pack, so that lookups can name it."""
    from service.builder import open_builder

    builder = open_builder(settings, store, workers)
    done: list[Built] = []
    with StopFlag() as stop, reporter() as says:
        says.update("compile", 0, len(kernels))
        for built in builder.build(kernels):
            done.append(built)
            if built.failure is not None:
                says.line(f"  {built.kernel.name}: {built.failure.message}")
            says.update("compile", len(done), len(kernels))
            if stop():
                break
    return done


def _report(built: Sequence[Built], wanted: int, as_json: bool) -> int:
    failed = [item for item in built if item.failure is not None]
    counts: dict[str, Any] = {
        "wanted": wanted,
        "compiled": sum(not item.cached and item.failure is None for item in built),
        "cached": sum(item.cached and item.failure is None for item in built),
        "failed": len(failed),
        "packs": len({item.pack.hash for item in built if item.pack is not None}),
    }
    if as_json:
        failures = [
            {"kernel": item.kernel.name, "kind": item.failure.kind, "message": item.failure.message}
            for item in failed
            if item.failure is not None
        ]
        kernels = {item.kernel.name: item.pack.hash for item in built if item.pack is not None}
        emit({"counts": counts, "kernels": kernels, "failures": failures})
    else:
        say(
            f"{counts['compiled']} compiled, {counts['cached']} compiled before, "
            f"{counts['failed']} failed, of {wanted} kernels, in {counts['packs']} packs"
        )
    return 1 if failed or len(built) < wanted else 0
