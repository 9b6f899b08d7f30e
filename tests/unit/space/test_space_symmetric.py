"""Kernels of symmetric products: their list, their text, and what the cost model makes of them."""

from __future__ import annotations

import pytest

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import CutlassKernel, EpilogueSchedule, cutlass
from gemmsmith.core.launch import RasterOrder
from gemmsmith.core.operation import Operation, layouts_of
from gemmsmith.core.problem import Layout, Problem
from gemmsmith.errors import InvalidProblem
from tests.support.replacing import replace
from tuner.backends import Level, candidates, kernels, launches, refusal
from tuner.backends.cutlass.operation import named
from tuner.backends.unit import unit_source
from tuner.errors import NoLegalCandidate
from tuner.explain.grid import of_candidate
from tuner.search.cost_model import predicted_us


def problem(n: int, k: int = 4096, dtype: str = "bf16", layout: str = "tn") -> Problem:
    return Problem(n, n, k, dtype=f"{dtype}.symmetric", layout=layout)


def offered(of: Problem, level: Level = Level.CORE) -> list[CutlassKernel]:
    return [cutlass(kernel) for kernel in kernels(of, level=level)]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("layout", ["tn", "nt"])
def test_kernels_are_named_apart_from_those_of_all_tiles(dtype: str, layout: str) -> None:
    half = offered(problem(4096, dtype=dtype, layout=layout))
    whole = offered(Problem(4096, 4096, 4096, dtype=dtype, layout=layout))
    assert half
    assert len({kernel.name for kernel in (*half, *whole)}) == len(half) + len(whole)
    for kernel in half:
        assert kernel.name.endswith("_symmetric")
        assert (kernel.swapped, kernel.epilogue) == (False, EpilogueSchedule.TMA)
        assert refusal(kernel, problem(4096, dtype=dtype, layout=layout)) is None


def test_the_whole_space_holds_the_list() -> None:
    every = {kernel.name for kernel in offered(problem(4096), Level.FULL)}
    assert every >= {kernel.name for kernel in offered(problem(4096))}


def test_only_rows_of_16_bytes_have_kernels() -> None:
    assert offered(problem(8, 8))
    for n, k in ((4092, 4096), (4096, 4095), (1, 8), (7, 7)):
        with pytest.raises(NoLegalCandidate):
            kernels(problem(n, k))


def test_a_launch_is_a_band_of_rows(h200: DeviceModel) -> None:
    kernel = next(each for each in offered(problem(4096)) if each.tile[0] == 128)
    for n, swizzles in ((8, [1]), (264, [1, 2]), (4096, [1, 2, 4, 8])):
        found = launches(kernel, problem(n), h200)
        assert [launch.swizzle for launch in found] == swizzles
        assert {launch.raster for launch in found} == {RasterOrder.ALONG_N}


def test_the_text_names_the_scheduler_and_the_mirror() -> None:
    text = unit_source([offered(problem(4096))[0]])
    assert '#include "gemmsmith/symmetric.hpp"' in text
    assert "gemmsmith::TriangleScheduler>;" in text
    assert "gemmsmith::Mirrored<cutlass::bfloat16_t, float>" in text
    assert "PersistentScheduler" not in text


def test_half_of_the_tiles_take_about_half_of_the_time(h200: DeviceModel) -> None:
    def best(of: Problem) -> float:
        return min(predicted_us(of, candidates(of, h200), h200))

    for n in (4096, 8192):
        assert 1.6 < best(Problem(n, n, n)) / best(problem(n, n)) < 2.1


def test_the_explanation_counts_the_tiles_of_half(h200: DeviceModel) -> None:
    kernels_of = {(each.tile[:2], each.cluster): each for each in offered(problem(4096))}
    for n, tile, cluster, tiles, whole in (
        (4096, (128, 128), (1, 1), 528, 4097 / 2 * 4096 / (528 * 128 * 128)),
        (4104, (128, 192), (1, 2), 396, 4105 / 2 * 4104 / (396 * 128 * 192)),
    ):
        kernel = kernels_of[tile, cluster]
        (launch, *_) = launches(kernel, problem(n), h200)
        grid = of_candidate(Candidate(kernel=kernel, launch=launch), problem(n), h200)
        assert grid is not None
        assert (grid.tiles, grid.raster) == (tiles, "N")
        assert grid.waves == pytest.approx(tiles / 132)
        assert grid.whole == pytest.approx(whole, rel=1e-3)


def test_swapped_kernels_are_refused() -> None:
    (good, *_) = offered(problem(4096))
    assert "its own transpose" in (refusal(named(replace(good, swapped=True))) or "")
    changed = replace(good, epilogue=EpilogueSchedule.NO_SMEM, alignment_d=1)
    assert "store by TMA" in (refusal(named(changed)) or "")


def test_the_operation_is_square_and_plain() -> None:
    assert layouts_of("bf16.symmetric") == (Layout.TN, Layout.NT)
    assert Operation.parse("fp16.symmetric.nt").symmetric
    assert str(Operation.read("symmetric")) == "bf16.symmetric tn"
    for dtype in ("int8", "tf32", "fp8_e4m3", "bf16.out_f32", "bf16.then_bias", "bf16.group_rows"):
        with pytest.raises(InvalidProblem):
            Operation.of(f"{dtype}.symmetric")
    with pytest.raises(InvalidProblem, match="n = m"):
        Problem(8, 16, 8, dtype="bf16.symmetric")


def test_work_and_bytes_are_those_of_half() -> None:
    (small, whole) = problem(64, 128), Problem(64, 64, 128)
    assert small.flops == 64 * 65 * 128
    assert small.operand_bytes == 2 * (64 * 128 + 64 * 64)
    assert whole.operand_bytes - small.operand_bytes == 2 * 64 * 128
