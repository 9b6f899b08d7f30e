"""Tables of Nsight Compute: recorded ones are read, and only metrics that it has are taken."""

from __future__ import annotations

import pytest

from tests.support.played_ncu import ADDED, LISTED, SHORT_K, TABLES, table
from tuner.profiling import ncu

RECORDED = sorted(TABLES.glob("*-ncu-*.csv"))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_recorded_table_is_read(path: object) -> None:
    text = path.read_text()  # type: ignore[attr-defined]
    kernels = ncu.read(text)
    assert len(kernels) == len(text.splitlines()) - 2
    for kernel in kernels:
        assert kernel.name
        assert kernel.us > 1
        assert 0 < (kernel.dram or 0) < 1
        assert 1024 <= (kernel.shared_bytes or 0) <= 228 * 1024
        assert (kernel.tensor, kernel.stalls) == (None, {})


def test_a_launch_has_the_medians_of_all_launches() -> None:
    default = ncu.read(SHORT_K.read_text())[:3]
    assert [kernel.us for kernel in default] == [9.216, 9.056, 9.280]
    [middle] = ncu.per_launch(default, 3)
    assert (middle.us, middle.waves, middle.registers) == (9.216, 0.97, 168)
    assert middle.name == "nvjet_sm90_tst_144x128_64x6_1x2_h_bz_TNN"
    assert (middle.blocks, middle.threads) == (128, 384)
    assert middle.l2_bytes == 1_132_549 * 32
    assert middle.dram == pytest.approx(0.1165)


def test_launches_of_several_kernels_are_divided() -> None:
    path = TABLES / "2026-11-21-h200-ncu-256x256x32768-bf16.csv"
    product, reduction = ncu.per_launch(ncu.read(path.read_text())[6:], 3)
    assert "64x128x128" in product.name
    assert "reduce_partials" in reduction.name
    assert (product.us, reduction.us) == (14.112, 5.824)


@pytest.mark.parametrize("count", [0, 1, 2, 4, 5])
def test_launches_that_differ_are_refused(count: int) -> None:
    kernels = [*ncu.read(SHORT_K.read_text()), *ncu.read(SHORT_K.read_text())][:count]
    with pytest.raises(ValueError, match=f"{count} kernels"):
        ncu.per_launch(kernels, 3)


def test_launches_of_other_kernels_are_refused() -> None:
    with pytest.raises(ValueError, match="not the same ones"):
        ncu.per_launch(ncu.read(SHORT_K.read_text())[1:4], 3)


def test_stalls_and_pipes_are_read() -> None:
    [kernel] = ncu.per_launch(ncu.read(table("winner")), 3)
    assert kernel.clock_mhz == pytest.approx(1530)
    assert (kernel.tensor, kernel.issue, kernel.occupancy) == (0.612, 0.0944, 0.1831)
    assert kernel.l2 == 0.3302
    assert list(kernel.waits)[:3] == ["gmma", "long_scoreboard", "barrier"]
    assert kernel.waits["gmma"] == pytest.approx(0.5)
    assert sum(kernel.waits.values()) == pytest.approx(1)
    assert "membar" not in kernel.stalls


@pytest.mark.parametrize(
    ("unit", "cell", "us"),
    [("ns", "9,216", 9.216), ("us", "9.216", 9.216), ("usecond", "9.216", 9.216), ("ms", "2", 2e3)],
)
def test_units_are_those_of_the_table(unit: str, cell: str, us: float) -> None:
    text = (
        "==PROF== Connected\n"
        '"ID","Kernel Name","Block Size","Grid Size","gpu__time_duration.sum",'
        '"launch__shared_mem_per_block","dram__bytes.sum","sm__cycles_elapsed.avg.per_second"\n'
        f'"","","","","{unit}","Kbyte/block","Mbyte","Ghz"\n'
        f'"0","gemm<{"x" * 500}>","(384, 1, 1)","(2, 64, 1)","{cell}","233.47","1.5","n/a"\n'
    )
    [kernel] = ncu.per_launch(ncu.read(text), 1)
    assert kernel.us == pytest.approx(us)
    assert (kernel.shared_bytes, kernel.dram_bytes, kernel.clock_mhz) == (233470, 1_500_000, None)
    assert len(kernel.name) < 200


def test_without_a_table_there_are_no_kernels() -> None:
    assert ncu.read("==ERROR== nothing was profiled\n") == []


def test_only_metrics_that_the_gpu_has_are_taken() -> None:
    taken = ncu.metrics([name.partition(".")[0] for name in LISTED])
    assert {*ADDED} <= {*taken}
    assert "smsp__average_warps_issue_stalled_wait_not_issued_per_issue_active.ratio" not in taken
    assert "dram__throughput.avg.pct_of_peak_sustained_elapsed" in taken
    without = ncu.metrics(["gpu__time_duration", "smsp__issue_active", "gpu__dram_throughput"])
    assert [name for name in without if "stalled" not in name] == [
        "gpu__time_duration.sum",
        "launch__waves_per_multiprocessor",
        "launch__registers_per_thread",
        "launch__shared_mem_per_block",
        "smsp__issue_active.avg.pct_of_peak_sustained_active",
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    ]
    assert len(ncu.metrics([])) > 20
