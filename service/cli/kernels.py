"""`gemmsmith kernels`: all kernels that a newcomer needs, in one file, and the way back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.options import DataOptions, Workers, load_settings
from service.cli.output import (
    CommandError,
    Result,
    counted,
    note,
    reporter,
    say,
    writable_bytes,
)
from service.cli.session import made_store

if TYPE_CHECKING:
    from gemmsmith.core.device import DeviceModel
    from gemmsmith.core.kernel import AnyKernel
    from service.settings import Settings
    from tuner.compile.kernels_file import Contents
    from tuner.trial import Winner

ARCH = "sm90"
"""The architecture of the shipped winners."""

Source = Annotated[str, typer.Argument(metavar="FILE|URL", help="A file that `build` wrote.")]


def build(
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="File to write, such as gemmsmith-sm90.gskernels.",
            callback=writable_bytes,
        ),
    ],
    limit: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of kernels, those of winners first.")
    ] = None,
    workers: Workers = None,
    *,
    data: DataOptions,
) -> Result:
    """Write the kernels of all shipped winners, and the base, to one signed file.

    Kernels that are in no pack yet are compiled first: minutes on 32 cores, hours on 2. After
    Ctrl-C or a kill the same command goes on. Packs are included whole.
    """
    from service import identity
    from service.cli.compiling import build as compiled
    from service.worker.builder import open_artifacts
    from tuner.compile import kernels_file

    settings = data.settings()
    settings.create_folders()
    with made_store(settings) as store:
        wanted = needed(settings)[:limit]
        outcome = compiled(settings, store, wanted, workers, None)
        failures = [built for built in outcome.built if built.failure is not None]
        if failures:
            first = failures[0]
            raise CommandError(
                f"{len(failures)} of {len(wanted)} kernels do not compile, first "
                f"{first.kernel.name}; no file is written"
            )
        manifests = dict(open_artifacts(settings, store).manifests(believed=True))
    packs = [built.pack for built in outcome.built if built.pack is not None]
    held = {pack.hash: (pack.path, manifests[pack.hash]) for pack in packs}
    signer = identity.signer(settings)
    with reporter() as says:
        contents, size = kernels_file.write(
            output,
            held,
            arch=ARCH,
            signer=signer,
            progress=lambda number: says.update("compress", number, len(held)),
        )
    notes = [
        f"signed with the key {signer.public.id}; who installs the file must trust it: "
        "`gemmsmith signing show` prints it"
    ]
    document = {"file": str(output), "size": size, **summary(contents)}
    return Result(document, f"{output}: {described(contents)}, {size / 1e6:.1f} MB", notes)


def needed(settings: Settings) -> list[AnyKernel]:
    """The kernels of all shipped winners of the architecture, then each device model's base."""
    from tuner.backends import compiles
    from tuner.exchange import read_winners
    from tuner.search.base import base_kernels

    winners: list[Winner] = []
    models: dict[str, DeviceModel] = {}
    for path in sorted(settings.winners.glob("*.json*")):
        of_file = [winner for winner in read_winners(path) if winner.device.arch == ARCH]
        winners += of_file
        models |= {winner.device.slug: winner.device for winner in of_file}
    if not models:
        raise CommandError(f"{settings.winners} has no winners of {ARCH}: set GEMMSMITH_WINNERS")
    kernels = [winner.runs.kernel for winner in winners if winner.runs is not None]
    for slug, model in models.items():
        note(f"choosing the base for {model.name}")  # takes seconds
        kernels += base_kernels(model, winners=[w for w in winners if w.device.slug == slug])
    return [k for k in {kernel.name: kernel for kernel in kernels}.values() if compiles(k)]


def install(source: Source, data: DataOptions) -> Result:
    """Install the kernels of a file, so that they need no compiler.

    The whole file is checked first: its signature, sizes and digests. Packs that are here already
    stay. After a kill the same command goes on. Running services and workers use the new packs.
    """
    from service.kernels import install as take
    from service.kernels import of_winners

    settings = data.settings()
    settings.create_folders()
    with made_store(settings) as store, reporter() as says:
        installed = take(settings, store, source, says.update)
        ready, of = of_winners(store, installed.contents)
    contents = installed.contents
    line = f"{settings.packs}: {described(contents)}, {installed.added} of them new"
    notes = [f"it has {ready} of the {of} kernels that winners run here"]
    if ready < of:
        notes.append(
            f"the others are compiled when they are needed: the file was built by gemmsmith "
            f"{contents.gemmsmith}, perhaps with other winners or sources"
        )
    document = {"added": installed.added, "winners": {"ready": ready, "of": of}}
    return Result({**document, **summary(contents)}, line, notes)


def list_(source: Source) -> Result:
    """List the kernels in a file, what they are built for, and who signed them."""
    from gemmsmith.errors import Untrusted
    from gemmsmith.signing import Purpose
    from service import identity, kernels

    with kernels.opened(source) as (_, contents):
        pass
    settings = load_settings()
    keys = identity.trusted(settings) | identity.shipped(settings, Purpose.PACK)
    try:
        contents.check(keys)
        trusted = True
    except Untrusted:
        trusted = False
    names = sorted({name for held in contents.packs.values() for name in held.held if name})
    key = contents.signature.key if contents.signature else None
    notes = [
        f"{described(contents)}, for {contents.arch} and {contents.machine}, built by gemmsmith "
        f"{contents.gemmsmith}, {', '.join(_compilers(contents))}",
        f"signed with the key {key}, which is {'trusted' if trusted else 'not trusted'} here",
    ]

    def show() -> None:
        for name in names:
            say(name)

    return Result(
        {**summary(contents), "key": key, "trusted": trusted, "names": names}, show, notes
    )


def _compilers(contents: Contents) -> list[str]:
    held = contents.packs.values()
    return sorted({f"nvcc {pack.nvcc} and CUTLASS {pack.cutlass}" for pack in held})


def described(contents: Contents) -> str:
    kernels, packs = counted(contents.kernels, "kernel"), counted(len(contents.packs), "pack")
    return f"{kernels} in {packs} of {contents.bytes / 1e6:.1f} MB"


def summary(contents: Contents) -> dict[str, Any]:
    return {
        "gemmsmith": contents.gemmsmith,
        "arch": contents.arch,
        "machine": contents.machine,
        "abi": list(contents.abi),
        "kernels": contents.kernels,
        "packs": len(contents.packs),
        "bytes": contents.bytes,
    }
