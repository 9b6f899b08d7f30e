"""Kernels of Triton for plain products, as a backend of gemmsmith."""
