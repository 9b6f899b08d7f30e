"""Paired finals against cuBLAS, screening and sweeps on the real GPU: sane, repeatable, quick."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import TileScheduler
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import DType, Layout, Problem
from tests.gpu import selection
from tests.gpu.conftest import Packs
from tests.support.types import FLOATS
from tuner.backends import launches, refusal
from tuner.devices.base import Contender
from tuner.devices.cuda import CudaDevice
from tuner.devices.recording import SCHEMA, Header, Sweep, SweepWriter
from tuner.devices.replay import ReplayDevice
from tuner.measure.policy import Policy
from tuner.measure.power import gain
from tuner.measure.statistics import paired_ratio, summarize

Record = Callable[[str, object], None]
LARGE = Problem(m=4096, n=4096, k=4096)


def _contenders(problem: Problem, packs: Packs, model: DeviceModel) -> list[Contender]:
    return [
        packs.contender(kernel, launch)
        for kernel in selection.chosen(problem.dtype, problem.layout)
        if refusal(kernel, problem) is None
        for launch in launches(kernel, problem, model)[:2]
    ]


@pytest.mark.parametrize("dtype", FLOATS)
def test_finals_against_cublas(
    dtype: DType, packs: Packs, device: CudaDevice, model: DeviceModel, record_property: Record
) -> None:
    problem = Problem(m=4096, n=4096, k=4096, dtype=dtype)
    contenders = _contenders(problem, packs, model)
    trials = device.screen(problem, contenders, Policy())
    times = {t.candidate: t.statistics.median_us for t in trials if t.statistics}
    assert times
    best = sorted((c for c in contenders if c.candidate in times), key=lambda c: times[c.candidate])
    best = best[:3]
    began = time.monotonic()
    finals = device.finals(problem, best, Policy())
    record_property("finals_seconds", round(time.monotonic() - began, 2))

    assert len(finals.candidates) == len(best)
    assert len(finals.baseline_us) >= 20
    assert all(len(samples) == len(finals.baseline_us) for samples in finals.samples_us)
    ratio = paired_ratio(finals.baseline_us, finals.samples_us[0])
    teraflops = problem.flops / summarize(finals.baseline_us).median_us / 1e6
    record_property("cublas_tflops", round(teraflops, 1))
    record_property("ratio", [ratio.ci_low, ratio.median, ratio.ci_high])
    record_property("sm_clock_mhz", finals.conditions.sm_clock_mhz)
    record_property("power_w", finals.conditions.power_w)
    assert 200 < teraflops < (1000 if not Operation.of(dtype).is_narrow_float else 2000)
    assert 0.4 < ratio.median < 1.5
    assert finals.conditions.sm_clock_mhz > 500
    assert finals.conditions.power_w > 50


def test_a_candidate_ties_with_itself(
    packs: Packs, device: CudaDevice, model: DeviceModel, record_property: Record
) -> None:
    for problem in (LARGE, Problem(m=64, n=4096, k=4096)):
        contender = next(
            c
            for c in _contenders(problem, packs, model)
            if c.candidate.kernel.scheduler is TileScheduler.PERSISTENT
        )
        finals = device.finals(problem, [contender, contender], Policy())
        ratio = paired_ratio(finals.samples_us[0], finals.samples_us[1])
        record_property(str(problem), [ratio.ci_low, ratio.median, ratio.ci_high])
        assert ratio.median == pytest.approx(1.0, abs=0.02)


def test_screening_is_quick_and_agrees_with_finals(
    packs: Packs, device: CudaDevice, model: DeviceModel, record_property: Record
) -> None:
    problem = Problem(m=256, n=4096, k=4096)
    contenders = _contenders(problem, packs, model)
    policy = Policy()
    list(device.screen(problem, contenders[:1], policy))
    began = time.monotonic()
    trials = list(device.screen(problem, contenders, policy))
    per_candidate = (time.monotonic() - began) / len(trials)
    costs = [t.cost_s for t in trials if t.measured]
    record_property("ms_per_candidate", round(per_candidate * 1e3, 2))
    record_property("median_cost_ms", round(median(costs) * 1e3, 2))
    assert per_candidate < 0.1
    best = min(
        (t for t in trials if t.statistics),
        key=lambda t: t.statistics.median_us if t.statistics else 0,
    )
    assert best.statistics is not None
    contender = next(c for c in contenders if c.candidate == best.candidate)
    finals = device.finals(problem, [contender], policy)
    assert summarize(finals.samples_us[0]).median_us == pytest.approx(
        best.statistics.median_us, rel=0.15
    )


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("batch", [1, 3])
def test_every_layout_has_a_baseline(
    layout: Layout, batch: int, packs: Packs, device: CudaDevice, model: DeviceModel
) -> None:
    problem = Problem(m=512, n=768, k=1024, batch=batch, layout=layout)
    contenders = _contenders(problem, packs, model)[:2]
    finals = device.finals(problem, contenders, Policy(final_rounds=5))
    assert len(finals.candidates) == len(contenders), finals.failures
    assert 1 < median(finals.baseline_us) < 200
    # In each further state only what is ahead in all before it is timed.
    ahead = [bool(gain((finals,), i)) for i in range(len(contenders))]
    assert (finals.boost is not None) == any(ahead)
    if finals.boost is None:
        return
    assert [bool(samples) for samples in finals.boost.samples_us] == ahead
    # Rested, cuBLAS takes no longer; nor does a launch's own delay weigh on it.
    assert 0.7 < median(finals.boost.baseline_us) / median(finals.baseline_us) < 1.15
    ahead = [bool(gain((finals, finals.boost), i)) for i in range(len(contenders))]
    assert (finals.interleaved is not None) == any(ahead)
    if finals.interleaved is not None:
        assert [bool(samples) for samples in finals.interleaved.samples_us] == ahead


@pytest.mark.parametrize(
    "shape", [(256, 256, 320, 1), (130, 129, 131, 1), (256, 144, 96, 5), (96, 33, 65, 7)]
)
def test_fp8_has_a_baseline_whatever_the_sizes(
    shape: tuple[int, int, int, int], packs: Packs, device: CudaDevice, model: DeviceModel
) -> None:
    m, n, k, batch = shape
    problem = Problem(m=m, n=n, k=k, batch=batch, dtype=DType.FP8_E4M3)
    contenders = [
        packs.contender(kernel, selection.plain_launch(kernel, problem))
        for kernel in selection.legal(problem)
    ]
    finals = device.finals(problem, contenders, Policy(final_rounds=5))
    assert finals.candidates
    assert not finals.failures
    assert len(finals.baseline_us) >= 5


def test_a_sweep_is_recorded_and_replayed(
    packs: Packs, device: CudaDevice, model: DeviceModel, tmp_path: Path, record_property: Record
) -> None:
    problem = Problem(m=64, n=4096, k=4096)
    contenders = _contenders(problem, packs, model)
    began = time.monotonic()
    recorded = device.sweep(problem, contenders, Policy(final_rounds=9), best=4)
    record_property("seconds", round(time.monotonic() - began, 2))
    path = tmp_path / "sweep.jsonl.zst"
    header = Header(
        schema=SCHEMA,
        device=device.model,
        environment=device.environment,
        recorded_at="2026-01-01T00:00:00+00:00",
        gemmsmith=device.environment.gemmsmith,
    )
    with SweepWriter(path, header) as writer:
        writer.append(recorded)
    replay = ReplayDevice("replay:sweep", [Sweep.load(path)])
    trials = list(replay.screen(problem, contenders, Policy()))
    assert len(trials) == len(contenders)
    measured = [t for t in trials if t.measured]
    assert len(measured) == len(trials), [t.failure for t in trials if t.failure]
    assert all(len(t.samples_us) >= 5 for t in measured)
    assert sum(bool(t.further_us) for t in recorded.trials) == 4


def test_the_environment_is_complete(device: CudaDevice) -> None:
    environment = device.environment
    assert environment.gpu_uuid.startswith("GPU-")
    for name in ("driver", "cuda", "cutlass", "torch", "cublas"):
        assert getattr(environment, name), name
    assert device.model.sm_count > 50
    assert device.model.l2_bytes > 2**20
