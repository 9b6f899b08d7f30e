"""From a problem to an answer: the exact winner, the nearest legal neighbour's, or a prediction.

Pure over its source: nothing is measured, compiled or written. A neighbour has the problem's
operation, batch and device. Its figures stay those of the problem that was measured, and the answer
says which that is; nothing is extrapolated. Its kernel is to be run only where such kernels were
seen to win (`gemmsmith.core.neighbours`); else the answer is to run cuBLAS. Where no neighbour is
near enough, the answer is the cost model's proposal without any measured figure, and to run cuBLAS
until the problem is tuned: only what was measured may replace that.

A winner that was altered in the database does not answer: the answer is what it would be without.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from gemmsmith.answers.answer import Answer
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.config import MAX_DISTANCE, Config, Match, Use
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.neighbours import NEIGHBOURS, answering, run_reach, runs_there
from gemmsmith.core.problem import Problem
from service.http.abilities import without_candidate
from tuner.backends import refusal, splits_refusal
from tuner.search.predict import Prediction, predict
from tuner.search.ranking import Ranker
from tuner.store.statement import is_intact
from tuner.trial import Winner

REACH = MAX_DISTANCE + 0.01
"""What is read: databases round logarithms in their own way, the distance decides."""

EXACT = frozenset({Match.EXACT})
MEASURED = frozenset({Match.EXACT, Match.NEAREST})
ANY = frozenset(Match)
"""What may answer a question."""

PackOf = Callable[[str], str | None]
"""The pack that holds a kernel, by the kernel's name."""

OnAltered = Callable[[Winner], None]


class WinnerSource(Protocol):
    """What a lookup reads: the store, or a snapshot of it."""

    def winner(self, problem: Problem, device_slug: str) -> Winner | None:
        """The current winner for exactly this problem."""
        ...

    def near_winners(
        self, problem: Problem, device_slug: str, limit: int, reach: float
    ) -> Iterable[Winner]:
        """Current winners of the same operation, batch and device, nearest first.

        None is farther than `reach` octaves. Those that cannot answer may be left out.
        """
        ...

    def won_near(self, problem: Problem, device_slug: str) -> Iterable[tuple[Problem, str]]:
        """Problems of the same operation and batch nearby, and the kernels that won on them."""
        ...


def find(
    source: WinnerSource,
    problem: Problem,
    device: DeviceModel,
    *,
    accepted: Collection[Match],
    pack_of: PackOf,
    ranker: Ranker,
    on_altered: OnAltered = lambda _: None,
) -> Answer | None:
    """The best answer for the problem on the device, of the `accepted` kinds.

    Returns None without a winner, a neighbour's winner or a legal kernel, as far as these are
    accepted. `ranker` predicts. `on_altered` gets the winners that are passed over.

    A neighbour whose answer is cuBLAS answers too: cuBLAS takes every problem. Its CUTLASS
    candidate comes along only where it is legal for the problem.
    """

    def is_whole(winner: Winner) -> bool:
        if is_intact(winner):
            return True
        on_altered(winner)
        return False

    winner = source.winner(problem, device.slug)
    if winner is not None and is_whole(winner):
        return as_served(winner, pack_of)
    if Match.NEAREST not in accepted:
        return None
    nearest = source.near_winners(problem, device.slug, NEIGHBOURS, REACH)
    # A filter: winners are checked only until one of them answers.
    neighbour = answering(
        problem, filter(is_whole, nearest), lambda winner: is_legal(winner.candidate, problem)
    )
    if neighbour is not None:
        return _of_neighbour(source, problem, neighbour, pack_of)
    if Match.PREDICTED not in accepted:
        return None
    prediction = predict(problem, device, ranker)
    return None if prediction is None else _predicted(problem, device, prediction, pack_of)


def _of_neighbour(
    source: WinnerSource, problem: Problem, neighbour: Winner, pack_of: PackOf
) -> Answer:
    if neighbour.use.is_default and not is_legal(neighbour.candidate, problem):
        neighbour = without_candidate(neighbour)
    use = Use.CUBLAS
    if neighbour.runs is not None and run_reach(problem):
        won = source.won_near(problem, neighbour.device.slug)
        if runs_there(problem, neighbour.runs.kernel.name, won):
            use = neighbour.use
    return _answer(problem, neighbour, Match.NEAREST, pack_of, use)


def is_legal(candidate: Candidate | None, problem: Problem) -> bool:
    """Whether there is a kernel that takes the problem, and can split its K as the launch says."""
    if candidate is None:
        return False
    kernel, launch = candidate.kernel, candidate.launch
    return refusal(kernel, problem) is None and splits_refusal(kernel, launch, problem) is None


def as_served(winner: Winner, pack_of: PackOf) -> Answer:
    """What is answered to the winner's own problem while that winner is served."""
    return _answer(winner.problem, winner, Match.EXACT, pack_of, winner.use)


def _answer(problem: Problem, winner: Winner, match: Match, pack_of: PackOf, use: Use) -> Answer:
    config = None
    if winner.candidate is not None:
        kernel = winner.candidate.kernel
        # A kernel compiled after the promotion has a pack that the winner does not know of.
        config = Config(
            kernel=kernel,
            launch=winner.candidate.launch,
            pack=winner.pack or pack_of(kernel.name),
        )
    return Answer(
        problem=problem,
        match=match,
        measured=winner.problem,
        distance=0.0 if match is Match.EXACT else problem.distance(winner.problem),
        use=use,
        config=config,
        statistics=winner.statistics,
        baseline=winner.baseline,
        speedup=winner.speedup,
        correctness=winner.correctness,
        conditions=winner.conditions,
        ties=winner.ties,
        device=winner.device,
        environment=winner.environment,
        revision=winner.revision,
        promoted_at=winner.promoted_at,
        replayed=winner.replayed,
        baseline_kernels=winner.baseline_kernels,
        power_penalty=winner.power_penalty,
        regimes=winner.regimes,
        stale=winner.stale,
        pinned=winner.pinned,
    )


def _predicted(
    problem: Problem, device: DeviceModel, prediction: Prediction, pack_of: PackOf
) -> Answer:
    kernel = prediction.candidate.kernel
    return Answer(
        problem=problem,
        match=Match.PREDICTED,
        measured=None,
        distance=None,
        use=Use.CUBLAS,
        config=Config(kernel=kernel, launch=prediction.candidate.launch, pack=pack_of(kernel.name)),
        statistics=None,
        baseline=None,
        speedup=None,
        correctness=None,
        conditions=None,
        ties=(),
        device=device,
        environment=None,
        revision=None,
        promoted_at=None,
        replayed=False,
        predicted_us=prediction.us,
    )
