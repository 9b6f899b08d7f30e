"""Architectures that are not measured: kernels of CUTLASS's own lists, legal to the last field."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import Backend, MainloopSchedule
from gemmsmith.core.operation import DType, Layout, Operation, layouts_of
from gemmsmith.core.problem import Problem
from tests.support.replacing import replace
from tests.support.types import FLOATS
from tuner.arch import ARCHITECTURES, MEASURED, architecture
from tuner.backends import Level, candidates, kernels, refusal, supporting
from tuner.backends.cutlass import footprint, generated
from tuner.backends.unit import kernel_digest, unit_source
from tuner.errors import NoLegalCandidate
from tuner.search.cost_model import predicted_us

OTHERS = [name for name in ARCHITECTURES if name not in MEASURED]


@cache
def supported(arch: str) -> list[Operation]:
    """Operations of floating-point types with kernels for the architecture."""
    operations = [Operation.of(dtype, layout) for dtype in FLOATS for layout in layouts_of(dtype)]
    return [each for each in operations if supporting(each, architecture(arch))]


def test_only_what_was_measured_is_said_to_be() -> None:
    assert MEASURED == ("sm90",)
    assert set(OTHERS) == {"sm80", "sm89", "sm100", "sm120"}


def test_ampere_has_no_fp8() -> None:
    for dtype in (DType.FP8_E4M3, DType.FP8_E5M2):
        assert not supporting(Operation.of(dtype), architecture("sm80"))
        with pytest.raises(NoLegalCandidate, match=f"{dtype} tn for sm80"):
            kernels(Problem(m=64, n=64, k=64, dtype=dtype), "sm80")
        for arch in ("sm89", "sm100", "sm120"):
            assert kernels(Problem(m=64, n=64, k=64, dtype=dtype), arch)


@pytest.mark.parametrize("arch", OTHERS)
@pytest.mark.parametrize("dtype", [DType.INT8, DType.TF32])
def test_what_is_not_on_cutlass_s_list_is_not_offered(arch: str, dtype: DType) -> None:
    for extent in (4096, 4095):
        with pytest.raises(NoLegalCandidate, match=f"{dtype} tn for {arch}"):
            kernels(Problem(m=extent, n=extent, k=extent, dtype=dtype), arch)


def test_no_two_kernels_of_any_architecture_share_a_name() -> None:
    seen: dict[str, object] = {}
    for arch in ARCHITECTURES:
        for dtype in FLOATS:
            for layout in layouts_of(dtype):
                for extent in (4096, 4100, 4095):
                    problem = Problem(m=extent, n=extent, k=extent, dtype=dtype, layout=layout)
                    if supporting(problem.operation, architecture(arch)):
                        for kernel in kernels(problem, arch):
                            assert seen.setdefault(kernel.name, kernel) == kernel
                            assert kernel.name.isidentifier()


@pytest.mark.parametrize("arch", OTHERS)
def test_generated_kernels_fit_and_are_emitted_for_their_architecture(arch: str) -> None:
    for operation in supported(arch):
        _generated_kernels_fit(arch, operation)


def _generated_kernels_fit(arch: str, operation: Operation) -> None:
    problem = Problem.of(operation, 4096, 4096, 4096)
    listed = kernels(problem, arch)
    assert len(listed) >= 15
    assert kernels(problem, arch, level=Level.FULL) == listed
    for kernel in listed:
        assert kernel.arch == arch
        assert generated.is_generated(kernel)
        assert refusal(kernel, problem) is None
        held = kernel.stages * footprint.stage_bytes(kernel)
        assert held <= architecture(arch).shared_bytes
    assert len({kernel_digest(kernel) for kernel in listed}) == len(listed)
    source = unit_source([listed[0]])
    if arch == "sm100":
        assert "cutlass::arch::Sm100" in source
        assert {kernel.backend for kernel in listed} == {Backend.CUTLASS3X}
        assert {kernel.mainloop for kernel in listed} == {
            MainloopSchedule.TCGEN05_ONE_SM,
            MainloopSchedule.TCGEN05_TWO_SM,
        }
        assert {kernel.swapped for kernel in listed} == {False, True}
    else:
        assert f"cutlass::arch::Sm{89 if operation.a.bits == 8 else 80}" in source
        assert {kernel.backend for kernel in listed} == {Backend.CUTLASS2X}
        assert {kernel.alignment_a for kernel in listed} == {128 // operation.a.bits}


@pytest.mark.parametrize("arch", OTHERS)
def test_one_changed_field_is_refused(arch: str) -> None:
    known = kernels(Problem(m=4096, n=4096, k=4096), arch)[0]
    for change in (
        {"tile": (96, 96, 96)},
        {"stages": 2},
        {"alignment_a": 1},
        {"arch": "sm90"},
        {"arch": "sm70"},
        {"layout": Layout.NT},
        {"dtype": DType.FP16},
        {"name": f"{known.name}x"},
    ):
        assert refusal(replace(known, **change)), change


@pytest.mark.parametrize("arch", OTHERS)
def test_hopper_s_kernels_are_not_theirs(arch: str) -> None:
    for kernel in kernels(Problem(m=4096, n=4096, k=4096), "sm90")[::20]:
        assert refusal(replace(kernel, arch=arch))


def test_two_sms_share_an_instruction_s_rows() -> None:
    for kernel in kernels(Problem(m=4096, n=4096, k=4096), "sm100"):
        if kernel.mainloop is MainloopSchedule.TCGEN05_TWO_SM:
            assert kernel.cluster[0] % 2 == 0
            assert f"_{2 * kernel.tile[0]}x{kernel.tile[1]}x{kernel.tile[2]}_" in kernel.name
        else:
            assert "x".join(map(str, kernel.tile)) in kernel.name


@settings(max_examples=100, deadline=None)
@given(
    arch=st.sampled_from(OTHERS),
    data=st.data(),
    m=st.integers(1, 1 << 16),
    n=st.integers(1, 1 << 16),
    k=st.integers(1, 1 << 16),
    batch=st.integers(1, 64),
)
def test_every_problem_has_a_candidate(
    arch: str, data: st.DataObject, m: int, n: int, k: int, batch: int
) -> None:
    problem = Problem.of(data.draw(st.sampled_from(supported(arch))), m, n, k, batch)
    device = DeviceModel(
        name="some GPU",
        arch=arch,
        sm_count=architecture(arch).typical_sm_count,
        memory_bytes=1,
        l2_bytes=architecture(arch).l2_bytes,
    )
    listed = candidates(problem, device)
    assert listed
    assert len({candidate.key for candidate in listed}) == len(listed)
    for candidate in listed:
        assert refusal(candidate.kernel, problem) is None
    assert all(0 < us < float("inf") for us in predicted_us(problem, listed, device))
