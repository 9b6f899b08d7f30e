"""Kernels with an FP8 output: those of the 16-bit one, in names and text of their own."""

from __future__ import annotations

import pytest

from gemmsmith.core.kernel import EpilogueSchedule, MainloopSchedule, cutlass
from gemmsmith.core.operation import Epilogue, Operation
from gemmsmith.core.problem import Problem
from tests.support.epilogues import STORED
from tests.support.replacing import replace
from tuner.backends import kernels, refusal
from tuner.backends.cutlass import footprint
from tuner.backends.cutlass.operation import named
from tuner.backends.unit import unit_source


def stored(epilogue: str, **extents: int) -> Problem:
    operation = Operation.of("fp8_e4m3", out="e4m3", epilogue=epilogue)
    return Problem.of(operation, **{"m": 4096, "n": 3072, "k": 768, **extents})


@pytest.mark.parametrize("epilogue", STORED)
def test_kernels_are_named_apart_from_those_of_16_bits(epilogue: Epilogue) -> None:
    problem = stored(epilogue)
    offered = [cutlass(each) for each in kernels(problem)]
    wide = [cutlass(each) for each in kernels(replace(problem, dtype=f"fp8_e4m3.then_{epilogue}"))]
    assert len({each.name for each in (*offered, *wide)}) == len(offered) + len(wide)
    for each in offered:
        assert f"_void_e4m3_{each.tile[0]}x" in each.name
        assert each.alignment_d == 16
    assert {each.fast_accumulation for each in offered} == {True, False}


def test_rows_of_d_are_of_16_bytes() -> None:
    for problem in (stored("bias", n=16), stored("silu_gate", n=32)):
        assert kernels(problem)
    known = cutlass(kernels(stored("bias"))[0])
    changed = replace(known, epilogue=EpilogueSchedule.NO_SMEM, alignment_d=1)
    assert "store by TMA" in (refusal(named(changed)) or "")


def test_rows_of_a_part_of_d_are_of_16_bytes() -> None:
    """A tile of 24 columns leaves as a whole; swapped, a part's rows run along the tile's M."""
    found = {
        each.swapped: each
        for each in map(cutlass, kernels(stored("bias")))
        if each.mainloop is MainloopSchedule.PINGPONG
    }
    narrow = {swapped: replace(each, tile=(64, 24, 128)) for swapped, each in found.items()}
    assert "does not store rows of 24 bytes" in (refusal(named(narrow[False])) or "")
    assert refusal(named(narrow[True])) is None


def test_parts_of_the_epilogue_are_as_cutlass_chooses_them() -> None:
    """64 columns of ping-pong kernels where they divide the tile; of gates a box of 128 bytes."""
    gated = {
        each.tile[:2]: footprint.epilogue_tile(each)
        for each in map(cutlass, kernels(stored("silu_gate")))
    }
    pingpong = {
        each.tile[:2]: footprint.epilogue_tile(each)
        for each in map(cutlass, kernels(stored("bias")))
        if each.mainloop is MainloopSchedule.PINGPONG
    }
    assert (pingpong[64, 128], pingpong[128, 96]) == ((64, 64), (64, 32))
    assert (gated[128, 256], gated[128, 192], gated[64, 64]) == ((64, 128), (64, 32), (64, 32))


def test_the_text_holds_the_epilogue_as_an_expression() -> None:
    kernel = cutlass(kernels(stored("bias_gelu"))[0])
    text = unit_source([kernel]).replace("gemmsmith::", "")
    swapped = "true" if kernel.swapped else "false"
    assert (
        "Fused<Multiply<OutputScale, StoreAmax<Apply<activation::gelu, MultiplyAdd<ScaledAlpha, "
        f"Accumulator, Bias<cutlass::bfloat16_t>>>>>, {swapped}, cutlass::float_e4m3_t, float>"
        in text
    )


def test_gated_kernels_store_fp8() -> None:
    fast, precise = (
        next(
            unit_source([each])
            for each in map(cutlass, kernels(stored("silu_gate")))
            if each.fast_accumulation is fast
        )
        for fast in (True, False)
    )
    for text in (fast, precise):
        assert '#include "gemmsmith/gated3x.hpp"' in text
        assert "cutlass::float_e4m3_t>;" in text
    assert "PromotingMainloop" in precise
    assert "PromotingMainloop" not in fast
