"""The calls of both clients, except those about jobs (`gemmsmith.http.job_calls`).

A call waits for its session's sender alone (`gemmsmith.http.sending`), blocking or not. The small
files of the answer cache are read and written in place. `Client` documents what its calls raise.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gemmsmith.answers import understood
from gemmsmith.answers.answer import Answer
from gemmsmith.answers.history import Revision
from gemmsmith.answers.snapshot import Snapshot
from gemmsmith.core.config import Match
from gemmsmith.core.device import DeviceModel, called
from gemmsmith.core.problem import Problem
from gemmsmith.errors import (
    Busy,
    NotTuned,
    NotUnderstood,
    ServiceError,
    ServiceFault,
    ServiceUnavailable,
)
from gemmsmith.http.listing import pages
from gemmsmith.http.replies import (
    NoAnswer,
    check,
    document,
    read,
    read_answers,
    read_list,
    read_snapshot,
)
from gemmsmith.http.requests import Query, fields_of, get, post
from gemmsmith.http.session import Session
from gemmsmith.signing import PublicKey

BATCH_LIMIT = 256
"""Problems per `POST /best:batch`; longer lists are sent in several requests."""


async def best(session: Session, query: Query, *, fresh: bool = False) -> Answer:
    """`GET /best`, revalidated against the cache, and answered from it if the service is away.

    With `fresh`, never from the cache alone.
    """
    cache = session.setup.cache
    entry = cache.load(query)
    if entry is not None and not fresh and time.monotonic() < session.away_until:
        session.last_from_cache = True
        return entry.answer
    request = get(
        "/best",
        **fields_of(query.problem),
        device=query.device,
        arch=query.arch,
        exact=query.exact or None,
    ).with_header("if-none-match", entry.etag if entry else None)
    try:
        response = await session.exchange(request)
        if response.status == 304 and entry is not None:
            session.answered()
            return entry.answer
        answer = read(check(response, lookup=True), Answer)
        check_answer(answer, query)
    except NotTuned as error:
        session.answered()
        _untuned(session, query, error)
        raise
    except (ServiceUnavailable, Busy, ServiceFault) as error:
        if entry is None or fresh:
            raise
        session.away(error)
        return entry.answer
    session.answered()
    cache.store(query, answer, response.headers.get("etag"))
    return answer


def check_answer(answer: Answer, query: Query) -> None:
    """Raise ServiceFault for the answer to another query, by a fault there or on the way."""
    check_same("the answer", "problem", answer.problem, query.problem)
    check_device("the answer", answer.device.slug, query.device)
    if query.arch is not None:
        check_same("the answer", "architecture", answer.device.arch, query.arch)
    if query.exact:
        check_same("the answer", "match", answer.match, Match.EXACT)


def check_same(what: str, field: str, received: object, asked: object) -> None:
    if received != asked:
        raise ServiceFault(200, "Wrong answer", f"{what} has {field} {received}, asked for {asked}")


def check_device(what: str, slug: str, asked: str | None) -> None:
    if asked is not None and not called(asked, [slug]):
        check_same(what, "device", slug, asked)


async def best_many(session: Session, queries: Sequence[Query]) -> list[Answer | NotTuned]:
    """`POST /best:batch` in pieces; the answers in the order of the queries.

    All queries have the same device, architecture and exactness.
    """
    answers: list[Answer | NotTuned] = []
    for start in range(0, len(queries), BATCH_LIMIT):
        piece = queries[start : start + BATCH_LIMIT]
        body = {
            "problems": [fields_of(query.problem) for query in piece],
            "device": piece[0].device,
            "arch": piece[0].arch,
            "exact": piece[0].exact or None,
        }
        try:
            response = await session.exchange(post("/best:batch", body))
            received = read_answers(check(response))
            for query, answer in zip(piece, received, strict=False):
                if isinstance(answer, Answer):
                    check_answer(answer, query)
        except (ServiceUnavailable, Busy, ServiceFault) as error:
            answers += _all_cached(session, piece, error)
            continue
        if len(received) != len(piece):
            raise ServiceFault(
                response.status, "Unreadable answer", f"{len(received)} answers to {len(piece)}"
            )
        session.answered()
        answers += [_remember(session, *pair) for pair in zip(piece, received, strict=True)]
    return answers


def _remember(session: Session, query: Query, answer: Answer | ServiceError) -> Answer | NotTuned:
    if isinstance(answer, Answer):
        session.setup.cache.store(query, answer, None)
        return answer
    if isinstance(answer, NotTuned):
        return _untuned(session, query, answer)
    raise answer


def _untuned(session: Session, query: Query, error: NotTuned) -> NotTuned:
    """The error with the call that tunes the problem. Its cached answer is removed."""
    session.setup.cache.drop(query)
    if not isinstance(error, NotUnderstood):
        device = "" if query.device is None else f", device={query.device!r}"
        error.call = f"client.tune({query.problem.arguments}{device})"
    return error


def _all_cached(session: Session, queries: Sequence[Query], error: Exception) -> list[Answer]:
    entries = [session.setup.cache.load(query) for query in queries]
    missing = [query.problem for query, entry in zip(queries, entries, strict=True) if not entry]
    if missing:
        raise ServiceUnavailable(
            f"{error}; {len(missing)} of {len(queries)} problems are not cached either, "
            f"first {missing[0]}"
        ) from error
    session.away(error)
    return [entry.answer for entry in entries if entry]


async def devices(session: Session) -> list[DeviceModel]:
    rows = read_list(check(await session.exchange(get("/devices"))), "devices")
    return understood.each(rows, DeviceModel, "device models")


async def snapshot(
    session: Session, device: str | None, arch: str | None, known: Snapshot | None
) -> Snapshot:
    """`GET /snapshot`, revalidated against `known`, else against the last one on disk.

    The one on disk is returned if the service is away and none is known.
    """
    shelf = session.setup.shelf(device, arch)
    before = known if known is not None else shelf.load()
    try:
        newest = await _newest(session, device, arch, before)
        check_device("the snapshot", newest.device, device)
    except (ServiceUnavailable, Busy, ServiceFault) as error:
        if before is None or known is not None:
            raise
        session.away(error)
        return before
    session.answered()
    if newest is not before:
        shelf.store(newest)
    return newest


async def _newest(
    session: Session, device: str | None, arch: str | None, before: Snapshot | None
) -> Snapshot:
    """The service's snapshot: `before` itself if nothing has changed."""
    request = replace(get("/snapshot", device=device, arch=arch), bound="snapshot_bytes")
    if before is not None:
        request = request.with_header("if-none-match", f'"{before.tag}"')
    response = await session.exchange(request)
    if response.status == 304 and before is not None:
        return before
    return read_snapshot(check(response))


async def pack(session: Session, pack_hash: str) -> Path:
    """The compiled pack as a local file, downloaded unless it is cached."""
    packs, apply = session.setup.packs(), session.sender.apply
    path = await apply(packs.find, pack_hash)
    if path is not None:
        return path
    return await apply(packs.store, pack_hash, await pack_bytes(session, pack_hash))


async def pack_bytes(session: Session, pack_hash: str) -> bytes:
    request = replace(get(f"/packs/{quote(pack_hash, safe='')}"), bound="pack_bytes")
    return check(await session.exchange(request)).body


async def signing_key(session: Session) -> PublicKey:
    """`GET /signing-key`; raises Rejected at services of releases that sign nothing."""
    response = check(await session.exchange(get("/signing-key")))
    try:
        return PublicKey.parse(str(document(response).get("key")))
    except ValueError as error:
        raise ServiceFault(response.status, "Unreadable answer", str(error)) from None


async def history(
    session: Session,
    problem: Problem,
    device: str | None,
    limit: int | None,
    *,
    before: int | None = None,
) -> list[Revision]:
    """`GET /winners/history`, newest first; with `before`, revisions before that one."""
    filters = {**fields_of(problem), "device": device, "after": before}
    revisions: list[Revision] = []
    async for rows in pages(session, "/winners/history", "revisions", filters, limit, lookup=True):
        for revision in understood.each(rows, Revision, "revisions"):
            _check_revision(revision, problem, device)
            revisions.append(revision)
    return revisions


async def explain(session: Session, problem: Problem, device: str | None) -> dict[str, Any]:
    """`GET /explain`, as the service sent it."""
    request = get("/explain", **fields_of(problem), device=device)
    content = document(check(await session.exchange(request), lookup=True))
    check_same("the explanation", "problem", content.get("problem"), fields_of(problem))
    return content


async def choose(
    session: Session, verb: str, problem: Problem, device: str | None, revision: int | None = None
) -> Revision:
    """`POST /winners/pin`, `/unpin` or `/rollback`; the revision that is served from now on."""
    body = {**fields_of(problem), "device": device, "revision": revision}
    # It is sent once, unlike every other request: a roll-back that is repeated would be undone.
    reply = await session.sender.send(post(f"/winners/{verb}", body))
    if isinstance(reply, NoAnswer):
        raise ServiceUnavailable(
            f"no answer from {session.setup.url}: {reply.reason}. It may have been done, or not: "
            "look at the history before you repeat it"
        )
    chosen = read(check(reply, lookup=True), Revision)
    _check_revision(chosen, problem, device)
    if revision is not None:
        check_same("the winner", "revision", chosen.answer.revision, revision)
    return chosen


def _check_revision(revision: Revision, problem: Problem, device: str | None) -> None:
    check_same("the winner", "problem", revision.answer.problem, problem)
    check_device("the winner", revision.answer.device.slug, device)
