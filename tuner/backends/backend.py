"""What a backend is: where kernels come from.

A backend is a folder here and a line in `tuner.backends.registry`. It says which operations it
computes on which architecture, names its kernels and launches, judges them, and writes the C++
that they are compiled from. Everything else in the tuner asks through `tuner.backends`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import AnyKernel, Backend
from gemmsmith.core.launch import Launch
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import Problem
from tuner.arch import Architecture

N = TypeVar("N")


class Level(StrEnum):
    """How much of the space to look at."""

    CORE = "core"  # the curated list and what fits the problem: where winners have been found
    FULL = "full"  # every legal kernel, thousands


class Features(NamedTuple, Generic[N]):
    """What the analytic cost model knows of a kernel, whatever the problem. Yes is 1, no is 0."""

    tile_m: N
    tile_n: N
    tile_k: N
    cluster_m: N
    cluster_n: N
    swapped: N
    sliced: N  # K is: a second kernel adds up
    cluster_split: N  # K is split within a cluster
    padded: N  # operands are copied first
    overlapped: N  # a tile's epilogue with the next tile's products
    fixed_us: N
    compute_clocks: N  # tensor cores, one K tile
    ingest_bytes: N  # copies into shared memory, one K tile, as TMA would do them
    store_clocks: N  # of one output tile


UNKNOWN = Features(
    tile_m=1.0,
    tile_n=1.0,
    tile_k=1.0,
    cluster_m=1.0,
    cluster_n=1.0,
    swapped=0.0,
    sliced=0.0,
    cluster_split=0.0,
    padded=0.0,
    overlapped=0.0,
    fixed_us=inf,
    compute_clocks=1.0,
    ingest_bytes=1.0,
    store_clocks=1.0,
)
"""Of a kernel of which nothing is known: never before any other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One kernel's share of a translation unit.

    Attributes:
        header: what defines the adapter that `entry` names; lies below one of `include`.
        definition: C++ that defines what the adapter wraps; kernels may share one.
        entry: the kernel's line in the pack's table.
        include: folders for the compiler's `-I`: the project's own, which are part of the digest.
    """

    header: str
    definition: str
    entry: str
    include: tuple[Path, ...]


class KernelBackend(Protocol):
    """A backend. All answers are deterministic, and none needs a compiler or a GPU."""

    name: Backend

    def supports(self, operation: Operation, arch: Architecture) -> bool:
        """Whether it has kernels of the operation on the architecture."""
        ...

    def kernels(self, problem: Problem, arch: Architecture, level: Level) -> Sequence[AnyKernel]:
        """The legal kernels for a problem of an operation that it supports; may be none.

        No two share a name, and each passes `refusal`.
        """
        ...

    def fitted(self, problem: Problem, device: DeviceModel) -> Sequence[AnyKernel]:
        """Legal kernels made for this problem on this device, beside the curated ones."""
        ...

    def prepare(self, problem: Problem, device: DeviceModel) -> None:
        """Do now what the first calls for such problems would be slow by."""
        ...

    def launches(self, kernel: AnyKernel, problem: Problem, device: DeviceModel) -> list[Launch]:
        """The launches worth measuring, in a fixed order; may be none."""
        ...

    def refusal(self, kernel: AnyKernel, problem: Problem | None = None) -> str | None:
        """Why a kernel is not legal (for the problem, if one is given); None when it is."""
        ...

    def part(self, kernel: AnyKernel) -> Part:
        """What the kernel is compiled from."""
        ...

    def variety(self, kernel: AnyKernel) -> tuple[object, ...]:
        """What kernels of one family that compile cheaply beside each other have in common."""
        ...

    def features(self, kernel: AnyKernel) -> Features[float]:
        """What the analytic cost model knows of it."""
        ...
