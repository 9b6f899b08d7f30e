"""What a kernel takes of a streaming multiprocessor, and what limits the blocks on it.

Shared memory, stages and threads of our kernels follow from their traits
(`tuner.backends.cutlass`); registers and spills are those that the compiler has written into the
pack, as `cuobjdump` prints them. Without the pack, or without that program, they are None. The
names of the default's kernels say how deep a pipeline is, so how much shared memory they take at
least; they do not say registers and threads.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

from gemmsmith.core.kernel import (
    TMA_MAINLOOPS,
    AnyKernel,
    Backend,
    CutlassKernel,
    MainloopSchedule,
    TileScheduler,
)
from gemmsmith.core.problem import Problem
from tuner.arch import ARCHITECTURES
from tuner.backends.cutlass import footprint
from tuner.backends.cutlass.operation import warps_2x
from tuner.explain.grid import Grid

REGISTERS, THREADS, BLOCKS = 65536, 2048, 32
"""Of one SM, on every architecture since sm_80 that kernels are measured on."""
_PARTS = 4
"""Of an SM. A warp's registers lie in one of them."""
_RESERVED_BYTES = 1024
"""Shared memory that CUDA keeps for itself in each block."""
_ALLOCATED = 256
"""Registers that are given to a warp at once."""
_WARP = 32

_GROUPED_THREADS, _CLUSTER_SPLIT_THREADS = 288, 160
"""Our own kernels: two or one consumer warpgroups, and a producer warp."""

_USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+)")
_KERNELS = ("entry_point", "Kernel2", "device_kernel")


class PackEntry(NamedTuple):
    """A kernel's entry in a pack: its mangled name, and registers and spilled bytes of a thread."""

    symbol: str
    registers: int
    spilled_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """A kernel's use of an SM.

    Attributes:
        threads: of a block; None if they do not follow from the traits.
        shared_bytes: dynamic shared memory of a block, at most 384 bytes too much.
        registers: of a thread; None if the pack is not here.
        spilled_bytes: of a thread's registers in local memory; None if the pack is not here.
        blocks_per_sm: blocks that fit on an SM.
        limited_by: `shared memory`, `registers`, `threads` or `blocks`.
        is_named: whether a kernel's name is all that is known. Then `shared_bytes` are those of
            the pipeline alone, and at most `blocks_per_sm` fit.
    """

    threads: int | None
    shared_bytes: int
    stages: int
    registers: int | None
    spilled_bytes: int | None
    blocks_per_sm: int
    limited_by: str
    is_named: bool = False


def resources(kernel: AnyKernel, pack: Path | None = None) -> Resources | None:
    """What a kernel takes of an SM; None for cuBLASLt's, whose algorithms do not say.

    `pack` is the compiled kernel's shared object, which is read but not loaded.
    """
    if not isinstance(kernel, CutlassKernel) or kernel.arch not in ARCHITECTURES:
        return None
    entry = compiled(kernel, pack)
    threads, shared = threads_of(kernel), footprint.shared_bytes(kernel)
    registers = entry.registers if entry else None
    blocks, limit = _fitting(kernel.arch, shared, threads, registers)
    return Resources(
        threads=threads,
        shared_bytes=shared,
        stages=footprint.stages(kernel),
        registers=registers,
        spilled_bytes=entry.spilled_bytes if entry else None,
        blocks_per_sm=blocks,
        limited_by=limit,
    )


def registers_fit(registers: int, threads: int) -> int:
    """Blocks of so many threads, with so many registers each, that an SM's registers hold."""
    warp = -(-registers * _WARP // _ALLOCATED) * _ALLOCATED
    return REGISTERS // _PARTS // warp * _PARTS // (threads // _WARP)


def named_resources(grid: Grid | None, problem: Problem, arch: str) -> Resources | None:
    """What a kernel takes whose name says no more than `grid`; None if that has no stages."""
    if grid is None or not grid.stages or not grid.tile[2] or arch not in ARCHITECTURES:
        return None
    tile_m, tile_n, depth = grid.tile
    operation = problem.operation
    shared = grid.stages * depth * (tile_m * operation.a.bytes + tile_n * operation.b.bytes)
    blocks, limit = _fitting(arch, shared, None, None)
    return Resources(
        threads=None,
        shared_bytes=shared,
        stages=grid.stages,
        registers=None,
        spilled_bytes=None,
        blocks_per_sm=blocks,
        limited_by=limit,
        is_named=True,
    )


def _fitting(arch: str, shared: int, threads: int | None, registers: int | None) -> tuple[int, str]:
    """Blocks that fit on an SM, and what limits them."""
    room = ARCHITECTURES[arch].shared_bytes + _RESERVED_BYTES
    fits = {"shared memory": room // (shared + _RESERVED_BYTES), "blocks": BLOCKS}
    if threads:
        fits["threads"] = THREADS // threads
        if registers:
            fits["registers"] = registers_fit(registers, threads)
    limit = min(fits, key=fits.__getitem__)
    return fits[limit], limit


def threads_of(kernel: CutlassKernel) -> int | None:
    """Threads of a block: a warpgroup (or warp) that loads, two by cp.async, and the consumers."""
    if kernel.backend is Backend.CUTLASS2X:
        warps = warps_2x(kernel.tile)
        return _WARP * prod(warps) if warps else None
    if kernel.scheduler is TileScheduler.GROUPS:
        return _GROUPED_THREADS
    if kernel.scheduler is TileScheduler.CLUSTER_SPLIT_K:
        return _CLUSTER_SPLIT_THREADS
    groups, loading = footprint.consumer_warpgroups(kernel), 1
    if kernel.mainloop is MainloopSchedule.PINGPONG:
        groups = 2
    elif kernel.mainloop is MainloopSchedule.CPASYNC_WARP_SPECIALIZED:
        loading = 2
    elif kernel.mainloop not in TMA_MAINLOOPS:
        return None
    return footprint.WARPGROUP_THREADS * (loading + groups)


def compiled(kernel: CutlassKernel, pack: Path | None) -> PackEntry | None:
    """The kernel's entry in the pack.

    Returns None if the pack or `cuobjdump` is not here, or if the kernel's entry has no name of its
    own and is not the only one.
    """
    if pack is None or not pack.is_file() or (program := cuobjdump()) is None:
        return None
    printed = subprocess.run(
        [program, "-res-usage", pack], capture_output=True, text=True, check=False, timeout=60
    ).stdout
    entries = [
        PackEntry(symbol, int(registers), int(stack))
        for symbol, registers, stack in _USAGE.findall(printed)
        if any(kind in symbol for kind in _KERNELS)
    ]
    name = _type_of(kernel)
    own = [entry for entry in entries if f"{len(name)}{name}" in entry.symbol]
    named = own or entries
    return named[0] if len(named) == 1 else None


def _type_of(kernel: CutlassKernel) -> str:
    """The type that a kernel's entry is an instance of. Kernels that copy operands or split K share
    that of the plain one.
    """
    if kernel.backend is Backend.CUTE:  # its types have no such names
        return kernel.name
    from tuner.backends.cutlass.text import struct

    return struct(kernel)


def cuobjdump() -> Path | None:
    """The program beside nvcc."""
    from tuner.compile.toolchain import find_toolchain
    from tuner.errors import CompilerNotFound

    try:
        beside = find_toolchain().nvcc.with_name("cuobjdump")
    except CompilerNotFound:
        return None
    return beside if beside.is_file() else None
