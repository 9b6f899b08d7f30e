"""Shared by the backends that use CUTLASS: names, footprints, rules, launches and headers."""

from __future__ import annotations

import sys
from pathlib import Path

# cutlass_library parses the command line when it is imported, and would handle `--help` itself.
_arguments, sys.argv = sys.argv, sys.argv[:1]
try:
    import cutlass_library as _cutlass_library  # noqa: F401
finally:
    sys.argv = _arguments

HEADERS = Path(__file__).parent / "include"
"""Folder for the compiler's `-I`: the C ABI and the adapters."""
