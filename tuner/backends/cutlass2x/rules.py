"""The legality rules of CUTLASS 2.x kernels that take any alignment.

Other 2.x kernels are legal if CUTLASS generates them (`tuner.backends.cutlass.generated`).
"""

from __future__ import annotations

from gemmsmith.core.kernel import CutlassKernel
from tuner.arch import architecture
from tuner.backends.cutlass import rules
from tuner.backends.cutlass.operation import warps_2x


def architecture_reads_type(kernel: CutlassKernel) -> str | None:
    # `mma.sync` takes FP8 from sm89 on.
    if kernel.operation.is_narrow_float and not architecture(kernel.arch).reads_fp8:
        return f"{kernel.arch} has no FP8"
    return None


def tile_is_built_in_2x(kernel: CutlassKernel) -> str | None:
    # A 2.x tile has a fixed warp arrangement; its K is that of two instructions, 512 bits.
    if warps_2x(kernel.tile) is None or kernel.tile[2] * kernel.operation.a.bits != 512:
        return f"no warp arrangement for the 2.x tile {kernel.tile}"
    return None


def groups_are_not_2x(kernel: CutlassKernel) -> str | None:
    return "no grouped kernels of CUTLASS 2.x" if kernel.operation.is_grouped else None


def pipeline_is_double_buffered(kernel: CutlassKernel) -> str | None:
    # `cp.async` cannot copy single elements, so CUTLASS loads through registers, in two stages.
    return None if kernel.stages == 2 else "alignment 1 needs exactly 2 stages in CUTLASS 2.x"


def alignment_is_left_over(kernel: CutlassKernel) -> str | None:
    # TMA and `cp.async` read all other rows faster.
    legal = kernel.alignment_a == 1
    return None if legal else f"{kernel.mainloop} does not take alignment {kernel.alignment_a}"


RULES = rules.by_name(
    rules.architecture_is_known,
    rules.operation_exists,
    groups_are_not_2x,
    architecture_reads_type,
    rules.fast_accumulation_is_fp8,
    rules.backend_matches_mainloop,
    rules.scheduler_matches_mainloop,
    rules.epilogue_matches_mainloop,
    tile_is_built_in_2x,
    rules.cluster_is_portable,
    pipeline_is_double_buffered,
    rules.shared_memory_suffices,
    alignment_is_left_over,
    rules.fields_follow_name,
)
"""The rules that every kernel must satisfy, in order: cheap and frequently violated rules first."""
