"""Profiles on the real GPU: Nsight Compute's counters are ours, and the trace has the kernels."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import CutlassKernel
from gemmsmith.core.problem import Problem
from tests.gpu.support.building import build
from tests.support.compiled import CLUSTER_SPLIT_K, PINGPONG, SPLIT_K, STREAM_K
from tests.support.counted import check_counters
from tuner.backends import launches
from tuner.explain.resources import compiled
from tuner.profiling import recorder

PROBLEM = Problem(m=256, n=256, k=8192)
"""A few tiles and a deep K: all of the kernels have launches for it."""
KERNELS = (PINGPONG, STREAM_K, SPLIT_K, CLUSTER_SPLIT_K)


def contestants(model: DeviceModel, *kernels: CutlassKernel) -> list[tuple[Candidate, Path]]:
    _, paths = build(KERNELS)
    return [
        (
            Candidate(kernel=kernel, launch=next(iter(launches(kernel, PROBLEM, model)))),
            paths[kernel.name],
        )
        for kernel in kernels
    ]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.scheduler.value)
def test_what_ncu_counts_is_what_explain_says(
    kernel: CutlassKernel, model: DeviceModel, record_property: Callable[[str, object], None]
) -> None:
    [(candidate, pack)] = contestants(model, kernel)
    with_ncu = recorder.Ncu.here()
    if with_ncu is None:
        pytest.skip("ncu is not on the path")
    profile = recorder.record(PROBLEM, model, [(candidate, pack)], with_ncu)
    main = profile.candidate.main
    record_property("waits", main.waits)
    record_property("tensor", main.tensor)
    check_counters(profile)
    assert sum(main.waits.values()) == pytest.approx(1)
    for share in (main.tensor, main.issue, main.occupancy, main.sm, main.l2, main.dram):
        assert share is not None
        assert 0 < share <= 1
    assert main.clock_mhz is not None
    assert 200 < main.clock_mhz < 1.1 * model.max_clock_mhz
    if usage := compiled(kernel, pack):
        assert main.registers == usage.registers


def test_a_trace_has_the_kernels_of_all_contestants(model: DeviceModel, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    recorder.trace(PROBLEM, contestants(model, PINGPONG, STREAM_K), path)
    events = json.loads(path.read_text())["traceEvents"]
    assert {"default", "winner", "runner-up 1"} <= {event.get("name") for event in events}
    kernels = [event["name"] for event in events if event.get("cat") == "kernel"]
    assert len([name for name in kernels if "cutlass3x" in name]) >= 2 * recorder.LAUNCHES
