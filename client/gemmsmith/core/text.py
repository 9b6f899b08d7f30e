"""Text that every part of the program can store and send: Unicode without NUL.

JSON can say two kinds of text that are neither: half of a surrogate pair, which has no UTF-8, and
NUL, which PostgreSQL does not store. Whoever takes text from elsewhere refuses both.
"""

from __future__ import annotations

from typing import Any

ACCEPTED = "Unicode text without NUL"


def flaw(text: str) -> str | None:
    """What makes `text` unusable, as a message about it goes on; None if nothing does."""
    if "\0" in text:
        return "has a NUL character"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "has half of a surrogate pair"
    return None


def flaw_in(document: Any) -> tuple[str, str] | None:
    """Where in decoded JSON there is unusable text, and its `flaw`; None if nowhere.

    Members' names count as text too. The place is a path of names and positions,
    `problems.3.dtype`, and empty for the document itself.
    """
    todo: list[tuple[str, Any]] = [("", document)]
    while todo:
        where, node = todo.pop()
        if isinstance(node, str):
            if found := flaw(node):
                return where, found
        elif isinstance(node, dict):
            for name in node:
                if found := flaw(name):
                    return where, f"has a member whose name {found}"
            todo += ((f"{where}.{name}".lstrip("."), value) for name, value in node.items())
        elif isinstance(node, list):
            todo += ((f"{where}.{i}".lstrip("."), value) for i, value in enumerate(node))
    return None
