"""`gemmsmith compile`: build kernel packs ahead of time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.candidates import level_of, predicted
from service.cli.options import DataOptions, DeviceSlug, LevelName, Workers, dtypes_of
from service.cli.output import MisuseError, Reporter, Result, note, reporter
from service.cli.session import connect, device_of, made_store, model_of
from service.cli.tasks import Task, TaskOptions

if TYPE_CHECKING:
    from gemmsmith.core.device import DeviceModel
    from gemmsmith.core.kernel import AnyKernel
    from gemmsmith.http.client import Client
    from service.settings import Settings
    from service.worker.builder import WithoutCompiler
    from tuner.backends import Level
    from tuner.compile import ArtifactStore, Builder, Built, Pack
    from tuner.store import Store


@dataclass(frozen=True, kw_only=True)
class CompileTaskOptions(TaskOptions):
    """The problems of `compile`, or the winners, or the base."""

    winners: Annotated[
        bool, typer.Option("--winners", help="The kernels that current winners run.")
    ] = False
    base: Annotated[
        bool,
        typer.Option(
            "--base",
            help="The kernels that win most often. New problems are then tuned "
            "without waiting for a compiler.",
        ),
    ] = False
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            "--dtype",
            "--dtypes",
            help="Element types: bf16, fp16, fp8_e4m3, fp8_e5m2; repeatable, or with commas. "
            "Default bf16; with --base bf16, fp16 and fp8_e4m3; with --winners all.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class KernelOptions:
    """Which kernels of the problems are compiled, and for which device model."""

    level: LevelName = "core"
    limit: Annotated[
        int | None,
        typer.Option(
            min=1, help="Maximum number of kernels per problem; with --winners or --base, in total."
        ),
    ] = None
    workers: Workers = None
    device: DeviceSlug = None
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="URL",
            help="Fetch packs from this service first, and compile the rest. Only packs with a "
            "trusted signature are accepted (see `gemmsmith signing`).",
        ),
    ] = None


def compile_(problems: CompileTaskOptions, options: KernelOptions, data: DataOptions) -> Result:
    """Compile kernels for M N K, for a suite, for the winners, or for new problems (--base).

    Kernels that are compiled already are skipped. If a kernel does not compile, it is reported, the
    others are still compiled, and the status is 1. Ctrl-C stops at once; compiled kernels are kept.

    With `--from`, this machine needs no compiler. It then accepts packs of any compiler, and
    kernels that the service lacks count as failed.
    """
    began = time.monotonic()
    ways = (problems.m is not None, problems.suite is not None, problems.winners, problems.base)
    if sum(ways) > 1:
        raise MisuseError("give M N K, --suite FILE, --winners or --base, one of them")
    if problems.base and problems.numerics is not None:
        raise MisuseError("--numerics does not go with --base: its kernels are for all orders")
    settings = data.settings()
    settings.create_folders()
    level_of(options.level)  # refused before anything is opened
    with ExitStack() as stack:
        client = None
        if options.source is not None:
            client = stack.enter_context(connect(options.source, cache_dir=None))
        store = stack.enter_context(made_store(settings))
        kernels = _chosen(settings, store, problems, options)
        outcome = build(settings, store, kernels, options.workers, client)
    return _result(outcome, len(kernels), time.monotonic() - began)


def _chosen(
    settings: Settings, store: Store, problems: CompileTaskOptions, options: KernelOptions
) -> list[AnyKernel]:
    """The kernels to compile, each once."""
    dtypes, device, limit = problems.dtype, options.device, options.limit
    if problems.winners:
        from tuner.exchange import of_types

        if device is not None:
            device = device_of(store, device)
        named = dtypes_of(dtypes) if dtypes else []
        winners = of_types(store.winners(device=device), named, problems.numerics)
        kernels = {w.runs.kernel.name: w.runs.kernel for w in winners if w.runs is not None}
        return list(kernels.values())[:limit]
    tasks = [] if problems.base else problems.tasks(None)  # refused before a device is looked for
    model = model_of(settings, device, store)
    if problems.base:
        from tuner.search.base import DTYPES, base_kernels

        kinds = dtypes_of(dtypes) if dtypes else DTYPES
        note(f"choosing the base for {model.name}, {', '.join(kinds)}")  # takes seconds
        return base_kernels(model, kinds, store.winners(device=model.slug), limit)
    return _of_problems(store, tasks, model, level_of(options.level), limit)


def _of_problems(
    store: Store, tasks: Sequence[Task], model: DeviceModel, level: Level, limit: int | None
) -> list[AnyKernel]:
    """Kernels of all problems, each once; of each problem the `limit` most promising ones.

    As in a tuning run, winners of near problems come first, then what resembles cuBLAS's choice,
    where an earlier run recorded it, then the best predicted ones. Problems of a suite for which
    no kernel can be compiled are noted.
    """
    from tuner.errors import NoLegalCandidate
    from tuner.search.hints import near_winners, resembling

    kernels: dict[str, AnyKernel] = {}
    without = []
    for task in tasks:
        try:
            by_time = [candidate for _, candidate in predicted(task.problem, model, level)]
        except NoLegalCandidate:
            if len(tasks) == 1:
                raise
            without.append(task.problem)
            continue
        order = near_winners(store, task.problem, model.slug)
        known = store.winner(task.problem, model.slug)
        if known is not None:
            order += resembling(by_time, known.baseline_kernels)
        order += by_time
        promising: dict[str, AnyKernel] = {}
        for candidate in order:
            promising.setdefault(candidate.kernel.name, candidate.kernel)
        kernels |= dict(list(promising.items())[:limit])
    if without:
        note(f"{len(without)} of {len(tasks)} problems have no kernels to compile: {without[0]} …")
    return list(kernels.values())


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What became of the kernels.

    Attributes:
        asked: a service was asked for packs.
        fetched: names of kernels whose packs came from the service.
        refused: packs of the service that were refused, with the reason.
    """

    asked: bool
    built: list[Built] = field(default_factory=list)
    fetched: set[str] = field(default_factory=set)
    refused: list[str] = field(default_factory=list)


def build(
    settings: Settings,
    store: Store,
    kernels: Sequence[AnyKernel],
    workers: int | None,
    client: Client | None,
) -> Outcome:
    """Fetch from the client's service what it has, and compile the rest."""
    # The builder records every pack, so that lookups can name it.
    outcome = Outcome(asked=client is not None)
    builder, toolchain = _open_builder(settings, store, workers, needed=client is None)
    try:
        with reporter() as says:
            if client is not None:
                _fetch(outcome, settings, client, builder.store, kernels, toolchain, says)
            says.update("compile", 0, len(kernels))
            # Closing it kills the compilers at once: what they compile is not worth waiting for.
            with closing(builder.build(kernels)) as results:  # type: ignore[type-var]
                for built in results:
                    outcome.built.append(built)
                    if built.failure is not None:
                        says.line(f"  {built.kernel.name}: {built.failure.message}")
                    says.update("compile", len(outcome.built), len(kernels))
    except KeyboardInterrupt:
        kept = sum(item.failure is None for item in outcome.built)
        raise KeyboardInterrupt(
            f"interrupted: {kept} of {len(kernels)} kernels are compiled and kept; the same "
            "command goes on"
        ) from None
    return outcome


def _open_builder(
    settings: Settings, store: Store, workers: int | None, *, needed: bool
) -> tuple[Builder | WithoutCompiler, str | None]:
    """The builder, and the digest of the only toolchain whose packs are taken (None for any).

    Raises:
        CompilerNotFound: no compiler is installed, and it is needed.
    """
    from service.worker.builder import WithoutCompiler, open_artifacts, open_builder
    from tuner.errors import CompilerNotFound

    try:
        builder = open_builder(settings, store, workers)
    except CompilerNotFound as error:
        if needed:
            raise
        return WithoutCompiler(open_artifacts(settings, store), store, str(error)), None
    return builder, builder.toolchain.digest


def _fetch(
    outcome: Outcome,
    settings: Settings,
    client: Client,
    artifacts: ArtifactStore,
    kernels: Sequence[AnyKernel],
    toolchain: str | None,
    says: Reporter,
) -> None:
    from service import identity
    from tuner.compile.fetch import fetch

    trusted = identity.trusted_packs(settings)
    says.update("fetch", 0, len(kernels))
    items = fetch(client, artifacts, kernels, toolchain=toolchain, trusted=trusted)
    for done, item in enumerate(items, 1):
        if item.pack is not None:
            outcome.fetched.add(item.kernel.name)
        outcome.refused += item.refused
        for reason in item.refused:
            says.line(f"  refused: {reason}")
        says.update("fetch", done, len(kernels))
    says.line(f"  {len(outcome.fetched)} kernels fetched from {client.url}")


def _result(outcome: Outcome, total: int, seconds: float) -> Result:
    built = outcome.built
    packs = {item.pack.hash: item.pack for item in built if item.pack is not None}
    size = _bytes(packs.values())
    usable = [item for item in built if item.failure is None]
    cached = [item for item in usable if item.cached]
    fetched = sum(item.kernel.name in outcome.fetched for item in cached)
    failures = [
        {"kernel": item.kernel.name, "kind": item.failure.kind, "message": item.failure.message}
        for item in built
        if item.failure is not None
    ]
    counts: dict[str, Any] = {
        "wanted": total,
        "fetched": fetched,
        "compiled": len(usable) - len(cached),
        "cached": len(cached) - fetched,
        "failed": len(failures),
        "packs": len(packs),
    }
    document = {
        "counts": counts,
        "seconds": round(seconds, 1),
        "bytes": size,
        "kernels": {item.kernel.name: item.pack.hash for item in built if item.pack is not None},
        "failures": failures,
        "refused": outcome.refused,
    }
    line = (
        f"{f'{fetched} fetched, ' if outcome.asked else ''}"
        f"{counts['compiled']} compiled, {counts['cached']} compiled before, "
        f"{counts['failed']} failed, of {total} kernels, in {counts['packs']} packs "
        f"({size / 1e6:.1f} MB), {seconds:.0f} s"
    )
    return Result(document, line, failed=bool(failures) or len(built) < total)


def _bytes(packs: Iterable[Pack]) -> int:
    """The size of all packs; a pack that was evicted meanwhile counts as 0."""
    total = 0
    for pack in packs:
        with suppress(FileNotFoundError):
            total += pack.path.stat().st_size
    return total
