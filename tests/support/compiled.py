"""A few real kernels, compiled with the wheels' nvcc only and kept between sessions.

Together they cover the features of a unit: ping-pong and stream-K schedulers, split-K in two
kernels and within a cluster, swapped operands, unaligned operands that are copied first, FP8 with
both epilogues, a low-alignment CUTLASS 2.x kernel, and a kernel that does not compile.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from gemmsmith.core.kernel import (
    Backend,
    EpilogueSchedule,
    Kernel,
    MainloopSchedule,
    TileScheduler,
    cutlass,
)
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import DType, Layout, Problem
from gemmsmith.runtime.abi import Arguments, KernelInfo, declare
from tests.support.arguments import packed_arguments
from tuner.backends.cutlass.operation import kernel
from tuner.backends.cutlass.text import struct
from tuner.compile import ArtifactStore, Builder, Built, Pack, Toolchain, find_toolchain, plan
from tuner.compile.eviction import SizeLimit

PINGPONG = kernel(
    operation=Operation.of(DType.BF16, Layout.TN),
    tile=(64, 128, 64),
    mainloop=MainloopSchedule.PINGPONG,
    epilogue=EpilogueSchedule.TMA,
    scheduler=TileScheduler.PERSISTENT,
    alignment=8,
)
STREAM_K = kernel(
    operation=Operation.of(DType.BF16, Layout.TN),
    tile=(128, 128, 64),
    cluster=(2, 1),
    mainloop=MainloopSchedule.COOPERATIVE,
    epilogue=EpilogueSchedule.TMA,
    scheduler=TileScheduler.STREAM_K,
    alignment=8,
)
SWAPPED = kernel(
    operation=Operation.of(DType.BF16, Layout.TN),
    tile=(64, 16, 128),
    mainloop=MainloopSchedule.PINGPONG,
    epilogue=EpilogueSchedule.TMA,
    scheduler=TileScheduler.PERSISTENT,
    alignment=8,
    swapped=True,
)
SPLIT_K = kernel(
    operation=Operation.of(DType.BF16, Layout.TN),
    tile=(64, 64, 64),
    mainloop=MainloopSchedule.PINGPONG,
    epilogue=EpilogueSchedule.TMA,
    scheduler=TileScheduler.SPLIT_K,
    alignment=8,
)
CLUSTER_SPLIT_K = kernel(
    operation=Operation.of(DType.BF16, Layout.TN),
    tile=(64, 16, 128),
    mainloop=MainloopSchedule.WARP_SPECIALIZED,
    epilogue=EpilogueSchedule.NO_SMEM,
    scheduler=TileScheduler.CLUSTER_SPLIT_K,
    alignment=8,
    swapped=True,
)
PADDED = kernel(  # PINGPONG's sibling: one definition, compiled once
    operation=Operation.of(DType.BF16, Layout.TN),
    tile=(64, 128, 64),
    mainloop=MainloopSchedule.PINGPONG,
    epilogue=EpilogueSchedule.TMA,
    scheduler=TileScheduler.PERSISTENT,
    alignment=1,
)
FP8_FAST = kernel(
    operation=Operation.of(DType.FP8_E4M3, Layout.TN),
    tile=(128, 128, 128),
    mainloop=MainloopSchedule.COOPERATIVE,
    epilogue=EpilogueSchedule.TMA,
    scheduler=TileScheduler.PERSISTENT,
    alignment=16,
    fast_accumulation=True,
)
FP8_NO_SMEM = kernel(
    operation=Operation.of(DType.FP8_E4M3, Layout.TN),
    tile=(64, 64, 128),
    mainloop=MainloopSchedule.PINGPONG,
    epilogue=EpilogueSchedule.NO_SMEM,
    scheduler=TileScheduler.PERSISTENT,
    alignment=16,
)
ALIGN_1 = kernel(
    operation=Operation.of(DType.BF16, Layout.TN),
    tile=(64, 64, 32),
    stages=2,
    mainloop=MainloopSchedule.MULTISTAGE,
    epilogue=EpilogueSchedule.THREADBLOCK,
    scheduler=TileScheduler.GRID,
    alignment=1,
)
IMPOSSIBLE = kernel(
    operation=Operation.of(DType.BF16, Layout.TN),
    tile=(64, 64, 32),
    stages=3,  # from three stages on, CUTLASS copies with cp.async: 4 bytes at least
    mainloop=MainloopSchedule.MULTISTAGE,
    epilogue=EpilogueSchedule.THREADBLOCK,
    scheduler=TileScheduler.GRID,
    alignment=1,
)
QUICK = (PINGPONG, PADDED, CLUSTER_SPLIT_K, ALIGN_1)
"""The kernels that `make test` compiles: one of each backend, and a sibling that costs nothing."""

KERNELS = [
    PINGPONG,
    STREAM_K,
    SPLIT_K,
    CLUSTER_SPLIT_K,
    PADDED,
    SWAPPED,
    FP8_FAST,
    FP8_NO_SMEM,
    ALIGN_1,
]

MISALIGNED, INVALID_LAYOUT, INVALID_PROBLEM, NOT_SUPPORTED = 1, 3, 4, 5
"""Statuses of `gs_can_implement`."""

COMPILING = [pytest.mark.compiles, pytest.mark.timeout(3600)]
"""Marks of a file whose fixture compiles: the first of its tests waits for all of its kernels."""

STORE_VARIABLE = "GEMMSMITH_TEST_PACKS"
STORE = Path(__file__).resolve().parents[2] / ".packs" / "tests"
"""The folder that keeps packs between test sessions; the variable names another folder.

The key of a pack includes its source, compiler and options (`tuner.compile.artifacts`), so a pack
of an older source is never used.
"""

LARGEST_MIXED = 4
"""Kernels in a unit of several families: nvcc needs 7.2 GB (13.0.88, four fused kernels)."""

LARGEST_STORE = SizeLimit(bytes=500_000_000)
"""If the folder is larger, the packs that were used least recently are removed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledPacks:
    """The compiled kernels; `path` is the `PATH` of their compilation."""

    store: ArtifactStore
    toolchain: Toolchain
    built: dict[Kernel, Built]
    path: str

    def pack(self, member: Kernel) -> Pack:
        """The pack that holds a kernel."""
        pack = self.built[member].pack
        assert pack is not None, self.built[member].failure
        return pack

    def code(self, member: Kernel) -> str:
        """Machine code of a kernel, without that of the others in its pack."""
        pack = self.pack(member)
        others = [_symbol(each) for each in self.built if each.name in pack.kernels]
        functions = sass(pack.path).split("Function :")[1:]
        if symbol := _symbol(member):
            (own,) = (each for each in functions if symbol in each.splitlines()[0])
            return own
        named = [symbol for symbol in others if symbol]
        return "".join(
            each for each in functions if not any(name in each.splitlines()[0] for name in named)
        )


def members(kernels: Iterable[Kernel]) -> list[ParameterSet]:
    """Parameters of a test, one for each kernel; `make test` runs those of `QUICK` only."""
    return [
        pytest.param(
            each,
            marks=() if each in QUICK else pytest.mark.long,
            id=each.name.split("tensorop_", 1)[1],
        )
        for each in kernels
    ]


def kept() -> Path:
    """The folder of the packs."""
    return Path(os.environ.get(STORE_VARIABLE, STORE))


def build(
    root: Path, kernels: Sequence[Kernel], *, workers: int | None = None, mixed: bool = False
) -> CompiledPacks:
    """Compile the kernels that are not in the folder yet, with a `PATH` without a CUDA toolkit.

    With `mixed`, units hold kernels of several families. This takes half the time, because most of
    it goes into the headers of CUTLASS.
    """
    with pytest.MonkeyPatch.context() as patch:
        if mixed:
            patch.setattr(plan, "units", _mixed_units)
        for variable in ("CUDA_HOME", "CUDA_PATH", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"):
            patch.delenv(variable, raising=False)
        folders = os.environ["PATH"].split(os.pathsep)
        patch.setenv("PATH", os.pathsep.join(f for f in folders if not _has_nvcc(f)))
        toolchain = find_toolchain(wheels_only=True)
        store = ArtifactStore(root, limit=LARGEST_STORE)
        built = {item.kernel: item for item in Builder(store, toolchain, workers).build(kernels)}
        return CompiledPacks(store=store, toolchain=toolchain, built=built, path=os.environ["PATH"])


class Loaded:
    """A kernel of a pack, called through ctypes only."""

    def __init__(self, packs: CompiledPacks, member: Kernel) -> None:
        pack = packs.pack(member)
        self.library = ctypes.CDLL(str(pack.path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
        declare(self.library)
        self.index = pack.kernels.index(member.name)

    def can_implement(self, arguments: Arguments) -> int:
        status: int = self.library.gs_can_implement(self.index, ctypes.byref(arguments))
        return status

    def workspace_bytes(self, arguments: Arguments) -> int:
        size: int = self.library.gs_workspace_bytes(self.index, ctypes.byref(arguments))
        return size

    def describe(self) -> KernelInfo:
        info = KernelInfo()
        assert self.library.gs_kernel_describe(self.index, ctypes.byref(info)) == 0
        return info

    def run(self, arguments: Arguments, workspace: int | None = None) -> int:
        status: int = self.library.gs_run(self.index, ctypes.byref(arguments), workspace, None)
        return status


def problem_of(
    member: Kernel, m: int = 256, n: int = 512, k: int = 1024, batch: int = 1
) -> Problem:
    """A problem of the kernel's types and layout."""
    return Problem(m=m, n=n, k=k, batch=batch, dtype=member.dtype, layout=member.layout)


def arguments_of(
    member: Kernel,
    m: int = 256,
    n: int = 512,
    k: int = 1024,
    batch: int = 1,
    splits: int | None = None,
) -> Arguments:
    """Packed arguments with a legal launch: two slices if the kernel must split K."""
    arguments = packed_arguments(problem_of(member, m, n, k, batch))
    if splits is None:
        splits = 2 if member.scheduler is TileScheduler.SPLIT_K else 1
    if splits > 1 or member.scheduler is TileScheduler.SPLIT_K:
        arguments.decomposition, arguments.splits = 1, splits
    return arguments


def sass(pack: Path) -> str:
    """Machine code of every kernel in a pack, by the disassembler from the wheels."""
    return _dump(pack, "--dump-sass")


def stacks(pack: Path) -> set[tuple[str, str]]:
    """Bytes of stack and of local memory that the pack's kernels take; registers spill there."""
    return set(re.findall(r"STACK:(\d+) .*?LOCAL:(\d+)", _dump(pack, "--dump-resource-usage")))


def registers(pack: Path) -> set[int]:
    """Registers of a thread, of each of the pack's kernels."""
    return set(map(int, re.findall(r"REG:(\d+)", _dump(pack, "--dump-resource-usage"))))


def disassembler() -> Path:
    """`cuobjdump` from the wheels; it wants its own folder in `PATH`."""
    import nvidia

    return next(
        folder / "cuobjdump"
        for place in nvidia.__path__
        for folder in Path(place).glob("cu*/bin")
        if (folder / "cuobjdump").exists()
    )


def _dump(pack: Path, what: str) -> str:
    tool = disassembler()
    return subprocess.run(
        [str(tool), what, str(pack)],
        env={"PATH": f"{tool.parent}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout


def _mixed_units(kernels: Sequence[Kernel], _: int) -> list[list[Kernel]]:
    """Units of few kernels of an architecture, of which the function of one at most is unnamed."""
    units = []
    for arch in dict.fromkeys(each.arch for each in kernels):
        members = [each for each in kernels if each.arch == arch]
        named = [each for each in members if _symbol(each)]
        others = [each for each in members if not _symbol(each)]
        count = max(len(others), -(-len(members) // LARGEST_MIXED))
        units += [[*others[place : place + 1], *named[place::count]] for place in range(count)]
    return units


def _symbol(kernel: Kernel) -> str:
    """What the name of the kernel's function has in it, and no other's; empty if that is nothing.

    Our own kernels and gated ones are instances of templates without a name.
    """
    if kernel.backend is Backend.CUTE or kernel.operation.epilogue.is_gated:
        return ""
    name = struct(cutlass(kernel))
    return f"{len(name)}{name}E"


def _has_nvcc(folder: str) -> bool:
    return shutil.which("nvcc", path=folder) is not None
