"""`gemmsmith bake`: winners and their packs in one file, for machines without a service."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.options import (
    DataOptions,
    DeviceSlug,
    NumericsName,
    OnlyDTypes,
    Workers,
    complete_suites,
    dtypes_of,
)
from service.cli.output import CommandError, MisuseError, Result, counted, reporter, writable_bytes
from service.cli.session import model_of

if TYPE_CHECKING:
    from gemmsmith.answers.snapshot import Snapshot
    from gemmsmith.core.kernel import AnyKernel
    from gemmsmith.core.problem import Problem
    from service.settings import Settings
    from tuner.store import Store
    from tuner.trial import Winner


@dataclass(frozen=True, kw_only=True)
class BakeOptions:
    """Which winners are baked."""

    suite: Annotated[
        Path | None,
        typer.Option(
            help="Only winners for the problems of this suite.", autocompletion=complete_suites
        ),
    ] = None
    winners: Annotated[bool, typer.Option("--winners", help="All current winners.")] = False
    dtype: OnlyDTypes = None
    numerics: NumericsName = None
    device: DeviceSlug = None


def bake(
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="File to write, such as winners.gspack; - is stdout.",
            callback=writable_bytes,
        ),
    ],
    chosen: BakeOptions,
    workers: Workers = None,
    *,
    data: DataOptions,
) -> Result:
    """Write winners and their compiled kernels to one file.

    `gemmsmith.use(FILE)` runs them without a service. Kernels that are in no pack yet are compiled
    first. Packs are included whole, with kernels that did not win. The file is signed with this
    installation's key.
    """
    from tuner.exchange import of_types
    from tuner.store import Store

    suite = chosen.suite
    if chosen.winners == (suite is not None):
        raise MisuseError("give --suite FILE or --winners, one of them")
    dtypes = dtypes_of(chosen.dtype) if chosen.dtype else []
    entries = [] if suite is None else _entries(suite, dtypes, chosen.numerics)
    problems = None if suite is None else [problem for entry in entries for problem in entry]
    settings = data.settings()
    settings.create_folders()
    slug = model_of(settings, chosen.device).slug
    with Store.open(settings.database) as store:
        winners: Sequence[Winner] = store.winners(device=slug)
        if suite is None:
            winners = of_types(winners, dtypes, chosen.numerics)
        baked = write(output, settings, store, slug, winners, problems=problems, workers=workers)
    missing = sum(baked.unanswered.issuperset(entry) for entry in entries)
    counts = {
        "winners": len(baked.snapshot.rows),
        "packs": len(baked.snapshot.packs()),
        "kernels": baked.kernels,
        "without_winner": missing,
    }
    revision = baked.snapshot.revision
    has = "has" if missing == 1 else "have"
    without = f"{missing} of the suite's {len(entries)} problems {has} no winner: torch runs them"
    line = (
        f"{output}: {counted(counts['winners'], 'winner')} of {slug}, "
        f"{counted(counts['kernels'], 'kernel')} in {counted(counts['packs'], 'pack')}, "
        f"{baked.size / 1e6:.1f} MB, snapshot {revision[:16]}"
    )
    document = {"file": str(output), "bytes": baked.size, "revision": revision, "counts": counts}
    return Result(document, line, [without] if missing else [])


@dataclass(frozen=True, kw_only=True, slots=True)
class Baked:
    """A bundle that was written.

    Attributes:
        snapshot: its winners.
        kernels: how many they run.
        unanswered: the problems that were to be answered and have no winner.
        size: in bytes.
    """

    snapshot: Snapshot
    kernels: int
    unanswered: frozenset[Problem]
    size: int


def write(
    output: Path,
    settings: Settings,
    store: Store,
    slug: str,
    winners: Sequence[Winner],
    *,
    problems: Sequence[Problem] | None = None,
    workers: int | None = None,
) -> Baked:
    """Write winners of the device model `slug` to a bundle; compile the kernels that need it.

    With `problems`, only the winners that answer for them, as they do for clients.

    Raises:
        CommandError: there are no winners, or a kernel cannot be compiled.
        OSError: the file cannot be written.
    """
    from gemmsmith.winners.bundle import write_bundle
    from service import documents, identity

    signer = identity.signer(settings)
    unanswered: frozenset[Problem] = frozenset()
    if problems is not None:
        snapshot = documents.snapshot(slug, winners, pack_of=lambda _: None)
        rows = {problem: snapshot.row_for(problem) for problem in problems}
        unanswered = frozenset(problem for problem, row in rows.items() if row is None)
        # A problem without a winner of its own may be answered by that of a near problem.
        answering = {row.problem for row in rows.values() if row is not None}
        winners = [winner for winner in winners if winner.problem in answering]
    if not winners:
        raise CommandError(f"no winner to bake on {slug}: run `gemmsmith tune --suite` first")
    files = _packs(settings, store, winners, workers)
    hashes = {kernel: path.stem for kernel, path in files.items()}

    def pack_of(winner: Winner) -> str | None:
        return hashes.get(winner.candidate.kernel.name) if winner.candidate else None

    baked = documents.snapshot(slug, winners, pack_of=pack_of, signer=signer)
    size = write_bundle(output, baked, {path.stem: path for path in files.values()})
    return Baked(snapshot=baked, kernels=len(files), unanswered=unanswered, size=size)


def _entries(suite: Path, dtypes: Sequence[str], numerics: str | None) -> list[list[Problem]]:
    """The problems of each entry of a suite, which is answered if any of them has a winner.

    An entry counts once in each of the `dtypes`. Without `dtypes`, it counts once in all: those
    that there are, and those that the suite names.
    """
    from gemmsmith.core.operation import DType, in_order
    from tuner.suites import load

    loaded = load(suite)
    entries: dict[object, list[Problem]] = {}
    for dtype in dtypes or in_order([*DType, *loaded.dtypes]):
        for entry, problem in loaded.problems(dtype, numerics):
            entries.setdefault((entry, dtype if dtypes else None), []).append(problem)
    return list(entries.values())


def _packs(
    settings: Settings, store: Store, winners: Sequence[Winner], workers: int | None
) -> dict[str, Path]:
    """The files of the packs that hold the winners' kernels, by kernel.

    Kernels that are in no pack are compiled.

    Raises:
        CommandError: there is no compiler for them, or they do not compile.
    """
    from service.worker.builder import open_artifacts

    artifacts = open_artifacts(settings, store)
    believed = dict(artifacts.manifests(believed=True))
    kernels: dict[str, AnyKernel] = {}
    files: dict[str, Path] = {}
    for winner in winners:
        if winner.runs is None:
            continue
        kernel = winner.runs.kernel
        kernels[kernel.name] = kernel
        # Only signed packs leave this machine; another pack may hold the same kernel.
        pack = artifacts.get(winner.pack) if winner.pack in believed else None
        if pack is None or kernel.name not in pack.kernels:
            pack = artifacts.find(kernel)
        if pack is not None:
            files[kernel.name] = pack.path
    missing = [kernel for name, kernel in kernels.items() if name not in files]
    if missing:
        files |= _compiled(settings, store, missing, len(kernels), workers)
    return files


def _compiled(
    settings: Settings, store: Store, missing: Sequence[AnyKernel], of: int, workers: int | None
) -> dict[str, Path]:
    from service.worker.builder import open_builder
    from tuner.errors import CompilerNotFound

    try:
        builder = open_builder(settings, store, workers)
    except CompilerNotFound as error:
        raise CommandError(
            f"{len(missing)} of {of} winners' kernels are in no pack with a trusted signature, "
            f"and cannot be compiled: {error} Or fetch them from a machine that has them: "
            "`gemmsmith compile --winners --from URL`."
        ) from error
    files: dict[str, Path] = {}
    failures = []
    with reporter() as says:
        says.update("compile", 0, len(missing))
        for done, built in enumerate(builder.build(missing), 1):
            if built.pack is not None:
                files[built.kernel.name] = built.pack.path
            elif built.failure is not None:
                failures.append(f"{built.kernel.name}: {built.failure.message}")
            says.update("compile", done, len(missing))
    if failures:
        raise CommandError(
            f"{len(failures)} of {of} winners' kernels do not compile, first {failures[0]}"
        )
    return files
