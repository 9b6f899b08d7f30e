"""A problem's winners, past and present, and the choices that people make among them.

The flows here are `gemmsmith.http.flows`' in form. A choice is sent once, unlike every other
request: a roll-back that is repeated would be undone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from gemmsmith.answers import understood
from gemmsmith.answers.answer import Answer, TunedAnswer
from gemmsmith.errors import NotUnderstood, ServiceUnavailable
from gemmsmith.http.flows import best, check_device, check_same
from gemmsmith.http.listing import Pages
from gemmsmith.http.replies import NoAnswer, check, read
from gemmsmith.http.requests import Query, choice_request, fields_of
from gemmsmith.http.session import Flow, Session
from gemmsmith.jobs import JobStatus
from gemmsmith.problem import Problem


class Origin(StrEnum):
    """Where a winner's measurements come from."""

    MEASURED = "measured"  # by this installation
    IMPORTED = "imported"  # by another one that is believed, on a real GPU: shipped winners
    UNSIGNED = "unsigned"  # by another one, says a file that nobody who is believed has signed
    REPLAYED = "replayed"  # on a recorded GPU


@dataclass(frozen=True, kw_only=True, slots=True)
class Revision:
    """A winner in the history of its problem.

    Attributes:
        answer: what is, was or would be answered while it is served; `answer.revision` is its
            number, `answer.pinned` and `answer.stale` are as of now.
        current: it is the one that is served.
    """

    answer: Answer
    origin: Origin
    current: bool


def history(
    session: Session,
    problem: Problem,
    *,
    device: str | None,
    limit: int | None,
    before: int | None = None,
) -> Flow[list[Revision]]:
    """`GET /winners/history`, newest first; with `before`, revisions before that one.

    Raises:
        NotTuned: the problem has no winner on that device model.
        ServiceError, ServiceUnavailable: no answer.
    """
    where = {**fields_of(problem), "device": device, "after": before}
    pages = Pages(session, "/winners/history", "revisions", where, limit)
    found: list[Revision] = []
    while not pages.finished:
        rows = yield from pages.rows(lookup=True)
        for revision in understood.each(rows, Revision, "revisions"):
            _check(revision, problem, device)
            found.append(revision)
    return found


def result_of(session: Session, status: JobStatus, device: str | None) -> Flow[TunedAnswer]:
    """What a finished job found, and what is served, asked of the service itself.

    Raises:
        NotUnderstood: only a newer gemmsmith can read what it found.
        ServiceError, ServiceUnavailable: no answer.
    """
    # A job may name a device as workers do (`cuda:0`, `replay:<file>`), which no lookup knows.
    if device is None and ":" not in status.device:
        device = status.device or None
    query = Query(problem=status.problem, device=device, exact=True)
    served = yield from best(session, query, fresh=True)
    number = status.winner_revision
    if number is None or number == served.revision:
        return TunedAnswer.of(served, served)
    revisions = yield from history(
        session, status.problem, device=served.device.slug, limit=1, before=number + 1
    )
    for revision in revisions:
        if revision.answer.revision == number:
            return TunedAnswer.of(revision.answer, served)
    raise NotUnderstood(
        200,
        "Not understood",
        f"revision {number}, which job {status.id} found, needs a newer gemmsmith",
    )


def choose(
    session: Session, verb: str, problem: Problem, *, device: str | None, revision: int | None
) -> Flow[Revision]:
    """`POST /winners/pin`, `/unpin` or `/rollback`; the revision that is served from now on.

    Raises:
        NotTuned: the problem has no winner on that device model.
        Rejected: there is no such revision, or nothing to undo.
        ServiceUnavailable: no answer; the choice may have been made, or not.
    """
    reply = yield choice_request(verb, problem, device=device, revision=revision)
    if isinstance(reply, NoAnswer):
        raise ServiceUnavailable(
            f"no answer from {session.url}: {reply.reason}. It may have been done, or not: look at "
            "the history before you repeat it"
        )
    chosen = read(check(reply, lookup=True), Revision)
    _check(chosen, problem, device)
    if revision is not None:
        check_same("the winner", "revision", chosen.answer.revision, revision)
    return chosen


def _check(revision: Revision, problem: Problem, device: str | None) -> None:
    check_same("the winner", "problem", revision.answer.problem, problem)
    check_device("the winner", revision.answer.device.slug, device)
