"""The base: the kernels that win most often, to be compiled once, ahead of any problem.

With them on a machine a new problem is tuned in seconds, because nothing has to be compiled first.
They are elected: sample problems of all sizes vote for the kernels that a tuning run would begin
with, known winners vote for themselves, and seats go to kernels that are cheap to compile and have
the votes of problems that have few kernels so far. Problems with rows that TMA cannot read or write
have different kernels. Only heads of an odd vocabulary vote for one of these each, in all passes.

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
from tuner.backends.cutlass.operation import of_type
from tuner.compile.plan import alike, share
from tuner.errors import NoLegalCandidate
from tuner.search.budget import BUDGETS
from tuner.search.exploration import Proposals
from tuner.search.ranking import by_time, predictions
from tuner.trial import Winner

BASE_CORE_SECONDS = 3300.0
"""Budget for compiling the base, by the costs of `tuner.compile.plan`: aimed at five minutes on 16
cores. Hosts of NVIDIA H200s differ: 324 kernels (3,830 core-seconds) took 232 s on one, choosing
included; 310 kernels (3,900) took 349 s on the slow cores of a larger one (2026-11-21 and 22)."""

DTYPES = (DType.BF16, DType.FP16, DType.FP8_E4M3)

_TWINS: dict[str, str] = {DType.FP16: DType.BF16}
"""The kernels that suit BF16 suit FP16, with its types: both have sixteen bits."""

_PASSES = (Layout.TN, Layout.TT, Layout.NT)
"""Of a linear layer: forward, input gradient, weight gradient."""

_PROBLEMS = 200
"""Sample problems of each element type and layout. Sizes drawn log-uniformly leave fewer new
problems without a kernel than powers of two would: M = 320 needs tiles of 80, no power does."""
_HALF = 4
"""The place in a problem's order of kernels whose vote has half the weight."""
_WINNER = 4.0
"""Votes of a measured winner, against 1 for the model's favourite."""
_ODD, _HEAD = 50257, 12.0
"""The vocabulary of GPT-2, and the votes for the favourite of each pass of such a head: enough for
a seat beside the shipped winners. Without a kernel, tuning it waits a minute for compilers."""

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
    known: dict[str, list[_Ballot]] = {}
    ballots: list[_Ballot] = []
    for dtype in dtypes:
        twin = _TWINS.get(dtype, dtype)
        if twin not in known:
            known[twin] = [_leaders(problem, device) for problem in _probes(twin)]
            for head in _heads(twin):
                known[twin] += [[(kernel, _HEAD)] for kernel, _ in _leaders(head, device)[:1]]
        ballots += [
            [
                (of_type(kernel, dtype), weight)
                for kernel, weight in ballot
                if isinstance(kernel, CutlassKernel)  # others are not compiled ahead
            ]
            for ballot in known[twin]
        ]
    ballots += [
        [(winner.candidate.kernel, _WINNER)]
        for winner in winners
        if winner.candidate is not None and winner.problem.dtype in dtypes
    ]
    seconds = BASE_CORE_SECONDS * len(dtypes) / len(DTYPES)
    return _elected(ballots, limit, inf if limit is not None else seconds)


def _probes(dtype: str) -> Iterator[Problem]:
    """The sample problems of an element type, always the same."""
    for layout in (layout for layout in _PASSES if layout in layouts_of(dtype)):
        draw = Random(f"{dtype} {layout}")  # noqa: S311 - a sample, no secret
        operation = Operation.of(dtype, layout)
        for _ in range(_PROBLEMS):
            yield Problem(
                batch=_size(draw, 2**3, 2**8, 1) if operation.is_grouped else 1,
                m=(m := _size(draw, 2**4, 2**13.5, 8)),
                n=m if operation.symmetric else _size(draw, 2**8, 2**14.5, 64),
                k=_size(draw, 2**8, 2**14, 64),
                dtype=dtype,
                layout=layout,
            )


def _heads(dtype: str) -> Iterator[Problem]:
    """The products of a head whose rows of logits are not aligned to 16 bytes."""
    m, k = 8192, 2048
    sizes = {Layout.TN: (m, _ODD, k), Layout.TT: (m, k, _ODD), Layout.NT: (_ODD, k, m)}
    for layout in (layout for layout in _PASSES if layout in layouts_of(dtype)):
        rows, columns, depth = sizes[layout]
        yield Problem(m=rows, n=columns, k=depth, dtype=dtype, layout=layout)


def _size(draw: Random, least: float, most: float, step: int) -> int:
    return max(1, round(exp(draw.uniform(log(least), log(most))) / step)) * step


def _leaders(problem: Problem, device: DeviceModel) -> _Ballot:
    try:
        legal = legal_candidates(problem, device)
    except NoLegalCandidate:  # a layout that no backend has kernels for
        return []
    predicted = predictions(problem, legal, device)
    plan = Proposals(by_time(legal, predicted), predicted, BUDGETS[Effort.DEFAULT].in_one_wave())
    return [
        (leader.kernel, 1 / (1 + place / _HALF)) for place, leader in enumerate(plan.kernels({}))
    ]


def _elected(ballots: Sequence[_Ballot], limit: int | None, core_seconds: float) -> list[AnyKernel]:
    """Kernels by a greedy election: each seat goes to the most votes per cost of compiling.

    A ballot's votes lose weight with each of its kernels that is elected.
    """
    votes: dict[str, list[tuple[int, float]]] = {}
    kernels: dict[str, AnyKernel] = {}
    for number, ballot in enumerate(ballots):
        for kernel, weight in ballot:
            kernels[kernel.name] = kernel
            votes.setdefault(kernel.name, []).append((number, weight))
    varieties = {name: alike(kernel) for name, kernel in kernels.items()}
    served = [0.0] * len(ballots)
    compiled: set[object] = set()
    elected: list[AnyKernel] = []

    def support(name: str) -> float:
        return sum(weight / (1 + served[i]) for i, weight in votes[name])

    supported = {name: support(name) for name in votes}
    while votes and (limit is None or len(elected) < limit):
        # By whether the variety is compiled already: kernels of one variety share its front end.
        cost = {known: share(known=known) for known in (True, False)}
        name = min(
            votes,
            key=lambda name: (-supported[name] / cost[varieties[name] in compiled], name),
        )
        core_seconds -= cost[varieties[name] in compiled]
        if core_seconds < 0:
            break
        affected: set[str] = set()
        for number, weight in votes.pop(name):
            served[number] += weight
            affected.update(kernel.name for kernel, _ in ballots[number])
        # Only the kernels of ballots that have just been served have lost support.
        supported.update({other: support(other) for other in affected if other in votes})
        compiled.add(varieties[name])
        elected.append(kernels[name])
    return elected
