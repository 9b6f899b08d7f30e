"""Fused problems: which exist, their bytes and operations, and their neighbours."""

from __future__ import annotations

import pytest

from gemmsmith.core.epilogue import Activation
from gemmsmith.core.operation import Epilogue, Operation
from gemmsmith.core.problem import Problem
from gemmsmith.errors import InvalidProblem
from tests.support.replacing import replace

M, N, K = 4096, 3072, 768
EVERY = [epilogue for epilogue in Epilogue if epilogue is not Epilogue.NONE]
FORWARD = [epilogue for epilogue in Epilogue if epilogue.backward is None]


def test_names_say_their_parts() -> None:
    for epilogue in FORWARD:
        words = [
            "row_scale" if epilogue.has_row_scale else "",
            "bias" if epilogue.has_bias else "",
            "residual" if epilogue.has_residual and epilogue.activation else "",
            epilogue.activation.value if epilogue.activation else "",
            "gate" if epilogue.is_gated else "",
            "scale" if epilogue.has_column_scale else "",
            "residual" if epilogue.has_residual and not epilogue.activation else "",
            "aux" if epilogue.stores_aux else "",
        ]
        assert ("_".join(filter(None, words)) or "none") == epilogue.value
        again = Epilogue.made_of(
            bias=epilogue.has_bias,
            activation=epilogue.activation,
            residual=epilogue.has_residual,
            aux=epilogue.stores_aux,
            gate=epilogue.is_gated,
            column_scale=epilogue.has_column_scale,
            row_scale=epilogue.has_row_scale,
        )
        assert again is epilogue
    assert {each.activation for each in Epilogue} == {None, *Activation}
    assert Epilogue.made_of(column_scale=True) is None
    assert Epilogue.made_of(row_scale=True, residual=True) is None
    assert Epilogue.made_of(activation="gelu") is None
    assert Epilogue.made_of(bias=True, activation="tanh") is None


def test_a_name_gives_what_is_read_and_what_is_written_beside_d() -> None:
    for epilogue in FORWARD:
        residual_first = epilogue.has_residual and epilogue.activation is not None
        read = {
            "row_scale": epilogue.has_row_scale,
            "bias": epilogue.has_bias,
            "residual": residual_first,
            "column_scale": epilogue.has_column_scale,
            "residual ": epilogue.has_residual and not residual_first,
        }
        assert epilogue.operands == tuple(name.strip() for name, reads in read.items() if reads)
        assert epilogue.results == (("aux",) if epilogue.stores_aux else ())
    for epilogue in Epilogue:
        if epilogue.backward is not None:
            value = ("activated",) if epilogue.backward.activated else ()
            assert epilogue.operands == ("aux",)
            assert epilogue.results == value + ("bias_gradient",) * epilogue.sums_rows
    assert Epilogue.BIAS_RESIDUAL_RELU_AUX.operands == ("bias", "residual")
    assert Epilogue.BIAS_SCALE_RESIDUAL.operands == ("bias", "column_scale", "residual")
    assert Epilogue.ROW_SCALE_BIAS.operands == ("row_scale", "bias")


def test_names_of_backward_epilogues_give_their_parts() -> None:
    matrices = {}
    for epilogue in Epilogue:
        parts = epilogue.backward
        if parts is None:
            continue
        words = [
            f"d{parts.activation}",
            "gate" if parts.gated else "",
            "act" if parts.activated else "",
            "bgrad" if parts.bias_gradient else "",
        ]
        assert "_".join(filter(None, words)) == epilogue.value
        again = Epilogue.backward_of(
            parts.activation,
            gated=parts.gated,
            activated=parts.activated,
            bias_gradient=parts.bias_gradient,
        )
        assert again is epilogue
        assert (epilogue.has_bias, epilogue.has_residual, epilogue.stores_aux) == (False,) * 3
        assert epilogue.activation is None
        matrices[epilogue] = (epilogue.reads, epilogue.outputs)
    assert len(matrices) == 4 * 3 + 5 * 2
    assert matrices[Epilogue.DGELU_BGRAD] == (1, 1)
    assert matrices[Epilogue.DRELU2_ACT] == (1, 2)
    assert matrices[Epilogue.DSILU_GATE] == (2, 2)
    assert matrices[Epilogue.DGELU_TANH_GATE_ACT] == (2, 3)
    assert matrices[Epilogue.DGELU_GATE] == (2, 2)
    assert Epilogue.backward_of("relu2", gated=True) is None
    assert Epilogue.backward_of("silu", activated=True, bias_gradient=True) is None


@pytest.mark.parametrize("epilogue", EVERY)
def test_keys_are_canonical(epilogue: Epilogue) -> None:
    operation = Operation.of("bf16", epilogue=epilogue)
    assert operation.key == f"bf16.then_{epilogue}.tn"
    assert Operation.parse(operation.key) == operation
    assert operation.is_fused
    assert operation.of_suites == Operation.of("bf16")
    assert operation.of_kernels == operation
    assert operation.default == "torch"


def test_a_plain_operation_is_not_fused() -> None:
    assert not Operation.of("bf16").is_fused
    assert Operation.of("bf16", epilogue="none") == Operation.of("bf16")
    assert Operation.of("bf16").default == "cuBLAS"


def test_further_matrices_that_are_read_and_written() -> None:
    def moved(epilogue: str) -> int:
        return Problem.of(Operation.of("bf16", epilogue=epilogue), M, N, K).operand_bytes

    plain = Problem(m=M, n=N, k=K)
    assert moved("none") == plain.operand_bytes
    assert moved("bias") == moved("bias_gelu") == plain.operand_bytes + 2 * N
    assert moved("bias_gelu_aux") == plain.operand_bytes + 2 * N + 2 * M * N
    assert moved("residual") == plain.operand_bytes + 2 * M * N
    assert moved("bias_residual") == plain.operand_bytes + 2 * N + 2 * M * N
    assert moved("scale_residual") == moved("bias_residual")
    assert moved("bias_scale_residual") == plain.operand_bytes + 4 * N + 2 * M * N
    assert moved("bias_scale_residual_aux") == plain.operand_bytes + 4 * N + 4 * M * N
    assert moved("row_scale") == plain.operand_bytes + 4 * M
    assert moved("row_scale_bias") == plain.operand_bytes + 4 * M + 2 * N
    assert moved("silu_gate") == plain.operand_bytes - M * N
    assert moved("silu_gate_aux") == plain.operand_bytes + M * N
    # aux and further outputs; with a gate, gate and up and the gradients of both.
    assert moved("dsilu") == plain.operand_bytes + 2 * M * N
    assert moved("dsilu_act") == plain.operand_bytes + 4 * M * N
    assert moved("dsilu_bgrad") == plain.operand_bytes + 2 * M * N + 2 * N
    assert moved("dsilu_gate") == plain.operand_bytes + 6 * M * N
    assert moved("dsilu_gate_act") == plain.operand_bytes + 8 * M * N
    fused = Problem(m=M, n=N, k=K, dtype="bf16.then_bias_silu_aux")
    assert fused.flops == plain.flops


def test_gate_and_up_are_combined_to_a_column() -> None:
    gated = Problem(m=M, n=N, k=K, dtype="bf16.then_silu_gate")
    assert (gated.columns, gated.flops) == (N // 2, 2 * M * N * K)
    assert Problem(m=M, n=N, k=K, dtype="bf16.then_bias").columns == N
    with pytest.raises(InvalidProblem, match="even n") as caught:
        replace(gated, n=N + 1)
    assert caught.value.field == "n"


def test_no_other_operation_is_a_neighbour() -> None:
    kinds = {Problem.of(Operation.of("bf16", epilogue=each), M, N, K).kind for each in Epilogue}
    assert len(kinds) == len(Epilogue)


@pytest.mark.parametrize("epilogue", FORWARD)
def test_epilogues_that_may_store_fp8(epilogue: Epilogue) -> None:
    """Epilogues at the end of a forward pass, without anything that is kept in 16 bits."""
    exists = epilogue.has_bias or epilogue.is_gated
    kept = epilogue.has_residual or epilogue.stores_aux or epilogue.has_row_scale
    if exists and not kept:
        operation = Operation.of("fp8_e4m3", out="e4m3", epilogue=epilogue)
        assert operation.key == f"fp8_e4m3.out_e4m3.then_{epilogue}.tn"
        assert Operation.parse(operation.key) == operation
        assert (operation.stores_fp8, operation.bias) == (True, "bf16")
        assert operation.of_suites == Operation.of("fp8_e4m3")
        return
    with pytest.raises(InvalidProblem, match="needs an epilogue with a bias or a gate") as caught:
        Operation.of("fp8_e4m3", out="e4m3", epilogue=epilogue)
    assert caught.value.field == "out"


def test_fp8_outputs_move_a_byte_an_element_and_a_bias_of_two() -> None:
    def moved(dtype: str) -> int:
        return Problem(m=M, n=N, k=K, dtype=dtype).operand_bytes

    assert moved("fp8_e4m3.out_e4m3.then_bias_gelu") == M * K + N * K + M * N + 2 * N
    assert moved("fp8_e4m3.out_e4m3.then_silu_gate") == M * K + N * K + M * N // 2


def test_there_is_one_matrix() -> None:
    with pytest.raises(InvalidProblem, match="single matrices") as caught:
        Problem(m=M, n=N, k=K, batch=2, dtype="bf16.then_bias")
    assert caught.value.field == "batch"
