"""Units are as many as workers, of one family each, and never too large."""

from __future__ import annotations

import pytest

from gemmsmith.core.kernel import EpilogueSchedule, Kernel, MainloopSchedule, TileScheduler
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import DType, Layout
from tests.support.replacing import replace
from tuner.backends.cutlass.operation import gemm_operation, kernel
from tuner.compile import plan
from tuner.errors import CompileFailed


def family(count: int, dtype: DType = DType.BF16) -> list[Kernel]:
    return [
        kernel(
            operation=Operation.of(dtype, Layout.TN),
            tile=(64, 8 * (1 + i % 32), 64 * (1 + i // 32)),
            mainloop=MainloopSchedule.PINGPONG,
            epilogue=EpilogueSchedule.TMA,
            scheduler=TileScheduler.PERSISTENT,
            alignment=8,
        )
        for i in range(count)
    ]


def rename(member: Kernel) -> Kernel:
    return replace(member, name=gemm_operation(member).procedural_name())


@pytest.mark.parametrize(
    ("kernels", "parallel", "sizes"),
    [
        (64, 16, [4] * 16),
        (5, 16, [1] * 5),
        (10, 2, [5, 5]),
        (1, 1, [1]),
        (3, 1, [3]),
        (95, 4, [4] * 5 + [5] * 15),  # five rounds of four, not four and three units
        (3, 16, [1] * 3),
    ],
)
def test_every_worker_gets_a_unit(kernels: int, parallel: int, sizes: list[int]) -> None:
    units = plan.units(family(kernels), parallel)
    assert sorted(len(unit) for unit in units) == sorted(sizes)


def test_units_cover_the_kernels_once_and_stay_within_a_family() -> None:
    kernels = [*family(30), *family(7, DType.FP16)]
    units = plan.units(kernels, 4)
    names = [member.name for unit in units for member in unit]
    assert sorted(names) == sorted(member.name for member in kernels)
    assert all(len({member.family for member in unit}) == 1 for unit in units)
    assert max(len(unit) for unit in units) <= plan.LARGEST_UNIT
    assert kernels[0] in units[0]


def test_kernels_that_differ_only_in_cluster_share_a_unit() -> None:
    wide, narrow = family(1)[0], family(2)[1]
    clusters = [replace(tile, cluster=(c, 1)) for c in (1, 2, 4) for tile in (wide, narrow)]
    units = plan.units([rename(member) for member in clusters], 2)
    assert [len({member.tile for member in unit}) for unit in units] == [1, 1]
    assert [len(unit) for unit in units] == [3, 3]


def test_alike_kernels_are_split_when_workers_would_be_idle() -> None:
    clusters = [rename(replace(family(1)[0], cluster=(c, 1))) for c in (1, 2, 4)]
    assert len(plan.units(clusters, 8)) == 3


def test_no_kernels_no_units() -> None:
    assert plan.units([], 4) == []


def test_environment_variable_overrides_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plan.JOBS_VARIABLE, "3")
    assert plan.workers() == 3
    assert plan.workers(jobs=2) == 2
    monkeypatch.setenv(plan.JOBS_VARIABLE, "many")
    with pytest.raises(CompileFailed, match="positive integer"):
        plan.workers()


def test_memory_bounds_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(plan.JOBS_VARIABLE, raising=False)
    monkeypatch.setattr(plan, "MEMORY_PER_UNIT", 2**60)
    assert plan.workers() == 1
    monkeypatch.setattr(plan, "MEMORY_PER_UNIT", 1)
    assert plan.workers() >= 1
