"""`gemmsmith serve`, `worker` and `fleet`: the long-running processes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from service.cli.options import DataOptions, DeviceName
from service.cli.output import CommandError, note

UntilIdle = Annotated[bool, typer.Option("--until-idle", help="Stop when the queue is empty.")]


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
        ),
    ] = None,
    device: DeviceName = None,
    *,
    data: DataOptions,
    winners: Annotated[
        Path | None,
        typer.Option(help="Folder of shipped winners, loaded at start (GEMMSMITH_WINNERS)."),
    ] = None,
) -> None:
    """Serve answers over HTTP until SIGTERM or Ctrl-C.

    Creates and migrates the database, loads the shipped winners, and prints lines to try.
    """
    from service.cli.serve import serve as run

    settings = data.settings(
        host=host, port=port, require_keys=require_keys, device=device, winners=winners
    )
    raise typer.Exit(run(settings, worker=worker))


def worker(device: DeviceName = None, *, data: DataOptions, until_idle: UntilIdle = False) -> None:
    """Run tuning jobs from the queue, until SIGTERM or Ctrl-C.

    It may be killed at any time. Another worker then continues from the recorded trials.
    """
    from service import logging
    from service.worker.process import run

    settings = data.settings(device=device)
    logging.configure(json=settings.log_json)
    done = run(settings, until_idle=until_idle)
    note(f"{done} jobs worked on")


def fleet(
    address: Annotated[
        str | None,
        typer.Option(
            help="The Ray cluster, such as HOST:6379. `local` starts one on this machine (with a "
            "recorded GPU, if it has none), which only this user can reach. Without it: the "
            "cluster that this machine belongs to."
        ),
    ] = None,
    cores: Annotated[
        int,
        typer.Option(
            min=0, help="Cores per compile task; 0: no compile tasks, each GPU's worker compiles."
        ),
    ] = 4,
    share: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Where machines share packs (any fsspec URL, such as s3://bucket/packs). Without "
            "it they all mount one packs folder.",
        ),
    ] = "",
    until_idle: UntilIdle = False,
    device: DeviceName = None,
    *,
    data: DataOptions,
) -> None:
    """Run a worker on every GPU of a Ray cluster, and compile on its other cores, until SIGTERM.

    Jobs come from the database, as those of `gemmsmith worker` do. Machines may join and leave.
    """
    from service.fleet import local

    if address == "local":
        local.prepare()
    try:
        from service.fleet.driver import Options
        from service.fleet.running import connected, run
    except ImportError:
        from tuner.extras import pip_install

        raise CommandError(f"Ray is not installed here: {pip_install('fleet')}") from None
    from service import logging
    from service.fleet.plan import RECORDED
    from service.worker.process import device_name

    settings = data.settings(device=device)
    settings.create_folders()
    recorded = device_name(settings) if address == "local" else ""
    recorded = recorded if recorded.startswith(RECORDED) else ""
    logging.configure(json=settings.log_json)
    try:
        with connected(address or "auto", recorded):
            run(settings, Options(cores=cores, share=share), until_idle=until_idle)
    except ConnectionError as error:
        raise CommandError(f"no Ray cluster: {error}. Start one: ray start --head") from error
    note("the fleet has stopped")
