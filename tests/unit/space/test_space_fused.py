"""Fused kernels: those of the bare product that leave by TMA, with the epilogue in their names."""

from __future__ import annotations

import pytest

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import (
    EpilogueSchedule,
    Kernel,
    MainloopSchedule,
    TileScheduler,
    cutlass,
)
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import Problem
from tests.support.replacing import replace
from tuner.backends import candidates, kernels, refusal
from tuner.backends.cutlass import footprint
from tuner.backends.cutlass.operation import kernel, named
from tuner.backends.unit import unit_source
from tuner.search.cost_model import predicted_us

M, N, K = 4096, 3072, 768


def fused(epilogue: str, dtype: str = "bf16", layout: str = "tn", **extents: int) -> Problem:
    operation = Operation.of(dtype, layout, epilogue=epilogue)
    return Problem.of(operation, **{"m": M, "n": N, "k": K, **extents})


def test_the_curated_ones_are_a_part_of_the_bare_products() -> None:
    def choices(found: Kernel) -> tuple[object, ...]:
        known = cutlass(found)
        return (known.tile, known.cluster, known.mainloop, known.scheduler, known.swapped)

    plain = {choices(each) for each in kernels(Problem(m=M, n=N, k=K))}
    assert {choices(each) for each in kernels(fused("bias_gelu"))} < plain


def test_a_longer_pipeline_is_left_where_nothing_is_loaded_or_stored_besides(
    h200: DeviceModel,
) -> None:
    plain = kernel(
        operation=Operation.of("bf16"),
        tile=(128, 256, 64),
        mainloop=MainloopSchedule.COOPERATIVE,
        epilogue=EpilogueSchedule.TMA,
        scheduler=TileScheduler.PERSISTENT,
        alignment=8,
    )
    staged = {
        epilogue: footprint.epilogue_bytes(
            named(replace(plain, dtype=fused(epilogue).dtype))  # type: ignore[arg-type]
        )
        for epilogue in ("residual", "bias", "bias_gelu_aux")
    }
    part = 128 * 32 * 2
    assert staged == {"residual": 4 * part, "bias": 2 * part, "bias_gelu_aux": 4 * part}
    assert candidates(fused("bias_gelu_aux"), h200)


def test_kernels_of_other_epilogues_take_no_problem_of_this_one() -> None:
    for epilogue in ("none", "bias_gelu_aux", "residual"):
        problem = fused(epilogue)
        for other in ("none", "bias_gelu", "bias"):
            if other != epilogue:
                assert refusal(kernels(fused(other))[0], problem)


def test_what_is_fused_costs_something_and_less_than_a_pass_of_its_own(h200: DeviceModel) -> None:
    def times(epilogue: str) -> float:
        problem = fused(epilogue)
        return min(predicted_us(problem, candidates(problem, h200), h200))

    plain = times("none")
    pass_us = 2 * M * N * 2 / 4e6
    for epilogue in ("bias", "bias_gelu_tanh", "bias_gelu_tanh_aux", "residual"):
        assert plain * 0.9 < times(epilogue) < plain + pass_us


LINEAR = "MultiplyAdd<Alpha, Accumulator, Bias<D>>"
SCALED = "MultiplyAdd<ScaledAlpha, Accumulator, Bias<D>>"


@pytest.mark.parametrize(
    ("epilogue", "dtype", "expression"),
    [
        ("bias", "bf16", LINEAR),
        ("bias_gelu", "fp16", f"Apply<activation::gelu, {LINEAR}>"),
        ("bias_silu_aux", "fp8_e4m3", f"Apply<activation::silu, Store<{SCALED}>>"),
        ("residual", "bf16", "Add<Residual<D>, Multiply<Alpha, Accumulator>>"),
        ("bias_residual", "bf16", f"Add<Residual<D>, {LINEAR}>"),
        (
            "scale_residual",
            "bf16",
            "MultiplyAdd<ColumnScale<D>, Multiply<Alpha, Accumulator>, Residual<D>>",
        ),
        (
            "bias_scale_residual_aux",
            "bf16",
            f"MultiplyAdd<ColumnScale<D>, Store<{LINEAR}>, Residual<D>>",
        ),
        ("row_scale", "fp8_e4m3", "Multiply<RowScale, Multiply<ScaledAlpha, Accumulator>>"),
        (
            "row_scale_bias",
            "fp16",
            "MultiplyAdd<RowScale, Multiply<Alpha, Accumulator>, Bias<D>>",
        ),
    ],
)
def test_the_source_holds_the_epilogue_as_an_expression(
    epilogue: str, dtype: str, expression: str
) -> None:
    d = {"bf16": "cutlass::bfloat16_t", "fp16": "cutlass::half_t"}
    for swapped in (False, True):
        kernel = next(
            kernel
            for kernel in kernels(fused(epilogue, dtype))
            if cutlass(kernel).swapped is swapped
        )
        source = unit_source([kernel])
        assert '#include "gemmsmith/fused3x.hpp"' in source
        assert f'("{kernel.name}")' in source
        assert "FusedGemm3x<" in source
        expected = expression.replace("D>", f"{d.get(dtype, d['bf16'])}>")
        text = source.replace("gemmsmith::", "")
        assert f"Fused<{expected}, {str(swapped).lower()}, " in text


def test_a_bare_product_has_no_expression() -> None:
    assert "fused3x" not in unit_source([kernels(Problem(m=M, n=N, k=K))[0]])
