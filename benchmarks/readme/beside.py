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
        chooses="only cuBLAS's default (on NVIDIA)",
        keeps="a CSV file",
        fallback="yes",
    ),
    Way(
        title="max-autotune",
        chooses="Triton templates, cuBLAS",
        keeps="the compile cache",
        fallback="yes, timed in isolation",
        peer="triton",
    ),
    Way(
        title="QuACK",
        chooses="CuTe kernels",
        keeps="a local cache",
        fallback="no",
        peer="quack",
    ),
    Way(
        title="cuBLASLt by hand",
        chooses="cuBLASLt's algorithms",
        keeps="your code",
        fallback="your code",
        peer="cublaslt",
    ),
    Way(
        title="gemmsmith",
        chooses="CUTLASS, cuBLASLt, own kernels",
        keeps="a database, a service",
        fallback="yes, timed in three regimes, with power",
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
        "| | chooses among | stores winners in | keeps a faster default | over cuBLAS |",
        "|---|---|---|---|---|",
    ]
    for way in WAYS:
        lines.append(
            f"| {way.title} | {way.chooses} | {way.keeps} | {way.fallback} "
            f"| {_measured(report.rows, way.peer)} |"
        )
    lines += [
        "",
        f"Over cuBLAS: mean speed-up of {len(report.rows)} problems in {report.dtype}, {device} at "
        f"the power limit, {report.recorded_at[:10]}. "
        "For max-autotune only Triton's kernels count.",
    ]
    return "\n".join(lines)
