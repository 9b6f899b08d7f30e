"""Toolchain discovery, the compile pool and the content-addressed store of kernel packs."""

from tuner.compile.artifacts import ArtifactStore, Pack
from tuner.compile.pool import Builder, Built
from tuner.compile.toolchain import Toolchain, find_toolchain

__all__ = ["ArtifactStore", "Builder", "Built", "Pack", "Toolchain", "find_toolchain"]
