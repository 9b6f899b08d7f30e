"""The report as one HTML page: no scripts, no network, everything in the file.

Text goes through jinja's auto-escaping; only the pictures, which escape their own, are passed as
markup. The same rows always give the same page: nothing of the moment of writing is in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from service.charts import draw, rooflines
from service.charts.ratios import classes, ratios
from service.report import regimes
from service.report.reasons import baseline_note, notes, why
from service.report.roofs import measured_roof
from service.report.rows import LOW, DeviceReport, ReportRow, Side
from service.report.verdict import NONE, choices

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --soft: #6b6b6b; --line: #8883; --paper: #fff;
  --won: #1b6ca8; --behind: #b5472d; --tie: #77777a; --roof: #3a3a3a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --soft: #a0a0a0; --paper: #161616;
  --won: #6db3e8; --behind: #ef8a6b; --tie: #9a9a9d; --roof: #cfcfcf; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 80rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin-top: 3rem; } h3 { margin-top: 2rem; }
.note { border-left: 3px solid var(--behind); padding-left: .75rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .85rem; }
th, td { padding: .2rem .6rem .2rem 0; text-align: right; vertical-align: top;
  border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 600; } .t { text-align: left; } .why { text-align: left; white-space: normal;
  min-width: 22rem; } .low { color: var(--behind); font-weight: 600; } .soft { color: var(--soft); }
"""

_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>gemmsmith: CUTLASS against cuBLAS</title>
<style>{{ style }}</style>
</head>
<body>
<h1>CUTLASS against cuBLAS</h1>
<p>The ratio is cuBLAS's time over that of the best CUTLASS candidate, the median of paired rounds
with its 95% bootstrap interval: above 1, CUTLASS is faster. Where its interval does not lie above
1, or its power costs more than it gains, cuBLAS stays the answer. FLOP per byte counts every
operand moved once.</p>
{% for device in devices %}
<h2>{{ device.name }} <span class="soft">({{ device.slug }})</span></h2>
<p>{{ device.about }}</p>
{% for note in device.notes %}<p class="note">{{ note }}</p>
{% endfor %}
{% if device.ceilings %}
<h3>What the GPU does at best</h3>
<p>{{ device.measured }}</p>
<div class="wide"><table>
<tr><th class="t">measured</th><th>value</th><th>time µs</th><th>samples</th></tr>
{% for line in device.ceilings %}<tr><td class="t">{{ line[0] }}</td>
{% for cell in line[1:] %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table></div>
{% endif %}
<h3>Summary</h3>
<div class="wide"><table>
<tr><th class="t">types</th><th class="t">problems</th><th>count</th><th>geometric mean</th>
<th>minimum</th><th>maximum</th><th>below {{ low }}</th><th>interval below 1</th>
<th>CUTLASS served</th></tr>
{% for s in device.summaries %}<tr><td class="t">{{ s.dtype }}</td><td class="t">{{ s.title }}</td>
<td>{{ s.problems }}</td><td>{{ "%.3f" | format(s.geometric_mean) }}</td>
<td>{{ "%.3f" | format(s.minimum) }}</td><td>{{ "%.3f" | format(s.maximum) }}</td>
<td>{{ s.below }}</td><td>{{ s.behind }}</td><td>{{ s.won }}</td></tr>
{% endfor %}
</table></div>
{% for part in device.parts %}
<h3>{{ part.dtype }}</h3>
<p class="soft">Disc: faster than cuBLAS. Triangle: slower. Ring: the interval includes 1.</p>
{{ part.ratios }}
{{ part.classes }}
<p class="soft">Filled: CUTLASS. Ring: cuBLAS, joined to the same problem.</p>
{{ part.roofline }}
<div class="wide"><table>
<tr><th class="t">problem</th><th>ratio</th><th>95% interval</th><th>CUTLASS µs</th>
<th>cuBLAS µs</th><th>TFLOP/s</th><th>cuBLAS</th><th>of peak</th><th>cuBLAS</th><th>TB/s</th>
<th>of bandwidth</th><th>cuBLAS</th><th>of a copy of its size</th><th>cuBLAS</th>
<th>FLOP/byte</th><th class="t">bound</th><th class="t">tile · cluster</th>
<th class="t">schedule</th><th class="t">scheduler</th><th class="t">launch</th>
<th class="why">why cuBLAS stays</th></tr>
{% for row in part.rows %}<tr>
<td class="t">{{ row.problem }}</td><td{% if row.low %} class="low"{% endif %}>{{ row.ratio }}</td>
{% for cell in row.figures %}<td>{{ cell }}</td>{% endfor %}
{% for cell in row.words %}<td class="t">{{ cell }}</td>{% endfor %}
<td class="why">{{ row.why }}</td></tr>
{% endfor %}
</table></div>
{% endfor %}
{% endfor %}
</body>
</html>
"""


def page(reports: Sequence[DeviceReport]) -> str:
    """The whole page."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = environment.from_string(_TEMPLATE)
    return template.render(
        style=Markup(draw.STYLE.read_text(encoding="utf-8") + _STYLE),  # noqa: S704 - ours
        low=LOW,
        devices=[_device(report) for report in reports],
    )


def _device(report: DeviceReport) -> dict[str, Any]:
    winners = [row.winner for row in report.rows]
    dates = sorted(winner.promoted_at[:10] for winner in winners if winner.promoted_at)
    drivers = sorted({winner.environment.driver for winner in winners})
    when = f", {dates[0]} to {dates[-1]}" if dates else ""
    ceilings = report.ceilings
    return {
        "name": report.device.name,
        "slug": report.device.slug,
        "about": f"{len(winners)} problems, {report.device.sm_count} SMs, driver "
        f"{', '.join(drivers)}{when}.",
        "notes": notes(report),
        "ceilings": _ceilings(report),
        "measured": f"Measured {ceilings.measured_at}, driver {ceilings.environment.driver}, "
        f"cuBLAS {ceilings.environment.cublas}."
        if ceilings
        else "",
        "summaries": report.summaries,
        "parts": [_part(report, dtype) for dtype in report.dtypes],
    }


def _ceilings(report: DeviceReport) -> list[tuple[str, ...]]:
    if report.ceilings is None:
        return []
    lines: list[tuple[str, ...]] = [
        (
            f"copy, {copy.read_bytes / 1e6:g} MB read and as many written",
            f"{copy.bytes_per_second / 1e12:.2f} TB/s",
            f"{copy.statistics.median_us:.2f}",
            str(copy.statistics.samples),
        )
        for copy in (*report.ceilings.copies, report.ceilings.copy)
    ]
    lines += [
        (
            f"cuBLAS, {peak.problem}",
            f"{peak.flops_per_second / 1e12:.0f} TFLOP/s",
            f"{peak.statistics.median_us:.2f}",
            str(peak.statistics.samples),
        )
        for peak in report.ceilings.peaks
    ]
    return lines


def _part(report: DeviceReport, dtype: str) -> dict[str, Any]:
    rows = report.of(dtype)
    ordered = sorted(rows, key=lambda row: (row.ratio is None, row.ratio or 0.0))
    roof = measured_roof(report.ceilings, dtype)
    return {
        "dtype": dtype,
        "ratios": ratios(rows),
        "classes": classes(report, dtype),
        "roofline": rooflines.of_rows(rows, dtype, [roof] if roof else []),
        "rows": [_row(row) for row in ordered],
    }


def _row(row: ReportRow) -> dict[str, Any]:
    speedup = row.winner.speedup
    interval = f"{speedup.ci_low:.3f}–{speedup.ci_high:.3f}" if speedup else NONE
    said = (why(row), regimes.summary(row.winner.regimes, row.winner.power_penalty))
    return {
        "problem": str(row.problem),
        "ratio": f"{speedup.median:.3f}" if speedup else NONE,
        "low": speedup is not None and speedup.median < LOW,
        "figures": (interval, *_figures(row.cutlass, row.cublas), _figure(row.intensity, 1)),
        "words": (row.bound or NONE, *choices(row.winner.candidate)),
        "why": "; ".join(filter(None, (*said, baseline_note(row.problem)))),
    }


def _figures(ours: Side | None, theirs: Side | None) -> tuple[str, ...]:
    """Times, rates and shares, ours beside cuBLAS's."""
    sides = (ours, theirs)
    return (
        *(_figure(side.time.median_us if side else None) for side in sides),
        *(_figure(side.flops_per_second / 1e12 if side else None, 1) for side in sides),
        *(_share(side.peak_share if side else None) for side in sides),
        _figure(ours.bytes_per_second / 1e12 if ours else None),
        *(_share(side.bandwidth_share if side else None) for side in sides),
        *(_share(side.copy_share if side else None) for side in sides),
    )


def _figure(value: float | None, digits: int = 2) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return NONE if value is None else f"{value:.0%}"
