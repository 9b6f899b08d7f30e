"""Each rule refuses the kernel that breaks it, and the legal space passes them all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gemmsmith.kernel import (
    Backend,
    EpilogueSchedule,
    Kernel,
    MainloopSchedule,
    TileScheduler,
)
from gemmsmith.problem import DType, Layout, Problem
from tuner.space import footprint, legality
from tuner.space.operation import kernel, named

GOOD = kernel(
    dtype=DType.BF16,
    layout=Layout.TN,
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
    dtype=DType.BF16,
    layout=Layout.NT,
    tile=(64, 64, 64),
    mainloop=MainloopSchedule.CPASYNC_WARP_SPECIALIZED,
    epilogue=EpilogueSchedule.NO_SMEM,
    scheduler=TileScheduler.GRID,
    alignment=2,
)
GOOD_2X = kernel(
    dtype=DType.FP16,
    layout=Layout.NN,
    tile=(128, 64, 32),
    stages=2,
    mainloop=MainloopSchedule.MULTISTAGE,
    epilogue=EpilogueSchedule.THREADBLOCK,
    scheduler=TileScheduler.GRID,
    alignment=1,
)

BROKEN: list[tuple[str, Kernel, dict[str, Any]]] = [
    ("architecture_is_known", GOOD, {"arch": "sm75"}),
    ("fp8_is_k_major", GOOD_FP8, {"layout": Layout.NT}),
    ("fast_accumulation_is_fp8", GOOD, {"fast_accumulation": True}),
    ("backend_matches_mainloop", GOOD, {"backend": Backend.CUTLASS2X}),
    ("scheduler_matches_mainloop", GOOD, {"scheduler": TileScheduler.GRID}),
    ("epilogue_matches_mainloop", GOOD_CPASYNC, {"epilogue": EpilogueSchedule.TMA}),
    ("tile_m_is_whole_warpgroups", GOOD, {"tile": (64, 128, 64)}),
    ("tile_n_fits_instruction", GOOD, {"tile": (128, 264, 64)}),
    ("tile_k_fits_swizzle", GOOD, {"tile": (128, 128, 32)}),
    ("tile_is_built_in_2x", GOOD_2X, {"tile": (96, 64, 32)}),
    ("promotion_interval_divides", GOOD_FP8, {"tile": (128, 64, 256)}),
    ("cluster_is_portable", GOOD, {"cluster": (4, 4)}),
    ("cluster_is_portable", GOOD, {"cluster": (3, 1)}),
    ("cluster_is_portable", GOOD_CPASYNC, {"cluster": (2, 1)}),
    ("registers_suffice", GOOD, {"tile": (256, 208, 64)}),
    ("registers_suffice", GOOD_FP8, {"tile": (128, 208, 128)}),
    ("registers_suffice", GOOD_CPASYNC, {"tile": (128, 256, 64)}),
    ("pipeline_is_deep_enough", GOOD, {"stages": 1}),
    ("pipeline_is_deep_enough", GOOD_2X, {"stages": 3}),
    ("shared_memory_suffices", GOOD, {"stages": 8}),
    ("k_major_b_fills_swizzle_atoms", GOOD, {"tile": (128, 24, 64)}),
    ("alignment_suits_mainloop", GOOD, {"alignment_a": 4, "alignment_b": 4}),
    ("alignment_suits_mainloop", GOOD_CPASYNC, {"alignment_a": 1, "alignment_b": 1}),
    ("alignment_suits_mainloop", GOOD_2X, {"alignment_a": 8, "alignment_b": 8}),
    ("cpasync_threads_cover_tile", GOOD_CPASYNC, {"tile": (64, 48, 64)}),
    ("fields_follow_name", GOOD, {"name": "mine"}),
    ("fields_follow_name", GOOD, {"alignment_d": 1}),
    ("fields_follow_name", GOOD_2X, {"swapped": True}),
]


@pytest.mark.parametrize("subject", [GOOD, GOOD_FP8, GOOD_CPASYNC, GOOD_2X])
def test_good_kernels_pass(subject: Kernel) -> None:
    assert legality.refusal(subject) is None


@pytest.mark.parametrize(
    ("rule", "subject", "change"), BROKEN, ids=[f"{rule}-{change}" for rule, _, change in BROKEN]
)
def test_rule_refuses(rule: str, subject: Kernel, change: dict[str, Any]) -> None:
    assert legality.RULES[rule](subject) is None
    broken = replace(subject, **change)
    assert legality.RULES[rule](broken)
    assert legality.refusal(broken)


def test_every_rule_is_tested() -> None:
    assert {rule for rule, _, _ in BROKEN} == set(legality.RULES)


@pytest.mark.parametrize(
    ("subject", "problem", "reason"),
    [
        (GOOD, Problem(m=1, n=8, k=8), None),
        (GOOD, Problem(m=1, n=8, k=8, dtype=DType.FP16), "built for"),
        (GOOD, Problem(m=1, n=8, k=8, layout=Layout.NT), "built for"),
        (GOOD, Problem(m=1, n=8, k=12), "rows of A"),
        (GOOD, Problem(m=1, n=12, k=8), "rows of D"),
        (GOOD_CPASYNC, Problem(m=64, n=63, k=7, layout=Layout.NT), "rows of B"),
        (GOOD_2X, Problem(m=7, n=7, k=7, dtype=DType.FP16, layout=Layout.NN), None),
        (
            GOOD_2X,
            Problem(m=7, n=7, k=7, batch=1 << 17, dtype=DType.FP16, layout=Layout.NN),
            "exceed the grid",
        ),
    ],
)
def test_problem_rules(subject: Kernel, problem: Problem, reason: str | None) -> None:
    refusal = legality.refusal(subject, problem)
    assert refusal is None if reason is None else reason in (refusal or "")


def test_precise_fp8_holds_two_accumulators() -> None:
    fast = replace(GOOD_FP8, fast_accumulation=True)
    assert footprint.accumulator_registers(GOOD_FP8) == 2 * footprint.accumulator_registers(fast)
