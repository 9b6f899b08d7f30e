"""Which of our own kernels are legal."""

from __future__ import annotations

from gemmsmith.kernel import CutlassKernel
from tuner.backends.cutlass import rules, wgmma


def cluster_sums_accumulate_fast(kernel: CutlassKernel) -> str | None:
    """`ClusterSplitKKernel` leaves FP8 sums in the tensor core: K is short in each slice."""
    if kernel.operation.is_narrow_float and not kernel.fast_accumulation:
        return "splitting K within a cluster accumulates FP8 in the tensor core only"
    return None


def cluster_lies_along_k(kernel: CutlassKernel) -> str | None:
    """The launch makes the cluster, out of the blocks that share a tile."""
    if kernel.cluster != (1, 1):
        return "the cluster lies along K: its size is the launch's number of splits"
    return None


RULES = rules.by_name(
    rules.architecture_is_known,
    wgmma.architecture_has_wgmma,
    rules.operation_exists,
    rules.fast_accumulation_is_fp8,
    cluster_sums_accumulate_fast,
    rules.backend_matches_mainloop,
    rules.scheduler_matches_mainloop,
    rules.epilogue_matches_mainloop,
    wgmma.tf32_is_k_major,
    wgmma.tile_m_is_whole_warpgroups,
    wgmma.tile_n_fits_instruction,
    wgmma.tile_k_fits_swizzle,
    cluster_lies_along_k,
    wgmma.registers_suffice,
    wgmma.pipeline_is_deep_enough,
    rules.shared_memory_suffices,
    wgmma.k_major_b_fills_swizzle_atoms,
    wgmma.alignment_suits_mainloop,
    rules.fields_follow_name,
)
"""What every kernel must satisfy, cheapest and most telling first."""
