"""Lookups are answered from memory, else read from the database and kept.

`GET /best` and `POST /best:batch` both end here. What memory lacks is read in few queries, however
many problems a batch has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import cast

import msgspec

from gemmsmith.answers.answer import Answer
from gemmsmith.core.config import Match
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.problem import Problem
from service import documents
from service.errors import ProblemError
from service.lookup import find
from service.lookup.abilities import EVERYTHING, Abilities
from service.lookup.cache import Answers, Rendered
from service.lookup.devices import check_fits
from service.lookup.find import Chart, Charted
from service.metrics.prometheus import UNKNOWN, AnswerSource, Metrics
from tuner.store import Store

_PARTS_AT_ONCE = 100
"""Parts of a batch's body in one piece: 100 KB, which a processor's cache has room for."""

Found = Rendered | ProblemError


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
        for start in range(0, len(self._parts), _PARTS_AT_ONCE):
            yield b"".join(self._parts[start : start + _PARTS_AT_ONCE])


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerReader:
    """Answers out of `answers`, else out of the store, with neighbours from its chart.

    Of all methods, `generation` is that of `answers` before the `device` was resolved.
    """

    store: Store
    chart: Chart
    answers: Answers
    metrics: Metrics

    def query(
        self,
        query: bytes,
        problem: Problem,
        device: DeviceModel | None,
        *,
        exact: bool,
        generation: int,
    ) -> Found:
        """The answer to one problem, which is kept under the query string from now on."""
        accepted = find.EXACT if exact else find.ANY
        [answer] = self.look_up([problem], device, accepted=accepted, generation=generation)
        if isinstance(answer, Rendered):
            self.answers.keep_query(query, answer, accepted, generation)
        return answer

    def batch(
        self,
        asked: Sequence[Problem | ProblemError],
        device: DeviceModel | None,
        *,
        exact: bool,
        generation: int,
        abilities: Abilities,
    ) -> Body:
        """The body of `POST /best:batch`: an answer to each problem, else an error.

        Nothing is predicted: a problem without a winner, its own or a neighbour's, is not tuned.

        Raises:
            StoreError: what memory lacks cannot be read.
        """
        problems = [item for item in asked if isinstance(item, Problem)]
        accepted = find.EXACT if exact else find.MEASURED
        known = self.look_up(problems, device, accepted=accepted, generation=generation)
        rest = iter(known)
        answers = (
            for_client(next(rest), abilities) if isinstance(item, Problem) else item
            for item in asked
        )
        return Body(
            answer.body
            if isinstance(answer, Rendered)
            else msgspec.json.encode(answer.document(f"/best:batch#/problems/{index}"))
            for index, answer in enumerate(answers)
        )

    def look_up(
        self,
        problems: Sequence[Problem],
        device: DeviceModel | None,
        *,
        accepted: Collection[Match],
        generation: int,
    ) -> list[Found]:
        """The answer to each problem, of the `accepted` kinds, or the error without an answer.

        Raises:
            StoreError: what memory lacks cannot be read.
        """
        slug = device.slug if device is not None else ""
        answers: list[Found | None] = [*self.answers.get_many(slug, problems, accepted)]
        self._count(answers, AnswerSource.MEMORY)
        missing = [place for place, answer in enumerate(answers) if answer is None]
        if missing:
            asked = list(dict.fromkeys(problems[place] for place in missing))
            read = self._read(asked, device, accepted, generation)
            for place in missing:
                answers[place] = read[problems[place]]
            self._count([answers[place] for place in missing], AnswerSource.DATABASE)
        return cast(list[Found], answers)

    def _read(
        self,
        problems: Sequence[Problem],
        device: DeviceModel | None,
        accepted: Collection[Match],
        generation: int,
    ) -> dict[Problem, Found]:
        """As `look_up`, out of the store, and kept from now on."""
        known: Mapping[Problem, Answer] = {}
        if device is not None:
            source = Charted(self.store, self.chart)
            known = find.find_many(source, problems, device, accepted=accepted)
        read: dict[Problem, Found] = {}
        for problem in problems:
            answer = known.get(problem)
            try:
                if answer is None or answer.match is not Match.EXACT:
                    check_fits(problem, device)  # a problem that was measured fits
            except ProblemError as error:
                read[problem] = error
                continue
            if answer is None:
                has_order = problem.operation.summation is not None
                exact = Match.PREDICTED not in accepted or has_order
                read[problem] = documents.not_tuned(problem, device, exact=exact)
                continue
            read[problem] = rendered = Rendered.of(answer)
            self.answers.keep(rendered, generation)
        return read

    def _count(self, answers: Iterable[Found | None], source: AnswerSource) -> None:
        """Count lookups by how they were answered; invalid requests do not count."""
        counts: Counter[str] = Counter()
        for answer in answers:
            if isinstance(answer, Rendered):
                counts[answer.match] += 1
            elif answer is not None and answer.status == HTTPStatus.NOT_FOUND:
                counts[UNKNOWN] += 1
        for match, number in counts.items():
            self.metrics.lookup(match, source, number)


def for_client(answer: Found, abilities: Abilities) -> Found:
    """The answer for a client of these abilities."""
    if isinstance(answer, ProblemError) or abilities is EVERYTHING:
        return answer
    if not abilities.knows(answer.problem):
        return documents.not_tuned(answer.problem, None, exact=True)
    if abilities.runs(answer.backend):
        return answer
    if answer.problem.operation.summation is not None:  # cuBLAS would give other bits
        return documents.not_tuned(answer.problem, None, exact=True)
    return answer.without_config()
