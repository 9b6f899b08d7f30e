"""`gemmsmith serve` and `gemmsmith worker`: the long-running processes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from service.cli.options import Database, DeviceName, Packs, Sweeps, load_settings
from service.cli.output import MisuseError, note


def serve(
    host: Annotated[
        str | None, typer.Option(help="Address to listen on (GEMMSMITH_HOST; else 127.0.0.1).")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port; 0 takes a free one (GEMMSMITH_PORT; else 8000).")
    ] = None,
    worker: Annotated[
        bool, typer.Option("--worker/--no-worker", help="Run a tuning worker beside it.")
    ] = False,
    require_keys: Annotated[
        bool | None,
        typer.Option(
            "--require-keys",
            help="Require API keys on the loopback interface, too (GEMMSMITH_REQUIRE_KEYS). "
            "Other interfaces always need them.",
            show_default=False,
        ),
    ] = None,
    device: DeviceName = None,
    database: Database = None,
    packs: Packs = None,
    sweeps: Sweeps = None,
    winners: Annotated[
        Path | None,
        typer.Option(
            help="Folder of shipped winners, loaded at start (GEMMSMITH_WINNERS).",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Serve answers over HTTP until SIGTERM or Ctrl-C.

    Creates and migrates the database, loads the shipped winners, and prints lines to try.
    """
    from service.cli.serve import serve as run
    from service.settings import SettingsError

    settings = load_settings(
        host=host,
        port=port,
        require_keys=require_keys,
        device=device,
        database=database,
        packs=packs,
        sweeps=sweeps,
        winners=winners,
    )
    try:
        status = run(settings, worker=worker)
    except SettingsError as error:
        raise MisuseError(str(error)) from error
    raise typer.Exit(status)


def worker(
    device: DeviceName = None,
    database: Database = None,
    packs: Packs = None,
    sweeps: Sweeps = None,
    until_idle: Annotated[
        bool, typer.Option("--until-idle", help="Stop when the queue is empty.")
    ] = False,
) -> None:
    """Run tuning jobs from the queue, until SIGTERM or Ctrl-C.

    It may be killed at any time. Another worker then continues from the recorded trials.
    """
    from service import logging
    from service.worker.process import run

    settings = load_settings(device=device, database=database, packs=packs, sweeps=sweeps)
    logging.configure(json=settings.log_json)
    done = run(settings, until_idle=until_idle)
    note(f"{done} jobs worked on")
