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
from tests.support.epilogues import FUSED
from tests.support.replacing import replace
from tuner.arch import ARCHITECTURES
from tuner.backends import Level, candidates, kernels, refusal
from tuner.backends.cutlass import footprint
from tuner.backends.cutlass.operation import kernel, named
from tuner.backends.registry import BACKENDS
from tuner.backends.unit import unit_source
from tuner.errors import NoLegalCandidate
from tuner.search.cost_model import AnalyticModel

M, N, K = 4096, 3072, 768


def fused(epilogue: str, dtype: str = "bf16", layout: str = "tn", **extents: int) -> Problem:
    operation = Operation.of(dtype, layout, epilogue=epilogue)
    return Problem.of(operation, **{"m": M, "n": N, "k": K, **extents})


@pytest.mark.parametrize("epilogue", FUSED)
@pytest.mark.parametrize(
    ("dtype", "layout"), [("bf16", "tn"), ("bf16", "tt"), ("fp16", "tn"), ("fp8_e4m3", "tn")]
)
def test_there_are_kernels_that_pass_the_rules(epilogue: str, dtype: str, layout: str) -> None:
    problem = fused(epilogue, dtype, layout)
    found = [cutlass(each) for each in kernels(problem)]
    assert len(found) >= 40
    for each in found:
        assert refusal(each, problem) is None
        assert f"_then_{epilogue}" in each.name
        assert each.epilogue is EpilogueSchedule.TMA
        assert each.scheduler is TileScheduler.PERSISTENT
    assert {each.mainloop for each in found} == {
        MainloopSchedule.PINGPONG,
        MainloopSchedule.COOPERATIVE,
    }
    assert {each.swapped for each in found} == {True, False}
    assert len({each.name for each in found}) == len(found)


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
        return min(AnalyticModel().predict(problem, candidates(problem, h200), h200))

    plain = times("none")
    pass_us = 2 * M * N * 2 / 4e6
    for epilogue in ("bias", "bias_gelu_tanh", "bias_gelu_tanh_aux", "residual"):
        assert plain * 0.9 < times(epilogue) < plain + pass_us


def test_only_the_backend_with_visitor_trees_has_them() -> None:
    operation = fused("bias").operation
    for backend in BACKENDS.values():
        for arch in ARCHITECTURES.values():
            expected = backend.name == "cutlass3x" and arch.name == "sm90"
            assert backend.supports(operation, arch) is expected


@pytest.mark.parametrize(("n", "k"), [(3076, 768), (3072, 764)])
def test_rows_that_tma_cannot_move_are_left_to_torch(n: int, k: int) -> None:
    with pytest.raises(NoLegalCandidate):
        kernels(fused("bias", n=n, k=k))


def test_the_list_of_all_is_wider() -> None:
    problem = fused("bias_residual")
    assert len(kernels(problem, level=Level.FULL)) > 10 * len(kernels(problem))


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
