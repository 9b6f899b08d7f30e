"""Loads compiled kernel packs, and launches their kernels on torch tensors.

`import gemmsmith.runtime` needs neither torch nor a GPU; `run` imports torch when it is called.
"""

from gemmsmith.runtime.abi import ABI_VERSION, Arguments, KernelInfo
from gemmsmith.runtime.launch import run
from gemmsmith.runtime.pack import LoadedKernel, LoadedPack

__all__ = ["ABI_VERSION", "Arguments", "KernelInfo", "LoadedKernel", "LoadedPack", "run"]
