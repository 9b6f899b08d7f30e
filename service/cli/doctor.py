"""`gemmsmith doctor`: what this machine has, what it lacks, and what to do about it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.options import AsJson, DataOptions
from service.cli.output import emit, say

if TYPE_CHECKING:
    from gemmsmith.signing import Trusted
    from service.settings import Settings
    from tuner.store import Store

_PACK = re.compile(r"[0-9a-f]{64}")


def doctor(
    url: Annotated[
        str | None,
        typer.Option(
            envvar="GEMMSMITH_URL",
            help="Service to check; default: where `gemmsmith serve` would listen.",
            show_default=False,
        ),
    ] = None,
    deep: Annotated[
        bool,
        typer.Option("--deep", help="Also verify every stored winner, kernel and pack."),
    ] = False,
    *,
    data: DataOptions,
    as_json: AsJson = False,
) -> None:
    """Check GPU, driver, compiler, torch, CUTLASS, disk, database, recordings and service.

    Changes nothing. The status is 0 if this machine can serve answers, otherwise 1. With --deep, it
    is also 1 if stored data was altered.
    """
    from service.cli import checks

    settings = data.settings()
    results = checks.run(settings, url)
    can = checks.abilities(results)
    altered = _altered(settings) if deep and can["serve"] else []
    if as_json:
        emit({"checks": results, "can": can} | ({"wrong": altered} if deep else {}))
    else:
        width = max(len(check.name) for check in results)
        for check in results:
            say(f"{check.status:<8} {check.name:<{width}}  {check.detail}")
            if check.fix:
                say(f"{'':<8} {'':<{width}}  → {check.fix}")
        say("")
        for ability, possible in can.items():
            say(f"{'yes' if possible else 'no':<8} {checks.ABILITIES[ability].label}")
        for line in altered:
            say(f"wrong    {line}")
    if not can["serve"] or altered:
        raise typer.Exit(1)


def _altered(settings: Settings) -> list[str]:
    """A line for every stored winner, kernel and pack that is not what was stored.

    Raises:
        SettingsError: the trusted keys cannot be read.
        StoreError: the database cannot be used.
    """
    from service import identity
    from tuner.store import Store, current

    trusted = identity.trusted(settings)
    if current(settings.database) is None:  # nothing is stored yet
        return [*_packs(settings.packs, trusted)]
    with Store.open(settings.database) as store:
        altered = [*_winners(store, trusted), *_kernels(store)]
    return [*altered, *_packs(settings.packs, trusted)]


def _winners(store: Store, trusted: Trusted) -> Iterator[str]:
    from tuner.store.statement import altered

    for page in store.every_revision():
        for winner in page:
            if reason := altered(winner, trusted):
                where = f"{winner.problem} on {winner.device.slug}, revision {winner.revision}"
                yield f"winner {where}: {reason}"


def _kernels(store: Store) -> Iterator[str]:
    from tuner.claims import kernel_doubt

    for name, kernel in store.dictionary.described():
        if kernel is None or kernel.name != name:
            yield f"kernel {name}: its description is another's, or cannot be read"
        elif reason := kernel_doubt(kernel):
            yield f"kernel {reason}"


def _packs(folder: Path, trusted: Trusted) -> Iterator[str]:
    import msgspec

    from gemmsmith.errors import Untrusted
    from tuner.compile.manifest import Manifest

    for path in sorted(folder.glob("*.so")):
        if not _PACK.fullmatch(path.stem):
            continue
        with path.open("rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
        if actual != path.stem:
            yield f"pack {path}: its bytes have the SHA-256 {actual}"
            continue
        try:
            manifest = msgspec.json.decode(path.with_suffix(".json").read_bytes(), type=Manifest)
            manifest.check(path.stem, trusted)
        except (OSError, msgspec.MsgspecError) as error:
            yield f"pack {path}: its manifest cannot be read: {error}"
        except Untrusted as error:
            yield f"pack {path}: {error}"
