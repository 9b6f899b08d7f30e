"""How answers and jobs look to people: in a notebook, and in a line of a terminal.

A service may be anybody's. What it sends is text here, never HTML, and never moves a terminal's
cursor.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

BAR = 24
"""Characters of a bar."""

_STYLE = "text-align:left"


def table(title: str, rows: Iterable[tuple[str, object]]) -> str:
    """A small HTML table of names and values; None and empty values are left out."""
    lines = [
        f'<tr><th style="{_STYLE}">{escape(name)}</th>'
        f'<td style="{_STYLE}">{escape(str(value))}</td></tr>'
        for name, value in rows
        if value is not None and value != ""
    ]
    heading = f'<caption style="{_STYLE}">{escape(title)}</caption>'
    return f"<table>{heading}{''.join(lines)}</table>"


def bar(done: int, total: int) -> str:
    """How much of something is done, as a bar of fixed width; empty where nobody knows."""
    if total <= 0:
        return ""
    full = BAR * min(max(done, 0), total) // total
    return f"[{'#' * full}{'-' * (BAR - full)}] {done}/{total}"


def line(text: str) -> str:
    """The text on one line: what a terminal would take for a command is left out."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
