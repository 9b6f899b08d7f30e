"""Predictions for many problems at once: each the one that `tuner.search.predict` makes of it.

A problem by itself takes a millisecond, nearly all of it to tell what is legal, kernel by kernel.
Here that is told in columns, for all problems that are offered the same kernels.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise, product
from typing import TYPE_CHECKING

from gemmsmith.core.candidate import Candidate, key_of
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import CutlassKernel
from gemmsmith.core.launch import Launch
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import Problem
from tuner.backends import kernels, prepare
from tuner.backends.backend import Features
from tuner.backends.columns import Extents, Fitted, Launches, Traits, every_launch, likeness
from tuner.errors import NoLegalCandidate
from tuner.search.cost_model import AnalyticModel, Choices, Sizes, sizes_of
from tuner.search.predict import FIRST, SHORTLIST, Prediction, predict
from tuner.search.ranking import Ranker

if TYPE_CHECKING:
    from numpy import float64, int64
    from numpy.typing import NDArray

    Column = NDArray[float64]
    Places = NDArray[int64]

_FEW = 4
"""Problems that are predicted sooner one by one."""

_LOOK = 32
"""Candidates looked at together for the shortlist: of most problems these have enough kernels."""

_ALIGNMENTS = (4096, 4104)
"""Extents whose rows TMA can read, and such as it can of 16 bits but not of 8. Others are rare."""

AT_ONCE = 128
"""Problems of one field: some 30,000 candidates, whose columns fit a processor's cache."""


def predict_many(
    problems: Sequence[Problem], device: DeviceModel, ranker: Ranker
) -> list[Prediction | None]:
    """The prediction for each problem; None where no kernel is legal.

    Other models than the analytic one are asked problem by problem.
    """
    if not isinstance(ranker, AnalyticModel) or len(problems) < _FEW:
        return [predict(problem, device, ranker) for problem in problems]
    found: list[Prediction | None] = [None] * len(problems)
    alike: dict[_Field, list[int]] = {}
    for place, problem in enumerate(problems):
        field = _field(problem, device)
        if field is None:
            found[place] = predict(problem, device, ranker)
        else:
            alike.setdefault(field, []).append(place)
    for field, places in alike.items():
        for start in range(0, len(places), AT_ONCE):
            some = places[start : start + AT_ONCE]
            made = field.predict([problems[place] for place in some], ranker)
            for place, prediction in zip(some, made, strict=True):
                found[place] = prediction
    return found


def prepare_many(operation: Operation, device: DeviceModel, model: AnalyticModel) -> None:
    """Make every kernel that the operation's problems may be offered, so that none is waited for.

    Takes some 0.2 s. An operation of which there are no kernels is no error.
    """
    usual = [Problem.of(operation, *extents) for extents in product(_ALIGNMENTS, repeat=3)]
    with suppress(NoLegalCandidate):
        for problem in usual:
            prepare(problem, device)
        predict_many(usual, device, model)
    for field in filter(None, {_field(problem, device) for problem in usual}):
        field.prepare(model)


class _Field:
    """The kernels that some problems of an operation are offered alike, and in what order of name.

    Threads share one; each waits for its turn.
    """

    def __init__(self, curated: Sequence[CutlassKernel], device: DeviceModel) -> None:
        self._device = device
        self._turn = threading.Lock()
        self._offer = Fitted(curated, device)
        self._curated = len(curated)
        self._described = 0
        self._features: Features[Column]
        self._traits: Traits
        self._ranks: Column

    def prepare(self, model: AnalyticModel) -> None:
        """Know of every kernel that may be offered."""
        with self._turn:
            self._offer.make_all()
            self._describe(model)

    def predict(self, problems: Sequence[Problem], model: AnalyticModel) -> list[Prediction | None]:
        """The prediction for each problem of this field."""
        import numpy

        sizes = Sizes(*numpy.array([sizes_of(problem) for problem in problems], dtype=float).T)
        extents = Extents(sizes.m, sizes.n, sizes.k, sizes.batch)
        with self._turn:
            of, fitted = self._offer.offered(extents)
            self._describe(model)
            features, traits, ranks = self._features, self._traits, self._ranks
        split = traits.split_k + traits.stream_k + traits.cluster_split_k > 0

        def judged(of: Places, kernel: Places, launch: Launches) -> Column:
            if not len(of):
                return numpy.array([])
            some = Features(*(column[kernel] for column in features))
            each = Sizes(*(column[of] for column in sizes))
            return model.in_columns(some, Choices(*launch[1:]), each, self._device)

        def launched(of: Places, kernel: Places) -> tuple[Places, Places, Launches]:
            launch = every_launch(traits.take(kernel), extents.take(of), self._device)
            return of[launch.places], kernel[launch.places], launch

        every = numpy.arange(len(problems))
        plain, splitting = (numpy.flatnonzero(which[: self._curated]) for which in (~split, split))
        first = Launches.of(every[:1], raster_heuristic=1.0, swizzle=float(FIRST.swizzle))
        table = judged(every[:, None], plain, first)  # a row for each problem
        most = _eighth(table)
        times = numpy.concatenate([table.ravel(), judged(of, fitted, first)])
        of = numpy.concatenate([numpy.repeat(every, len(plain)), of])
        kernel = numpy.concatenate([numpy.tile(plain, len(every)), fitted])
        more_of, more, launch = launched(
            numpy.repeat(every, len(splitting)), numpy.tile(splitting, len(every))
        )
        of, kernel = numpy.concatenate([of, more_of]), numpy.concatenate([kernel, more])
        times = numpy.concatenate([times, judged(more_of, more, launch)])
        there = numpy.flatnonzero(times <= most[of])
        of, kernel, times = of[there], kernel[there], times[there]
        order = numpy.lexsort((ranks[kernel], times, of))
        of, kernel = _best(len(every), of[order], kernel[order])
        of, kernel, launch = launched(of, kernel)
        return self._chosen(len(problems), of, kernel, launch, judged(of, kernel, launch))

    def _chosen(
        self, count: int, of: Places, kernel: Places, launch: Launches, times: Column
    ) -> list[Prediction | None]:
        """The soonest of each problem; equal times fall to the key."""
        import numpy

        least = numpy.full(count, numpy.inf)
        numpy.minimum.at(least, of, times)
        found: list[tuple[str, int, Launch, float] | None] = [None] * count
        first = numpy.flatnonzero(times == least[of])
        which = (column[first].tolist() for column in (of, kernel, times))
        for problem, one, us, launched in zip(*which, launch.named(first), strict=True):
            key = key_of(self._offer.kernels[one], launched)
            other = found[problem]
            if other is None or key < other[0]:
                found[problem] = key, one, launched, us
        return [each and self._prediction(*each[1:]) for each in found]

    def _prediction(self, kernel: int, launch: Launch, us: float) -> Prediction:
        this = Candidate(kernel=self._offer.kernels[kernel], launch=launch)
        return Prediction(candidate=this, us=us)

    def _describe(self, model: AnalyticModel) -> None:
        """Know of every kernel that was offered by now."""
        import numpy

        known, new = self._offer.kernels, self._offer.kernels[self._described :]
        if not new:
            return
        described = model.described(new), Traits.of(new, self._device)
        if self._described:
            described = (
                Features(*map(numpy.append, self._features, described[0])),
                Traits(*map(numpy.append, self._traits, described[1])),
            )
        self._features, self._traits = described
        by_name = sorted(range(len(known)), key=lambda place: known[place].name)
        self._ranks = numpy.empty(len(known))
        self._ranks[by_name] = range(len(known))
        self._described = len(known)


def _eighth(times: Column) -> Column:
    """Of each row the time that a kernel of the shortlist has at most; more make it shorter."""
    import numpy

    if times.shape[1] < SHORTLIST:
        return numpy.full(len(times), numpy.inf)
    found: Column = numpy.partition(times, SHORTLIST - 1, axis=1)[:, SHORTLIST - 1]
    return found


def _best(count: int, of: Places, kernel: Places) -> tuple[Places, Places]:
    """Of each problem's kernels, in their order, the first few, each once."""
    import numpy

    starts = numpy.searchsorted(of, numpy.arange(count + 1)).tolist()
    kept_of: list[int] = []
    kept: list[int] = []
    for problem, (start, end) in enumerate(pairwise(starts)):
        there: dict[int, None] = {}
        for place in range(start, end, _LOOK):
            there |= dict.fromkeys(kernel[place : min(place + _LOOK, end)].tolist())
            if len(there) >= SHORTLIST:
                break
        few = list(there)[:SHORTLIST]
        kept += few
        kept_of += [problem] * len(few)
    return numpy.array(kept_of, dtype=int), numpy.array(kept, dtype=int)


def _field(problem: Problem, device: DeviceModel) -> _Field | None:
    """The field of such problems; None where there is none in columns."""
    if problem.operation.is_grouped:
        return None
    try:
        return _field_of(likeness(problem, device.arch), device)
    except NoLegalCandidate:
        return None


@lru_cache(maxsize=8192)
def _field_of(like: Problem, device: DeviceModel) -> _Field | None:
    curated = tuple(kernels(like, device.arch))
    known = tuple(kernel for kernel in curated if isinstance(kernel, CutlassKernel))
    return _shared(known, device) if len(known) == len(curated) else None


@lru_cache(maxsize=256)
def _shared(curated: tuple[CutlassKernel, ...], device: DeviceModel) -> _Field:
    """One for all who are offered these kernels, however they differ otherwise."""
    return _Field(curated, device)
