"""`gemmsmith report`: the comparison with cuBLAS as a page with charts, CSV and JSON.

`gemmsmith ceilings` measures the limits of the GPU that the report compares with.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gemmsmith.core.device import called
from service.cli.options import Database, OnlyDevice, OnlyDTypes, dtypes_of, load_settings
from service.cli.output import (
    CommandError,
    MisuseError,
    Result,
    microseconds,
    note,
    ratio,
    say,
    table,
    writable,
    writable_folder,
)

if TYPE_CHECKING:
    from gemmsmith.answers.answer import Statistics
    from service.report.problem_rows import DeviceReport
    from tuner.trial import Winner


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Which winners are compared."""

    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[FILE]...", help="More winners files.")
    ] = None
    winners: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE...", help="Winners files instead of the database's current winners."
        ),
    ] = None
    dtype: OnlyDTypes = None
    device: OnlyDevice = None


def report(
    compared: ReportOptions,
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
        Path | None, typer.Option(help="Folder of measured ceilings (see `gemmsmith ceilings`).")
    ] = None,
    database: Database = None,
) -> Result:
    """Compare what is served with the default, and with the limits of the GPU.

    Writes report.html, report.csv and report.json.
    """
    from gemmsmith.files import write
    from service.pages.report import page
    from service.report.export import to_csv, to_json
    from service.report.reasons import notes

    paths = [*(compared.winners or ()), *(compared.files or ())]
    winners = _from_files(paths) if paths else _from_database(database)
    dtypes = dtypes_of(compared.dtype) if compared.dtype else None
    reports = _reports(_chosen(winners, dtypes, compared.device), ceilings)
    written = {
        "html": (output / "report.html", page(reports).encode()),
        "csv": (output / "report.csv", to_csv(reports).encode()),
        "json": (output / "report.json", to_json(reports)),
    }
    for path, content in written.values():
        write(path, content)
    files = {name: str(path) for name, (path, _) in written.items()}
    summaries = [
        {"device": item.device.slug, "notes": notes(item), "summary": item.summaries}
        for item in reports
    ]

    def show() -> None:
        for item in reports:
            _print(item)
            for line in notes(item):
                note(line)
        for file in files.values():
            say(file)

    return Result({"files": files, "devices": summaries}, show)


def _from_files(paths: Sequence[Path]) -> list[Winner]:
    """The winners of all files; of several for the same problem and device, the latest."""
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
        winners = store.winners()
    if not winners:
        raise CommandError(
            f"the database {url} has no winners: measure some with `gemmsmith tune`, take "
            "the shipped ones with `gemmsmith db upgrade`, or pass --winners FILE"
        )
    return winners


def _chosen(
    winners: Sequence[Winner], dtypes: Sequence[str] | None, device: str | None
) -> list[Winner]:
    """The winners that the options select, at least one."""
    fitting = called(device or "", {winner.device.slug for winner in winners})
    chosen = [
        winner
        for winner in winners
        if (dtypes is None or winner.problem.dtype in dtypes)
        and (device is None or winner.device.slug in fitting)
    ]
    if chosen:
        return chosen
    kinds = sorted({f"{w.problem.dtype} on {w.device.slug}" for w in winners})
    raise CommandError(f"no such winners; there are {', '.join(kinds)}")


def _reports(winners: Sequence[Winner], folder: Path | None) -> list[DeviceReport]:
    """A report per device model, with its ceilings where they were measured."""
    from service.report.problem_rows import device_report
    from tuner.measure.ceilings import CeilingsError, path_for, read_ceilings

    devices: dict[str, list[Winner]] = {}
    for winner in winners:
        devices.setdefault(winner.device.slug, []).append(winner)
    reports = []
    for slug, of_device in sorted(devices.items()):
        path = path_for(slug, folder)
        measured = read_ceilings(path) if path.is_file() else None
        if measured is not None and measured.device.slug != slug:
            raise CeilingsError(f"{path} holds ceilings of {measured.device.slug}, not of {slug}")
        reports.append(device_report(of_device, measured))
    return reports


def _print(report: DeviceReport) -> None:
    rows = []
    for summary in report.summaries:
        ratios = map(ratio, (summary.geometric_mean, summary.median, summary.minimum))
        kept = summary.problems - summary.won
        rows.append((summary.dtype, summary.title, summary.problems, *ratios, kept))
    columns = ("types", "problems", "count", "geometric mean", "median", "minimum", "not served")
    table(f"{report.device.slug}: what is served against the default", columns, rows, left=2)


def ceilings(
    device: Annotated[str, typer.Option(help="The GPU to measure: cuda:0.")] = "cuda:0",
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="File to write; default <device slug>.json where `gemmsmith report` looks.",
            callback=writable,
        ),
    ] = None,
) -> Result:
    """Measure copy bandwidth and the peak rate of cuBLAS on this machine's GPU.

    It takes about ten seconds, and waits while another process measures on the GPU.
    """
    from gemmsmith.files import private_folder
    from tuner.measure.ceilings import document, measure, own_folder, path_for, write_ceilings

    named = re.fullmatch(r"cuda(?::(\d{1,3}))?", device, re.ASCII)
    if named is None:
        raise MisuseError(f"ceilings are measured on a GPU: --device cuda:0, got {device!r}")
    measured = measure(int(named[1] or 0), on_step=note)
    path = output
    if path is None:
        private_folder(own_folder())
        path = path_for(measured.device.slug, own_folder())
    write_ceilings(measured, path)
    lines: list[tuple[object, str, Statistics]] = []
    for copy in (*measured.copies, measured.copy):
        rate = f"{copy.bytes_per_second / 1e12:.3f} TB/s"
        lines.append((f"copy of {copy.read_bytes / 1e6:g} MB", rate, copy.statistics))
    for peak in measured.peaks:
        rate = f"{peak.flops_per_second / 1e12:.1f} TFLOP/s"
        lines.append((peak.problem, rate, peak.statistics))
    rows = [(name, rate, microseconds(time.median_us), time.samples) for name, rate, time in lines]

    def show() -> None:
        table(measured.device.name, ("measured", "value", "µs", "samples"), rows)
        say(str(path))

    return Result({"file": str(path)} | document(measured), show)
