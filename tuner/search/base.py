"""The base: the kernels that win most often, to be compiled once, ahead of any problem.

With them on a machine a problem that nobody has seen is tuned in seconds, because nothing has to be
compiled first. They are chosen like a committee: problems of all sizes vote for the kernels that a
tuning run would begin with, the winners known vote for themselves, and seats go to those who speak
for the problems that have the fewest so far, and are cheap to compile. Rows that TMA cannot read or
write are not asked for: their kernels are others, and compiled when such a problem comes.

Deterministic: the same device model and winners give the same kernels in the same order, on every
machine of a fleet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import exp, inf, log
from random import Random

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import AnyKernel, CutlassKernel
from gemmsmith.core.operation import Layout, Operation, layouts_of
from gemmsmith.core.problem import DType, Problem
from gemmsmith.core.tuning import Effort
from tuner.backends import candidates as legal_candidates
from tuner.backends import variety
from tuner.backends.cutlass.operation import of_type
from tuner.compile.plan import BASE_COST, KERNEL_COST, MOST_VARIETIES, VARIETY_COST
from tuner.errors import NoLegalCandidate
from tuner.search.budget import BUDGETS
from tuner.search.cost_model import AnalyticModel
from tuner.search.exploration import Proposals
from tuner.search.ranking import by_time, predictions
from tuner.trial import Winner

BASE_CORE_SECONDS = 3300.0
"""What compiling the base may cost by `tuner.compile.plan`'s figures, aimed at five minutes of 16
cores. Hosts of NVIDIA H200s differ: 324 kernels of 3,830 took one 232 s, choosing included; 310 of
3,900 took the slow cores of a larger one 349 s (2026-11-21 and 22)."""

DTYPES = (DType.BF16, DType.FP16, DType.FP8_E4M3)

_ASKED_AS: dict[str, str] = {DType.FP16: DType.BF16}
"""Sixteen bits are sixteen bits: what suits BF16 suits FP16, and is looked for once."""

_PASSES = (Layout.TN, Layout.TT, Layout.NT)
"""Of a linear layer: forward, input gradient, weight gradient."""

_PROBLEMS = 200
"""Asked of each family. Problems drawn log-uniformly leave fewer unseen ones without a kernel than
the same number on a lattice of powers of two: M = 320 wants tiles of 80 that no power does."""
_HALF = 4
"""The place on a problem's list whose vote counts half."""
_WINNER = 4.0
"""Votes of a measured winner, against 1 for the model's favourite."""

_Ballot = list[tuple[AnyKernel, float]]


def base_kernels(
    device: DeviceModel,
    dtypes: Sequence[str] = DTYPES,
    winners: Iterable[Winner] = (),
    limit: int | None = None,
) -> list[AnyKernel]:
    """The kernels to compile ahead of time, the most useful first.

    Args:
        device: the device model they are to run on.
        dtypes: element types to serve.
        winners: what won on this device model so far.
        limit: kernels in all; by default what `BASE_CORE_SECONDS` allow, a third of it a type.
    """
    asked: dict[str, list[_Ballot]] = {}
    ballots: list[_Ballot] = []
    for dtype in dtypes:
        twin = _ASKED_AS.get(dtype, dtype)
        if twin not in asked:
            asked[twin] = [_leaders(problem, device) for problem in _probes(twin)]
        ballots += [
            [
                (of_type(kernel, dtype), weight)
                for kernel, weight in each
                if isinstance(kernel, CutlassKernel)  # others are not compiled ahead
            ]
            for each in asked[twin]
        ]
    ballots += [
        [(winner.candidate.kernel, _WINNER)]
        for winner in winners
        if winner.candidate is not None and winner.problem.dtype in dtypes
    ]
    seconds = BASE_CORE_SECONDS * len(dtypes) / len(DTYPES)
    return _elected(ballots, limit, inf if limit is not None else seconds)


def _probes(dtype: str) -> Iterator[Problem]:
    """Always the same problems."""
    for layout in (each for each in _PASSES if each in layouts_of(dtype)):
        draw = Random(f"{dtype} {layout}")  # noqa: S311 - a sample, no secret
        grouped = Operation.of(dtype, layout).is_grouped
        for _ in range(_PROBLEMS):
            yield Problem(
                batch=_size(draw, 2**3, 2**8, 1) if grouped else 1,
                m=_size(draw, 2**4, 2**13.5, 8),
                n=_size(draw, 2**8, 2**14.5, 64),
                k=_size(draw, 2**8, 2**14, 64),
                dtype=dtype,
                layout=layout,
            )


def _size(draw: Random, least: float, most: float, step: int) -> int:
    """A multiple of `step`, log-uniformly between two bounds."""
    return max(1, round(exp(draw.uniform(log(least), log(most))) / step)) * step


def _leaders(problem: Problem, device: DeviceModel) -> _Ballot:
    try:
        found = legal_candidates(problem, device)
    except NoLegalCandidate:  # a layout that no backend has kernels for
        return []
    predicted = predictions(problem, found, device, AnalyticModel())
    plan = Proposals(by_time(found, predicted), predicted, BUDGETS[Effort.DEFAULT].in_one_wave())
    return [
        (leader.kernel, 1 / (1 + place / _HALF)) for place, leader in enumerate(plan.kernels({}))
    ]


def _elected(ballots: Sequence[_Ballot], limit: int | None, core_seconds: float) -> list[AnyKernel]:
    """Greedily, each seat to the kernel with the most votes for what it costs to compile.

    A ballot's votes weigh the less, the more of them have been heeded.
    """
    votes: dict[str, list[tuple[int, float]]] = {}
    kernels: dict[str, AnyKernel] = {}
    for number, ballot in enumerate(ballots):
        for kernel, weight in ballot:
            kernels[kernel.name] = kernel
            votes.setdefault(kernel.name, []).append((number, weight))
    varieties = {name: (kernel.family, variety(kernel)) for name, kernel in kernels.items()}
    heeded = [0.0] * len(ballots)
    begun: set[object] = set()
    elected: list[AnyKernel] = []

    def support(name: str) -> float:
        return sum(weight / (1 + heeded[i]) for i, weight in votes[name])

    supported = {name: support(name) for name in votes}
    while votes and (limit is None or len(elected) < limit):
        cost = {True: KERNEL_COST, False: VARIETY_COST + BASE_COST / MOST_VARIETIES}
        name = min(
            votes,
            key=lambda name: (-supported[name] / cost[varieties[name] in begun], name),
        )
        core_seconds -= cost[varieties[name] in begun]
        if core_seconds < 0:
            break
        heard: set[str] = set()
        for number, weight in votes.pop(name):
            heeded[number] += weight
            heard.update(kernel.name for kernel, _ in ballots[number])
        supported.update({other: support(other) for other in heard if other in votes})
        begun.add(varieties[name])
        elected.append(kernels[name])
    return elected
