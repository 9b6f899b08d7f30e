"""Renders templates: the environment, the filters that format numbers, and the headers of pages.

Everything is escaped unless it is `Markup`, which only charts are; they escape their own text.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.responses import HTMLResponse, RedirectResponse, Response

from gemmsmith.core.device import recording_of
from gemmsmith.core.problem import DType, Layout
from service.http.access import LOCAL, Caller, Scope
from service.pages import addresses
from service.report.explained import sections, work
from service.report.verdict import NONE, choices, faster, verdict, why
from service.report.waiting import waiting

_FOLDER = Path(__file__).parent
STATIC = _FOLDER / "static"

HEADERS = {
    # Scripts, styles and icons are files of this service; nothing is inline or from other hosts.
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def page(
    template: str, *, caller: Caller | None = None, status: int = 200, **values: Any
) -> Response:
    content = html(template, caller=caller, **values)
    return HTMLResponse(content, status_code=status, headers=HEADERS)


def html(template: str, *, caller: Caller | None = None, **values: Any) -> str:
    """Render a page as text. For a `caller` of None it has everything that any caller may do."""

    def may(scope: str) -> bool:
        return caller is None or Scope(scope) in caller.scopes

    known = caller is not None and caller is not LOCAL
    return _TEMPLATES.get_template(template).render(
        **values, may=may, signed_in=caller.name if caller and known else None
    )


def see_other(location: str) -> Response:
    return RedirectResponse(location, status_code=303)


def fragment(chart: Markup) -> Response:
    return HTMLResponse(chart, headers=HEADERS)


def _microseconds(value: float | None) -> str:
    """Format with four digits: 7.310, 73.10, 731.0, 7 310."""
    if value is None:
        return NONE
    decimals = 3 if value < 10 else 2 if value < 100 else 1 if value < 1000 else 0
    return f"{value:,.{decimals}f}".replace(",", " ")


def _ratio(value: float | None, digits: int = 3) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return NONE if value is None else f"{value:.0%}"


def _seconds(value: float) -> str:
    """Format a duration: 130 ms, 1.9 s, 48 s, 2 min 5 s, 3 h 20 min."""
    if value < 1:
        return f"{value * 1e3:.0f} ms"
    if value < 100:
        return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


def _clock(value: float) -> Markup:
    """Format seconds since the epoch as the time of day in UTC, with the date as a tooltip."""
    at = datetime.fromtimestamp(value, UTC)
    return Markup('<time datetime="{}" title="{} UTC">{}</time>').format(
        at.isoformat(timespec="milliseconds"),
        at.strftime("%Y-%m-%d %H:%M:%S"),
        at.strftime("%H:%M:%S"),
    )


def _coded(value: str) -> Markup:
    """Turn `backticks` into code."""
    parts = enumerate(value.split("`"))
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if i % 2 else part for i, part in parts
    )


def _when(value: float | str | None) -> Markup | str:
    """Format seconds since the epoch, or an RFC 3339 time, to the second in UTC."""
    if not value:
        return NONE
    try:
        at = (
            datetime.fromisoformat(value)
            if isinstance(value, str)
            else datetime.fromtimestamp(value, UTC)
        ).astimezone(UTC)
    except (ValueError, OverflowError):  # an imported winner may have any text here
        return str(value)
    return Markup('<time datetime="{}">{} UTC</time>').format(
        at.isoformat(timespec="seconds"), at.strftime("%Y-%m-%d %H:%M:%S")
    )


def _size(value: int) -> str:
    return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"


def _short(name: str, most: int = 44) -> str:
    # The beginning and the end of a kernel's name differ most between kernels.
    return name if len(name) <= most else f"{name[: most // 2 - 4]}…{name[-(most // 2 + 3) :]}"


_FILTERS: Mapping[str, Any] = {
    "us": _microseconds,
    "ratio": _ratio,
    "share": _share,
    "seconds": _seconds,
    "clock": _clock,
    "coded": _coded,
    "when": _when,
    "size": _size,
    "short": _short,
    "faster": faster,
    "recording": recording_of,
}

_TEMPLATES = Environment(
    loader=FileSystemLoader([_FOLDER / "templates", STATIC]),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters.update(_FILTERS)
_TEMPLATES.globals.update(
    dtypes=tuple(DType),
    layouts=tuple(Layout),
    problem_href=addresses.problem,
    job_href=addresses.job,
    tune_href=addresses.tune,
    words=choices,
    verdict=verdict,
    explained_sections=sections,
    explained_work=work,
    why_unusable=why,
    waiting=waiting,
    uses={
        "cutlass": "CUTLASS",
        "cublaslt": "cuBLASLt",
        "plugin": "a plugin",
        "cublas": "the default",
    },
    list_href=addresses.winners_of,
)
