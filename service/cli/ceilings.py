"""`gemmsmith ceilings`: what the local GPU does at best, for `gemmsmith report`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from service.cli.options import AsJson
from service.cli.output import MisuseError, emit, microseconds, note, say, table, writable


def ceilings(
    device: Annotated[str, typer.Option(help="The GPU to measure: cuda:0.")] = "cuda:0",
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="File to write; default <device slug>.json where `gemmsmith report` looks.",
            show_default=False,
            callback=writable,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure copy bandwidth and the peak rate of cuBLAS on this machine's GPU.

    It takes about ten seconds, and waits while another process measures on the GPU.
    """
    from gemmsmith.files import private_folder
    from tuner.measure.ceilings import document, measure, own_folder, path_for, write_ceilings

    found = measure(_ordinal(device), on_step=note)
    path = output
    if path is None:
        private_folder(own_folder())
        path = path_for(found.device.slug, own_folder())
    write_ceilings(found, path)
    if as_json:
        emit({"file": str(path)} | document(found))
        return
    rows: list[tuple[object, ...]] = [
        (
            f"copy of {copy.read_bytes / 1e6:g} MB",
            f"{copy.bytes_per_second / 1e12:.3f} TB/s",
            microseconds(copy.statistics.median_us),
            copy.statistics.samples,
        )
        for copy in (*found.copies, found.copy)
    ]
    rows += [
        (
            peak.problem,
            f"{peak.flops_per_second / 1e12:.1f} TFLOP/s",
            microseconds(peak.statistics.median_us),
            peak.statistics.samples,
        )
        for peak in found.peaks
    ]
    table(found.device.name, ("measured", "value", "µs", "samples"), rows)
    say(str(path))


def _ordinal(device: str) -> int:
    """The number in `cuda:0`; raises MisuseError for anything else."""
    named = re.fullmatch(r"cuda(?::(\d{1,3}))?", device, re.ASCII)
    if named is None:
        raise MisuseError(f"ceilings are measured on a GPU: --device cuda:0, got {device!r}")
    return int(named[1] or 0)
