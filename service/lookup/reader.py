"""Lookups are answered from memory, else read from the database and kept.

`GET /best` and `POST /best:batch` both end here. What memory lacks is read in few queries, however
many problems a batch has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import cast

import msgspec

from gemmsmith.answers.answer import Answer
from gemmsmith.core.config import Match
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.problem import Problem
from service.http import documents
from service.http.abilities import EVERYTHING, Abilities
from service.http.errors import ProblemError
from service.http.state import State
from service.lookup import find
from service.lookup.cache import Rendered
from service.lookup.devices import check_fits
from service.lookup.neighbourhood import Charted
from service.metrics.prometheus import UNKNOWN, AnswerSource

_PARTS_AT_ONCE = 100
"""Parts of a batch's body in one piece: 100 KB, which a processor's cache has room for."""

Found = Rendered | ProblemError


def answer_query(
    service: State,
    query: bytes,
    problem: Problem,
    device: DeviceModel | None,
    *,
    exact: bool,
    generation: int,
) -> Found:
    """The answer to one problem, which is kept under the query string from now on."""
    accepted = find.EXACT if exact else find.ANY
    [answer] = look_up(service, [problem], device, accepted=accepted, generation=generation)
    if isinstance(answer, Rendered):
        service.answers.keep_query(query, answer, accepted, generation)
    return answer


def look_up(
    service: State,
    problems: Sequence[Problem],
    device: DeviceModel | None,
    *,
    accepted: Collection[Match],
    generation: int,
) -> list[Found]:
    """The answer to each problem, of the `accepted` kinds, or the error without an answer.

    `generation` is that of the memory before `device` was resolved.

    Raises:
        StoreError: what memory lacks cannot be read.
    """
    slug = device.slug if device is not None else ""
    known = service.answers.get_many(slug, problems, accepted)
    _count(service, known, AnswerSource.MEMORY)
    asked = [problem for problem, answer in zip(problems, known, strict=True) if not answer]
    if not asked:
        return cast(list[Found], known)
    missing = list(dict.fromkeys(asked))
    read = dict(zip(missing, _read(service, missing, device, accepted), strict=True))
    for answer in read.values():
        if isinstance(answer, Rendered):
            service.answers.keep(answer, generation)
    _count(service, [read[problem] for problem in asked], AnswerSource.DATABASE)
    return [answer or read[problem] for problem, answer in zip(problems, known, strict=True)]


def for_client(answer: Found, abilities: Abilities) -> Found:
    """The answer for a client of these abilities."""
    if isinstance(answer, ProblemError) or abilities is EVERYTHING:
        return answer
    if not abilities.knows(answer.problem):
        return documents.not_tuned(answer.problem, None, exact=True)
    return answer if abilities.runs(answer.backend) else answer.without_config()


def batch(
    service: State,
    asked: Sequence[Problem | ProblemError],
    device: DeviceModel | None,
    *,
    exact: bool,
    generation: int,
    abilities: Abilities = EVERYTHING,
) -> Body:
    """The body of `POST /best:batch`: an answer to each problem, else an error.

    Nothing is predicted: a problem without a winner, its own or a neighbour's, is not tuned.

    Raises:
        StoreError: what memory lacks cannot be read.
    """
    problems = [item for item in asked if isinstance(item, Problem)]
    accepted = find.EXACT if exact else find.MEASURED
    known = look_up(service, problems, device, accepted=accepted, generation=generation)
    rest = iter(known)
    answers = (
        for_client(next(rest), abilities) if isinstance(item, Problem) else item for item in asked
    )
    return Body(
        answer.body
        if isinstance(answer, Rendered)
        else msgspec.json.encode(answer.document(f"/best:batch#/problems/{index}"))
        for index, answer in enumerate(answers)
    )


class Body:
    """Many answers as one JSON document: 20 MB for 10,000, so it is never put into one piece."""

    def __init__(self, answers: Iterable[bytes]) -> None:
        self._parts = [b'{"answers":[']
        for answer in answers:
            self._parts += (answer, b",")
        self._parts[-1] = b"]}"

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __iter__(self) -> Iterator[bytes]:
        """The pieces to be sent one after the other."""
        for start in range(0, len(self._parts), _PARTS_AT_ONCE):
            yield b"".join(self._parts[start : start + _PARTS_AT_ONCE])


def _read(
    service: State,
    asked: Sequence[Problem],
    device: DeviceModel | None,
    accepted: Collection[Match],
) -> Iterator[Found]:
    problems = [_fitting(problem, device) for problem in asked]
    answers: Mapping[Problem, Answer] = {}
    if device is not None:
        answers = find.find_many(
            Charted(service.store, service.chart),
            [problem for problem in problems if isinstance(problem, Problem)],
            device,
            accepted=accepted,
            ranker=service.ranker,
        )
    for problem in problems:
        if isinstance(problem, ProblemError):
            yield problem
        elif problem in answers:
            yield Rendered.of(answers[problem])
        else:
            exact = Match.PREDICTED not in accepted
            yield documents.not_tuned(problem, device, exact=exact)


def _fitting(problem: Problem, device: DeviceModel | None) -> Problem | ProblemError:
    try:
        check_fits(problem, device)
    except ProblemError as error:
        return error
    return problem


def _count(service: State, answers: Iterable[Found | None], source: AnswerSource) -> None:
    """Count lookups by how they were answered; invalid requests do not count."""
    counts: Counter[str] = Counter()
    for answer in answers:
        if isinstance(answer, Rendered):
            counts[answer.match] += 1
        elif answer is not None and answer.status == HTTPStatus.NOT_FOUND:
            counts[UNKNOWN] += 1
    for match, number in counts.items():
        service.metrics.lookup(match, source, number)
