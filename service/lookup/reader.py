"""Lookups as they are answered: from memory, else read from the database and kept.

`GET /best` and `POST /best:batch` end here. What memory lacks is read in as few queries as there
can be.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from http import HTTPStatus
from typing import cast

import msgspec

from gemmsmith.answers.answer import Answer
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.problem import Problem
from service.http import documents
from service.http.abilities import EVERYTHING, Abilities
from service.http.errors import ProblemError
from service.http.state import State
from service.lookup import find
from service.lookup.cache import Rendered
from service.lookup.devices import check_fits
from service.lookup.neighbourhood import Charted, Together
from service.metrics.prometheus import UNKNOWN, AnswerSource

_BULK_FROM = 32
"""Problems from which they are read together instead of one by one."""

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
    """The answer to one question, from now on known under the query string that asked it."""
    [found] = look_up(service, [problem], device, exact=exact, generation=generation)
    if isinstance(found, Rendered):
        service.answers.keep_query(query, found, exact=exact, generation=generation)
    return found


def look_up(
    service: State,
    problems: Sequence[Problem],
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
    known = service.answers.get_many(slug, problems, exact=exact)
    _count(service, known, AnswerSource.MEMORY)
    asked = [problem for problem, answer in zip(problems, known, strict=True) if not answer]
    if not asked:
        return cast(list[Found], known)
    missing = list(dict.fromkeys(asked))
    read = dict(zip(missing, _read(service, missing, device, exact=exact), strict=True))
    for answer in read.values():
        if isinstance(answer, Rendered):
            service.answers.keep(answer, generation)
    _count(service, [read[problem] for problem in asked], AnswerSource.DATABASE)
    return [answer or read[problem] for problem, answer in zip(problems, known, strict=True)]


def told(found: Found, abilities: Abilities) -> Found:
    """What a caller of these abilities is told of what was found."""
    if isinstance(found, ProblemError) or abilities is EVERYTHING:
        return found
    if not abilities.knows(found.problem):
        return documents.not_tuned(found.problem, None, exact=True)
    return found if abilities.runs(found.backend) else found.without_config()


def batch(
    service: State,
    asked: Sequence[Problem | ProblemError],
    device: DeviceModel | None,
    *,
    exact: bool,
    generation: int,
    abilities: Abilities = EVERYTHING,
) -> Body:
    """The body of `POST /best:batch`: an answer for each question, an error for what is none.

    Raises:
        StoreError: what memory lacks cannot be read.
    """
    problems = [item for item in asked if isinstance(item, Problem)]
    found = iter(look_up(service, problems, device, exact=exact, generation=generation))
    answers = (
        told(next(found), abilities) if isinstance(item, Problem) else item for item in asked
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
    service: State, asked: Sequence[Problem], device: DeviceModel | None, *, exact: bool
) -> Iterator[Found]:
    problems = [_fitting(problem, device) for problem in asked]
    sound = [problem for problem in problems if isinstance(problem, Problem)]
    source: Charted | Together = Charted(service.store, service.chart)
    if device is not None and len(sound) >= _BULK_FROM:
        source = Together(service.store, service.chart, sound, device.slug)
    answers: Iterator[Answer | None] = iter(())
    if device is not None:
        answers = find.find_many(
            source,
            sound,
            device,
            exact=exact,
            pack_of=functools.cache(source.pack_for),
            ranker=service.ranker,
            on_altered=service.altered.note,
        )
    for problem in problems:
        if isinstance(problem, ProblemError):
            yield problem
            continue
        answer = next(answers, None)
        yield (
            documents.not_tuned(problem, device, exact=exact)
            if answer is None
            else Rendered.of(answer)
        )


def _fitting(problem: Problem, device: DeviceModel | None) -> Problem | ProblemError:
    try:
        check_fits(problem, device)
    except ProblemError as error:
        return error
    return problem


def _count(service: State, answers: Iterable[Found | None], source: AnswerSource) -> None:
    """Count lookups by how they were answered; wrong questions are none."""
    counts: Counter[str] = Counter()
    for answer in answers:
        if isinstance(answer, Rendered):
            counts[answer.match] += 1
        elif answer is not None and answer.status == HTTPStatus.NOT_FOUND:
            counts[UNKNOWN] += 1
    for match, number in counts.items():
        service.metrics.lookup(match, source, number)
