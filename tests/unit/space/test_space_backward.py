"""Kernels with backward epilogues: which there are, what they occupy, and their source."""

from __future__ import annotations

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import EpilogueSchedule, MainloopSchedule, TileScheduler, cutlass
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import Problem
from tests.support.replacing import replace
from tuner.backends import Level, candidates, kernels, refusal
from tuner.backends.cutlass import footprint
from tuner.backends.cutlass.operation import kernel, named
from tuner.backends.unit import unit_source
from tuner.search.cost_model import predicted_us

M, N, K = 4096, 3072, 768


def problem(epilogue: str, dtype: str = "bf16", layout: str = "tt") -> Problem:
    return Problem.of(Operation.of(dtype, layout, epilogue=epilogue), M, N, K)


def test_swapped_ones_are_refused() -> None:
    found = cutlass(kernels(problem("dgelu"))[0])
    assert "not swapped" in str(refusal(named(replace(found, swapped=True))))


def test_gates_leave_no_room_for_the_widest_tiles() -> None:
    for epilogue, widest in (("dgelu_act", 192), ("dsilu_gate", 192), ("dsilu_gate_act", 176)):
        listed = kernels(problem(epilogue), level=Level.FULL)
        assert max(footprint.accumulator_registers(cutlass(each)) for each in listed) == widest


def test_each_matrix_has_buffers_of_its_own() -> None:
    plain = kernel(
        operation=Operation.of("bf16", "tt"),
        tile=(128, 128, 64),
        mainloop=MainloopSchedule.COOPERATIVE,
        epilogue=EpilogueSchedule.TMA,
        scheduler=TileScheduler.PERSISTENT,
        alignment=8,
    )
    staged = {
        epilogue: footprint.epilogue_bytes(named(replace(plain, dtype=problem(epilogue).dtype)))
        for epilogue in ("dgelu", "dgelu_act", "dgelu_bgrad", "dsilu_gate", "dsilu_gate_act")
    }
    part = 128 * 32 * 2
    assert staged == {
        "dgelu": 4 * part,  # D takes aux's place
        "dgelu_act": 6 * part,
        "dgelu_bgrad": 4 * part,
        "dsilu_gate": (4 + 4 + 2) * part,  # gate, up and up's gradient
        "dsilu_gate_act": (4 + 4 + 2 + 2) * part,
    }


def test_what_is_fused_costs_something_and_less_than_passes_of_its_own(h200: DeviceModel) -> None:
    def times(epilogue: str) -> float:
        asked = problem(epilogue)
        return min(predicted_us(asked, candidates(asked, h200), h200))

    one = M * N * 2 / 4e6
    plain = times("none")
    assert plain * 0.9 < times("dgelu_tanh") < plain + 3 * one
    assert times("dgelu_tanh") < times("dgelu_tanh_act")
    assert times("dsilu_gate") < plain + 7 * one


def test_the_source_names_the_whole_epilogue() -> None:
    source = unit_source([kernels(problem("dgelu_tanh_gate_act"))[0]])
    assert '#include "gemmsmith/backward3x.hpp"' in source
    assert "gemmsmith::Backward<gemmsmith::slope::gelu_tanh, true, true, false," in source
    assert "BackwardGemm3x<" in source
    source = unit_source([kernels(problem("drelu2_bgrad"))[0]])
    assert "gemmsmith::Backward<gemmsmith::slope::relu2, false, false, true," in source
