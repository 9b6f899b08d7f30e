"""Patches models so that they run tuned kernels without a change of their code."""
