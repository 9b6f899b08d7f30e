"""Kernels of products with an epilogue, of every kind: those that exist, and when none does."""

from __future__ import annotations

import pytest

from gemmsmith.core.kernel import EpilogueSchedule, MainloopSchedule, TileScheduler, cutlass
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import Problem
from tests.support.epilogues import BACKWARD, FUSED, GATED, STORED
from tuner.arch import ARCHITECTURES
from tuner.backends import Level, kernels, refusal
from tuner.backends.cutlass import footprint
from tuner.backends.registry import BACKENDS
from tuner.errors import NoLegalCandidate

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


def problem(operation: Operation | str, n: int = 3072, k: int = 768) -> Problem:
    known = operation if isinstance(operation, Operation) else Operation.of(operation)
    return Problem.of(known, 4096, n, k)


@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_there_are_kernels_that_pass_the_rules(operation: Operation) -> None:
    epilogue, asked = operation.epilogue, problem(operation)
    offered = [cutlass(each) for each in kernels(asked)]
    assert len(offered) >= (15 if epilogue.backward else 40)
    for kernel in offered:
        assert refusal(kernel, asked) is None
        assert kernel.name.endswith(f"_then_{epilogue}")
        assert kernel.epilogue is EpilogueSchedule.TMA
        assert kernel.scheduler is TileScheduler.PERSISTENT
        assert footprint.stages(kernel) >= 2
    assert {kernel.mainloop for kernel in offered} == {
        MainloopSchedule.PINGPONG,
        MainloopSchedule.COOPERATIVE,
    }
    can_swap = epilogue.backward is None and not epilogue.is_gated
    assert {kernel.swapped for kernel in offered} == ({True, False} if can_swap else {False})
    assert len({kernel.name for kernel in offered}) == len(offered)


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
        *((f"fp8_e4m3.out_e4m3.then_{epilogue}", "tn", 1) for epilogue in STORED),
    ],
)
def test_the_list_of_all_is_wider(dtype: str, layout: str, times: int) -> None:
    asked = problem(Operation.of(dtype, layout))
    assert len(kernels(asked, level=Level.FULL)) > times * len(kernels(asked))
