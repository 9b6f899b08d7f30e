"""`gemmsmith report`: the comparison with cuBLAS as a page with charts, CSV and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gemmsmith.core.device import called
from service.cli import completion
from service.cli.options import (
    AsJson,
    Database,
    OnlyDevice,
    dtypes_of,
    load_settings,
)
from service.cli.output import CommandError, emit, note, ratio, say, table, writable_folder

if TYPE_CHECKING:
    from service.report.problem_rows import DeviceReport
    from tuner.trial import Winner


def report(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILE]...", help="More winners files.", show_default=False),
    ] = None,
    winners: Annotated[
        list[Path] | None,
        typer.Option(
            "--winners",
            metavar="FILE...",
            help="Winners files instead of the database's current winners.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            "--dtype",
            help="Only these element types; repeatable, or with commas.",
            autocompletion=completion.dtypes,
            show_default=False,
        ),
    ] = None,
    device: OnlyDevice = None,
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            help="Folder to write to; created if missing.",
            callback=writable_folder,
        ),
    ] = Path("report"),
    ceilings: Annotated[
        Path | None,
        typer.Option(
            help="Folder of measured ceilings (see `gemmsmith ceilings`).", show_default=False
        ),
    ] = None,
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """Compare the winners with cuBLAS, and with the limits of the GPU.

    Writes report.html, report.csv and report.json.
    """
    from gemmsmith.files import write
    from service.pages.report import page
    from service.report.export import to_csv, to_json
    from service.report.reasons import notes

    given = [*(winners or ()), *(files or ())]
    found = _from_files(given) if given else _from_database(database)
    reports = _reports(_chosen(found, dtypes_of(dtype) if dtype else None, device), ceilings)
    written = {
        "html": (output / "report.html", page(reports).encode()),
        "csv": (output / "report.csv", to_csv(reports).encode()),
        "json": (output / "report.json", to_json(reports)),
    }
    for path, content in written.values():
        write(path, content)
    if as_json:
        summaries = [
            {"device": each.device.slug, "notes": notes(each), "summary": each.summaries}
            for each in reports
        ]
        emit(
            {"files": {name: str(path) for name, (path, _) in written.items()}}
            | {"devices": summaries}
        )
        return
    for each in reports:
        _print(each)
        for line in notes(each):
            note(line)
    for path, _ in written.values():
        say(str(path))


def _from_files(paths: Sequence[Path]) -> list[Winner]:
    """The winners of all files; of two for one problem and device, the later one."""
    from tuner.exchange import read_winners

    latest: dict[object, Winner] = {}
    for winner in (winner for path in paths for winner in read_winners(path)):
        key = (winner.device.slug, winner.problem)
        known = latest.get(key)
        if known is None or winner.promoted_at >= known.promoted_at:
            latest[key] = winner
    if not latest:
        raise CommandError(f"no winners in {', '.join(map(str, paths))}")
    return list(latest.values())


def _from_database(database: str | None) -> list[Winner]:
    from tuner.store import Store

    url = load_settings(database=database).database
    with Store.open(url) as store:
        found = store.winners()
    if not found:
        raise CommandError(
            f"the database {url} has no winners: measure some with `gemmsmith tune`, take "
            "the shipped ones with `gemmsmith db upgrade`, or pass --winners "
            "FILE"
        )
    return found


def _chosen(
    winners: Sequence[Winner], dtypes: Sequence[str] | None, device: str | None
) -> list[Winner]:
    """Those that were asked for; raises CommandError, naming what there is, for none."""
    fitting = called(device or "", {winner.device.slug for winner in winners})
    chosen = [
        winner
        for winner in winners
        if (dtypes is None or winner.problem.dtype in dtypes)
        and (device is None or winner.device.slug in fitting)
    ]
    if chosen:
        return chosen
    there = sorted({f"{w.problem.dtype} on {w.device.slug}" for w in winners})
    raise CommandError(f"no such winners; there are {', '.join(there)}")


def _reports(winners: Sequence[Winner], folder: Path | None) -> list[DeviceReport]:
    """A report per device model, with its ceilings where they were measured."""
    from service.report.problem_rows import device_report
    from tuner.measure.ceilings import CeilingsError, path_for, read_ceilings

    devices: dict[str, list[Winner]] = {}
    for winner in winners:
        devices.setdefault(winner.device.slug, []).append(winner)
    reports = []
    for slug, mine in sorted(devices.items()):
        path = path_for(slug, folder)
        found = read_ceilings(path) if path.is_file() else None
        if found is not None and found.device.slug != slug:
            raise CeilingsError(f"{path} holds ceilings of {found.device.slug}, not of {slug}")
        reports.append(device_report(mine, found))
    return reports


def _print(report: DeviceReport) -> None:
    rows = [
        (
            summary.dtype,
            summary.title,
            summary.problems,
            ratio(summary.geometric_mean),
            ratio(summary.median),
            ratio(summary.minimum),
            summary.below,
        )
        for summary in report.summaries
    ]
    columns = ("types", "problems", "count", "geometric mean", "median", "minimum", "below 0.97")
    table(report.device.slug, columns, rows, left=2)
