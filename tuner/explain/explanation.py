"""The explanation of a winner: work, and both sides with grid, resources, energy and time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gemmsmith.answers.answer import Ratio, Regime, Statistics
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.config import Use
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.problem import Problem
from tuner.explain import sentences
from tuner.explain.advice import Advice, advise
from tuner.explain.breakdown import Kernels, TimePart, breakdown, kernels_of
from tuner.explain.competitors import Competitor, Energy, Work, work_of
from tuner.explain.grid import Grid, of_candidate
from tuner.explain.named_grid import of_names
from tuner.explain.resources import Resources, named_resources, resources
from tuner.explain.roofline import regime_of, roofline_of
from tuner.explain.waits import is_of, waits
from tuner.profiling.records import ProblemProfile
from tuner.trial import Winner


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Why a kernel is served for a problem on a device model.

    Attributes:
        use: what is served.
        regime: the regime of the times: the one in which the candidate gains least.
        candidate: the best candidate, even if the default is served.
        power: what the candidate's power costs, in words.
        why: why the winner wins, or why the default stays.
        left: what is left to gain.
        advice: what would make it faster, measured or predicted.
        profile: Nsight Compute's counters of both; None if none is on record.
        profile_is_earlier: whether it is of another candidate than the winner's.
        waits: what the warps wait for, by the profile; "" without one.
    """

    problem: Problem
    device: DeviceModel
    use: Use
    regime: Regime
    ratio: Ratio | None
    power_penalty: float | None
    work: Work
    candidate: Competitor | None
    default: Competitor | None
    power: str
    why: str
    left: str
    advice: tuple[Advice, ...]
    profile: ProblemProfile | None = None
    profile_is_earlier: bool = False
    waits: str = ""


def explain(
    winner: Winner,
    pack: Path | None = None,
    near: Sequence[Winner] = (),
    tried: Collection[str] = (),
    profile: ProblemProfile | None = None,
) -> Explanation:
    """Explain a winner.

    `pack` is its compiled kernel, if that is on this machine; `near` are tuned neighbours; `tried`
    are names of kernels that were measured on the problem.
    """
    problem, regime = winner.problem, regime_of(winner)
    roofline = roofline_of(problem, winner.device, regime)
    times = [time.median_us for time in (winner.statistics, winner.baseline) if time]
    if roofline is not None and times:  # so that no share is above 1
        roofline = roofline.raised(problem, min(times))
    work = work_of(problem, roofline)
    candidate = None
    if winner.candidate is not None and winner.statistics is not None:
        candidate = _side(
            winner,
            work,
            winner.statistics,
            name=winner.candidate.kernel.name,
            grid=of_candidate(winner.candidate, problem, winner.device),
            candidate=winner.candidate,
            taken=resources(winner.candidate.kernel, pack),
        )
    default = None
    if winner.baseline is not None:
        named = of_names(winner.baseline_kernels, problem, winner.device)
        default = _side(
            winner,
            work,
            winner.baseline,
            name=problem.operation.default,
            grid=named,
            taken=named_resources(named, problem, winner.device.arch),
        )
    served = default if winner.use.is_default else candidate
    grid = served.grid if served else None
    return Explanation(
        problem=problem,
        device=winner.device,
        use=winner.use,
        regime=regime,
        ratio=winner.speedup,
        power_penalty=winner.power_penalty,
        work=work,
        candidate=candidate,
        default=default,
        power=sentences.power(winner),
        why=sentences.why(winner, candidate, default),
        left=sentences.left(work, served),
        advice=advise(winner, near, roofline=roofline, grid=grid, tried=tried),
        profile=profile,
        profile_is_earlier=profile is not None and not is_of(profile, winner.candidate),
        waits=waits(profile, winner.candidate) if profile else "",
    )


def _side(
    winner: Winner,
    work: Work,
    time: Statistics,
    *,
    name: str,
    grid: Grid | None,
    candidate: Candidate | None = None,
    taken: Resources | None = None,
) -> Competitor:
    time_us, conditions = time.median_us, winner.conditions
    kernels = Kernels() if candidate else kernels_of(winner.baseline_kernels)
    parts: Mapping[TimePart, float] = {}
    if work.roofline is not None:
        parts = breakdown(
            winner.problem,
            work.roofline,
            time_us,
            grid,
            candidate=candidate,
            kernels=kernels,
            clock_mhz=conditions.sm_clock_mhz if conditions else 0.0,
        )
    energy = None
    if conditions is not None and conditions.power_w:
        joules = conditions.power_w * time_us / 1e6
        energy = Energy(
            watts=conditions.power_w,
            clock_mhz=conditions.sm_clock_mhz,
            joules=joules,
            flops_per_joule=work.flops / joules,
        )
    return Competitor(
        name=name,
        kernels=kernels,
        time_us=time_us,
        tflops=work.flops / time_us / 1e6,
        gb_per_s=work.least_bytes / time_us / 1e3,
        share=work.floor_us / time_us if work.floor_us is not None else None,
        grid=grid,
        resources=taken,
        energy=energy,
        parts=parts,
    )
