"""Templates into answers: one environment, the formats that pages write figures in, one policy.

Everything is escaped unless it is `Markup`, which only pictures are; they escape their own text.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.responses import HTMLResponse, RedirectResponse, Response

from gemmsmith.problem import DType, Layout
from service.pages import addresses
from service.report.page import choices

_SERVICE = Path(__file__).parent.parent
STATIC = _SERVICE / "static"

HEADERS = {
    # Scripts, styles and pictures are files of ours; nothing inline, nothing from elsewhere.
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-cache",
}

NONE = "–"


def page(template: str, *, status: int = 200, **values: Any) -> Response:
    """The page as an answer."""
    return HTMLResponse(html(template, **values), status_code=status, headers=HEADERS)


def html(template: str, **values: Any) -> str:
    """The page as text."""
    return _TEMPLATES.get_template(template).render(**values)


def see_other(location: str) -> Response:
    """To the page that shows what a form has changed."""
    return RedirectResponse(location, status_code=303)


def picture(svg: str) -> Markup:
    """A picture of `service.pictures`, which escapes its text, as part of a page."""
    return Markup(svg)  # noqa: S704


def _microseconds(value: float | None) -> str:
    """Four digits: 7.310, 73.10, 731.0, 7 310."""
    if value is None:
        return NONE
    return (
        f"{value:,.{3 if value < 10 else 2 if value < 100 else 1 if value < 1000 else 0}f}".replace(
            ",", " "
        )
    )


def _ratio(value: float | None, digits: int = 3) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return NONE if value is None else f"{value:.0%}"


def _when(value: float | str | None) -> Markup | str:
    """A time, of seconds since the epoch or RFC 3339, to the second in UTC."""
    if not value:
        return NONE
    try:
        at = (
            datetime.fromisoformat(value)
            if isinstance(value, str)
            else datetime.fromtimestamp(value, UTC)
        )
    except ValueError:  # of an imported winner: whatever its file says
        return str(value)
    at = at.astimezone(UTC)
    return Markup('<time datetime="{}">{} UTC</time>').format(
        at.isoformat(timespec="seconds"), at.strftime("%Y-%m-%d %H:%M:%S")
    )


def _size(value: int) -> str:
    return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"


_FILTERS: Mapping[str, Any] = {
    "us": _microseconds,
    "ratio": _ratio,
    "share": _share,
    "when": _when,
    "size": _size,
}

_TEMPLATES = Environment(
    loader=FileSystemLoader(_SERVICE / "templates"),
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
)
