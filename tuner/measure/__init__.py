"""Verifies and times candidates against cuBLAS.

`statistics` and `footprint` are plain Python; everything else runs in the measuring child
process, the only one that imports torch and holds a CUDA context.
"""
