"""cuBLASLt's own kernels as candidates: a pack that runs the library's algorithms by their bytes.

An algorithm is valid for one version of the library only; a launch carries both.
"""
