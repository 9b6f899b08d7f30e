"""Grouped products with a gate, forward and backward: our own kernels, by rows, in 16 bits, and no
others.
"""

from __future__ import annotations

import pytest

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import Backend, MainloopSchedule, TileScheduler, cutlass
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import Problem
from gemmsmith.errors import InvalidProblem
from tests.support.epilogues import BACKWARD, GATED
from tests.support.replacing import replace
from tuner.backends import Level, candidates, kernels, refusal
from tuner.backends.cutlass import footprint
from tuner.backends.cutlass.operation import named
from tuner.backends.unit import unit_source
from tuner.errors import NoLegalCandidate

BACKWARD_GATES = [each for each in BACKWARD if each.backward and each.backward.gated]


def gated(epilogue: str, dtype: str = "bf16", layout: str = "tn", **extents: int) -> Problem:
    operation = Operation.of(dtype, layout, grouping="rows", epilogue=epilogue)
    return Problem.of(operation, **{"m": 16384, "n": 1536, "k": 2048, "batch": 128, **extents})


@pytest.mark.parametrize("epilogue", [*GATED, *BACKWARD_GATES])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_there_are_kernels_that_pass_the_rules(epilogue: str, dtype: str) -> None:
    problem = gated(epilogue, dtype)
    found = [cutlass(each) for each in kernels(problem)]
    assert {each.backend for each in found} == {Backend.CUTE}
    assert {each.scheduler for each in found} == {TileScheduler.GROUPS}
    assert {each.swapped for each in found} == {True, False}
    assert {each.mainloop for each in found} == {
        MainloopSchedule.WARP_SPECIALIZED,
        MainloopSchedule.PINGPONG,
        MainloopSchedule.COOPERATIVE,
    }
    for each in found:
        assert refusal(each, problem) is None
        assert each.name.endswith(f"_groups_then_{epilogue}")
        assert footprint.stages(each) >= 2
        header = "grouped_backward" if problem.operation.epilogue.backward else "grouped_gate"
        assert f"gemmsmith/{header}.hpp" in unit_source([each])
    assert len({each.name for each in found}) == len(found)
    assert set(found) <= set(kernels(problem, level=Level.FULL))


def test_a_tile_has_whole_slabs_of_both() -> None:
    plain = next(each for each in map(cutlass, kernels(gated("silu_gate"))) if not each.swapped)
    narrow = named(replace(plain, tile=(plain.tile[0], 136, plain.tile[2])))
    assert "multiple of 16 columns" in str(refusal(narrow))


def test_a_backward_gate_reads_weights_of_both_orders() -> None:
    for layout in ("tn", "tt"):
        listed = kernels(gated("dsilu_gate_act", layout=layout, n=768), level=Level.FULL)
        assert max(footprint.accumulator_registers(cutlass(each)) for each in listed) == 128
        columns = {cutlass(each).tile[0 if each.swapped else 1] for each in map(cutlass, listed)}
        assert columns == {64, 128, 192, 256}


def test_d_needs_whole_vectors(h200: DeviceModel) -> None:
    assert candidates(gated("silu_gate", n=1552), h200)
    with pytest.raises(NoLegalCandidate, match="alignment"):
        kernels(gated("silu_gate", n=1544))


@pytest.mark.parametrize(
    ("dtype", "grouping", "epilogue"),
    [
        ("bf16", "depth", "silu_gate"),
        ("bf16", "rows", "bias"),
        ("bf16", "rows", "dsilu"),
        ("fp8_e4m3", "rows", "silu_gate"),
    ],
)
def test_there_is_no_other_epilogue_of_groups(dtype: str, grouping: str, epilogue: str) -> None:
    layout = "nt" if grouping == "depth" else "tn"
    scaling = "row" if dtype == "fp8_e4m3" else None
    with pytest.raises(InvalidProblem, match=r"gates of bf16 and fp16 by rows|needs scaling"):
        Operation.of(dtype, layout, grouping=grouping, epilogue=epilogue, scaling=scaling)


def test_extents_and_bytes() -> None:
    problem = gated("silu_gate_aux", n=1536)
    assert problem.columns == 768
    assert problem.matrices == (1, 128, 3)
    assert problem.operand_bytes == 2 * (16384 * 2048 + 128 * 1536 * 2048 + 3 * 16384 * 768)
    problem = gated("dsilu_gate_act", layout="tt", n=768, k=2048)
    assert (problem.columns, problem.matrices) == (768, (1, 128, 3))
    assert problem.operand_bytes == 2 * (16384 * 2048 + 128 * 768 * 2048 + 5 * 16384 * 768)
    with pytest.raises(InvalidProblem, match="even n"):
        gated("silu_gate", n=1537)
