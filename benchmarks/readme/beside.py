"""gemmsmith and other ways to a fast product: what they do, and their measured ratios."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from benchmarks.peers.records import Report, Row
from benchmarks.peers.table import GEMMSMITH as OURS
from benchmarks.peers.table import as_answered, ratios
from benchmarks.readme.kinds import PLAIN, kind_of
from benchmarks.readme.shipped import AVERAGES, RESULTS, averages, got, short
from tuner.trial import Winner

FILE = "2026-11-21-h200-peers-bf16.json"


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to a fast product; `peer` is its name in the file, None if it was not measured."""

    title: str
    chooses: str
    keeps: str
    fallback: str
    peer: str | None = None


WAYS = (
    Way(
        title="TunableOp",
        chooses="cuBLASLt's first 8 algorithms; before torch 2.14 only cuBLAS's default",
        keeps="a CSV file",
        fallback="yes, timed in isolation",
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


def _measured(report: Report, peer: str | None) -> str:
    if peer is None:
        return "not measured"
    ratios_of = as_answered(report.rows) if peer == OURS else ratios(report.rows, peer)
    gains = [ratio for row, ratio in ratios_of.items() if _is_plain(report.rows[row])]
    return averages(gains) if gains else "not measured"


def _is_plain(row: Row) -> bool:
    return kind_of(row.problem) is PLAIN


def table(winners: Sequence[Winner]) -> str:
    """Write a row for each way, with ratios of the plain problems only."""
    report = msgspec.json.decode((RESULTS / FILE).read_bytes(), type=Report)
    assert report.device is not None
    lines = [
        "| | chooses among | stores winners in | keeps a faster default | over cuBLAS |",
        "|---|---|---|---|---|",
    ]
    for way in WAYS:
        lines.append(
            f"| {way.title} | {way.chooses} | {way.keeps} | {way.fallback} "
            f"| {_measured(report, way.peer)} |"
        )
    problems = [row.problem for row in report.rows if _is_plain(row)]
    device = report.device.slug
    shipped = [got(w) for w in winners if w.problem in problems and w.device.slug == device]
    lines += [
        "",
        f"Over cuBLAS: {AVERAGES} of {len(problems)} problems in {report.dtype} that the first "
        f"table calls “{PLAIN.title.lower()}”, in one run on {_with_torch(report)}, at the power "
        f"limit, {report.recorded_at[:10]}. For max-autotune only Triton's kernels count. In the "
        "least favourable of the three regimes, as in the first table, the shipped winners of "
        f"{len(shipped)} of these problems gain {averages(shipped)}.",
    ]
    return "\n".join(lines)


def _with_torch(report: Report) -> str:
    assert report.device is not None
    assert report.environment is not None
    version = report.environment.torch.partition("+")[0]
    return f"an {short(report.device)} with torch {version}"
