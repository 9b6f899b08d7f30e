"""The library's calls as generators: each yields the requests it needs and returns its result.

A flow never does input or output itself (the answer cache's small files excepted). The two
clients drive the same flows, one with blocking sends, one with awaited ones, so that retrying,
revalidating, falling back to the cache and reading errors exist once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from gemmsmith.answers.answer import Answer, Match
from gemmsmith.answers.cache import Entry
from gemmsmith.answers.document import SINCE
from gemmsmith.answers.snapshot import Shelf, Snapshot
from gemmsmith.device import DeviceModel, called
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
    job_path,
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

LATEST = "latest"
"""What a service calls the newest job."""

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
    check_answer(answer, query)
    session.answered()
    session.cache.store(query, answer, response.headers.get("etag"))
    return answer


def check_answer(answer: Answer, query: Query) -> None:
    """Do nothing if the answer is one to the query.

    Raises:
        ServiceFault: it is an answer to another, by a fault of the service or on the way.
    """
    check_same("the answer", "problem", answer.problem, query.problem)
    check_device("the answer", answer.device.slug, query.device)
    if query.arch is not None:
        check_same("the answer", "architecture", answer.device.arch, query.arch)
    if query.exact:
        check_same("the answer", "match", answer.match, Match.EXACT)


def check_same(what: str, field: str, received: object, asked: object) -> None:
    """Do nothing if what was received is what was asked for.

    Raises:
        ServiceFault: it is not.
    """
    if received != asked:
        raise ServiceFault(200, "Wrong answer", f"{what} has {field} {received}, asked for {asked}")


def check_device(what: str, slug: str, asked: str | None) -> None:
    """As `check_same`, of a device model, by any of its names."""
    if asked is not None and not called(asked, [slug]):
        check_same(what, "device", slug, asked)


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
            for query, answer in zip(piece, found, strict=False):
                if isinstance(answer, Answer):
                    check_answer(answer, query)
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
    status = yield from _order(session, request, patience)
    check_same("the job", "problem", status.problem, problem)
    return status


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
    response = yield from session.exchange(get(job_path(identifier)))
    return _job(response, identifier)


def cancel(session: Session, identifier: str) -> Flow[JobStatus]:
    """`DELETE /jobs/{id}`."""
    request = Request(method="DELETE", path=job_path(identifier))
    response = check((yield from session.exchange(request)))
    if response.body:
        return _job(response, identifier)
    return (yield from job(session, identifier))


def _job(response: Response, identifier: str) -> JobStatus:
    status = read(check(response), JobStatus)
    if identifier != LATEST:
        check_same("the job", "identifier", status.id, identifier)
    return status


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
        check_device("the snapshot", found.device, device)
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
        raise ServiceFault(response.status, "Unreadable answer", str(error)) from None
