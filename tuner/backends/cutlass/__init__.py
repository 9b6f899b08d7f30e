"""What the backends made of CUTLASS's parts share: names, footprints, rules, launches, headers."""

from __future__ import annotations

from pathlib import Path

HEADERS = Path(__file__).parent / "include"
"""Directory for the compiler's `-I`: the C ABI and its adapters."""
