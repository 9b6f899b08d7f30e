"""Makes cells of CSV files safe to open in a spreadsheet."""

from __future__ import annotations

from typing import Any

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""Characters that begin a formula in Excel, LibreOffice or Google Sheets (OWASP, CSV Injection)."""


def inert(value: Any) -> Any:
    """Return the cell, with an apostrophe before text that a spreadsheet would run."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
