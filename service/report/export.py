"""The rows as CSV and JSON, with the same columns.

Units are in the names: `_us` microseconds, `_tflops` 10¹² FLOP a second, `_gb_per_s` 10⁹ bytes a
second; shares are fractions. An unknown value is an empty field in CSV and null in JSON.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from gemmsmith.answers.answer import Regime, Statistics
from service.report.problem_rows import DeviceReport, ReportRow, Side
from service.report.reasons import default_note, notes, why
from service.tables import inert
from tuner.measure.ceilings import document
from tuner.trial import Winner

FORMAT = "gemmsmith-report"
VERSION = 1


def record(row: ReportRow) -> dict[str, Any]:
    """Return a row's columns by name, with values for JSON."""
    winner, problem = row.winner, row.problem
    speedup, conditions = winner.speedup, winner.conditions
    return {
        "problem": str(problem),
        "device": winner.device.slug,
        "m": problem.m,
        "n": problem.n,
        "k": problem.k,
        "batch": problem.batch,
        "dtype": problem.dtype,
        "layout": problem.layout.value,
        "classes": [kind.value for kind in row.classes],
        "use": winner.use.value,
        "ratio": speedup.median if speedup else None,
        "ratio_low": speedup.ci_low if speedup else None,
        "ratio_high": speedup.ci_high if speedup else None,
        "served_ratio": row.served_ratio,
        **_time("cutlass", winner.statistics),
        **_time("cublas", winner.baseline),
        **_side("cutlass", row.cutlass),
        **_side("cublas", row.cublas),
        "flop_per_byte": row.intensity,
        "ridge_flop_per_byte": row.ridge,
        "bound": row.bound.value if row.bound else None,
        **_candidate(row),
        "sm_clock_mhz": conditions.sm_clock_mhz if conditions else None,
        "power_w": conditions.power_w if conditions else None,
        "throttle": list(conditions.throttle) if conditions else [],
        **_regimes(winner),
        "power_penalty": winner.power_penalty,
        "ties": len(winner.ties),
        "replayed": winner.replayed,
        "promoted_at": winner.promoted_at,
        "driver": winner.environment.driver,
        "baseline": default_note(problem),
        "baseline_kernels": list(winner.baseline_kernels),
        "why": why(row),
    }


def _regimes(winner: Winner) -> dict[str, Any]:
    medians = {item.regime: item.speedup.median for item in winner.regimes if item.speedup}
    return {f"ratio_{regime.value}": medians.get(regime) for regime in Regime}


def _time(name: str, time: Statistics | None) -> dict[str, Any]:
    return {
        f"{name}_us": time.median_us if time else None,
        f"{name}_us_low": time.ci_low_us if time else None,
        f"{name}_us_high": time.ci_high_us if time else None,
        f"{name}_samples": time.samples if time else None,
    }


def _side(name: str, side: Side | None) -> dict[str, Any]:
    return {
        f"{name}_tflops": side.flops_per_second / 1e12 if side else None,
        f"{name}_gb_per_s": side.bytes_per_second / 1e9 if side else None,
        f"{name}_peak_share": side.peak_share if side else None,
        f"{name}_bandwidth_share": side.bandwidth_share if side else None,
        f"{name}_copy_share": side.copy_share if side else None,
    }


_KERNEL = (
    "backend", "tile", "cluster", "stages", "mainloop", "epilogue", "scheduler", "swapped",
    "fast_accumulation",
)  # fmt: skip


def _candidate(row: ReportRow) -> dict[str, Any]:
    """Return the columns of the best CUTLASS candidate: its kernel and its launch."""
    candidate = row.winner.candidate
    if candidate is None:
        return dict.fromkeys(
            ("kernel", *_KERNEL, "raster", "swizzle", "decomposition", "splits", "sm_budget")
        )
    kernel, launch = msgspec.to_builtins(candidate.kernel), msgspec.to_builtins(candidate.launch)
    for name in ("tile", "cluster"):
        if name in kernel:
            kernel[name] = "x".join(map(str, kernel[name]))
    launch.pop("algorithm", None)  # bytes that only cuBLASLt can read
    return {"kernel": kernel["name"], **{name: kernel.get(name) for name in _KERNEL}, **launch}


def to_csv(reports: Sequence[DeviceReport]) -> str:
    """Write all rows of all devices as CSV; items of lists are separated by spaces."""
    records = [record(row) for report in reports for row in report.rows]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=list(records[0]), lineterminator="\n")
    writer.writeheader()
    for columns in records:
        writer.writerow({name: _cell(value) for name, value in columns.items()})
    return text.getvalue()


def _cell(value: Any) -> Any:
    return inert(" ".join(value) if isinstance(value, list) else value)


def to_json(reports: Sequence[DeviceReport]) -> bytes:
    content = {"format": FORMAT, "version": VERSION, "devices": [_device(r) for r in reports]}
    return msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"


def _device(report: DeviceReport) -> dict[str, Any]:
    return {
        "device": {"slug": report.device.slug} | msgspec.to_builtins(report.device),
        "notes": notes(report),
        "ceilings": document(report.ceilings) if report.ceilings else None,
        "summary": [asdict(summary) for summary in report.summaries],
        "problems": [record(row) for row in report.rows],
    }
