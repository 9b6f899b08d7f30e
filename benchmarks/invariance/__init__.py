"""What one order of sums costs, and that it keeps the bits: see docs/invariance.md."""
