"""Gated kernels: tiles of two halves, in CUTLASS's own mainloops, with the gate in their names."""

from __future__ import annotations

import pytest

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import CutlassKernel, EpilogueSchedule, MainloopSchedule, cutlass
from gemmsmith.core.operation import Epilogue, Operation
from gemmsmith.core.problem import Problem
from tests.support.replacing import replace
from tuner.arch import ARCHITECTURES
from tuner.backends import Level, candidates, kernels, refusal
from tuner.backends.cutlass import footprint
from tuner.backends.cutlass.operation import named
from tuner.backends.registry import BACKENDS
from tuner.backends.unit import unit_source
from tuner.errors import NoLegalCandidate
from tuner.search.cost_model import AnalyticModel

M, N, K = 4096, 8192, 2048
GATED = [each for each in Epilogue if each.is_gated]


def gated(epilogue: str, dtype: str = "bf16", **extents: int) -> Problem:
    operation = Operation.of(dtype, epilogue=epilogue)
    return Problem.of(operation, **{"m": M, "n": N, "k": K, **extents})


@pytest.mark.parametrize("epilogue", GATED)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8_e4m3"])
def test_there_are_kernels_that_pass_the_rules(epilogue: str, dtype: str) -> None:
    problem = gated(epilogue, dtype)
    found = [cutlass(each) for each in kernels(problem)]
    assert len(found) >= 40
    for each in found:
        assert refusal(each, problem) is None
        assert f"_then_{epilogue}" in each.name
        assert each.tile[1] % 32 == 0
        assert footprint.stages(each) >= 2
    assert {each.mainloop for each in found} == {
        MainloopSchedule.PINGPONG,
        MainloopSchedule.COOPERATIVE,
    }
    assert {(1, 1), (2, 1), (1, 2)} <= {each.cluster for each in found}
    tiles = {(*each.tile[:2], each.mainloop) for each in found}
    assert {
        (128, 192, MainloopSchedule.PINGPONG),
        (128, 128, MainloopSchedule.PINGPONG),
        (128, 256, MainloopSchedule.COOPERATIVE),
        (256, 128, MainloopSchedule.COOPERATIVE),
    } <= tiles


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
        return min(AnalyticModel().predict(problem, candidates(problem, h200), h200))

    plain = time(Problem(m=M, n=N, k=K))
    pass_us = 1.5 * M * N * 2 / 4e6
    for epilogue in ("silu_gate", "silu_gate_aux"):
        assert plain * 0.9 < time(gated(epilogue)) < plain + pass_us


def test_one_backend_has_them() -> None:
    operation = gated("silu_gate").operation
    for backend in BACKENDS.values():
        for arch in ARCHITECTURES.values():
            expected = backend.name == "cutlass3x" and arch.name == "sm90"
            assert backend.supports(operation, arch) is expected


@pytest.mark.parametrize(("n", "k"), [(8200, 2048), (8192, 2044)])
def test_rows_that_tma_cannot_move_are_left_to_torch(n: int, k: int) -> None:
    with pytest.raises(NoLegalCandidate):
        kernels(gated("silu_gate", n=n, k=k))


def test_the_list_of_all_is_wider() -> None:
    assert len(kernels(gated("silu_gate"), level=Level.FULL)) > 2 * len(kernels(gated("silu_gate")))


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
