"""How answers and jobs are shown in a notebook and in a terminal.

The text of a service is not trusted. It is escaped in HTML, and it can neither control a terminal
nor begin a new line (`line`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from html import escape

BAR = 24
"""Width of a progress bar in characters."""

LONGEST = 10_000
"""Longest line that is shown, in characters, so that a service cannot flood a terminal."""

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
    """A progress bar of fixed width; empty if the total is not known."""
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
    """Untrusted text as a single line for a terminal or a log.

    Control characters, which a terminal would obey, and ends of lines become spaces. Passwords in
    URLs become `***`. Text after the first `LONGEST` characters is cut off.
    """
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]}…"
    if not text.isprintable():
        text = "".join(letter if _is_harmless(letter) else " " for letter in text)
    return without_passwords(text)


def _is_harmless(letter: str) -> bool:
    # The surrogates stand for bytes of a path that is not valid UTF-8.
    return letter.isprintable() or "\udca0" <= letter <= "\udcff"


def lines(text: str) -> str:
    return "\n".join(map(line, text.split("\n")))


def document(text: str) -> str:
    """A JSON document, safe for a terminal: control characters are escaped as in JSON."""
    if not text.replace("\n", "").isprintable():
        text = "".join(
            letter if letter.isprintable() or letter == "\n" else json.dumps(letter)[1:-1]
            for letter in text
        )
    return without_passwords(text)


def address(text: str) -> str:
    """A URL without passwords, for messages, even if its scheme is missing."""
    return line(text if "://" in text else f"://{text}").removeprefix("://")


def without_passwords(text: str) -> str:
    """The text with passwords, tokens and keys in its URLs replaced by `***`."""
    if "@" in text:
        text = _TOKEN.sub(r"\1***@", _PASSWORD.sub(r"\1***@", text))
    return _PARAMETER.sub(r"\1***", text) if "://" in text else text
