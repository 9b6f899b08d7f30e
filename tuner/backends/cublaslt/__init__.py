"""cuBLASLt's own kernels as candidates: a pack that runs an algorithm of the library by its bytes.

An algorithm is valid for one version of the library only, so a launch has both.
"""
