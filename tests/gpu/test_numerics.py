"""Every schedule, precision and layout against FP32, as the measuring child verifies them.

The child compares each output with torch's FP32 product of the same inputs, poisons outputs and
workspace first, and runs every launch twice; see tuner/workloads/reference.py. That it notices what
is wrong is shown in test_isolation.py and in tests/unit/measure.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import Kernel
from gemmsmith.core.problem import DType, Layout, Problem
from tests.gpu import selection
from tests.gpu.conftest import Packs
from tuner.backends import refusal
from tuner.devices.base import Contender
from tuner.devices.cuda import CudaDevice
from tuner.measure.policy import Policy
from tuner.trial import Trial

CHECKED = Policy(screen_samples=1, candidate_timeout_s=20.0)
FAMILIES = [pytest.param(*family, id="-".join(family)) for family in selection.FAMILIES]


def _names(kernel: Kernel) -> str:
    return kernel.name.removeprefix("cutlass3x_sm90_tensorop_gemm_")


def _problem_for(kernel: Kernel) -> Problem:
    """The first of the family's problems that the kernel takes; for padded ones, must copy."""
    family = (kernel.dtype, kernel.layout)
    moderate = [selection.aligned(*family), *selection.less_aligned(*family)]
    if selection.padded(kernel):
        moderate = [*reversed(moderate[1:]), selection.unaligned_operands(*family)]
    for problem in moderate:
        if refusal(kernel, problem) is None:
            return problem
    for problem in (*selection.odd_problems(*family), *selection.batched(*family)):
        if refusal(kernel, problem) is None:
            return problem
    pytest.fail(f"no test problem suits {kernel.name}")


def _assert_right(trials: list[Trial], expected: int) -> float:
    """All trials verified; returns the largest error in units of its tolerance."""
    assert len(trials) == expected
    wrong = [
        f"{t.problem} {t.candidate.key}: {t.failure.kind}: {t.failure.message}"
        for t in trials
        if t.failure is not None
    ]
    assert not wrong, "\n".join(wrong)
    shares = [t.correctness.error / t.correctness.tolerance for t in trials if t.correctness]
    assert len(shares) == expected
    return max(shares)


@pytest.mark.parametrize("kernel", selection.everything(), ids=_names)
def test_kernel_with_every_launch(
    kernel: Kernel,
    packs: Packs,
    device: CudaDevice,
    model: DeviceModel,
    record_property: Callable[[str, object], None],
) -> None:
    problem = _problem_for(kernel)
    found = selection.launches_of(kernel, problem, model)
    contenders = [packs.contender(kernel, launch) for launch in found]
    trials = list(device.screen(problem, contenders, CHECKED))
    record_property("launches", len(found))
    record_property("error_over_tolerance", round(_assert_right(trials, len(found)), 3))


@pytest.mark.parametrize("position", ["m", "n", "k", "all"])
@pytest.mark.parametrize(("dtype", "layout"), FAMILIES)
def test_awkward_sizes(
    dtype: DType, layout: Layout, position: str, packs: Packs, device: CudaDevice
) -> None:
    problems = selection.odd_problems(dtype, layout)
    offset = ("m", "n", "k").index(position) if position != "all" else None
    single = problems[: 3 * len(selection.EXTENTS)]
    some = single[offset::3] if offset is not None else problems[len(single) :]
    for problem in some:
        contenders = [
            packs.contender(kernel, selection.plain_launch(kernel, problem))
            for kernel in selection.legal(problem)
        ]
        _assert_right(list(device.screen(problem, contenders, CHECKED)), len(contenders))


@pytest.mark.parametrize(("dtype", "layout"), FAMILIES)
def test_batches(
    dtype: DType, layout: Layout, packs: Packs, device: CudaDevice, model: DeviceModel
) -> None:
    for problem in selection.batched(dtype, layout):
        contenders: list[Contender] = []
        for kernel in selection.legal(problem, most=4):
            found = selection.launches_of(kernel, problem, model)
            contenders += [packs.contender(kernel, launch) for launch in found[:3]]
        assert contenders
        _assert_right(list(device.screen(problem, contenders, CHECKED)), len(contenders))


@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP8_E4M3])
def test_large_k_stays_within_tolerance(
    dtype: DType, packs: Packs, device: CudaDevice, model: DeviceModel
) -> None:
    """FP8's fast accumulation loses most where K is long; split-K and stream-K matter there."""
    problem = Problem(m=256, n=256, k=32768, dtype=dtype)
    contenders: list[Contender] = []
    for kernel in selection.chosen(dtype, Layout.TN):
        if refusal(kernel, problem) is None:
            found = selection.launches_of(kernel, problem, model)
            contenders += [packs.contender(kernel, launch) for launch in found]
    _assert_right(list(device.screen(problem, contenders, CHECKED)), len(contenders))
