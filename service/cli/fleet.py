"""`gemmsmith fleet`: many GPUs, placed by Ray, on one database."""

from __future__ import annotations

from typing import Annotated

import typer

from service.cli.options import Database, DeviceName, Packs, Sweeps, load_settings
from service.cli.output import CommandError, note
from tuner.extras import pip_install


def fleet(
    address: Annotated[
        str | None,
        typer.Option(
            help="The Ray cluster, such as HOST:6379. `local` starts one on this machine (with a "
            "recorded GPU, if it has none). Without it: the cluster that this machine belongs to.",
            show_default=False,
        ),
    ] = None,
    cores: Annotated[
        int,
        typer.Option(
            min=0,
            help="Cores per compile task; 0: no compile tasks, each GPU's worker compiles.",
        ),
    ] = 4,
    share: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Where machines share packs (any fsspec URL, such as s3://bucket/packs). Without "
            "it they all mount one packs folder.",
            show_default=False,
        ),
    ] = "",
    until_idle: Annotated[
        bool, typer.Option("--until-idle", help="Stop when the queue is empty.")
    ] = False,
    device: DeviceName = None,
    database: Database = None,
    packs: Packs = None,
    sweeps: Sweeps = None,
) -> None:
    """Run a worker on every GPU of a Ray cluster, and compile on its other cores, until SIGTERM.

    Jobs come from the database, as those of `gemmsmith worker` do. Machines may join and leave.
    """
    try:
        from service.fleet.driver import Options
        from service.fleet.running import connected, run
    except ImportError:
        raise CommandError(f"Ray is not installed here: {pip_install('fleet')}") from None
    from service import logging
    from service.fleet.plan import RECORDED
    from service.worker.process import device_name

    settings = load_settings(device=device, database=database, packs=packs, sweeps=sweeps)
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
