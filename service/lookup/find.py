"""From a question to an answer: the exact winner, the nearest legal neighbour's, or a prediction.

Pure over its source: nothing is measured, compiled or written. A neighbour has the question's
operation, batch and device. Its figures stay those of the problem that was measured,
and the answer says which that is; nothing is extrapolated. Its kernel is to be run only where such
kernels were seen to win (`gemmsmith.core.neighbours`); else the answer is to run cuBLAS. Where no
neighbour is near enough, the answer is the cost model's proposal without any measured figure, and
to run cuBLAS until it is tuned: only what was measured may replace that.

A winner that was altered in the database is none: what is answered is what would be without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from gemmsmith.answers.answer import Answer
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.config import MAX_DISTANCE, Config, Match, Use
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.neighbours import NEIGHBOURS, answering, run_reach, runs_there
from gemmsmith.core.problem import Problem
from service.http.abilities import without_candidate
from tuner.backends import refusal, splits_refusal
from tuner.search.predict import Prediction
from tuner.search.predict_many import predict_many
from tuner.search.ranking import Ranker
from tuner.store.statement import is_intact
from tuner.trial import Winner

REACH = MAX_DISTANCE + 0.01
"""What is read: databases round logarithms in their own way, the distance decides."""

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
    exact: bool,
    pack_of: PackOf,
    ranker: Ranker,
    on_altered: OnAltered = lambda _: None,
) -> Answer | None:
    """As `find_many`, for one problem."""
    [found] = find_many(
        source,
        [problem],
        device,
        exact=exact,
        pack_of=pack_of,
        ranker=ranker,
        on_altered=on_altered,
    )
    return found


def find_many(
    source: WinnerSource,
    problems: Sequence[Problem],
    device: DeviceModel,
    *,
    exact: bool,
    pack_of: PackOf,
    ranker: Ranker,
    on_altered: OnAltered = lambda _: None,
) -> Iterator[Answer | None]:
    """The best answer that there is for each of the problems on the device.

    None where only an exact one would do and there is none, or where no kernel is legal. What has
    no neighbour is predicted by `ranker`, all of it together. `on_altered` is told of winners that
    are passed over.

    A neighbour whose answer is cuBLAS answers too: cuBLAS takes every problem. Its CUTLASS
    candidate comes along only where it is legal for the question.
    """
    seen: dict[tuple[Problem, int], bool] = {}  # one winner may be near many problems

    def is_whole(winner: Winner) -> bool:
        key = winner.problem, winner.revision
        if key not in seen:
            seen[key] = is_intact(winner)
            if not seen[key]:
                on_altered(winner)
        return seen[key]

    measured = {
        each: _measured(source, each, device, exact, pack_of, is_whole) for each in problems
    }
    others = [] if exact else [each for each, answer in measured.items() if answer is None]
    predictions = dict(zip(others, predict_many(others, device, ranker), strict=True))
    for problem in problems:
        prediction = predictions.get(problem)
        if prediction is None:
            yield measured[problem]
        else:
            yield _predicted(problem, device, prediction, pack_of)


def _measured(
    source: WinnerSource,
    problem: Problem,
    device: DeviceModel,
    exact: bool,
    pack_of: PackOf,
    is_whole: Callable[[Winner], bool],
) -> Answer | None:
    winner = source.winner(problem, device.slug)
    if winner is not None and is_whole(winner):
        return as_served(winner, pack_of)
    if exact:
        return None
    nearest = source.near_winners(problem, device.slug, NEIGHBOURS, REACH)
    whole = filter(is_whole, nearest)  # looked at as far as there is none that answers
    neighbour = answering(problem, whole, lambda winner: is_legal(winner.candidate, problem))
    if neighbour is None:
        return None
    if neighbour.use.is_default and not is_legal(neighbour.candidate, problem):
        neighbour = without_candidate(neighbour)
    kernel = None if neighbour.runs is None else neighbour.runs.kernel.name
    if kernel is not None and run_reach(problem):
        won = source.won_near(problem, device.slug)
        use = neighbour.use if runs_there(problem, kernel, won) else Use.CUBLAS
    else:
        use = Use.CUBLAS
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
