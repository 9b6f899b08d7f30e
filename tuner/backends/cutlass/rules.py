"""Legality rules that the CUTLASS backends share.

A rule takes a kernel, and returns None if it is legal, else the reason. A backend lists its own and
the shared rules that apply to it (`RULES` of its `rules` module); the enumerators, the verifier and
the tests use that list. A rule names its source: a static assertion of CUTLASS's headers,
`can_implement`, or a limit of the hardware. Rules that depend on the problem are the library's
(`gemmsmith.core.legality`). Nothing here compiles or needs a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from gemmsmith.core.kernel import (
    TMA_MAINLOOPS,
    Backend,
    CutlassKernel,
    EpilogueSchedule,
    MainloopSchedule,
    TileScheduler,
)
from gemmsmith.errors import InvalidProblem
from tuner.arch import ARCHITECTURES, architecture
from tuner.backends.cutlass import footprint
from tuner.backends.cutlass.operation import backend_of, name_of

KernelRule = Callable[[CutlassKernel], str | None]


def by_name(*rules: KernelRule) -> Mapping[str, KernelRule]:
    return MappingProxyType({rule.__name__: rule for rule in rules})


def architecture_is_known(kernel: CutlassKernel) -> str | None:
    known = kernel.arch in ARCHITECTURES
    return None if known else f"no kernels for architecture {kernel.arch}"


def operation_exists(kernel: CutlassKernel) -> str | None:
    """Its types and layout make an operation. 8-bit operands are K-major
    (`gmma_ss_tag_to_major_A`).
    """
    try:
        _ = kernel.operation
    except InvalidProblem as error:
        return str(error)
    return None


def fast_accumulation_is_fp8(kernel: CutlassKernel) -> str | None:
    """Only the TMA mainloops for FP8 have a variant with fast accumulation."""
    if kernel.fast_accumulation and not (
        kernel.operation.is_narrow_float and kernel.mainloop in TMA_MAINLOOPS
    ):
        return "fast accumulation exists for FP8 with a TMA mainloop only"
    return None


def backend_matches_mainloop(kernel: CutlassKernel) -> str | None:
    if kernel.backend is not backend_of(kernel.mainloop, kernel.scheduler):
        return f"{kernel.mainloop} with {kernel.scheduler} is not a kernel of {kernel.backend}"
    return None


def scheduler_matches_mainloop(kernel: CutlassKernel) -> str | None:
    """A mainloop takes some schedulers only; stream-K is for cooperative (static assertions)."""
    allowed = _SCHEDULERS.get(kernel.mainloop, ())
    if kernel.scheduler not in allowed:
        return f"{kernel.mainloop} does not take the {kernel.scheduler} scheduler"
    return None


_SCHEDULERS = {
    MainloopSchedule.MULTISTAGE: (TileScheduler.GRID,),
    MainloopSchedule.CPASYNC_WARP_SPECIALIZED: (TileScheduler.GRID, TileScheduler.PERSISTENT),
    MainloopSchedule.WARP_SPECIALIZED: (
        TileScheduler.GRID,
        TileScheduler.SPLIT_K,
        TileScheduler.CLUSTER_SPLIT_K,
        TileScheduler.GROUPS,
    ),
    MainloopSchedule.PINGPONG: (
        TileScheduler.PERSISTENT,
        TileScheduler.SPLIT_K,
        TileScheduler.GROUPS,
    ),
    MainloopSchedule.COOPERATIVE: (
        TileScheduler.PERSISTENT,
        TileScheduler.STREAM_K,
        TileScheduler.SPLIT_K,
        TileScheduler.GROUPS,
    ),
}


def epilogue_matches_mainloop(kernel: CutlassKernel) -> str | None:
    """TMA epilogues go with TMA mainloops; cp.async stores from registers; 2.x has its own."""
    if kernel.scheduler is TileScheduler.CLUSTER_SPLIT_K:
        legal = kernel.epilogue is EpilogueSchedule.NO_SMEM
    elif kernel.scheduler in (TileScheduler.SPLIT_K, TileScheduler.GROUPS):
        legal = kernel.epilogue is EpilogueSchedule.TMA
    elif kernel.mainloop in TMA_MAINLOOPS:
        legal = kernel.epilogue in (EpilogueSchedule.TMA, EpilogueSchedule.NO_SMEM)
    elif kernel.mainloop is MainloopSchedule.MULTISTAGE:
        legal = kernel.epilogue is EpilogueSchedule.THREADBLOCK
    else:
        legal = kernel.epilogue is EpilogueSchedule.NO_SMEM
    return None if legal else f"{kernel.mainloop} does not take the {kernel.epilogue} epilogue"


def cluster_is_portable(kernel: CutlassKernel) -> str | None:
    """Up to 4 blocks along M and N, 8 in all; only TMA mainloops multicast."""
    m, n = kernel.cluster
    if kernel.mainloop not in TMA_MAINLOOPS:
        return None if (m, n) == (1, 1) else f"{kernel.mainloop} takes clusters of 1×1 only"
    arch = architecture(kernel.arch)
    powers = m in (1, 2, 4) and n in (1, 2, 4)
    if not powers or max(m, n) > arch.max_cluster_side or m * n > arch.max_cluster:
        return f"cluster {m}×{n}: sides must be 1, 2 or 4, with {arch.max_cluster} blocks at most"
    return None


def shared_memory_suffices(kernel: CutlassKernel) -> str | None:
    """Mainloop, epilogue and barriers fit a thread block's shared memory (launch failure)."""
    used, limit = footprint.shared_bytes(kernel), architecture(kernel.arch).shared_bytes
    if used > limit:
        return f"{used} bytes of shared memory exceed {limit}"
    return None


def fields_follow_name(kernel: CutlassKernel) -> str | None:
    """Every field follows from the name (`tuner.backends.cutlass.operation`)."""
    expected_d = 128 // kernel.operation.d.bits if kernel.epilogue is EpilogueSchedule.TMA else 1
    if kernel.alignment_a != kernel.alignment_b or kernel.alignment_d != expected_d:
        return "A and B share one alignment, and D's follows from the epilogue"
    if kernel.swapped and kernel.backend is Backend.CUTLASS2X:
        return "CUTLASS 2.x kernels are not swapped"
    if kernel.name != name_of(kernel):
        return "the name is not CUTLASS's procedural name"
    return None


def choice_refusal(kernel: CutlassKernel, rules: Mapping[str, KernelRule]) -> str | None:
    """The reason why a kernel's choices are not legal, apart from its name; None if they are."""
    for rule in rules.values():
        if rule is not fields_follow_name and (reason := rule(kernel)):
            return reason
    return None
