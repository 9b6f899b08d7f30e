"""Tuned kernels below torch's own operators."""
