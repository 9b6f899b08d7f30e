"""The synchronous client of a gemmsmith service. Safe to share between threads.

Wrong arguments raise before anything is sent. A service that is away costs a bounded time
(`timeout` per attempt, `retries` more attempts with back-off); then the last known answer is
served from the cache, with a warning in the log `gemmsmith`, or ServiceUnavailable is raised.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, SupportsIndex, TypeVar

import httpx

from gemmsmith import flows, history
from gemmsmith.answer import Answer
from gemmsmith.bounds import BOUNDS, Bounds
from gemmsmith.device import DeviceModel
from gemmsmith.elements import TypeName
from gemmsmith.errors import Busy, NotTuned
from gemmsmith.handles import TuningJob
from gemmsmith.history import Revision
from gemmsmith.jobs import EventCursor, JobEvent, JobStatus, job_statuses_of
from gemmsmith.problem import Problem
from gemmsmith.replies import Reply
from gemmsmith.requests import Query, Request, calls_of, deadline_of, effort_of, problem_of
from gemmsmith.retry import Patience
from gemmsmith.session import Flow
from gemmsmith.signing import PublicKey
from gemmsmith.snapshot import Shelf, Snapshot
from gemmsmith.transport import (
    DEFAULT_TIMEOUT_S,
    CacheDir,
    Setup,
    is_plain,
    no_answer,
    received,
)
from gemmsmith.tuning import Effort

T = TypeVar("T")


class Client:
    """Asks a service for winners and orders tuning jobs.

    Args:
        url: where the service listens; by default `GEMMSMITH_URL`, else http://127.0.0.1:8000.
        api_key: as `gemmsmith keys create` prints it, for a service that asks for one; by default
            that of the environment, `GEMMSMITH_API_KEY`.
        timeout: seconds for connecting, sending and each wait for data of one attempt.
        retries: further attempts after refused or broken connections and 429, 502, 503, 504.
        cache_dir: folder of the answer and pack cache; `"default"` is the platform's cache
            folder (or `GEMMSMITH_CACHE_DIR`), None caches nothing.
        bounds: the most that is taken from the service; what exceeds one is a ServiceFault.
        transport: an httpx transport to use instead of the network.

    Raises:
        ValueError: the URL, the key, the time-out or the number of retries makes no sense.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: str | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        retries: int = 3,
        cache_dir: CacheDir = "default",
        bounds: Bounds = BOUNDS,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._setup = Setup(url, api_key, timeout, retries, cache_dir, bounds)
        self._session = self._setup.session
        self._http = httpx.Client(transport=transport, **self._setup.options())
        self._sleep: Callable[[float], None] = time.sleep

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; cached answers and packs stay."""
        self._http.close()
        self._setup.cleanup()

    @property
    def url(self) -> str:
        """The service's base URL."""
        return self._setup.url

    @property
    def cache_folder(self) -> Path:
        """Where answers and packs are kept; a temporary folder where nothing is to be cached."""
        return self._setup.packs().root.parent

    @property
    def last_from_cache(self) -> bool:
        """The last lookup was served from the cache because the service was away."""
        return self._session.last_from_cache

    def best(
        self,
        m: SupportsIndex,
        n: SupportsIndex,
        k: SupportsIndex,
        *,
        batch: SupportsIndex = 1,
        dtype: TypeName = "bf16",
        layout: str = "tn",
        device: str | None = None,
        arch: str | None = None,
        exact: bool = False,
    ) -> Answer:
        """The fastest known kernel for `D[m,n] = A[m,k] · B[k,n]`.

        `device` is a device model's slug (`nvidia-h200-132sm`), by default the service's own, or
        the only one known of `arch`. What was not tuned gets the answer of a neighbouring problem
        (`match` is `nearest`), else the cost model's proposal (`predicted`: nothing was measured,
        and `use` is `cublas`); `exact` refuses both.

        Raises:
            InvalidProblem: the problem makes no sense; nothing was sent.
            NotTuned: not tuned and `exact`, or nothing can be said of it; `tune` it.
            ServiceUnavailable: the service is away and no answer is cached.
            ServiceError: the service refused or failed.
        """
        problem = problem_of(m, n, k, batch=batch, dtype=dtype, layout=layout)
        query = Query(problem=problem, device=device, arch=arch, exact=exact)
        return self._run(flows.best(self._session, query))

    def best_many(
        self,
        problems: Sequence[Problem],
        *,
        device: str | None = None,
        arch: str | None = None,
        exact: bool = False,
    ) -> list[Answer | NotTuned]:
        """Answers to many problems in their order; what is not tuned yet gives its `NotTuned`.

        Raises:
            as `best`, except that NotTuned is returned, not raised.
        """
        queries = [Query(problem=p, device=device, arch=arch, exact=exact) for p in problems]
        return self._run(flows.best_many(self._session, queries))

    def tune(
        self,
        m: SupportsIndex,
        n: SupportsIndex,
        k: SupportsIndex,
        *,
        batch: SupportsIndex = 1,
        dtype: TypeName = "bf16",
        layout: str = "tn",
        effort: str = Effort.DEFAULT,
        priority: int = 0,
        calls: int = 0,
        device: str | None = None,
        deadline_s: int | None = None,
        wait: bool = False,
        timeout: float | None = None,
        on_busy: Callable[[Busy], None] = lambda _: None,
    ) -> TuningJob:
        """Request a tuning job, or join the one already on its way for this problem.

        Of waiting jobs the one of highest `priority` goes first, then the one that is expected
        to save most time in all its calls. `calls` is how often you run this problem, in a step
        or a day: any span, if it is the same for all your problems. Those of a job that is
        joined add up. `device` is a device model's slug, by default whichever worker comes
        first. After `deadline_s` seconds the job is given up unless it has a winner; of orders
        that join, the later deadline holds, or none.

        With `wait`, returns only when the job has ended, and raises what `TuningJob.wait` raises.
        While the service's queue is full, or your key's quota used up, the order is repeated as
        the service asks, each time after `on_busy` was told: for `timeout` seconds, which count
        for `wait` too. Without a timeout that is any time with `wait`, and otherwise a few
        attempts.

        Raises:
            InvalidProblem: the problem, the effort, `calls` or `deadline_s` makes no sense;
                nothing was sent.
            Busy: there was no room for the job in time; nothing was ordered.
            ServiceUnavailable, ServiceError: the job could not be ordered.
        """
        problem = problem_of(m, n, k, batch=batch, dtype=dtype, layout=layout)
        patience = Patience(timeout if timeout is not None or wait else 0.0, on_busy)
        status = self._run(
            flows.tune(
                self._session,
                problem,
                effort=effort_of(effort),
                priority=priority,
                device=device,
                calls=calls_of(calls),
                deadline_s=deadline_of(deadline_s),
                patience=patience,
            )
        )
        job = TuningJob(self, status)
        if wait:
            job.wait(patience.left())
        return job

    def job(self, identifier: str) -> TuningJob:
        """A handle on a job by its identifier."""
        return TuningJob(self, self.job_status(identifier))

    def job_status(self, identifier: str) -> JobStatus:
        """How far a job is."""
        return self._run(flows.job(self._session, identifier))

    def cancel(self, identifier: str) -> JobStatus:
        """Ask a job to stop."""
        return self._run(flows.cancel(self._session, identifier))

    def retry(
        self,
        identifier: str,
        *,
        timeout: float = 0.0,
        on_busy: Callable[[Busy], None] = lambda _: None,
    ) -> TuningJob:
        """Request anew what a job failed to do, or was cancelled before; waits as `tune` does.

        Raises:
            Rejected: there is no such job, it is done, or it is not over yet.
            Busy: the queue is full, or the key's quota used up, for longer than `timeout`.
        """
        patience = Patience(timeout, on_busy)
        return TuningJob(self, self._run(flows.retry(self._session, identifier, patience)))

    def jobs(self, *, state: str | None = None, limit: int | None = None) -> Iterator[JobStatus]:
        """Jobs, newest first, fetched page by page: those in one `state`, at most `limit`."""
        pages = flows.Pages(self._session, "/jobs", "jobs", {"state": state}, limit)
        while not pages.finished:
            found = self._run(flows.page(self._session, pages.request()))
            yield from job_statuses_of(pages.take(found))

    def devices(self) -> list[DeviceModel]:
        """Device models that the service knows winners or trials of."""
        return self._run(flows.devices(self._session))

    def snapshot(
        self, device: str | None = None, *, arch: str | None = None, known: Snapshot | None = None
    ) -> Snapshot:
        """All current winners of a device model, for lookups without the service.

        `device` and `arch` as in `best`. Given the snapshot that is `known`, that very object
        comes back while nothing has changed. When the service is away the last snapshot that was
        cached is given, with a warning in the log, unless one is known.

        Raises:
            ServiceUnavailable: the service is away, and nothing is cached or one is known.
            Rejected: no such device model, or no winners of any yet.
            ServiceError: the service refused or failed.
        """
        shelf = Shelf(self._setup.cache_dir, self.url, device, arch)
        return self._run(
            flows.snapshot(self._session, shelf, device=device, arch=arch, known=known)
        )

    def history(
        self, problem: Problem, *, device: str | None = None, limit: int | None = None
    ) -> list[Revision]:
        """Every winner that the problem has had on a device model, newest first.

        Raises:
            NotTuned: it has none.
            ServiceUnavailable, ServiceError: no answer.
        """
        return self._run(history.history(self._session, problem, device=device, limit=limit))

    def pin(self, problem: Problem, revision: int, *, device: str | None = None) -> Revision:
        """Serve that revision until it is unpinned, whatever is promoted meanwhile.

        This, `unpin` and `rollback` need a key of scope admin. They are sent once; without an
        answer (ServiceUnavailable) they may have been done, or not.

        Raises:
            NotTuned, Rejected: the problem has no winner, or no such revision.
        """
        return self._choose("pin", problem, device, revision)

    def unpin(self, problem: Problem, *, device: str | None = None) -> Revision:
        """Serve the newest winner of the best origin again; Rejected where none is pinned."""
        return self._choose("unpin", problem, device)

    def rollback(self, problem: Problem, *, device: str | None = None) -> Revision:
        """Serve, pinned, what was served before; Rejected where nothing was."""
        return self._choose("rollback", problem, device)

    def _choose(
        self, verb: str, problem: Problem, device: str | None, revision: int | None = None
    ) -> Revision:
        return self._run(
            history.choose(self._session, verb, problem, device=device, revision=revision)
        )

    def results(self, *, limit: int | None = None, **filters: Any) -> Iterator[dict[str, Any]]:
        """Trials, oldest first, fetched page by page as they are consumed.

        At most `limit` of them; `filters` are those of `GET /results`: m, n, k (together), batch,
        dtype, layout, device, phase, job.
        """
        pages = flows.Pages(self._session, "/results", "trials", filters, limit)
        while not pages.finished:
            yield from pages.take(self._run(flows.page(self._session, pages.request())))

    def packs(
        self, *, toolchain: str | None = None, limit: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """Manifests of the kernel packs that the service has, by hash, fetched page by page.

        At most `limit` of them; `toolchain` is the digest of the only toolchain to list.
        """
        pages = flows.Pages(self._session, "/packs", "packs", {"toolchain": toolchain}, limit)
        while not pages.finished:
            yield from pages.take(self._run(flows.page(self._session, pages.request())))

    def pack(self, pack_hash: str) -> Path:
        """The compiled kernel pack as a local file, downloaded unless it is here already.

        Raises:
            PackCorrupt: what arrived has another hash. Whose it is, `gemmsmith.packs` checks.
            ServiceError, ServiceUnavailable: the service has no such pack, or is away.
        """
        packs = self._setup.packs()
        found = packs.find(pack_hash)
        return found if found is not None else packs.store(pack_hash, self.pack_bytes(pack_hash))

    def pack_bytes(self, pack_hash: str) -> bytes:
        """What the service sends for the pack: not checked, not kept. See `pack`."""
        return self._run(flows.pack(self._session, pack_hash)).body

    def signing_key(self) -> PublicKey:
        """What the service signs with; `python -m gemmsmith trust` makes it believed here."""
        return self._run(flows.signing_key(self._session))

    def winner_of(self, status: JobStatus, device: str | None = None) -> Answer:
        """The answer a finished job led to on `device`; never one from the cache."""
        return self._run(flows.winner_of(self._session, status, device))

    def job_events(
        self, identifier: str, *, after: str = "", deadline: float | None = None
    ) -> Iterator[JobEvent | None]:
        """A job's events until it ends; None now and then, for the reader to look at its clock.

        `after` is the identifier of the last event already seen; by `deadline`, on
        `time.monotonic()`'s clock, something is yielded in any case.
        """
        cursor = EventCursor(identifier, self._setup.stream_retry, after, self._session.bounds)
        while not cursor.finished:
            request = cursor.request(cursor.patience(deadline))
            reply: Reply
            try:
                with self._http.stream(**self._setup.arguments(request)) as response:
                    if response.status_code >= 400 or not is_plain(response):
                        reply = received(response, request, self._session.bounds)
                    else:
                        for chunk in response.iter_raw():
                            yield from cursor.feed(chunk)
                            yield None
                        reply = cursor.ended()
            except httpx.RequestError as error:
                reply = no_answer(error)
            ended = cursor.ended_cleanly(reply)
            if cursor.finished or (ended and self.job_status(identifier).state.terminal):
                return
            yield None
            self._sleep(cursor.interrupted(reply, deadline))

    def _run(self, flow: Flow[T]) -> T:
        try:
            request = next(flow)
            while True:
                request = flow.send(self._send(request))
        except StopIteration as stop:
            result: T = stop.value
            return result

    def _send(self, request: Request) -> Reply:
        if request.delay:
            self._sleep(request.delay)
        try:
            with self._http.stream(**self._setup.arguments(request)) as response:
                return received(response, request, self._session.bounds)
        except httpx.RequestError as error:
            return no_answer(error)
