"""What one order of sums costs, and that it keeps the bits: see docs/invariance.md."""

from pathlib import Path

SUITE = Path("invariant")
"""configs/suites/invariant.toml."""
