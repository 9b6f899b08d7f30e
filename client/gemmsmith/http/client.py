"""The synchronous client of a gemmsmith service. Safe to share between threads.

Invalid arguments raise before anything is sent. If the service cannot be reached, or sends too
slowly, a call takes a bounded time (`timeout` per attempt, `retries` more attempts with back-off).
Then it returns the last known answer from the cache, with a warning in the log `gemmsmith`, or
raises ServiceUnavailable.

A client may be used in forked processes as well. Each has its own connections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, SupportsIndex

import httpx

from gemmsmith.answers.answer import Answer, TunedAnswer
from gemmsmith.answers.history import Revision
from gemmsmith.answers.snapshot import Snapshot
from gemmsmith.core.bounds import BOUNDS, Bounds
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.elements import TypeName
from gemmsmith.core.numerics import with_numerics
from gemmsmith.core.problem import Problem
from gemmsmith.core.tuning import Effort
from gemmsmith.errors import Busy, NotTuned
from gemmsmith.http import job_calls, listing, lookups
from gemmsmith.http.events import follow
from gemmsmith.http.handles import TuningJob
from gemmsmith.http.jobs import JobEvent, JobStatus
from gemmsmith.http.requests import Query, calls_of, deadline_of, effort_of, problem_of
from gemmsmith.http.retry import Patience
from gemmsmith.http.sending import Sender
from gemmsmith.http.session import Session
from gemmsmith.http.transport import DEFAULT_TIMEOUT_S, ApiKey, CacheDir, Setup
from gemmsmith.signing import PublicKey


class Client:
    """Looks up winners at a service, and requests tuning jobs.

    Args:
        url: where the service listens; by default `GEMMSMITH_URL`, else http://127.0.0.1:8000.
            Redirects are not followed. A service on this machine is reached directly, others
            through the proxies of the environment.
        api_key: an API key, as `gemmsmith keys create` prints it, if the service requires one; by
            default that of the environment, `GEMMSMITH_API_KEY`, if this is the service of
            `GEMMSMITH_URL`: the same scheme, host and port. False sends none.
        timeout: seconds for an attempt, from connecting to the last byte of the answer. Each MiB
            of a long answer adds a second.
        retries: further attempts after refused or broken connections and 429, 502, 503, 504. They
            all begin within a minute of the first.
        cache_dir: folder of the cache of answers and packs; `"default"` is the platform's cache
            folder (or `GEMMSMITH_CACHE_DIR`), None disables the cache.
        bounds: size limits for what the service sends; exceeding one raises ServiceFault.
        transport: an httpx transport to use instead of the network. It has its own time limits,
            and forked processes share it.

    Raises:
        ValueError: the URL, the key, the timeout or the number of retries is invalid.
        ServiceUnavailable: the proxy of the environment cannot be used.
    """

    _handle = TuningJob

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: ApiKey = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        retries: int = 3,
        cache_dir: CacheDir = "default",
        bounds: Bounds = BOUNDS,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._setup = Setup(url, api_key, timeout, retries, cache_dir, bounds)
        self._sender = Sender(self._setup, transport)
        self._session = Session(self._setup, self._sender)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Cached answers and packs are kept."""
        self._sender.http.close()
        self._setup.cleanup()

    @property
    def url(self) -> str:
        """The service's base URL."""
        return self._setup.url

    @property
    def cache_folder(self) -> Path:
        """Folder of cached answers and packs; a temporary folder if the cache is disabled."""
        return self._setup.packs().root.parent

    @property
    def last_from_cache(self) -> bool:
        """Whether the last lookup came from the cache because the service could not be reached."""
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
        numerics: str | None = None,
        device: str | None = None,
        arch: str | None = None,
        exact: bool = False,
    ) -> Answer:
        """The fastest known kernel for `D[m,n] = A[m,k] · B[k,n]`.

        `device` is a device model, by its slug or its name (`nvidia-h200-132sm`, `H200`). By
        default it is the service's own GPU, or the only known model of `arch`. For a problem that
        was not tuned, the answer is the winner of a nearby problem (`match` is `nearest`), or else
        a proposal of the cost model (`predicted`: nothing was measured, and `use` is `cublas`).
        With `exact`, both raise NotTuned. With `numerics="invariant"` the kernel gives a row the
        same bits at every M: the question is that of the operation with `sum_sequential`.

        Raises:
            InvalidProblem: the problem is invalid; nothing was sent.
            NotTuned: not tuned and `exact`, or nothing is known about it; call `tune`.
            ServiceUnavailable: the service cannot be reached, and no answer is cached.
            ServiceError: the service refused the request, or failed.
        """
        problem = problem_of(m, n, k, batch=batch, dtype=dtype, layout=layout)
        problem = with_numerics(problem, numerics)
        query = Query(problem=problem, device=device, arch=arch, exact=exact)
        return self._sender.run(lookups.best(self._session, query))

    def best_many(
        self,
        problems: Sequence[Problem],
        *,
        device: str | None = None,
        arch: str | None = None,
        exact: bool = False,
    ) -> list[Answer | NotTuned]:
        """Answers for many problems, in their order, with a `NotTuned` for each untuned problem.

        Nothing is predicted here, except by services of release 0.1.

        Raises:
            as `best`, except that NotTuned is returned, not raised.
        """
        queries = [Query(problem=p, device=device, arch=arch, exact=exact) for p in problems]
        return self._sender.run(lookups.best_many(self._session, queries))

    def tune(
        self,
        m: SupportsIndex,
        n: SupportsIndex,
        k: SupportsIndex,
        *,
        batch: SupportsIndex = 1,
        dtype: TypeName = "bf16",
        layout: str = "tn",
        numerics: str | None = None,
        effort: str = Effort.DEFAULT,
        priority: int = 0,
        calls: int = 0,
        device: str | None = None,
        deadline_s: int | None = None,
        wait: bool = False,
        timeout: float | None = None,
        on_busy: Callable[[Busy], None] = lambda _: None,
    ) -> TuningJob:
        """Request a tuning job, or join the existing job for this problem.

        Waiting jobs with the highest `priority` run first, then those that are expected to save
        most time in all their calls. `calls` is how often you run this problem per step, per day,
        or in any other period, which must be the same for all your problems. If a request joins a
        job, their calls add up. `device` is the slug of a device model; by default any worker may
        take the job. After `deadline_s` seconds, a job without a winner fails. If a request joins
        a job, the later deadline applies, or none if one of them has none. `numerics` is as in
        `best`.

        With `wait`, returns when the job has ended, and raises as `TuningJob.wait` does. If the
        queue is full or your key has reached its limit, the request is repeated after the time
        that the service gives; `on_busy` is called before each wait. This goes on for `timeout`
        seconds, which include the time of `wait`. Without a timeout, it goes on without limit
        with `wait`, and for a few attempts otherwise.

        Raises:
            InvalidProblem: the problem, the effort, `calls` or `deadline_s` is invalid; nothing
                was sent.
            Busy: the queue stayed full; nothing was requested.
            ServiceUnavailable, ServiceError: the job could not be requested.
        """
        problem = problem_of(m, n, k, batch=batch, dtype=dtype, layout=layout)
        problem = with_numerics(problem, numerics)
        patience = Patience(timeout if timeout is not None or wait else 0.0, on_busy)
        options = {
            "effort": effort_of(effort),
            "priority": priority,
            "device": device,
            "calls": calls_of(calls) or None,  # older services reject the field
            "deadline_s": deadline_of(deadline_s),
        }
        call = job_calls.tune(self._session, problem, options, patience)
        return self._sender.run(self._handle.of(self._session, call, patience if wait else None))

    def job(self, identifier: str) -> TuningJob:
        """A handle to a job, by its identifier."""
        call = job_calls.job(self._session, identifier)
        return self._sender.run(self._handle.of(self._session, call))

    def job_status(self, identifier: str) -> JobStatus:
        """The status of a job."""
        return self._sender.run(job_calls.job(self._session, identifier))

    def cancel(self, identifier: str) -> JobStatus:
        """Cancel a job."""
        return self._sender.run(job_calls.cancel(self._session, identifier))

    def retry(
        self,
        identifier: str,
        *,
        timeout: float = 0.0,
        on_busy: Callable[[Busy], None] = lambda _: None,
    ) -> TuningJob:
        """Request a failed or cancelled job again; waits as `tune` does.

        Raises:
            Rejected: there is no such job, it succeeded, or it has not ended yet.
            Busy: the queue is full, or the key's limit is reached, for longer than `timeout`.
        """
        call = job_calls.retry(self._session, identifier, Patience(timeout, on_busy))
        return self._sender.run(self._handle.of(self._session, call))

    def jobs(self, *, state: str | None = None, limit: int | None = None) -> Iterator[JobStatus]:
        """Jobs, newest first, fetched page by page: those in one `state`, at most `limit`."""
        return self._sender.iterate(job_calls.jobs(self._session, state, limit))

    def devices(self) -> list[DeviceModel]:
        """Device models for which the service has winners or trials."""
        return self._sender.run(lookups.devices(self._session))

    def snapshot(
        self, device: str | None = None, *, arch: str | None = None, known: Snapshot | None = None
    ) -> Snapshot:
        """All current winners of a device model, for lookups without the service.

        `device` and `arch` are as in `best`. If `known` is given and nothing has changed, returns
        that object. If the service cannot be reached and `known` is not given, returns the last
        cached snapshot, with a warning in the log.

        Raises:
            ServiceUnavailable: the service cannot be reached, and nothing is cached or `known`
                is given.
            Rejected: there is no such device model, or there are no winners yet.
            ServiceError: the service refused the request, or failed.
        """
        return self._sender.run(lookups.snapshot(self._session, device, arch, known))

    def history(
        self, problem: Problem, *, device: str | None = None, limit: int | None = None
    ) -> list[Revision]:
        """Every winner that the problem has had on a device model, newest first.

        Raises:
            NotTuned: it has no winner.
            ServiceUnavailable, ServiceError: the service did not answer, or failed.
        """
        return self._sender.run(lookups.history(self._session, problem, device, limit))

    def explain(self, problem: Problem, *, device: str | None = None) -> dict[str, Any]:
        """Why the problem's winner is the fastest: the document of `GET /explain`.

        Raises:
            NotTuned: it has no winner.
            ServiceUnavailable, ServiceError: the service did not answer, or failed.
        """
        return self._sender.run(lookups.explain(self._session, problem, device))

    def pin(self, problem: Problem, revision: int, *, device: str | None = None) -> Revision:
        """Serve this revision until it is unpinned, even if others are promoted meanwhile.

        This, `unpin` and `rollback` need a key with scope admin. They are sent once. After
        ServiceUnavailable, the change may or may not have been made.

        Raises:
            NotTuned, Rejected: the problem has no winner, or no such revision.
        """
        return self._sender.run(lookups.choose(self._session, "pin", problem, device, revision))

    def unpin(self, problem: Problem, *, device: str | None = None) -> Revision:
        """Serve the newest winner of the best origin again; raises Rejected if none is pinned."""
        return self._sender.run(lookups.choose(self._session, "unpin", problem, device))

    def rollback(self, problem: Problem, *, device: str | None = None) -> Revision:
        """Serve and pin the previous revision; raises Rejected if none precedes it."""
        return self._sender.run(lookups.choose(self._session, "rollback", problem, device))

    def results(self, /, *, limit: int | None = None, **filters: Any) -> Iterator[dict[str, Any]]:
        """Trials, oldest first, fetched page by page as they are consumed.

        At most `limit` of them; `filters` are those of `GET /results`: m, n, k (together), batch,
        dtype, layout, device, phase, job.
        """
        rows = listing.rows(self._session, "/results", "trials", filters, limit)
        return self._sender.iterate(rows)

    def packs(
        self, *, toolchain: str | None = None, limit: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """Manifests of the service's kernel packs, by hash, fetched page by page.

        At most `limit` of them; `toolchain` is the digest of the only toolchain to list.
        """
        filters = {"toolchain": toolchain}
        return self._sender.iterate(listing.rows(self._session, "/packs", "packs", filters, limit))

    def pack(self, pack_hash: str) -> Path:
        """The compiled kernel pack as a local file, downloaded unless it is cached.

        Raises:
            PackCorrupt: the downloaded bytes have another hash. Its signature is checked by
                `gemmsmith.winners.packs`.
            ServiceError, ServiceUnavailable: the service has no such pack, or cannot be reached.
        """
        return self._sender.run(lookups.pack(self._session, pack_hash))

    def pack_bytes(self, pack_hash: str) -> bytes:
        """The bytes that the service sends for the pack, neither checked nor cached. See `pack`."""
        return self._sender.run(lookups.pack_bytes(self._session, pack_hash))

    def signing_key(self) -> PublicKey:
        """The public key of the service; `python -m gemmsmith trust` makes it trusted here."""
        return self._sender.run(lookups.signing_key(self._session))

    def winner_of(self, status: JobStatus, device: str | None = None) -> TunedAnswer:
        """The winner of a finished job on `device`, and what is served; never from the cache."""
        return self._sender.run(job_calls.winner_of(self._session, status, device))

    def job_events(
        self, identifier: str, *, after: str = "", deadline: float | None = None
    ) -> Iterator[JobEvent | None]:
        """A job's events until it ends; sometimes None, so that the reader can check its clock.

        `after` is the identifier of the last event already seen; by `deadline`, on
        `time.monotonic()`'s clock, something is yielded in any case.
        """
        events = follow(self._session, identifier, after=after, deadline=deadline)
        return self._sender.iterate(events)
