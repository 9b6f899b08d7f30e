"""Lookups as they are answered: from memory, else read from the database and kept.

Every road to an answer ends here: `GET /best`, `POST /best:batch`, and `service.fast_path`, which
takes a short cut to the same memory. What memory lacks is read in as few queries as there can be.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from http import HTTPStatus

import msgspec

from gemmsmith.device import DeviceModel
from gemmsmith.errors import InvalidProblem
from gemmsmith.problem import Problem
from service import documents, lookup
from service.answers import Question, Rendered
from service.catalogue import check_fits
from service.metrics import UNKNOWN, Source
from service.problems import ProblemError, invalid_field
from service.state import State
from tuner.store import Store
from tuner.trial import Winner

_BULK_FROM = 32
"""Problems from which they are read together instead of one by one."""

_SNAPSHOT_MOST = 5_000
"""Winners of a device up to which many neighbours are looked for in memory (0.4 s to read them);
among more, each neighbourhood is a query of its own."""

Found = Rendered | ProblemError


def look_up(
    service: State,
    questions: Sequence[Question],
    device: DeviceModel | None,
    *,
    exact: bool,
    generation: int,
) -> list[Found]:
    """The answer to each question, or why there is none.

    `generation` is that of the memory before `device` was resolved.

    Raises:
        StoreError: what memory lacks cannot be read.
    """
    slug = device.slug if device is not None else ""
    known = service.answers.get_many(slug, questions, exact=exact)
    asked = zip(questions, known, strict=True)
    missing = list(dict.fromkeys(question for question, answer in asked if answer is None))
    read = dict(zip(missing, _read(service, missing, device, exact=exact), strict=True))
    for answer in read.values():
        if isinstance(answer, Rendered):
            service.answers.keep(answer, generation)
    answers = [
        read[question] if answer is None else answer
        for question, answer in zip(questions, known, strict=True)
    ]
    _count(service, known, answers)
    return answers


def batch(
    service: State,
    asked: Sequence[Question | ProblemError],
    device: DeviceModel | None,
    *,
    exact: bool,
    generation: int,
) -> bytes:
    """The body of `POST /best:batch`: an answer for each question, an error for what is none.

    Raises:
        StoreError: what memory lacks cannot be read.
    """
    questions = [item for item in asked if isinstance(item, Question)]
    found = iter(look_up(service, questions, device, exact=exact, generation=generation))
    bodies = []
    for index, item in enumerate(asked):
        answer = next(found) if isinstance(item, Question) else item
        if isinstance(answer, Rendered):
            bodies.append(answer.body)
        else:
            document = answer.document(f"/best:batch#/problems/{index}")
            bodies.append(msgspec.json.encode(document))
    return b'{"answers":[%b]}' % b",".join(bodies)


def _read(
    service: State, questions: Sequence[Question], device: DeviceModel | None, *, exact: bool
) -> Iterator[Found]:
    problems = [_problem(question, device) for question in questions]
    sound = [problem for problem in problems if isinstance(problem, Problem)]
    source: lookup.WinnerSource = service.store
    if device is not None and len(sound) >= _BULK_FROM:
        source = _Together(service.store, sound, device)
    pack_of = functools.cache(service.store.pack_for)
    for problem in problems:
        if isinstance(problem, ProblemError):
            yield problem
            continue
        answer = None
        if device is not None:
            answer = lookup.find(
                source, problem, device, exact=exact, pack_of=pack_of, ranker=service.ranker
            )
        yield (
            documents.not_tuned(problem, device, exact=exact)
            if answer is None
            else Rendered.of(answer)
        )


def _problem(question: Question, device: DeviceModel | None) -> Problem | ProblemError:
    try:
        problem = question.problem()
        check_fits(problem, device)
    except InvalidProblem as error:
        return invalid_field(error.field, str(error))
    except ProblemError as error:
        return error
    return problem


class _Together:
    """The winners of many problems, read at once; their neighbours, once one is asked for."""

    def __init__(self, store: Store, problems: Sequence[Problem], device: DeviceModel) -> None:
        self._store = store
        self._device = device
        self._exact = {found.problem: found for found in store.winners_of(problems, device.slug)}

    def winner(self, problem: Problem, _device_slug: str) -> Winner | None:
        """The current winner for exactly this problem."""
        return self._exact.get(problem)

    def near_winners(
        self, problem: Problem, device_slug: str, limit: int, reach: float
    ) -> Sequence[Winner]:
        """Current winners of the same types, layout, batch and device, nearest first."""
        return self._around.near_winners(problem, device_slug, limit, reach)

    @functools.cached_property
    def _around(self) -> lookup.WinnerSource:
        found = self._store.winners(device=self._device.slug, limit=_SNAPSHOT_MOST + 1)
        return lookup.Snapshot(found) if len(found) <= _SNAPSHOT_MOST else self._store


def _count(service: State, known: Sequence[Rendered | None], answers: Sequence[Found]) -> None:
    """Count lookups by how they were answered; wrong questions are none."""
    counts = Counter(
        (
            answer.match if isinstance(answer, Rendered) else UNKNOWN,
            Source.DATABASE if kept is None else Source.MEMORY,
        )
        for kept, answer in zip(known, answers, strict=True)
        if isinstance(answer, Rendered) or answer.status == HTTPStatus.NOT_FOUND
    )
    for (match, source), number in counts.items():
        service.metrics.lookup(match, source, number)
