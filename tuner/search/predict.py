"""The cost model's choice for a problem that was not tuned, in a few milliseconds.

To predict every kernel in every launch takes too long for a lookup. The kernel matters more than
the order of its tiles. So each kernel is predicted in one order first, or with all its splits if
it splits K, and then the best few in all launches. Nothing is measured, compiled or stored, and
the same problem gets the same prediction.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import AnyKernel, CutlassKernel, TileScheduler
from gemmsmith.core.launch import Launch
from gemmsmith.core.problem import Problem
from tuner.backends import launches, offered, prepare
from tuner.errors import NoLegalCandidate
from tuner.search.cost_model import predicted_us
from tuner.search.ranking import Ranker

SHORTLIST = 8
"""Kernels judged in all launches. With the analytic model 4 are enough to find what leads the whole
field, for each of 500 random problems; the others leave room for other models."""

FIRST = Launch(swizzle=8)
"""The launch that kernels are first judged in. Where the order of tiles matters, most do best in
wide groups; judged in groups of 1, 1 problem in 150 lost its best kernel."""

ROUNDING = 1e-9
"""Processors round powers differently. Times that are no farther apart are the same."""

_SPLITTING = (TileScheduler.SPLIT_K, TileScheduler.CLUSTER_SPLIT_K, TileScheduler.STREAM_K)
"""The number of splits decides how fast these are. Judged first in every third launch only, they
lost the lead for 1 problem in 60, by up to 11%."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The candidate expected to be fastest, and the microseconds that one launch should take."""

    candidate: Candidate
    us: float


def predict(
    problem: Problem, device: DeviceModel, ranker: Ranker = predicted_us
) -> Prediction | None:
    """The legal candidate that `ranker` expects to be fastest. Returns None if no kernel is legal.

    The first problem of its element types, layout and alignment takes longer: its kernels are made
    in about 0.1 s. `ranker` predicts twice, and the second prediction, of the best few kernels,
    counts.
    """
    try:
        kernels = offered(problem, device)
    except NoLegalCandidate:
        return None
    prepare(problem, device)
    first = []
    for kernel in kernels:
        if isinstance(kernel, CutlassKernel) and kernel.scheduler not in _SPLITTING:
            first.append(Candidate(kernel=kernel, launch=FIRST))
        else:
            some = launches(kernel, problem, device)
            first += [Candidate(kernel=kernel, launch=launch) for launch in some]
    times = ranker(problem, first, device)
    names = [candidate.kernel.name for candidate in first]
    shortlist: dict[str, AnyKernel] = {}
    for _, name, index in sorted(zip(times, names, range(len(first)), strict=True)):
        shortlist.setdefault(name, first[index].kernel)
        if len(shortlist) == SHORTLIST:
            break
    finalists = [
        Candidate(kernel=kernel, launch=launch)
        for kernel in shortlist.values()
        for launch in launches(kernel, problem, device)
    ]
    if not finalists:
        return None
    times = ranker(problem, finalists, device)
    least = min(times)
    most = least * (1 + ROUNDING)
    ties = (tied for tied, time in zip(finalists, times, strict=True) if time <= most)
    return Prediction(candidate=min(ties, key=attrgetter("key")), us=least)
