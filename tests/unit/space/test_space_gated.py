"""Gated kernels: tiles of two halves, in CUTLASS's own mainloops, with the gate in their names."""

from __future__ import annotations

import pytest

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import CutlassKernel, EpilogueSchedule, MainloopSchedule, cutlass
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import Problem
from tests.support.epilogues import GATED
from tests.support.replacing import replace
from tuner.backends import candidates, kernels, refusal
from tuner.backends.cutlass import footprint
from tuner.backends.cutlass.operation import named
from tuner.backends.unit import unit_source
from tuner.search.cost_model import predicted_us

M, N, K = 4096, 8192, 2048


def gated(epilogue: str, dtype: str = "bf16", **extents: int) -> Problem:
    operation = Operation.of(dtype, epilogue=epilogue)
    return Problem.of(operation, **{"m": M, "n": N, "k": K, **extents})


@pytest.mark.parametrize("epilogue", GATED)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8_e4m3"])
def test_tiles_and_clusters_of_every_kind_are_offered(epilogue: str, dtype: str) -> None:
    offered = [cutlass(each) for each in kernels(gated(epilogue, dtype))]
    assert all(each.tile[1] % 32 == 0 for each in offered)
    assert {(1, 1), (2, 1), (1, 2)} <= {each.cluster for each in offered}
    assert {
        (128, 192, MainloopSchedule.PINGPONG),
        (128, 128, MainloopSchedule.PINGPONG),
        (128, 256, MainloopSchedule.COOPERATIVE),
        (256, 128, MainloopSchedule.COOPERATIVE),
    } <= {(*each.tile[:2], each.mainloop) for each in offered}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"swapped": True}, "along the kernel's N"),
        ({"tile": (128, 208, 64)}, "multiple of 32"),
        ({"tile": (128, 96, 64), "cluster": (4, 1)}, "multiple of 64"),
        ({"tile": (64, 64, 128)}, "tile K of 128 bytes"),
        ({"epilogue": EpilogueSchedule.NO_SMEM}, "store by TMA"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(change: dict[str, object], reason: str) -> None:
    known: CutlassKernel = cutlass(kernels(gated("silu_gate"))[0])
    assert reason in (refusal(named(replace(known, **change))) or "")


def test_buffers_leave_the_mainloop_its_stages() -> None:
    found = {
        (each.tile[:2], each.mainloop): each
        for each in map(cutlass, kernels(gated("silu_gate_aux")))
    }
    for tile, mainloop, buffers, stages in (
        ((128, 192), MainloopSchedule.PINGPONG, 2 * 64 * 32 * 2, 5),
        ((128, 128), MainloopSchedule.PINGPONG, 2 * 64 * 64 * 2, 6),
        ((128, 256), MainloopSchedule.COOPERATIVE, 4 * 64 * 64 * 2, 4),
        ((256, 128), MainloopSchedule.COOPERATIVE, 4 * 64 * 64 * 2, 4),
    ):
        each = found[tile, mainloop]
        assert footprint.epilogue_bytes(each) == buffers
        assert footprint.stages(each) == stages


def test_what_gates_costs_less_than_a_pass_of_its_own(h200: DeviceModel) -> None:
    def time(problem: Problem) -> float:
        return min(predicted_us(problem, candidates(problem, h200), h200))

    plain = time(Problem(m=M, n=N, k=K))
    pass_us = 1.5 * M * N * 2 / 4e6
    for epilogue in ("silu_gate", "silu_gate_aux"):
        assert plain * 0.9 < time(gated(epilogue)) < plain + pass_us


def test_the_source_is_cutlasss_mainloop_and_our_epilogue() -> None:
    found = next(
        each
        for each in map(cutlass, kernels(gated("gelu_tanh_gate_aux", "fp8_e4m3")))
        if each.tile[:2] == (128, 256) and each.fast_accumulation
    )
    source = unit_source([found])
    assert '#include "gemmsmith/gated3x.hpp"' in source
    assert "gemmsmith::activation::gelu_tanh, true, true, false, cutlass::bfloat16_t>" in source
    assert "gemmsmith::GatedMainloop<" in source
    assert "cutlass::gemm::KernelTmaWarpSpecializedCooperativeFP8FastAccum" in source
    assert f"entry<gemmsmith::GatedGemm3x<{found.name}, " in source
