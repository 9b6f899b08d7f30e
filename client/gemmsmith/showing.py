"""How answers and jobs look to people: in a notebook, and in a line of a terminal.

A service may belong to a stranger. Its text is never HTML here, never a command to a terminal, and
never begins a line of its own (`line`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from html import escape

BAR = 24
"""Characters of a bar."""

LONGEST = 10_000
"""Characters of a line that are shown; longer ones were written to fill a screen."""

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


_PASSWORD = re.compile(
    r"""(://[^\s"/@:]*:)"""  # a scheme, a user
    r"""(?!\d+(?:[/?\#\s"']|$))"""  # not host:port
    r"""(?:[^\s"/]{0,200}|[^\s"@]{0,200})@"""  # a password; a slash in it may not be escaped
)
_TOKEN = re.compile(r"""\b(https?://|socks\w*://)[^\s"/@:]+@""")
_PARAMETER = re.compile(
    r"""([?&](?:\w*password|passwd|pwd|secret|\w*token|api_?key)=)[^\s"'&\\\#]*""", re.IGNORECASE
)


def line(text: str) -> str:
    """The text as one line of a terminal or a log; it may come from a stranger.

    A control character, which a terminal would obey, becomes a space, and so does the end of a
    line. Passwords in URLs become `***`. What is longer than `LONGEST` is cut off.
    """
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]}…"
    if not text.isprintable():
        text = "".join(letter if _is_harmless(letter) else " " for letter in text)
    return without_passwords(text)


def _is_harmless(letter: str) -> bool:
    # The latter are bytes of a path that is no text.
    return letter.isprintable() or "\udca0" <= letter <= "\udcff"


def lines(text: str) -> str:
    """The text with each of its lines as `line` has it: a table, or a traceback."""
    return "\n".join(map(line, text.split("\n")))


def document(text: str) -> str:
    """A JSON document in the same way; what a terminal would obey is escaped as JSON escapes it."""
    if not text.replace("\n", "").isprintable():
        text = "".join(
            letter if letter.isprintable() or letter == "\n" else json.dumps(letter)[1:-1]
            for letter in text
        )
    return without_passwords(text)


def address(text: str) -> str:
    """A URL as it may be printed, even if its scheme was forgotten."""
    return line(text if "://" in text else f"://{text}").removeprefix("://")


def without_passwords(text: str) -> str:
    """The text without the passwords, tokens and keys of the URLs in it."""
    if "@" in text:
        text = _TOKEN.sub(r"\1***@", _PASSWORD.sub(r"\1***@", text))
    return _PARAMETER.sub(r"\1***", text) if "://" in text else text
