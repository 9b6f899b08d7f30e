"""Invented trials and winners, for tests of the store."""

from __future__ import annotations

from gemmsmith.answers.answer import Conditions, Correctness, Ratio, Statistics
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.config import Use
from gemmsmith.core.device import DeviceModel, Environment
from gemmsmith.core.launch import Decomposition, Launch, RasterOrder
from gemmsmith.core.problem import Problem
from tests.support.candidates import KERNEL
from tests.support.replacing import replace
from tuner.store import Store
from tuner.store.imports import Foreign
from tuner.store.statement import canonical, fingerprint
from tuner.store.winners import entries
from tuner.trial import Failure, FailureKind, Phase, Trial, Winner

DEVICE = DeviceModel(
    name="NVIDIA H200",
    arch="sm90",
    sm_count=132,
    memory_bytes=150_000_000_000,
    l2_bytes=60 * 2**20,
    max_clock_mhz=1980,
    memory_bandwidth=4_800_000_000_000,
)
OTHER_DEVICE = replace(DEVICE, name="NVIDIA H20", sm_count=78)
ENVIRONMENT = Environment(
    gpu_uuid="GPU-1",
    driver="580.1",
    cuda="13.0",
    cutlass="4.2.0",
    compiler="V13.0.88",
    torch="2.13.0",
    cublas="13.0",
    gemmsmith="0.1.0",
)
PROBLEM = Problem(m=256, n=4096, k=4096)


def candidate(number: int = 0) -> Candidate:
    return Candidate(
        kernel=replace(KERNEL, name=f"kernel_{number}"),
        launch=Launch(
            raster=RasterOrder.ALONG_M, swizzle=4, decomposition=Decomposition.SPLIT_K, splits=2
        ),
    )


def trial(number: int = 0, problem: Problem = PROBLEM, job: str | None = None) -> Trial:
    time = 10.0 + number
    return Trial(
        problem=problem,
        candidate=candidate(number),
        device=DEVICE,
        environment=ENVIRONMENT,
        phase=Phase.SCREEN,
        statistics=Statistics(median_us=time, ci_low_us=time - 1, ci_high_us=time + 1, samples=3),
        samples_us=(time - 1, time, time + 1),
        correctness=Correctness(error=1e-3, max_error=2e-3, tolerance=1e-2, repeatable=True),
        conditions=Conditions(
            sm_clock_mhz=1755.0, power_w=640.5, temperature_c=55.0, throttle=("sw_power_cap",)
        ),
        workspace_bytes=4096,
        cost_s=0.25,
        job=job,
    )


def failed_trial(number: int = 0) -> Trial:
    return replace(
        trial(number),
        statistics=None,
        samples_us=(),
        failure=Failure(kind=FailureKind.NON_FINITE, message="NaN at D[0, 3]"),
        correctness=Correctness(
            error=float("inf"), max_error=float("inf"), tolerance=1e-2, repeatable=False
        ),
        conditions=None,
    )


def winner(problem: Problem = PROBLEM, time: float = 10.0) -> Winner:
    measured = trial(problem=problem)
    return Winner(
        problem=problem,
        device=measured.device,
        environment=measured.environment,
        use=Use.CUTLASS,
        candidate=measured.candidate,
        statistics=Statistics(median_us=time, ci_low_us=time, ci_high_us=time, samples=25),
        baseline=Statistics(median_us=12.0, ci_low_us=11.5, ci_high_us=12.5, samples=25),
        speedup=Ratio(median=12.0 / time, ci_low=1.01, ci_high=1.4),
        correctness=measured.correctness,
        conditions=measured.conditions,
        ties=("kernel_7@heuristic.s1.data_parallel.x1.sm0",),
        job="job-1",
    )


def imported(store: Store, winner: Winner, *, believed: bool = True) -> Winner:
    """Import a winner from another installation; the revision that has it."""
    winner = canonical(winner)
    digest = fingerprint(winner)
    named = set(entries(winner)) - {winner.problem}
    foreign = Foreign(winner=winner, digest=digest, believed=believed)
    store.imports.take([[foreign]], named, unsigned=False)  # type: ignore[arg-type]
    history = store.history(winner.problem, winner.device.slug)
    return next(revision for revision in history if fingerprint(revision) == digest)
