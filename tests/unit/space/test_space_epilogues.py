"""Kernels of products with an epilogue, of every kind: those that exist, and when none does.

Forward ones are those of the bare product that leave by TMA, with the epilogue in their names.
Gated ones have tiles of two halves, in CUTLASS's own mainloops.
"""

from __future__ import annotations

import pytest

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import (
    CutlassKernel,
    EpilogueSchedule,
    Kernel,
    MainloopSchedule,
    TileScheduler,
    cutlass,
)
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import Problem
from tests.support.epilogues import BACKWARD, FUSED, GATED, STORED
from tests.support.replacing import replace
from tuner.arch import ARCHITECTURES
from tuner.backends import Level, candidates, kernels, refusal
from tuner.backends.cutlass import footprint
from tuner.backends.cutlass.operation import kernel, named
from tuner.backends.registry import BACKENDS
from tuner.backends.unit import unit_source
from tuner.errors import NoLegalCandidate
from tuner.search.cost_model import predicted_us

M, N, K = 4096, 3072, 768

FORWARD = (("bf16", "tn"), ("bf16", "tt"), ("fp16", "tn"), ("fp8_e4m3", "tn"))
OPERATIONS = [
    *(Operation.of(*kind, epilogue=epilogue) for epilogue in FUSED for kind in FORWARD),
    *(
        Operation.of(dtype, epilogue=epilogue)
        for epilogue in GATED
        for dtype in ("bf16", "fp16", "fp8_e4m3")
    ),
    *(
        Operation.of(*kind, epilogue=epilogue)
        for epilogue in BACKWARD
        for kind in (("bf16", "tt"), ("fp16", "tt"), ("bf16", "tn"))
    ),
    *(Operation.of("fp8_e4m3", out="e4m3", epilogue=epilogue) for epilogue in STORED),
]


def problem(operation: Operation | str, n: int = N, k: int = K) -> Problem:
    known = operation if isinstance(operation, Operation) else Operation.of(operation)
    return Problem.of(known, M, n, k)


def fused(epilogue: str, dtype: str = "bf16", layout: str = "tn") -> Problem:
    return problem(Operation.of(dtype, layout, epilogue=epilogue))


def gated(epilogue: str, dtype: str = "bf16") -> Problem:
    return problem(Operation.of(dtype, epilogue=epilogue), 8192, 2048)


def fastest_us(problem: Problem, device: DeviceModel) -> float:
    return min(predicted_us(problem, candidates(problem, device), device))


def staged(layout: str, *epilogues: str) -> dict[str, int]:
    """Bytes of shared memory of each epilogue, with a tile of 128 rows."""
    plain = kernel(
        operation=Operation.of("bf16", layout),
        tile=(128, 256 if layout == "tn" else 128, 64),
        mainloop=MainloopSchedule.COOPERATIVE,
        epilogue=EpilogueSchedule.TMA,
        scheduler=TileScheduler.PERSISTENT,
        alignment=8,
    )
    return {
        epilogue: footprint.epilogue_bytes(
            named(replace(plain, dtype=fused(epilogue, layout=layout).dtype))  # type: ignore[arg-type]
        )
        for epilogue in epilogues
    }


@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_there_are_kernels_that_pass_the_rules(operation: Operation) -> None:
    epilogue, asked = operation.epilogue, problem(operation)
    offered = [cutlass(each) for each in kernels(asked)]
    assert len(offered) >= (15 if epilogue.backward else 40)
    for member in offered:
        assert refusal(member, asked) is None
        assert member.name.endswith(f"_then_{epilogue}")
        assert member.epilogue is EpilogueSchedule.TMA
        assert member.scheduler is TileScheduler.PERSISTENT
        assert footprint.stages(member) >= 2
    assert {member.mainloop for member in offered} == {
        MainloopSchedule.PINGPONG,
        MainloopSchedule.COOPERATIVE,
    }
    can_swap = epilogue.backward is None and not epilogue.is_gated
    assert {member.swapped for member in offered} == ({True, False} if can_swap else {False})
    assert len({member.name for member in offered}) == len(offered)


@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_one_backend_of_one_architecture_has_them(operation: Operation) -> None:
    for backend in BACKENDS.values():
        for arch in ARCHITECTURES.values():
            expected = backend.name == "cutlass3x" and arch.name == "sm90"
            assert backend.supports(operation, arch) is expected


@pytest.mark.parametrize(
    ("dtype", "n", "k"),
    [
        ("bf16.then_bias", 3076, 768),
        ("bf16.then_bias", 3072, 764),
        ("bf16.then_silu_gate", 8200, 2048),
        ("bf16.then_silu_gate", 8192, 2044),
        ("fp8_e4m3.out_e4m3.then_bias", 3080, 768),
        ("fp8_e4m3.out_e4m3.then_silu_gate", 3088, 768),
    ],
)
def test_rows_that_tma_cannot_move_are_left_to_torch(dtype: str, n: int, k: int) -> None:
    with pytest.raises(NoLegalCandidate, match="alignment"):
        kernels(problem(dtype, n, k))


@pytest.mark.parametrize(
    ("dtype", "layout", "times"),
    [
        ("bf16.then_bias_residual", "tn", 10),
        ("bf16.then_silu_gate", "tn", 2),
        ("bf16.then_dsilu_gate_act", "tt", 5),
        # One of each kind: activations that need as many registers have the same kernels.
        ("fp8_e4m3.out_e4m3.then_bias_relu2", "tn", 1),
        ("fp8_e4m3.out_e4m3.then_bias_gelu", "tn", 1),
        ("fp8_e4m3.out_e4m3.then_silu_gate", "tn", 1),
    ],
)
def test_the_list_of_all_is_wider(dtype: str, layout: str, times: int) -> None:
    asked = problem(Operation.of(dtype, layout))
    assert len(kernels(asked, level=Level.FULL)) > times * len(kernels(asked))


def test_the_curated_ones_are_a_part_of_the_bare_products() -> None:
    def choices(found: Kernel) -> tuple[object, ...]:
        known = cutlass(found)
        return (known.tile, known.cluster, known.mainloop, known.scheduler, known.swapped)

    plain = {choices(each) for each in kernels(Problem(m=M, n=N, k=K))}
    assert {choices(each) for each in kernels(fused("bias_gelu"))} < plain


def test_a_longer_pipeline_is_left_where_nothing_is_loaded_or_stored_besides(
    h200: DeviceModel,
) -> None:
    part = 128 * 32 * 2
    assert staged("tn", "residual", "bias", "bias_gelu_aux") == {
        "residual": 4 * part,
        "bias": 2 * part,
        "bias_gelu_aux": 4 * part,
    }
    assert candidates(fused("bias_gelu_aux"), h200)


def test_kernels_of_other_epilogues_take_no_problem_of_this_one() -> None:
    for epilogue in ("none", "bias_gelu_aux", "residual"):
        asked = fused(epilogue)
        for other in ("none", "bias_gelu", "bias"):
            if other != epilogue:
                assert refusal(kernels(fused(other))[0], asked)


def test_what_is_fused_costs_something_and_less_than_a_pass_of_its_own(h200: DeviceModel) -> None:
    plain = fastest_us(fused("none"), h200)
    pass_us = 2 * M * N * 2 / 4e6
    for epilogue in ("bias", "bias_gelu_tanh", "bias_gelu_tanh_aux", "residual"):
        assert plain * 0.9 < fastest_us(fused(epilogue), h200) < plain + pass_us


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
        member = next(
            member
            for member in kernels(fused(epilogue, dtype))
            if cutlass(member).swapped is swapped
        )
        source = unit_source([member])
        assert '#include "gemmsmith/fused3x.hpp"' in source
        assert f'("{member.name}")' in source
        assert "FusedGemm3x<" in source
        expected = expression.replace("D>", f"{d.get(dtype, d['bf16'])}>")
        text = source.replace("gemmsmith::", "")
        assert f"Fused<{expected}, {str(swapped).lower()}, " in text


def test_a_bare_product_has_no_expression() -> None:
    assert "fused3x" not in unit_source([kernels(Problem(m=M, n=N, k=K))[0]])


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
def test_what_a_gated_kernel_cannot_do_is_refused(change: dict[str, object], reason: str) -> None:
    known: CutlassKernel = cutlass(kernels(gated("silu_gate"))[0])
    assert reason in (refusal(named(replace(known, **change))) or "")


def test_buffers_of_gates_leave_the_mainloop_its_stages() -> None:
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
    plain = fastest_us(Problem(m=M, n=8192, k=2048), h200)
    pass_us = 1.5 * M * 8192 * 2 / 4e6
    for epilogue in ("silu_gate", "silu_gate_aux"):
        assert plain * 0.9 < fastest_us(gated(epilogue), h200) < plain + pass_us


def test_the_source_of_a_gate_is_cutlasss_mainloop_and_our_epilogue() -> None:
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


def test_swapped_backward_ones_are_refused() -> None:
    found = cutlass(kernels(fused("dgelu", layout="tt"))[0])
    assert "not swapped" in str(refusal(named(replace(found, swapped=True))))


def test_backward_gates_leave_no_room_for_the_widest_tiles() -> None:
    for epilogue, widest in (("dgelu_act", 192), ("dsilu_gate", 192), ("dsilu_gate_act", 176)):
        listed = kernels(fused(epilogue, layout="tt"), level=Level.FULL)
        assert max(footprint.accumulator_registers(cutlass(each)) for each in listed) == widest


def test_each_matrix_of_a_backward_one_has_buffers_of_its_own() -> None:
    names = ("dgelu", "dgelu_act", "dgelu_bgrad", "dsilu_gate", "dsilu_gate_act")
    part = 128 * 32 * 2
    assert staged("tt", *names) == {
        "dgelu": 4 * part,  # D takes aux's place
        "dgelu_act": 6 * part,
        "dgelu_bgrad": 4 * part,
        "dsilu_gate": (4 + 4 + 2) * part,  # gate, up and up's gradient
        "dsilu_gate_act": (4 + 4 + 2 + 2) * part,
    }


def test_what_is_fused_backward_costs_less_than_passes_of_its_own(h200: DeviceModel) -> None:
    def times(epilogue: str) -> float:
        return fastest_us(fused(epilogue, layout="tt"), h200)

    one = M * N * 2 / 4e6
    plain = times("none")
    assert plain * 0.9 < times("dgelu_tanh") < plain + 3 * one
    assert times("dgelu_tanh") < times("dgelu_tanh_act")
    assert times("dsilu_gate") < plain + 7 * one


def test_the_source_names_the_whole_backward_epilogue() -> None:
    source = unit_source([kernels(fused("dgelu_tanh_gate_act", layout="tt"))[0]])
    assert '#include "gemmsmith/differentiate.hpp"' in source
    assert "gemmsmith::Differentiate<gemmsmith::slope::gelu_tanh, true, true, false>" in source
    assert "FusedGemm3x<" in source
    source = unit_source([kernels(fused("drelu2_bgrad", layout="tt"))[0]])
    assert "gemmsmith::Differentiate<gemmsmith::slope::relu2, false, false, true>" in source
    assert "SummingGemm3x<" in source
