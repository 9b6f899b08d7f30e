"""Tuned kernels in models that know nothing of them, for as long as they are patched."""
