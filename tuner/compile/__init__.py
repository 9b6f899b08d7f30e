"""Toolchain discovery, the compile pool and the content-addressed store of kernel packs."""

from tuner.compile.artifacts import ArtifactStore
from tuner.compile.eviction import SizeLimit
from tuner.compile.manifest import Manifest, Pack
from tuner.compile.pool import Builder, Built
from tuner.compile.toolchain import Toolchain, find_toolchain

__all__ = [
    "ArtifactStore",
    "Builder",
    "Built",
    "Manifest",
    "Pack",
    "SizeLimit",
    "Toolchain",
    "find_toolchain",
]
