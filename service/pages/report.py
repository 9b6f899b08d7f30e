"""The report as one HTML page: no scripts, no network, everything in the file.

The same rows always give the same page: it has no time or name of the machine that wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from service.charts import rooflines
from service.charts.ratios import classes, ratios
from service.pages.render import html
from service.report import regimes
from service.report.headroom import LISTED, family_cells, problem_cells
from service.report.problem_rows import LOW, DeviceReport, ReportRow
from service.report.reasons import default_note, notes, why
from service.report.roofs import Roof
from tuner.explain.headroom import Cause


def page(reports: Sequence[DeviceReport]) -> str:
    """Render the whole page."""
    return html(
        "report.html",
        reports=reports,
        low=LOW,
        notes=notes,
        ratios=ratios,
        classes=classes,
        roofline=_roofline,
        slowest_first=_slowest_first,
        remarks=_remarks,
        causes=tuple(Cause),
        listed=LISTED,
        family_cells=family_cells,
        problem_cells=problem_cells,
    )


def _roofline(report: DeviceReport, dtype: str) -> Markup:
    limits = report.limits
    peak = limits.peak(dtype) if limits else None
    roofs = [Roof(bandwidth=limits.bandwidth, peak=peak, measured=True)] if limits and peak else []
    return rooflines.of_rows(report.of(dtype), dtype, roofs)


def _slowest_first(rows: Sequence[ReportRow]) -> list[ReportRow]:
    return sorted(rows, key=lambda row: (row.ratio is None, row.ratio or 0.0))


def _remarks(row: ReportRow) -> str:
    measured = regimes.summary(row.winner.regimes, row.winner.power_penalty)
    return "; ".join(filter(None, (why(row), measured, default_note(row.problem))))
