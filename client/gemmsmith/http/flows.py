"""The library's calls as generators: each yields the requests it needs and returns its result.

A flow never does input or output itself (the answer cache's small files excepted). The two
clients drive the same flows, one with blocking sends, one with awaited ones, so that retrying,
revalidating, falling back to the cache and reading errors exist once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from gemmsmith.answers.answer import Answer
from gemmsmith.answers.cache import Entry
from gemmsmith.answers.document import SINCE
from gemmsmith.answers.snapshot import Shelf, Snapshot
from gemmsmith.bounds import exceeded
from gemmsmith.device import DeviceModel
from gemmsmith.errors import (
    Busy,
    NotTuned,
    NotUnderstood,
    ServiceError,
    ServiceFault,
    ServiceUnavailable,
    SnapshotCorrupt,
)
from gemmsmith.http.replies import (
    SCHEMA,
    Response,
    check,
    document,
    read,
    read_answers,
    read_devices,
    read_snapshot,
)
from gemmsmith.http.requests import (
    BATCH_LIMIT,
    Query,
    Request,
    batch_request,
    best_request,
    get,
    pack_request,
    retry_request,
    snapshot_request,
    tune_call,
    tune_request,
)
from gemmsmith.http.retry import Patience
from gemmsmith.http.session import Flow, Session
from gemmsmith.jobs import JobStatus
from gemmsmith.problem import Problem
from gemmsmith.signing import PublicKey
from gemmsmith.tuning import Effort

PAGE = 200
"""Rows asked for at once in a listing."""

FULL = 429
"""The status of orders that a full queue, or a key's used-up quota, has no room for."""


def best(session: Session, query: Query, *, fresh: bool = False) -> Flow[Answer]:
    """`GET /best`, revalidated against the cache, answered from it when the service is away.

    With `fresh`, never from the cache alone.

    Raises:
        NotTuned: the service knows nothing for this problem that the query accepts.
        ServiceError, ServiceUnavailable: no answer, and nothing cached.
    """
    entry = session.cache.load(query)
    if entry is not None and not fresh and time.monotonic() < session.away_until:
        session.away(None)
        return entry.answer
    try:
        response = yield from session.exchange(best_request(query, entry.etag if entry else None))
        return _accept(session, query, entry, response)
    except NotTuned as error:
        session.answered()
        _untuned(session, query, error)
        raise
    except (ServiceUnavailable, Busy, ServiceFault) as error:
        if entry is None or fresh:
            raise
        session.away(error)
        return entry.answer


def _accept(session: Session, query: Query, entry: Entry | None, response: Response) -> Answer:
    if response.status == 304 and entry is not None:
        session.answered()
        return entry.answer
    answer = read(check(response, lookup=True), Answer)
    session.answered()
    session.cache.store(query, answer, response.headers.get("etag"))
    return answer


def best_many(session: Session, queries: Sequence[Query]) -> Flow[list[Answer | NotTuned]]:
    """`POST /best:batch` in pieces; answers in the order asked.

    Raises:
        ServiceUnavailable: the service is away and at least one problem is not cached.
        Rejected: the service refuses one of the problems.
    """
    answers: list[Answer | NotTuned] = []
    for start in range(0, len(queries), BATCH_LIMIT):
        piece = queries[start : start + BATCH_LIMIT]
        try:
            response = yield from session.exchange(batch_request(piece))
            found = read_answers(check(response))
        except (ServiceUnavailable, Busy, ServiceFault) as error:
            answers += _all_cached(session, piece, error)
            continue
        if len(found) != len(piece):
            raise ServiceFault(
                response.status, "Unreadable answer", f"{len(found)} answers to {len(piece)}"
            )
        session.answered()
        answers += [_remember(session, *pair) for pair in zip(piece, found, strict=True)]
    return answers


def _remember(session: Session, query: Query, found: Answer | ServiceError) -> Answer | NotTuned:
    if isinstance(found, Answer):
        session.cache.store(query, found, None)
        return found
    if isinstance(found, NotTuned):
        return _untuned(session, query, found)
    raise found


def _untuned(session: Session, query: Query, error: NotTuned) -> NotTuned:
    """The error, which says how to tune the problem, once its cached answer is forgotten."""
    session.cache.drop(query)
    if not isinstance(error, NotUnderstood):
        error.call = tune_call(query)
    return error


def _all_cached(session: Session, queries: Sequence[Query], error: Exception) -> list[Answer]:
    entries = [session.cache.load(query) for query in queries]
    missing = [query.problem for query, entry in zip(queries, entries, strict=True) if not entry]
    if missing:
        raise ServiceUnavailable(
            f"{error}; {len(missing)} of {len(queries)} problems are not cached either, "
            f"first {missing[0]}"
        ) from error
    session.away(error)
    return [entry.answer for entry in entries if entry]


def tune(
    session: Session,
    problem: Problem,
    *,
    effort: Effort,
    priority: int,
    device: str | None,
    calls: int,
    deadline_s: int | None,
    patience: Patience,
) -> Flow[JobStatus]:
    """`POST /tune`: a new job, or the one that is already on its way.

    Raises:
        Busy: there was no room in the queue for as long as `patience` lasted.
    """
    request = tune_request(
        problem,
        effort=effort,
        priority=priority,
        device=device,
        calls=calls,
        deadline_s=deadline_s,
    )
    return (yield from _order(session, request, patience))


def retry(session: Session, identifier: str, patience: Patience) -> Flow[JobStatus]:
    """`POST /jobs/{id}/retry`: a new job for what that one failed to do.

    Raises:
        Rejected: it did not fail, nor was it cancelled.
        Busy: as `tune`.
    """
    return (yield from _order(session, retry_request(identifier), patience))


def _order(session: Session, request: Request, patience: Patience) -> Flow[JobStatus]:
    """Send an order until there is room for it; refusals of any other kind are final."""
    others = session.retry
    if patience.left() != 0.0:  # a full queue is this loop's to wait for, and to tell about
        others = replace(others, statuses=others.statuses - {FULL})
    while True:
        try:
            return read(check((yield from session.exchange(request, others))), JobStatus)
        except Busy as busy:
            if busy.status != FULL:
                raise
            request = replace(request, delay=patience.pause(busy))


def job(session: Session, identifier: str) -> Flow[JobStatus]:
    """`GET /jobs/{id}`."""
    response = yield from session.exchange(get(f"/jobs/{identifier}"))
    return read(check(response), JobStatus)


def cancel(session: Session, identifier: str) -> Flow[JobStatus]:
    """`DELETE /jobs/{id}`."""
    request = Request(method="DELETE", path=f"/jobs/{identifier}")
    response = check((yield from session.exchange(request)))
    if response.body:
        return read(response, JobStatus)
    return (yield from job(session, identifier))


def devices(session: Session) -> Flow[list[DeviceModel]]:
    """`GET /devices`."""
    return read_devices(check((yield from session.exchange(get("/devices")))))


def snapshot(
    session: Session, shelf: Shelf, *, device: str | None, arch: str | None, known: Snapshot | None
) -> Flow[Snapshot]:
    """`GET /snapshot`, revalidated against the one that is `known`, else the shelf's.

    The shelf's stands in when the service is away; who knows one already has that.

    Raises:
        ServiceError, ServiceUnavailable: no snapshot, and none on the shelf, or one known.
    """
    before = known if known is not None else shelf.load()
    try:
        found = yield from _newest(session, device, arch, before)
    except (ServiceUnavailable, Busy, ServiceFault) as error:
        if before is None or known is not None:
            raise
        session.away(error)
        return before
    session.answered()
    if found is not before:
        shelf.store(found)
    return found


def _newest(
    session: Session, device: str | None, arch: str | None, before: Snapshot | None
) -> Flow[Snapshot]:
    """The service's snapshot: the one before if it is that still, or what has become of it."""
    tag = None if before is None else before.tag
    since = before.revision if before is not None and session.gives_deltas else None
    response = yield from session.exchange(snapshot_request(device, arch, tag, since=since))
    if response.status == 422 and since is not None:  # an older service has taken its place
        response = yield from session.exchange(snapshot_request(device, arch, tag))
    told = response.headers.get(SINCE.lower())
    session.gives_deltas = told is not None
    if response.status == 304 and before is not None:
        return before
    if before is not None and since is not None and told == since:
        try:
            return before.updated(check(response).body)
        except SnapshotCorrupt:  # whatever it is that went wrong, the whole is right
            response = yield from session.exchange(snapshot_request(device, arch, None))
    return read_snapshot(check(response))


def page(session: Session, request: Request) -> Flow[dict[str, Any]]:
    """One page of a listing."""
    return document(check((yield from session.exchange(request))))


def pack(session: Session, pack_hash: str) -> Flow[Response]:
    """`GET /packs/{hash}`: the compiled pack's bytes."""
    return check((yield from session.exchange(pack_request(pack_hash))))


def signing_key(session: Session) -> Flow[PublicKey]:
    """`GET /signing-key`: what the service signs with.

    Raises:
        Rejected: the service is of a release that signs nothing.
        ServiceFault: the answer holds no public key.
    """
    response = yield from session.exchange(get("/signing-key"))
    try:
        return PublicKey.parse(str(document(check(response)).get("key")))
    except ValueError as error:
        raise ServiceFault(response.status, "Unreadable answer", str(error)) from error


class Pages:
    """Where a reader is in a listing whose pages each link to the next, and never back."""

    def __init__(
        self,
        session: Session,
        path: str,
        name: str,
        filters: dict[str, Any],
        limit: int | None,
    ) -> None:
        self.finished = limit == 0
        self._bounds = session.bounds
        self._seen: set[Request] = set()
        self._name = name
        self._left = limit
        self._next = get(path, **filters, limit=PAGE if limit is None else min(PAGE, limit))

    def request(self) -> Request:
        """The request for the next page."""
        return self._next

    def take(self, found: dict[str, Any]) -> list[dict[str, Any]]:
        """The rows of a page; remembers where the next one starts.

        Raises:
            ServiceFault: not a page of this listing, or of a newer schema; or it links to a page
                that was read before, or to more pages than are to be read.
        """
        schema = found.get("schema", 1)
        if not isinstance(schema, int) or schema > SCHEMA:
            raise ServiceFault(
                200, "Unreadable answer", f"schema {schema}, this gemmsmith reads {SCHEMA}: upgrade"
            )
        rows = found.get(self._name)
        if not isinstance(rows, list):
            raise ServiceFault(200, "Unreadable answer", f"a page without a list `{self._name}`")
        if self._left is not None:
            rows = rows[: self._left]
            self._left -= len(rows)
        link = (found.get("links") or {}).get("next") or {}
        self.finished = not rows or self._left == 0 or not link.get("href")
        if not self.finished:
            parts = urlsplit(link["href"])
            # Only path and query: wherever the service believes to be, it is asked where it was.
            self._follow(get(parts.path, **dict(parse_qsl(parts.query))))
        return rows

    def _follow(self, following: Request) -> None:
        self._seen.add(self._next)
        if following in self._seen:
            raise ServiceFault(
                200, "Unreadable answer", f"a page of {following.path} links back to an earlier one"
            )
        if len(self._seen) >= self._bounds.pages:
            raise ServiceFault(
                200, "Answer refused", exceeded(f"the list {following.path}", "pages", self._bounds)
            )
        self._next = following
