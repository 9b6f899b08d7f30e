"""gemmsmith beside other ways to a fast product: what they do, and what was measured of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from benchmarks.peers.records import Report, Row
from benchmarks.peers.table import as_answered, geometric_mean, ratios
from benchmarks.readme.shipped import RESULTS, short

FILE = "2026-11-21-h200-peers-bf16.json"


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to a fast product; `peer` is its name in the file, None if it was not measured."""

    title: str
    chooses: str
    keeps: str
    fallback: str
    peer: str | None = None


WAYS = (
    Way(
        title="TunableOp",
        chooses="cuBLAS's default alone (on NVIDIA)",
        keeps="CSV file",
        fallback="yes",
    ),
    Way(
        title="max-autotune",
        chooses="Triton templates, cuBLAS",
        keeps="compile cache",
        fallback="yes, timed alone",
        peer="triton",
    ),
    Way(
        title="QuACK",
        chooses="CuTe kernels",
        keeps="local cache",
        fallback="no",
        peer="quack",
    ),
    Way(
        title="cuBLASLt by hand",
        chooses="cuBLASLt's list",
        keeps="what you write",
        fallback="what you write",
        peer="cublaslt",
    ),
    Way(
        title="gemmsmith",
        chooses="CUTLASS, cuBLASLt, its own",
        keeps="database, service",
        fallback="yes, three regimes and power",
        peer="gemmsmith",
    ),
)


def _measured(rows: Sequence[Row], peer: str | None) -> str:
    if peer is None:
        return "not measured"
    found = as_answered(rows) if peer == "gemmsmith" else ratios(rows, peer)
    mean = geometric_mean(found.values())
    return "not measured" if mean is None else f"{mean:.2f} ×"


def table() -> str:
    """One row a way."""
    report = msgspec.json.decode((RESULTS / FILE).read_bytes(), type=Report)
    device = short(report.device) if report.device else "no GPU"
    lines = [
        "| | chooses among | keeps | default where faster | × cuBLAS |",
        "|---|---|---|---|---|",
    ]
    for way in WAYS:
        lines.append(
            f"| {way.title} | {way.chooses} | {way.keeps} | {way.fallback} "
            f"| {_measured(report.rows, way.peer)} |"
        )
    lines += [
        "",
        f"× cuBLAS: {len(report.rows)} problems in {report.dtype}, {device} at the power limit, "
        f"{report.recorded_at[:10]}; of max-autotune Triton's kernels alone.",
    ]
    return "\n".join(lines)
