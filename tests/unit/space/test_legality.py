"""Each rule refuses the kernel that breaks it, and the legal space passes them all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from gemmsmith.core import legality
from gemmsmith.core.kernel import (
    Backend,
    EpilogueSchedule,
    Kernel,
    MainloopSchedule,
    TileScheduler,
)
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import DType, Layout, Problem
from tests.support.replacing import replace
from tuner.backends import BACKENDS, refusal
from tuner.backends.cutlass import footprint
from tuner.backends.cutlass.operation import kernel, named
from tuner.backends.cutlass.rules import KernelRule, shared_memory_suffices
from tuner.backends.cutlass.shared import CutlassBackend

GOOD = kernel(
    operation=Operation.of(DType.BF16, Layout.TN),
    tile=(128, 128, 64),
    cluster=(2, 1),
    mainloop=MainloopSchedule.COOPERATIVE,
    epilogue=EpilogueSchedule.TMA,
    scheduler=TileScheduler.PERSISTENT,
    alignment=8,
)
GOOD_FP8 = named(
    replace(GOOD, dtype=DType.FP8_E4M3, tile=(128, 128, 128), alignment_a=16, alignment_b=16)
)
GOOD_CPASYNC = kernel(
    operation=Operation.of(DType.BF16, Layout.NT),
    tile=(64, 64, 64),
    mainloop=MainloopSchedule.CPASYNC_WARP_SPECIALIZED,
    epilogue=EpilogueSchedule.NO_SMEM,
    scheduler=TileScheduler.GRID,
    alignment=2,
)
GOOD_SPLIT_K = kernel(
    operation=Operation.of(DType.BF16, Layout.TN),
    tile=(64, 64, 64),
    mainloop=MainloopSchedule.PINGPONG,
    epilogue=EpilogueSchedule.TMA,
    scheduler=TileScheduler.SPLIT_K,
    alignment=8,
)
GOOD_CLUSTER = kernel(
    operation=Operation.of(DType.FP8_E4M3, Layout.TN),
    tile=(64, 16, 256),
    mainloop=MainloopSchedule.WARP_SPECIALIZED,
    epilogue=EpilogueSchedule.NO_SMEM,
    scheduler=TileScheduler.CLUSTER_SPLIT_K,
    alignment=16,
    swapped=True,
    fast_accumulation=True,
)
GOOD_PADDED = kernel(
    operation=Operation.of(DType.BF16, Layout.TN),
    tile=(128, 128, 64),
    mainloop=MainloopSchedule.PINGPONG,
    epilogue=EpilogueSchedule.NO_SMEM,
    scheduler=TileScheduler.PERSISTENT,
    alignment=1,
)
GOOD_2X = kernel(
    operation=Operation.of(DType.FP16, Layout.NN),
    tile=(128, 64, 32),
    stages=2,
    mainloop=MainloopSchedule.MULTISTAGE,
    epilogue=EpilogueSchedule.THREADBLOCK,
    scheduler=TileScheduler.GRID,
    alignment=1,
)
GOOD_2X_FP8 = named(replace(GOOD_2X, dtype=DType.FP8_E4M3, layout=Layout.TN, tile=(128, 64, 64)))
GOOD_TF32 = kernel(
    operation=Operation.of(DType.TF32, Layout.TN),
    tile=(128, 128, 32),
    mainloop=MainloopSchedule.COOPERATIVE,
    epilogue=EpilogueSchedule.TMA,
    scheduler=TileScheduler.PERSISTENT,
    alignment=4,
)
GOOD_SCALE_ROW = kernel(
    operation=Operation.of("int8.out_bf16.scale_row", Layout.TN),
    tile=(128, 128, 128),
    mainloop=MainloopSchedule.COOPERATIVE,
    epilogue=EpilogueSchedule.TMA,
    scheduler=TileScheduler.PERSISTENT,
    alignment=16,
)

GOOD_GROUPS = kernel(
    operation=Operation.of("bf16.group_rows", Layout.TN),
    tile=(128, 32, 64),
    mainloop=MainloopSchedule.PINGPONG,
    epilogue=EpilogueSchedule.TMA,
    scheduler=TileScheduler.PERSISTENT,
    alignment=8,
    swapped=True,
)
GOOD_WALKED = named(replace(GOOD_GROUPS, backend=Backend.CUTE, scheduler=TileScheduler.GROUPS))
GOOD_WALKED_GATED = named(replace(GOOD_WALKED, dtype="bf16.group_rows.then_silu_gate_aux"))
GOOD_WALKED_BACKWARD = named(
    replace(
        GOOD_WALKED,
        dtype="bf16.group_rows.then_dsilu_gate_act",
        tile=(128, 128, 64),
        swapped=False,
    )
)
GOOD_FUSED = named(replace(GOOD, dtype="bf16.then_bias_gelu_aux"))
GOOD_SYMMETRIC = named(replace(GOOD, dtype="bf16.symmetric"))
GOOD_BACKWARD = named(
    replace(
        GOOD,
        dtype="bf16.then_dsilu_gate_act",
        layout=Layout.TT,
        tile=(128, 176, 64),
        mainloop=MainloopSchedule.PINGPONG,
    )
)
GOOD_GATED = named(
    replace(
        GOOD,
        dtype="bf16.then_silu_gate_aux",
        tile=(128, 192, 64),
        mainloop=MainloopSchedule.PINGPONG,
    )
)
GOOD_FP8_OUTPUT = named(
    replace(
        GOOD_FP8,
        dtype="fp8_e4m3.out_e4m3.then_bias",
        alignment_d=16,
        tile=(128, 64, 128),
        mainloop=MainloopSchedule.PINGPONG,
    )
)

BROKEN: list[tuple[str, Kernel, dict[str, Any]]] = [
    ("architecture_is_known", GOOD, {"arch": "sm75"}),
    ("architecture_has_wgmma", GOOD, {"arch": "sm100"}),
    ("architecture_has_wgmma", GOOD_CLUSTER, {"arch": "sm120"}),
    ("operation_exists", GOOD_FP8, {"layout": Layout.NT}),
    ("fast_accumulation_is_fp8", GOOD, {"fast_accumulation": True}),
    ("sums_accumulate_fast", GOOD_CLUSTER, {"fast_accumulation": False}),
    ("backend_matches_mainloop", GOOD, {"backend": Backend.CUTLASS2X}),
    ("backend_matches_mainloop", GOOD, {"backend": Backend.CUTE}),
    ("backend_matches_mainloop", GOOD_CLUSTER, {"backend": Backend.CUTLASS3X}),
    ("scheduler_matches_mainloop", GOOD, {"scheduler": TileScheduler.GRID}),
    ("scheduler_matches_mainloop", GOOD, {"scheduler": TileScheduler.CLUSTER_SPLIT_K}),
    ("scheduler_matches_mainloop", GOOD_2X, {"scheduler": TileScheduler.SPLIT_K}),
    ("epilogue_matches_mainloop", GOOD_CPASYNC, {"epilogue": EpilogueSchedule.TMA}),
    ("epilogue_matches_mainloop", GOOD_SPLIT_K, {"epilogue": EpilogueSchedule.NO_SMEM}),
    ("epilogue_matches_mainloop", GOOD_CLUSTER, {"epilogue": EpilogueSchedule.TMA}),
    ("tile_m_is_whole_warpgroups", GOOD, {"tile": (64, 128, 64)}),
    ("tile_n_fits_instruction", GOOD, {"tile": (128, 264, 64)}),
    ("tile_n_fits_instruction", GOOD_CLUSTER, {"tile": (64, 12, 256)}),
    ("tile_n_fits_instruction", GOOD_SCALE_ROW, {"tile": (128, 40, 128)}),
    ("tile_k_fits_swizzle", GOOD, {"tile": (128, 128, 32)}),
    ("architecture_reads_type", GOOD_2X_FP8, {"arch": "sm80"}),
    ("tile_is_built_in_2x", GOOD_2X, {"tile": (96, 64, 32)}),
    ("promotion_interval_divides", GOOD_FP8, {"tile": (128, 64, 256)}),
    ("cluster_is_portable", GOOD, {"cluster": (4, 4)}),
    ("cluster_is_portable", GOOD, {"cluster": (3, 1)}),
    ("cluster_is_portable", GOOD_CPASYNC, {"cluster": (2, 1)}),
    ("cluster_is_the_launchs", GOOD_CLUSTER, {"cluster": (2, 1)}),
    ("cluster_is_the_launchs", GOOD_WALKED, {"cluster": (1, 2)}),
    ("grouped_kernels_are_pointer_arrays", GOOD_GROUPS, {"scheduler": TileScheduler.SPLIT_K}),
    (
        "grouped_kernels_are_pointer_arrays",
        GOOD_GROUPS,
        {"mainloop": MainloopSchedule.WARP_SPECIALIZED, "scheduler": TileScheduler.GRID},
    ),
    ("grouped_kernels_are_pointer_arrays", GOOD_GROUPS, {"alignment_a": 1, "alignment_b": 1}),
    (
        "grouped_kernels_are_pointer_arrays",
        GOOD_GROUPS,
        {"dtype": "fp8_e4m3.scale_row.group_rows"},
    ),
    ("fused_kernels_leave_by_tma", GOOD_FUSED, {"epilogue": EpilogueSchedule.NO_SMEM}),
    ("fused_kernels_leave_by_tma", GOOD_FUSED, {"scheduler": TileScheduler.STREAM_K}),
    ("fused_kernels_leave_by_tma", GOOD_FUSED, {"alignment_a": 1, "alignment_b": 1}),
    (
        "fused_kernels_leave_by_tma",
        GOOD_FUSED,
        {"mainloop": MainloopSchedule.WARP_SPECIALIZED, "scheduler": TileScheduler.GRID},
    ),
    ("activation_leaves_registers", GOOD_FUSED, {"tile": (128, 256, 64), "swapped": True}),
    ("symmetric_kernels_leave_by_tma", GOOD_SYMMETRIC, {"swapped": True}),
    ("symmetric_kernels_leave_by_tma", GOOD_SYMMETRIC, {"epilogue": EpilogueSchedule.NO_SMEM}),
    ("symmetric_kernels_leave_by_tma", GOOD_SYMMETRIC, {"scheduler": TileScheduler.STREAM_K}),
    ("gated_tile_is_two_halves", GOOD_GATED, {"tile": (128, 176, 64)}),
    ("gated_tile_is_two_halves", GOOD_GATED, {"tile": (128, 192, 128)}),
    ("gated_tile_is_two_halves", GOOD_GATED, {"tile": (128, 160, 64), "cluster": (4, 1)}),
    ("gated_tile_is_two_halves", GOOD_GATED, {"swapped": True}),
    ("gates_leave_registers", GOOD_BACKWARD, {"tile": (128, 192, 64)}),
    ("backward_kernels_are_not_swapped", GOOD_BACKWARD, {"swapped": True}),
    ("tma_stores_whole_vectors", GOOD_FP8_OUTPUT, {"tile": (128, 72, 128)}),
    ("fields_follow_name", GOOD_FP8_OUTPUT, {"alignment_d": 8}),
    ("fields_follow_name", GOOD_FUSED, {"dtype": "bf16.then_bias_gelu"}),
    ("scheduler_suits_grouping", GOOD_CLUSTER, {"scheduler": TileScheduler.GROUPS}),
    ("scheduler_suits_grouping", GOOD_WALKED, {"dtype": "bf16"}),
    ("groups_are_stored_in_16_bits", GOOD_WALKED, {"dtype": "bf16.out_f32.group_rows"}),
    ("gates_have_whole_slabs", GOOD_WALKED_GATED, {"tile": (128, 136, 64), "swapped": False}),
    ("row_gradients_have_whole_slabs", GOOD_WALKED_BACKWARD, {"tile": (128, 96, 64)}),
    ("gradients_of_gates_fit_registers", GOOD_WALKED_BACKWARD, {"tile": (128, 192, 64)}),
    ("groups_are_not_2x", GOOD_2X, {"dtype": "fp16.group_rows", "layout": Layout.TN}),
    ("registers_suffice", GOOD, {"tile": (256, 208, 64)}),
    ("registers_suffice", GOOD_FP8, {"tile": (128, 208, 128)}),
    ("registers_suffice", GOOD_CLUSTER, {"tile": (128, 200, 64)}),
    ("registers_suffice", GOOD_CPASYNC, {"tile": (128, 256, 64)}),
    ("pipeline_is_deep_enough", GOOD, {"stages": 1}),
    ("pipeline_is_double_buffered", GOOD_2X, {"stages": 3}),
    ("shared_memory_suffices", GOOD, {"stages": 8}),
    ("shared_memory_suffices", GOOD_SPLIT_K, {"stages": 13}),  # FP32 is staged
    ("shared_memory_suffices", GOOD_CLUSTER, {"stages": 12}),
    ("k_major_b_fills_swizzle_atoms", GOOD, {"tile": (128, 24, 64)}),
    ("k_major_b_fills_swizzle_atoms", GOOD_TF32, {"tile": (128, 48, 32)}),
    ("alignment_suits_mainloop", GOOD, {"alignment_a": 4, "alignment_b": 4}),
    ("alignment_suits_mainloop", GOOD_PADDED, {"alignment_a": 2, "alignment_b": 2}),
    ("alignment_suits_mainloop", GOOD_SPLIT_K, {"alignment_a": 1, "alignment_b": 1}),
    ("alignment_suits_mainloop", GOOD_CLUSTER, {"alignment_a": 1, "alignment_b": 1}),
    ("alignment_suits_mainloop", GOOD_CPASYNC, {"alignment_a": 1, "alignment_b": 1}),
    ("alignment_is_left_over", GOOD_2X, {"alignment_a": 8, "alignment_b": 8}),
    ("cpasync_threads_cover_tile", GOOD_CPASYNC, {"tile": (64, 48, 64)}),
    ("tf32_is_k_major", GOOD_TF32, {"layout": Layout.NT}),
    ("cpasync_copies_16_bit_and_fp8", GOOD_CPASYNC, {"dtype": "tf32"}),
    ("row_scales_leave_by_tma", GOOD_SCALE_ROW, {"epilogue": EpilogueSchedule.NO_SMEM}),
    ("fields_follow_name", GOOD_SCALE_ROW, {"dtype": "int8.out_bf16"}),
    ("fields_follow_name", GOOD, {"name": "mine"}),
    ("fields_follow_name", GOOD, {"alignment_d": 1}),
    ("fields_follow_name", GOOD_2X, {"swapped": True}),
    ("fields_follow_name", GOOD_PADDED, {"alignment_a": 8, "alignment_b": 8}),
    ("fields_follow_name", GOOD_SPLIT_K, {"scheduler": TileScheduler.PERSISTENT}),
]


@pytest.mark.parametrize(
    "subject",
    [
        GOOD,
        GOOD_FP8,
        GOOD_SPLIT_K,
        GOOD_CLUSTER,
        GOOD_PADDED,
        GOOD_CPASYNC,
        GOOD_2X,
        GOOD_2X_FP8,
        GOOD_TF32,
        GOOD_SCALE_ROW,
        GOOD_GROUPS,
        GOOD_WALKED,
        GOOD_WALKED_GATED,
        GOOD_WALKED_BACKWARD,
        GOOD_FUSED,
        GOOD_BACKWARD,
        GOOD_GATED,
        GOOD_FP8_OUTPUT,
    ],
)
def test_good_kernels_pass(subject: Kernel) -> None:
    assert refusal(subject) is None


@pytest.mark.parametrize(
    ("rule", "subject", "change"), BROKEN, ids=[f"{rule}-{change}" for rule, _, change in BROKEN]
)
def test_rule_refuses(rule: str, subject: Kernel, change: dict[str, Any]) -> None:
    assert rules(subject)[rule](subject) is None
    broken = replace(subject, **change)
    assert rules(subject)[rule](broken)
    assert refusal(broken)


def rules(kernel: Kernel) -> Mapping[str, KernelRule]:
    """Those of the kernel's backend."""
    return BACKENDS[kernel.backend].rules


def test_every_rule_is_tested() -> None:
    assert {rule for rule, _, _ in BROKEN} == {
        rule
        for backend in BACKENDS.values()
        if isinstance(backend, CutlassBackend)
        for rule in backend.rules
    }


FP16_NN: dict[str, Any] = {"dtype": DType.FP16, "layout": Layout.NN}
UNSUITED: list[tuple[str, Kernel, Problem, str]] = [
    ("serves_operation", GOOD, Problem(m=1, n=8, k=8, dtype=DType.FP16), "built for"),
    ("serves_operation", GOOD, Problem(m=8, n=8, k=8, layout=Layout.NT), "built for"),
    ("rows_are_aligned", GOOD, Problem(m=1, n=8, k=12), "rows of A"),
    ("rows_are_aligned", GOOD, Problem(m=1, n=12, k=8), "rows of D"),
    ("rows_are_aligned", GOOD_CPASYNC, Problem(m=64, n=63, k=7, layout=Layout.NT), "rows of B"),
    (
        "grid_is_launchable",
        GOOD_2X,
        Problem(m=7, n=7, k=7, batch=1 << 17, **FP16_NN),
        "exceed the grid",
    ),
    (
        "grid_is_launchable",
        GOOD_CLUSTER,
        Problem(m=1 << 21, n=16, k=4096, dtype=DType.FP8_E4M3),
        "exceed the grid",
    ),
    ("grid_is_launchable", GOOD, Problem(m=1 << 24, n=1 << 24, k=8), "do not fit"),
    (
        "splitting_takes_one_matrix",
        GOOD_SPLIT_K,
        Problem(m=64, n=64, k=4096, batch=2),
        "single matrices",
    ),
    (
        "splitting_takes_one_matrix",
        GOOD_CLUSTER,
        Problem(m=64, n=64, k=4096, batch=2, dtype=DType.FP8_E4M3),
        "single matrices",
    ),
]


@pytest.mark.parametrize(("rule", "subject", "problem", "reason"), UNSUITED)
def test_problem_rule_refuses(rule: str, subject: Kernel, problem: Problem, reason: str) -> None:
    for name, each in legality.PROBLEM_RULES.items():
        assert (each(subject, problem) is None) is (name != rule)
    assert reason in (refusal(subject, problem) or "")


def test_every_problem_rule_is_tested() -> None:
    assert {rule for rule, *_ in UNSUITED} == set(legality.PROBLEM_RULES)


@pytest.mark.parametrize(
    ("subject", "problem"),
    [
        (GOOD, Problem(m=1, n=8, k=8)),
        (GOOD, Problem(m=1, n=8, k=8, batch=1 << 20)),
        (GOOD_SPLIT_K, Problem(m=1, n=8, k=8)),
        (GOOD_CLUSTER, Problem(m=1, n=7, k=16, dtype=DType.FP8_E4M3)),
        (GOOD_PADDED, Problem(m=7, n=7, k=7, batch=1 << 20)),
        (GOOD_2X, Problem(m=7, n=7, k=7, **FP16_NN)),
    ],
)
def test_suited_problems_pass(subject: Kernel, problem: Problem) -> None:
    assert refusal(subject, problem) is None


def test_fp32_partials_take_the_room_of_a_stage() -> None:
    sibling = replace(GOOD_SPLIT_K, scheduler=TileScheduler.PERSISTENT)
    assert footprint.stages(sibling) == footprint.stages(GOOD_SPLIT_K) + 1 == 13
    assert shared_memory_suffices(replace(sibling, stages=13)) is None


def test_precise_fp8_holds_two_accumulators() -> None:
    fast = replace(GOOD_FP8, fast_accumulation=True)
    assert footprint.accumulator_registers(GOOD_FP8) == 2 * footprint.accumulator_registers(fast)


@pytest.mark.parametrize(
    ("n", "k", "stages", "compiles"),  # as nvcc 13.0 and CUTLASS 4.2.0 were seen to
    [
        (8, 32, 5, False),
        (8, 32, 8, True),
        (8, 64, 3, False),
        (8, 64, 4, True),
        (16, 32, 3, False),
        (16, 32, 4, True),
        (16, 64, 3, True),
        (24, 32, 4, False),
        (48, 32, 4, False),
        (160, 32, 3, True),
    ],
)
def test_tf32_needs_four_swizzle_atoms(n: int, k: int, stages: int, compiles: bool) -> None:
    rule = rules(GOOD_TF32)["k_major_b_fills_swizzle_atoms"]
    assert (rule(replace(GOOD_TF32, tile=(64, n, k), stages=stages)) is None) == compiles
