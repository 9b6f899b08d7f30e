"""Cells of CSV files that no spreadsheet takes for formulas."""

from __future__ import annotations

from typing import Any

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""Characters that begin a formula in Excel, LibreOffice or Google Sheets (OWASP, CSV Injection)."""


def inert(value: Any) -> Any:
    """The cell, a text with an apostrophe before it where it would be run.

    Numbers are no text and stay as they are.
    """
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
