"""What a lookup chooses: a candidate and its pack, whose problem it is of, and what to run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from gemmsmith.core.kernel import AnyKernel, Backend, Kernel
from gemmsmith.core.launch import Launch
from gemmsmith.core.plain import Plain

MAX_DISTANCE = 2.0
"""Farthest neighbour that answers: a factor of 4 in one of M, N, K, or of 2.2 in each.

Beyond that the number of tiles, and with it the best tile, is another. Few neighbours' kernels are
run, see `gemmsmith.core.neighbours`.
"""


class Match(StrEnum):
    """How the measured problem relates to the requested one."""

    EXACT = "exact"  # measured on this very problem
    NEAREST = "nearest"  # measured on a neighbour whose winner is legal here
    PREDICTED = "predicted"  # the cost model's choice; never measured


class Use(StrEnum):
    """What the caller should run."""

    CUTLASS = "cutlass"  # the config, a compiled kernel, beat the default
    CUBLASLT = "cublaslt"  # the config, another algorithm of cuBLASLt's, beat the default
    CUBLAS = "cublas"  # the default was at least as fast: keep torch's own operator

    @classmethod
    def of(cls, kernel: Kernel) -> Use:
        """What running a kernel is called."""
        return cls.CUBLASLT if kernel.backend is Backend.CUBLASLT else cls.CUTLASS

    @property
    def is_default(self) -> bool:
        """Whether to run torch's own operator."""
        return self is Use.CUBLAS


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Config(Plain):
    """A candidate and the compiled pack that holds its kernel.

    Attributes:
        pack: content hash of the kernel pack, for `GET /packs/{hash}`; None if the service
            has not compiled it (a shipped or replayed winner).
    """

    kernel: AnyKernel
    launch: Launch
    pack: str | None = None

    def __repr__(self) -> str:
        return f"<Config {self.kernel.name}@{self.launch.key}>"
