"""What a lookup returns: a kernel, its launch and its pack, and how it matches the question."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from gemmsmith.core.kernel import AnyKernel, Backend, Kernel
from gemmsmith.core.launch import Launch
from gemmsmith.core.plain import Plain

MAX_DISTANCE = 2.0
"""Farthest neighbour that may answer: a factor of 4 in one of M, N, K, or of 2.2 in each.

Farther away the number of tiles differs so much that another tile is best. Of the neighbours within
this distance only a few answer, see `gemmsmith.core.neighbours`.
"""


class Match(StrEnum):
    """How the measured problem relates to the requested one."""

    EXACT = "exact"  # the requested problem was measured
    NEAREST = "nearest"  # measured on a neighbour whose winner is legal for the requested problem
    PREDICTED = "predicted"  # the cost model's choice; never measured


class Use(StrEnum):
    """What the caller should run."""

    CUTLASS = "cutlass"  # the config's compiled kernel beat the default
    CUBLASLT = "cublaslt"  # the config's cuBLASLt algorithm beat the default
    PLUGIN = "plugin"  # the config's compiled kernel, which a plugin added, beat the default
    CUBLAS = "cublas"  # the default was at least as fast: keep torch's own operator

    @classmethod
    def of(cls, kernel: Kernel) -> Use:
        return _USES.get(kernel.backend, cls.CUTLASS)

    @property
    def is_default(self) -> bool:
        return self is Use.CUBLAS


_USES = {Backend.CUBLASLT: Use.CUBLASLT, Backend.PLUGIN: Use.PLUGIN}


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Config(Plain):
    """A kernel, its launch, and the compiled pack that holds the kernel.

    Attributes:
        pack: content hash of the kernel pack, for `GET /packs/{hash}`; None if the service
            has not compiled the kernel (a shipped or replayed winner).
    """

    kernel: AnyKernel
    launch: Launch
    pack: str | None = None

    def __repr__(self) -> str:
        return f"<Config {self.kernel.name}@{self.launch.key}>"
