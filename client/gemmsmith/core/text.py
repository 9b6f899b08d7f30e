"""Text that every part of the program can store and send: Unicode without NUL.

JSON also allows half of a surrogate pair, which has no UTF-8 encoding, and NUL, which PostgreSQL
does not store. Code that accepts text from outside rejects both.
"""

from __future__ import annotations

from typing import Any

ACCEPTED = "Unicode text without NUL"


def flaw(text: str) -> str | None:
    """Why `text` is unusable, worded to follow a field's name; None if it is usable."""
    if "\0" in text:
        return "has a NUL character"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "has half of a surrogate pair"
    return None


def flaw_in(document: Any) -> tuple[str, str] | None:
    """The path of unusable text in decoded JSON, and its `flaw`; None if all text is usable.

    Names of members are checked too. The path consists of names and positions,
    `problems.3.dtype`, and is empty for the document itself.
    """
    todo: list[tuple[str, Any]] = [("", document)]
    while todo:
        where, node = todo.pop()
        if isinstance(node, str):
            if reason := flaw(node):
                return where, reason
        elif isinstance(node, dict):
            for name in node:
                if reason := flaw(name):
                    return where, f"has a member whose name {reason}"
            todo += ((f"{where}.{name}".lstrip("."), value) for name, value in node.items())
        elif isinstance(node, list):
            todo += ((f"{where}.{i}".lstrip("."), value) for i, value in enumerate(node))
    return None
