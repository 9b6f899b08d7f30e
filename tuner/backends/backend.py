"""The interface of a backend, which is a source of kernels.

A backend is a folder here and a line in `tuner.backends.registry`, or a package of its own
(`tuner.backends.plugin`). It says which operations it
computes on which architecture, lists its kernels and launches, judges whether they are legal, and
writes the C++ that they are compiled from. The rest of the tuner uses `tuner.backends`.
"""

# ruff: noqa: ARG002, B027 - the default methods list nothing, whatever the arguments

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import AnyKernel
from gemmsmith.core.launch import Launch
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import Problem
from tuner.arch import Architecture

N = TypeVar("N")


class Level(StrEnum):
    """How much of the space of kernels to list."""

    CORE = "core"  # the curated list and tiles fitted to the problem, among which winners were
    FULL = "full"  # every legal kernel, thousands


class Features(NamedTuple, Generic[N]):
    """The cost model's description of a kernel, for any problem. True is 1, false is 0."""

    tile_m: N
    tile_n: N
    tile_k: N
    cluster_m: N
    cluster_n: N
    swapped: N
    sliced: N  # K is split among thread blocks, and a second kernel adds the slices
    cluster_split: N  # K is split within a cluster
    padded: N  # operands are copied first, because TMA cannot read their rows
    overlapped: N  # a tile's epilogue runs beside the next tile's products
    fixed_us: N  # start, prologue and last epilogue
    compute_clocks: N  # of the tensor cores, for one K tile
    ingest_bytes: N  # copied into shared memory for one K tile; scaled up if slower than TMA
    store_clocks: N  # to store one output tile


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
"""Of a kernel that the model cannot describe: it is ranked after all others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One kernel's share of a translation unit.

    Attributes:
        header: the header that defines the adapter in `entry`; a path below one of `include`.
        definition: C++ that defines the type which the adapter wraps; kernels may share it.
        entry: the kernel's line in the pack's table.
        include: the project's own folders for the compiler's `-I`; headers in them are part of the
            digest.
    """

    header: str
    definition: str
    entry: str
    include: tuple[Path, ...]


class KernelBackend(ABC):
    """A backend. All its methods are deterministic, and none needs a compiler or a GPU.

    The methods that list kernels and launches list none by default.
    """

    name: str

    def supports(self, operation: Operation, arch: Architecture) -> bool:
        """Whether the backend has kernels of the operation on the architecture."""
        return False

    def kernels(self, problem: Problem, arch: Architecture, level: Level) -> Sequence[AnyKernel]:
        """The legal kernels for a problem whose operation the backend supports; may be empty.

        No two kernels share a name, and every kernel passes `refusal`.
        """
        return ()

    def fitted(self, problem: Problem, device: DeviceModel) -> Sequence[AnyKernel]:
        """Further legal kernels, with tiles that fit this problem on this device."""
        return ()

    def prepare(self, problem: Problem, device: DeviceModel) -> None:
        """Fill the caches that the first calls for problems like this one would fill slowly."""

    def launches(self, kernel: AnyKernel, problem: Problem, device: DeviceModel) -> list[Launch]:
        """The launches worth measuring, in a fixed order; may be empty."""
        return []

    @abstractmethod
    def refusal(self, kernel: AnyKernel, problem: Problem | None = None) -> str | None:
        """The reason why a kernel is not legal, or not for `problem`; None if it is legal."""

    @abstractmethod
    def part(self, kernel: AnyKernel) -> Part:
        """The kernel's share of a translation unit."""

    @abstractmethod
    def variety(self, kernel: AnyKernel) -> tuple[object, ...]:
        """A key that is equal for kernels which share most of their compile time in one unit."""

    @abstractmethod
    def features(self, kernel: AnyKernel) -> Features[float]:
        """The cost model's description of a kernel."""
