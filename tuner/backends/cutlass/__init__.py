"""What the backends made of CUTLASS's parts share: names, footprints, rules, launches, headers."""

from __future__ import annotations

import sys
from pathlib import Path

# cutlass_library reads the command line when it is imported, and would answer `--help` itself.
_arguments, sys.argv = sys.argv, sys.argv[:1]
try:
    import cutlass_library as _cutlass_library  # noqa: F401
finally:
    sys.argv = _arguments

HEADERS = Path(__file__).parent / "include"
"""Directory for the compiler's `-I`: the C ABI and its adapters."""
