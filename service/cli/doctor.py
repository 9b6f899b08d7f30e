"""`gemmsmith doctor`: what this machine has, what it lacks, and what to do about it."""

from __future__ import annotations

from typing import Annotated

import typer

from service.cli.options import AsJson, Database, Packs, Sweeps, load_settings
from service.cli.output import emit, say


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
    database: Database = None,
    packs: Packs = None,
    sweeps: Sweeps = None,
    as_json: AsJson = False,
) -> None:
    """Check GPU, driver, compiler, torch, CUTLASS, disk, database, recordings and service.

    Changes nothing. The status is 0 if this machine can serve answers, otherwise 1. With --deep, it
    is also 1 if stored data was altered.
    """
    from service.cli import checks
    from service.cli.deep import wrong

    settings = load_settings(database=database, packs=packs, sweeps=sweeps)
    found = checks.run(settings, url)
    can = checks.abilities(found)
    spoilt = wrong(settings) if deep and can["serve"] else []
    if as_json:
        emit({"checks": found, "can": can} | ({"wrong": spoilt} if deep else {}))
    else:
        width = max(len(check.name) for check in found)
        for check in found:
            say(f"{check.status:<8} {check.name:<{width}}  {check.detail}")
            if check.fix:
                say(f"{'':<8} {'':<{width}}  → {check.fix}")
        say("")
        for ability, possible in can.items():
            say(f"{'yes' if possible else 'no':<8} {checks.ABILITIES[ability].label}")
        for line in spoilt:
            say(f"wrong    {line}")
    if not can["serve"] or spoilt:
        raise typer.Exit(1)
