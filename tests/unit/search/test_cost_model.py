"""The analytic model orders candidates as measurements did, and sanely where there are none."""

from __future__ import annotations

import time

import pytest

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import CutlassKernel, MainloopSchedule, TileScheduler
from gemmsmith.core.launch import Decomposition, Launch
from gemmsmith.core.problem import DType, Layout, Problem
from tests.support.candidates import PROBLEM, named
from tests.support.replacing import replace
from tuner.backends import candidates
from tuner.backends.cutlass.operation import is_padded
from tuner.search.cost_model import predicted_us
from tuner.search.ranking import by_kernel, by_time, predictions

H200 = DeviceModel(
    name="NVIDIA H200", arch="sm90", sm_count=132, memory_bytes=150 * 10**9, l2_bytes=50 << 20
)

PINGPONG = MainloopSchedule.PINGPONG
COOPERATIVE = MainloopSchedule.COOPERATIVE

WINNERS = [
    # M, N, K, the winning tile, cluster, schedule and orientation, its µs: BF16 tn on one H200,
    # CUDA-graph replays over rotating operands, 2026-11-20.
    (16, 4096, 4096, (64, 16, 128), (1, 1), PINGPONG, True, 11.9),
    (16, 28672, 4096, (64, 16, 128), (2, 1), PINGPONG, True, 57.1),
    (64, 4096, 14336, (64, 32, 128), (1, 1), PINGPONG, True, 31.5),
    (256, 4096, 4096, (64, 128, 64), (1, 1), PINGPONG, False, 15.7),
    (256, 28672, 4096, (128, 224, 64), (2, 1), COOPERATIVE, False, 93.6),
    (256, 4096, 14336, (64, 128, 64), (1, 1), PINGPONG, False, 46.8),
    (4096, 6144, 4096, (128, 192, 64), (2, 1), PINGPONG, False, 310),
    (4096, 28672, 4096, (128, 192, 64), (2, 1), PINGPONG, False, 1421),
    (8192, 6144, 4096, (128, 176, 64), (2, 1), PINGPONG, False, 605),
    (8192, 8192, 8192, (128, 256, 64), (2, 1), COOPERATIVE, False, 1646),
    (4096, 4096, 4096, (128, 256, 64), (2, 1), COOPERATIVE, False, 195),
    (1024, 4096, 14336, (128, 256, 64), (2, 1), COOPERATIVE, True, 165),
    (4096, 576, 7168, (128, 144, 64), (1, 2), PINGPONG, False, 51.1),
    (512, 512, 8192, (64, 64, 64), (1, 1), PINGPONG, False, 16.4),
]

OURS = (TileScheduler.SPLIT_K, TileScheduler.CLUSTER_SPLIT_K)
SPLITTING = (*OURS, TileScheduler.STREAM_K)


def _predicted(problem: Problem) -> list[tuple[float, Candidate]]:
    listed = candidates(problem, H200)
    times = predicted_us(problem, listed, H200)
    assert len(times) == len(listed)
    return sorted(zip(times, listed, strict=True), key=lambda pair: (pair[0], pair[1].key))


@pytest.mark.parametrize(
    ("m", "n", "k", "tile", "cluster", "mainloop", "swapped", "measured"), WINNERS
)
def test_measured_winners_rank_high_and_their_times_are_close(
    m: int,
    n: int,
    k: int,
    tile: tuple[int, int, int],
    cluster: tuple[int, int],
    mainloop: MainloopSchedule,
    swapped: bool,
    measured: float,
) -> None:
    """Among CUTLASS's own schedules: our ways of splitting K came a day after these winners."""
    found = _predicted(Problem(m=m, n=n, k=k))
    ordered = [each for each in found if each[1].kernel.scheduler not in OURS]
    place, predicted = next(
        (place, predicted)
        for place, (predicted, candidate) in enumerate(ordered)
        if (candidate.kernel.tile, candidate.kernel.cluster) == (tile, cluster)
        and candidate.kernel.mainloop is mainloop
        and candidate.kernel.swapped is swapped
        and candidate.kernel.scheduler is TileScheduler.PERSISTENT
    )
    assert place <= 0.2 * len(ordered)
    assert measured / 1.3 < predicted < measured * 1.3


SPLIT = [
    # M, N, K, tile, slices, µs of a CUTLASS kernel computing the slices as batches, without their
    # reduction: BF16 tn on one H200, 2026-11-20.
    (128, 128, 16384, (64, 32, 128), 16, 5.7),
    (256, 256, 32768, (64, 64, 64), 8, 13.1),
    (512, 512, 8192, (64, 64, 128), 2, 12.0),
]


@pytest.mark.parametrize(("m", "n", "k"), [each[:3] for each in SPLIT])
def test_few_tiles_and_deep_k_are_split(m: int, n: int, k: int) -> None:
    """The first two were won by the stream-K scheduler, twofold, before there was any other."""
    ordered = _predicted(Problem(m=m, n=n, k=k))
    best = [candidate for _, candidate in ordered[:10]]
    assert {candidate.kernel.scheduler for candidate in best} <= set(SPLITTING)
    for candidate in best:
        assert candidate.launch.decomposition in (Decomposition.SPLIT_K, Decomposition.STREAM_K)
    whole = min(us for us, each in ordered if each.kernel.scheduler not in SPLITTING)
    for scheduler in SPLITTING:
        assert min(us for us, each in ordered if each.kernel.scheduler is scheduler) < whole


@pytest.mark.parametrize(("m", "n", "k", "tile", "splits", "partials_us"), SPLIT)
def test_split_k_takes_what_its_slices_took_and_a_reduction(
    m: int, n: int, k: int, tile: tuple[int, int, int], splits: int, partials_us: float
) -> None:
    """A reduction whose launch overlaps takes 1 to 2.5 µs (cuBLAS's own, the same GPU)."""
    predicted = min(
        us
        for us, candidate in _predicted(Problem(m=m, n=n, k=k))
        if candidate.kernel.scheduler is TileScheduler.SPLIT_K
        and candidate.kernel.tile[:2] == tile[:2]
        and candidate.launch.splits == splits
    )
    assert (partials_us + 1.0) / 1.2 < predicted < (partials_us + 2.5) * 1.2


def test_a_large_product_is_not_split_our_way() -> None:
    for problem in (Problem(m=4096, n=4096, k=4096), Problem(m=8192, n=6144, k=4096)):
        assert _predicted(problem)[0][1].kernel.scheduler not in OURS


def test_copying_unaligned_operands_costs_but_less_than_loads_of_two_bytes() -> None:
    aligned = _predicted(Problem(m=4096, n=4096, k=4096))[0][0]
    odd = _predicted(Problem(m=4096, n=4096, k=4095))
    padded = min(us for us, candidate in odd if is_padded(candidate.kernel))
    loaded = min(us for us, candidate in odd if not is_padded(candidate.kernel))
    assert aligned < padded < loaded


def test_fp8_is_faster_than_bf16_and_fast_accumulation_than_precise() -> None:
    bf16 = _predicted(Problem(m=8192, n=8192, k=8192))[0][0]
    fp8 = _predicted(Problem(m=8192, n=8192, k=8192, dtype=DType.FP8_E4M3))
    fast = min(each for each, candidate in fp8 if candidate.kernel.fast_accumulation)
    precise = min(each for each, candidate in fp8 if not candidate.kernel.fast_accumulation)
    assert 1.5 < bf16 / fast < 2.3
    assert fast < precise


@pytest.mark.parametrize("axis", ["m", "n", "k", "batch"])
def test_more_work_never_takes_less_time(axis: str) -> None:
    small = Problem(m=1024, n=2048, k=2048)
    large = replace(small, **{axis: getattr(small, axis) * 4})
    for candidate in candidates(small, H200):
        if candidate.kernel.scheduler is TileScheduler.STREAM_K:
            continue
        before, after = (predicted_us(each, [candidate], H200)[0] for each in (small, large))
        assert 0 < before < after


def test_a_bigger_gpu_is_not_slower() -> None:
    problem = Problem(m=4096, n=4096, k=4096)
    smaller = replace(H200, sm_count=78)
    best = [
        min(predicted_us(problem, candidates(problem, device), device))
        for device in (H200, smaller)
    ]
    assert best[0] < best[1]


def test_two_thousand_predictions_take_a_tenth_of_a_second() -> None:
    problem = Problem(m=8192, n=28672, k=8192)
    found = (candidates(problem, H200) * 4)[:2000]
    assert len(found) == 2000
    fastest = min(_timed(problem, found) for _ in range(5))
    assert fastest < 0.1


def _timed(problem: Problem, found: list[Candidate]) -> float:
    before = time.process_time()
    predicted_us(problem, found, H200)
    return time.process_time() - before


def test_groups_are_predicted_as_a_batch_of_their_shares() -> None:
    """The same tiles and the same bytes, for either orientation."""
    plain = [each for each in _plain_tn() if each.kernel.scheduler is TileScheduler.PERSISTENT]
    for tokens, groups, n, k in ((4096, 32, 7168, 2048), (32, 128, 1536, 2048)):
        alike = Problem(m=max(1, tokens // groups), n=n, k=k, batch=min(tokens, groups))
        rows = Problem(m=tokens, n=n, k=k, batch=groups, dtype="bf16.group_rows")
        assert predicted_us(rows, plain, H200) == predicted_us(alike, plain, H200)
    alike = Problem(m=1536, n=2048, k=512, batch=64, layout=Layout.NT)
    depth = Problem(
        m=1536, n=2048, k=512 * 64, batch=64, dtype="bf16.group_depth", layout=Layout.NT
    )
    assert predicted_us(depth, plain, H200) == predicted_us(alike, plain, H200)


def _plain_tn() -> list[Candidate]:
    listed = candidates(Problem(m=4096, n=4096, k=4096), H200)
    assert {each.kernel.swapped for each in listed if isinstance(each.kernel, CutlassKernel)} == {
        True,
        False,
    }
    return listed


def test_the_fastest_prediction_leads_and_ties_fall_to_the_key() -> None:
    field = [named("c"), named("b"), named("a")]
    times = predictions(PROBLEM, field, H200, lambda *_: [0.5, 1.0, 1.0])
    order = by_time(field, times)
    assert [c.kernel.name for c in order] == ["c", "a", "b"]


def test_candidates_group_by_kernel_in_rank_order() -> None:
    swizzled = replace(named("a"), launch=Launch(swizzle=4))
    groups = by_kernel([named("b"), swizzled, named("a")])
    assert list(groups) == ["b", "a"]
    assert groups["a"] == [swizzled, named("a")]
