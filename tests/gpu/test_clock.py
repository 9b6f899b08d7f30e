"""The clock that a timed spin tells, and the power that NVML tells, of a GPU at work."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import pytest
import torch

from gemmsmith.core.device import DeviceModel
from tuner.measure.conditions import Monitor
from tuner.measure.graphs import Stream, TorchGraph
from tuner.measure.local_gpu import gpu_uuid
from tuner.measure.timing import CLOCK_S, SETTLE_S, Timer, cool_down

Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def monitor() -> Monitor:
    return Monitor(gpu_uuid())


@pytest.fixture(scope="module")
def timer(monitor: Monitor) -> tuple[Timer, Stream]:
    torch.cuda.synchronize()  # makes the context
    stream = Stream()
    return Timer(stream, monitor), stream


@pytest.fixture
def heavy(timer: tuple[Timer, Stream]) -> Iterator[TorchGraph]:
    """About 5 ms of the largest tiles."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    torch.mm(a, a, out=out)
    torch.cuda.synchronize()
    graph = TorchGraph(timer[1], 3, lambda _: torch.mm(a, a, out=out))
    yield graph
    graph.close()


def test_a_spin_tells_the_clock_that_nvml_tells(
    timer: tuple[Timer, Stream],
    heavy: TorchGraph,
    monitor: Monitor,
    model: DeviceModel,
    record_property: Record,
) -> None:
    timer[0].clock(heavy)  # may end before the card, still cool, has slowed to its limit of power
    found = [timer[0].clock(heavy) for _ in range(3)]
    cool_down()
    seen = [
        monitor.sm_clock_mhz() for ran in timer[0].busy(heavy, SETTLE_S + CLOCK_S) if ran > SETTLE_S
    ]
    record_property("spin_mhz", [round(mhz, 1) for mhz in found])
    record_property("nvml_mhz", seen)
    assert max(found) < 1.03 * min(found)
    assert max(found) < 1.01 * model.max_clock_mhz
    assert statistics.median(found) == pytest.approx(statistics.mean(seen), rel=0.03)


def test_power_is_that_of_now(
    timer: tuple[Timer, Stream], heavy: TorchGraph, monitor: Monitor, record_property: Record
) -> None:
    """The plain call averages over a second, and would still tell half of it."""
    cool_down()
    drawn = [monitor.read().power_w for ran in timer[0].busy(heavy, SETTLE_S) if ran > 0.1]
    record_property("power_w", drawn)
    assert drawn[-1] > 0.6 * monitor.power_limit_w() > 0
