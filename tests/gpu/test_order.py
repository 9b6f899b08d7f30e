"""Kernels of one order of sums give a row the same bits, at every M and wherever the row is."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest
import torch

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.config import Config
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import (
    TMA_MAINLOOPS,
    CutlassKernel,
    Kernel,
    TileScheduler,
    cutlass,
)
from gemmsmith.core.launch import Decomposition, Launch
from gemmsmith.core.legality import launch_refusal
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import Problem
from gemmsmith.ops.engine.forms import Form, Spec, shapes
from gemmsmith.ops.engine.operands import present
from gemmsmith.ops.engine.plan import Plan
from gemmsmith.ops.engine.platform import Cuda
from gemmsmith.runtime.pack import LoadedPack
from tests.gpu.support.building import build, plan_of
from tests.gpu.support.families import CHECKED, GROUPED, PLAIN_KINDS, check, problem_of
from tests.support.replacing import replace
from tuner.backends import kernels, refusal
from tuner.devices.base import Contender
from tuner.devices.cuda import CudaDevice

M = 4096
WEIGHTS = ((4096, 4096), (4096, 14336))
COMPARISONS = 22
"""For each kernel and weight: about 500 in all."""

OUTPUTS = {"bf16": torch.bfloat16, "bf16.out_f32": torch.float32}
"""Rounding to bf16 hides most differences; FP32 outputs hide none."""


@cache
def chosen(dtype: str) -> tuple[CutlassKernel, ...]:
    """One kernel of each kind: nine into bf16, three into FP32; together twelve are compiled.

    Of swapped ones the narrowest tile, for few rows, and of the others the largest.
    """

    def kind(kernel: CutlassKernel) -> tuple[object, ...]:
        return kernel.mainloop, kernel.scheduler, kernel.swapped

    def size(kernel: CutlassKernel) -> int:
        m, n, _ = kernel.tile
        return m * n * (1 if kernel.swapped else -1)

    aligned = Problem(M, 4096, 4096, dtype=dtype)
    offered = sorted(map(cutlass, kernels(aligned)), key=size)
    by_kind = {kind(kernel): kernel for kernel in reversed(offered)}
    if dtype == "bf16.out_f32":
        return tuple(by_kind[kind] for kind in PLAIN_KINDS[:3])
    by_cpasync = map(cutlass, kernels(replace(aligned, k=4100)))
    padded = map(cutlass, kernels(replace(aligned, k=4097)))
    return (
        *(by_kind[kind] for kind in PLAIN_KINDS),
        next(kernel for kernel in by_cpasync if "cpasync" in kernel.mainloop),
        next(kernel for kernel in padded if kernel.mainloop in TMA_MAINLOOPS),
    )


@pytest.fixture(scope="module")
def built() -> dict[str, Path]:
    return build([kernel for dtype in OUTPUTS for kernel in chosen(dtype)])[1]


@pytest.fixture(scope="module")
def grouped() -> dict[str, Path]:
    return GROUPED.built()


def one_slice(kernel: CutlassKernel) -> Launch:
    """The launch without slices."""
    cut = Decomposition.SPLIT_K
    return Launch(decomposition=cut) if kernel.scheduler is TileScheduler.SPLIT_K else Launch()


def product(
    kernel: Kernel, launch: Launch, x: torch.Tensor, weight: torch.Tensor, built: dict[str, Path]
) -> torch.Tensor:
    (shape, *_) = shapes(Form.LINEAR, Spec.of(x), Spec.of(weight), OUTPUTS[kernel.dtype])
    assert refusal(kernel, shape.problem) is None
    loaded = LoadedPack.open(built[kernel.name]).kernel(kernel.name)
    config = Config(kernel=kernel, launch=launch, pack="a" * 64)
    d = Plan(config, shape, loaded, Cuda(), torch.device("cuda", 0), 0)(x, weight)
    assert d is not None
    return d


@pytest.mark.parametrize("weight", WEIGHTS, ids=str)
@pytest.mark.parametrize("dtype", OUTPUTS)
def test_rows_have_the_same_bits_at_every_m(
    dtype: str, weight: tuple[int, int], built: dict[str, Path]
) -> None:
    """Against one kernel's product of all rows; each comparison is of a random range of rows."""
    n, k = weight
    torch.manual_seed(41)
    draw = random.Random(41)
    x = torch.randn(M, k, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5
    members = chosen(dtype)
    whole = product(members[0], one_slice(members[0]), x, w, built)
    torch.testing.assert_close(whole.float(), x.float() @ w.float().t(), atol=0.05, rtol=0.02)
    differing = {}
    for kernel in members:
        launch = one_slice(kernel)
        assert kernel.summation(launch) == "sequential"
        sizes = [1, M, *(int(2 ** draw.uniform(0, 12)) for _ in range(COMPARISONS - 2))]
        for m in sizes:
            first = draw.randrange(M - m + 1)
            rows = product(kernel, launch, x[first : first + m], w, built)
            if not torch.equal(rows, whole[first : first + m]):
                other = int((rows != whole[first : first + m]).sum())
                differing[f"{kernel.name} at {m} rows from {first}"] = other
    assert not differing


@pytest.mark.parametrize("splits", [2, 4])
def test_slices_add_up_alike_by_cluster_and_by_batch(splits: int, built: dict[str, Path]) -> None:
    n, k = WEIGHTS[0]
    torch.manual_seed(41)
    x = torch.randn(256, k, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5
    launch = Launch(decomposition=Decomposition.SPLIT_K, splits=splits)
    sliced = [kernel for kernel in chosen("bf16") if "split_k" in kernel.scheduler]
    assert {kernel.scheduler for kernel in sliced} == {
        TileScheduler.SPLIT_K, TileScheduler.CLUSTER_SPLIT_K,
    }  # fmt: skip
    whole = product(sliced[0], launch, x, w, built)
    for kernel in sliced:
        assert kernel.summation(launch) == f"split_{splits}"
        for first, m in ((0, 256), (3, 1), (17, 100)):
            rows = product(kernel, launch, x[first : first + m], w, built)
            assert torch.equal(rows, whole[first : first + m]), kernel.name


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("bf16.sum_sequential", (528, 4096, 4096)),
        ("bf16.sum_sequential", (3, 4096, 4096)),
        ("bf16.sum_split_2", (64, 4096, 4096)),
        ("bf16.out_f32.sum_sequential", (528, 4096, 4096)),
    ],
)
def test_screening_finds_no_other_bits(
    dtype: str,
    size: tuple[int, int, int],
    built: dict[str, Path],
    device: CudaDevice,
    model: DeviceModel,
) -> None:
    """The tuner's own comparison, in the measuring process."""
    problem = Problem.of(Operation.of(dtype), *size)
    splits = 2 if "split" in dtype else 1
    contenders = []
    for kernel in chosen(problem.operation.of_kernels.dtype):
        cut = Launch(decomposition=Decomposition.SPLIT_K, splits=splits)
        launch = cut if splits > 1 else one_slice(kernel)
        if (splits > 1 and "split_k" not in kernel.scheduler) or refusal(kernel, problem):
            continue
        assert launch_refusal(kernel, launch, problem) is None
        candidate = Candidate(kernel=kernel, launch=launch)
        contenders.append(Contender(candidate=candidate, pack=built[kernel.name]))
    trials = list(device.screen(problem, contenders, CHECKED))
    assert len(trials) == len(contenders) >= 2
    wrong = [f"{t.candidate.key}: {t.failure.message}" for t in trials if t.failure is not None]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("operation", GROUPED.operations, ids=lambda operation: operation.key)
def test_groups_have_the_same_bits_in_every_spread(
    operation: Operation, grouped: dict[str, Path], device: CudaDevice, model: DeviceModel
) -> None:
    """The tuner's own comparison: tokens of experts, and experts' gradients."""
    ordered = replace(operation, summation="sequential")
    for size in GROUPED.sizes[:2]:
        check(problem_of(ordered, size), GROUPED.chosen(operation), grouped, device, model)


def test_tokens_have_the_bits_of_single_products(
    built: dict[str, Path], grouped: dict[str, Path]
) -> None:
    tokens, n, k, experts = 700, 1024, 4096, 8
    torch.manual_seed(41)
    draw = random.Random(41)
    x = torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(experts, n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5
    single = chosen("bf16")[0]
    rows = [product(single, one_slice(single), x, weight, built) for weight in w]
    (shape, *_) = shapes(Form.GROUPED, Spec.of(x), Spec.of(w.mT), groups=experts)
    spreads = [
        [tokens] * experts,  # all in the first
        [0] * (experts - 1) + [tokens],  # all in the last
        *(sorted(draw.randrange(tokens + 1) for _ in range(experts)) for _ in range(10)),
    ]
    for kernel in GROUPED.chosen(Operation.of("bf16.group_rows")):
        assert refusal(kernel, shape.problem) is None
        for ends in spreads:
            offsets = torch.tensor(ends, device="cuda", dtype=torch.int32)
            d = plan_of(kernel, shape, grouped)(x, w.mT, present(offsets=offsets))
            assert d is not None
            for group, (first, last) in enumerate(zip([0, *ends], ends, strict=False)):
                assert torch.equal(d[first:last], rows[group][first:last]), (kernel.name, ends)
