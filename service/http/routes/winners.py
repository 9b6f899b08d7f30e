"""`/winners/…`: a problem's history of winners, and what people choose to serve from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.responses import Response

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.problem import Problem
from service import documents
from service.errors import ProblemError, invalid_field
from service.http.access import Caller, Scope, needs
from service.http.requests import HistoryQuery, PinBody, WinnerBody
from service.http.routes.paging import next_page
from service.http.state import Service, State
from service.lookup import find
from service.lookup.abilities import Abilities, Asking
from tuner.errors import NoSuchRevision, NoSuchWinner, NothingToUndo
from tuner.store.revisions import WinnerRevision

router = APIRouter(prefix="/winners", tags=["history"])

Admin = Annotated[Caller, needs(Scope.ADMIN)]


@router.get("/history", dependencies=[needs(Scope.READ)])
def history(service: Service, asking: Asking, query: Annotated[HistoryQuery, Query()]) -> Response:
    """All winners of a problem on a GPU model, newest first.

    Each comes with the answer of `GET /best` while it is served. `current` marks the one that is;
    `origin` says where its measurements come from.
    """
    with _asked(service, query) as (problem, device):
        if not asking.knows(problem):
            raise NoSuchWinner
        revisions = service.store.revisions(
            problem, device.slug, before=query.after, limit=query.limit
        )
        if not revisions and query.after is None:
            raise NoSuchWinner
    following = next_page("/winners/history", query, revisions, lambda last: last.winner.revision)
    rows = [_document(service, asking, revision) for revision in revisions]
    return documents.page("revisions", rows, following)


@router.post("/pin")
def pin(service: Service, caller: Admin, asking: Asking, body: PinBody) -> Response:
    """Serve a revision until it is unpinned, even if others are promoted meanwhile."""
    with _asked(service, body) as (problem, device):
        chosen = service.store.pin(problem, device.slug, body.revision, actor=caller.name)
    return _served(service, asking, chosen)


@router.post("/unpin")
def unpin(service: Service, caller: Admin, asking: Asking, body: WinnerBody) -> Response:
    """Serve the newest winner of the best origin again: measured, imported, then replayed."""
    with _asked(service, body) as (problem, device):
        chosen = service.store.unpin(problem, device.slug, actor=caller.name)
    return _served(service, asking, chosen)


@router.post("/rollback")
def roll_back(service: Service, caller: Admin, asking: Asking, body: WinnerBody) -> Response:
    """Serve and pin the revision that was current before.

    A second rollback undoes the first. To serve any other revision, pin it.
    """
    with _asked(service, body) as (problem, device):
        chosen = service.store.roll_back(problem, device.slug, actor=caller.name)
    return _served(service, asking, chosen)


@contextmanager
def _asked(
    service: State, asked: HistoryQuery | WinnerBody
) -> Iterator[tuple[Problem, DeviceModel]]:
    """What is meant; turns what is not there, or cannot be chosen, into an answer."""
    problem = asked.problem()
    device = service.catalogue.resolve(asked.arch, asked.device)
    if device is None:
        raise documents.not_tuned(problem, None, exact=True)
    try:
        yield problem, device
    except NoSuchWinner:
        raise documents.not_tuned(problem, device, exact=True) from None
    except NoSuchRevision as error:
        raise invalid_field("revision", f"{error}", "one that /winners/history lists") from error
    except NothingToUndo as error:
        raise ProblemError(
            status=409,
            kind="nothing-to-undo",
            detail=f"{error}.",
            links={"history": {"href": documents.history_url(problem, device.slug)}},
        ) from error


def _served(service: State, asking: Abilities, chosen: WinnerRevision) -> Response:
    service.catch_up()
    return documents.json_response(_document(service, asking, chosen))


def _document(service: State, asking: Abilities, revision: WinnerRevision) -> dict[str, Any]:
    winner = asking.report(revision.winner)
    return {
        "current": revision.current,
        "origin": revision.origin,
        "answer": documents.answer(find.as_served(winner, service.store.pack_for)),
        "links": {"history": {"href": documents.history_url(winner.problem, winner.device.slug)}},
    }
