"""The run-time choices for a compiled kernel."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from msgspec import UNSET, UnsetType

from gemmsmith.core.plain import Plain


class RasterOrder(StrEnum):
    """The order in which consecutive thread blocks take output tiles."""

    HEURISTIC = "heuristic"  # CUTLASS picks the shorter side
    ALONG_M = "along_m"  # consecutive tiles go down M
    ALONG_N = "along_n"  # consecutive tiles go across N


class Decomposition(StrEnum):
    """How a problem is divided among thread blocks. Without a stream-K scheduler: data-parallel."""

    DATA_PARALLEL = "data_parallel"  # one thread block computes a whole output tile
    SPLIT_K = "split_k"  # `splits` thread blocks share each tile along K
    STREAM_K = "stream_k"  # all thread blocks share the work of the last wave equally
    HEURISTIC = "heuristic"  # CUTLASS picks among the above


ALGORITHM_BYTES = 64
"""Size of `cublasLtMatmulAlgo_t`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """An algorithm of cuBLASLt. It is valid for one version of the library only.

    Attributes:
        library: `cublasLtGetVersion()` of the library that proposed the algorithm.
        code: the 64 bytes of `cublasLtMatmulAlgo_t` in hexadecimal.
        workspace_bytes: device memory that it needs in addition to the operands.

    Raises:
        ValueError: the code is not 64 bytes in hexadecimal.
    """

    library: int
    code: str
    workspace_bytes: int = 0

    def __post_init__(self) -> None:
        try:
            size = len(bytes.fromhex(self.code))
        except ValueError:
            size = 0
        if size != ALGORITHM_BYTES or self.workspace_bytes < 0:
            raise ValueError(f"an algorithm is {ALGORITHM_BYTES} bytes in hexadecimal")

    @classmethod
    def of(cls, library: int, words: Sequence[int], workspace_bytes: int = 0) -> Algorithm:
        code = b"".join(word.to_bytes(8, "little") for word in words).hex()
        return cls(library=library, code=code, workspace_bytes=workspace_bytes)

    @property
    def words(self) -> tuple[int, ...]:
        code = bytes.fromhex(self.code)
        return tuple(int.from_bytes(code[i : i + 8], "little") for i in range(0, len(code), 8))


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Launch(Plain):
    """Run-time choices. `raster` is in the kernel's own orientation.

    Each backend reads the fields that it supports; the others keep these defaults.

    Attributes:
        swizzle: largest number of tiles per swizzled group (1, 2, 4 or 8), for L2 reuse.
        splits: thread blocks per tile along K; more than 1 only with split-K or heuristic.
        sm_budget: streaming multiprocessors that the kernel may occupy; 0 means all.
        algorithm: cuBLASLt's algorithm; only for the backend `cublaslt`.
    """

    raster: RasterOrder = RasterOrder.HEURISTIC
    swizzle: int = 1
    decomposition: Decomposition = Decomposition.DATA_PARALLEL
    splits: int = 1
    sm_budget: int = 0
    algorithm: Algorithm | UnsetType = UNSET

    @property
    def key(self) -> str:
        """Canonical short form, unique per launch: `along_m.s4.split_k.x2.sm0`."""
        if self.algorithm is not UNSET:
            digest = hashlib.sha256(self.algorithm.code.encode()).hexdigest()[:16]
            return f"algorithm.{self.algorithm.library}.{digest}.x{self.splits}"
        return (
            f"{self.raster}.s{self.swizzle}.{self.decomposition}.x{self.splits}.sm{self.sm_budget}"
        )

    def __repr__(self) -> str:
        return f"<Launch {self.key}>"
