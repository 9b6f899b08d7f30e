"""The asynchronous client of a gemmsmith service: `Client`, awaited, on asyncio.

Promises and failures are those of `gemmsmith.http.client`; both drive the flows of
`gemmsmith.http.flows`. Cached answers are small files, read and written in place; packs are stored
in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, Self, SupportsIndex, TypeVar

import httpx

from gemmsmith.answers import history
from gemmsmith.answers.answer import Answer, TunedAnswer
from gemmsmith.answers.history import Revision
from gemmsmith.answers.snapshot import Snapshot
from gemmsmith.bounds import BOUNDS, Bounds
from gemmsmith.device import DeviceModel
from gemmsmith.elements import TypeName
from gemmsmith.errors import Busy, NotTuned
from gemmsmith.http import flows
from gemmsmith.http.handles import AsyncTuningJob
from gemmsmith.http.listing import Pages
from gemmsmith.http.replies import Reply
from gemmsmith.http.requests import Query, Request, calls_of, deadline_of, effort_of, problem_of
from gemmsmith.http.retry import Patience
from gemmsmith.http.sending import AsyncSender
from gemmsmith.http.session import Flow
from gemmsmith.http.transport import (
    DEFAULT_TIMEOUT_S,
    ApiKey,
    CacheDir,
    Setup,
)
from gemmsmith.jobs import EventCursor, JobEvent, JobStatus, job_statuses_of
from gemmsmith.problem import Problem
from gemmsmith.signing import PublicKey
from gemmsmith.tuning import Effort

T = TypeVar("T")


class AsyncClient:
    """Looks up winners at a service, and requests tuning jobs; arguments as for `Client`."""

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: ApiKey = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        retries: int = 3,
        cache_dir: CacheDir = "default",
        bounds: Bounds = BOUNDS,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._setup = Setup(url, api_key, timeout, retries, cache_dir, bounds)
        self._session = self._setup.session
        self._sender = AsyncSender(self._setup, transport)
        self._sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Cached answers and packs are kept."""
        await self._sender.http.aclose()
        self._setup.cleanup()

    @property
    def url(self) -> str:
        """The service's base URL."""
        return self._setup.url

    @property
    def last_from_cache(self) -> bool:
        """Whether the last lookup came from the cache because the service could not be reached."""
        return self._session.last_from_cache

    async def best(
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
        """The fastest known kernel for `D[m,n] = A[m,k] · B[k,n]`; as `Client.best`."""
        problem = problem_of(m, n, k, batch=batch, dtype=dtype, layout=layout)
        query = Query(problem=problem, device=device, arch=arch, exact=exact)
        return await self._run(flows.best(self._session, query))

    async def best_many(
        self,
        problems: Sequence[Problem],
        *,
        device: str | None = None,
        arch: str | None = None,
        exact: bool = False,
    ) -> list[Answer | NotTuned]:
        """Answers for many problems in their order; as `Client.best_many`."""
        queries = [Query(problem=p, device=device, arch=arch, exact=exact) for p in problems]
        return await self._run(flows.best_many(self._session, queries))

    async def tune(
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
    ) -> AsyncTuningJob:
        """Request a tuning job, or join the existing one; as `Client.tune`."""
        problem = problem_of(m, n, k, batch=batch, dtype=dtype, layout=layout)
        patience = Patience(timeout if timeout is not None or wait else 0.0, on_busy)
        status = await self._run(
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
        job = AsyncTuningJob(self, status)
        if wait:
            await job.wait(patience.left())
        return job

    async def job(self, identifier: str) -> AsyncTuningJob:
        """A handle to a job, by its identifier."""
        return AsyncTuningJob(self, await self.job_status(identifier))

    async def job_status(self, identifier: str) -> JobStatus:
        """The status of a job."""
        return await self._run(flows.job(self._session, identifier))

    async def cancel(self, identifier: str) -> JobStatus:
        """Cancel a job."""
        return await self._run(flows.cancel(self._session, identifier))

    async def retry(
        self,
        identifier: str,
        *,
        timeout: float = 0.0,
        on_busy: Callable[[Busy], None] = lambda _: None,
    ) -> AsyncTuningJob:
        """Request a failed or cancelled job again; waits as `tune` does.

        Raises:
            Rejected: there is no such job, it succeeded, or it has not ended yet.
            Busy: the queue is full, or the key's limit is reached, for longer than `timeout`.
        """
        patience = Patience(timeout, on_busy)
        return AsyncTuningJob(
            self, await self._run(flows.retry(self._session, identifier, patience))
        )

    async def jobs(
        self, *, state: str | None = None, limit: int | None = None
    ) -> AsyncIterator[JobStatus]:
        """Jobs, newest first, fetched page by page: those in one `state`, at most `limit`."""
        pages = Pages(self._session, "/jobs", "jobs", {"state": state}, limit)
        while not pages.finished:
            for status in job_statuses_of(await self._run(pages.rows())):
                yield status

    async def devices(self) -> list[DeviceModel]:
        """Device models for which the service has winners or trials."""
        return await self._run(flows.devices(self._session))

    async def snapshot(
        self, device: str | None = None, *, arch: str | None = None, known: Snapshot | None = None
    ) -> Snapshot:
        """All current winners of a device model; as `Client.snapshot`."""
        shelf = self._setup.shelf(device, arch)
        return await self._run(
            flows.snapshot(self._session, shelf, device=device, arch=arch, known=known)
        )

    async def history(
        self, problem: Problem, *, device: str | None = None, limit: int | None = None
    ) -> list[Revision]:
        """Every winner that the problem has had, newest first; as `Client.history`."""
        flow = history.history(self._session, problem, device=device, limit=limit)
        return await self._run(flow)

    async def pin(self, problem: Problem, revision: int, *, device: str | None = None) -> Revision:
        """Serve this revision until it is unpinned; as `Client.pin`."""
        return await self._choose("pin", problem, device, revision)

    async def unpin(self, problem: Problem, *, device: str | None = None) -> Revision:
        """Serve the newest winner of the best origin again; as `Client.unpin`."""
        return await self._choose("unpin", problem, device)

    async def rollback(self, problem: Problem, *, device: str | None = None) -> Revision:
        """Serve and pin the previous revision; as `Client.rollback`."""
        return await self._choose("rollback", problem, device)

    async def _choose(
        self, verb: str, problem: Problem, device: str | None, revision: int | None = None
    ) -> Revision:
        return await self._run(
            history.choose(self._session, verb, problem, device=device, revision=revision)
        )

    async def results(
        self, *, limit: int | None = None, **filters: Any
    ) -> AsyncIterator[dict[str, Any]]:
        """Trials, oldest first, fetched page by page; as `Client.results`."""
        pages = Pages(self._session, "/results", "trials", filters, limit)
        while not pages.finished:
            for row in await self._run(pages.rows()):
                yield row

    async def packs(
        self, *, toolchain: str | None = None, limit: int | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """Manifests of the service's kernel packs; as `Client.packs`."""
        pages = Pages(self._session, "/packs", "packs", {"toolchain": toolchain}, limit)
        while not pages.finished:
            for row in await self._run(pages.rows()):
                yield row

    async def pack(self, pack_hash: str) -> Path:
        """The compiled kernel pack as a local file; as `Client.pack`."""
        packs = self._setup.packs()
        found = await asyncio.to_thread(packs.find, pack_hash)
        if found is not None:
            return found
        response = await self._run(flows.pack(self._session, pack_hash))
        return await asyncio.to_thread(packs.store, pack_hash, response.body)

    async def signing_key(self) -> PublicKey:
        """The public key of the service; as `Client.signing_key`."""
        return await self._run(flows.signing_key(self._session))

    async def winner_of(self, status: JobStatus, device: str | None = None) -> TunedAnswer:
        """What a finished job found on `device`, and what is served; never from the cache."""
        return await self._run(history.result_of(self._session, status, device))

    async def job_events(
        self, identifier: str, *, after: str = "", deadline: float | None = None
    ) -> AsyncIterator[JobEvent | None]:
        """A job's events until it ends; as `Client.job_events`."""
        cursor = EventCursor(identifier, self._setup.stream_retry, after, self._session.bounds)
        while not cursor.finished:
            reply: Reply = cursor.ended()
            stream = self._sender.stream(cursor.request(cursor.patience(deadline)))
            async with aclosing(stream) as pieces:
                async for piece in pieces:
                    if isinstance(piece, bytes):
                        for event in cursor.feed(piece):
                            yield event
                        yield None
                    else:
                        reply = piece
            if cursor.finished or (cursor.ended_cleanly(reply) and await self._over(identifier)):
                return
            yield None
            await self._sleep(cursor.interrupted(reply, deadline))

    async def _over(self, identifier: str) -> bool:
        return (await self.job_status(identifier)).state.terminal

    async def _run(self, flow: Flow[T]) -> T:
        try:
            request = next(flow)
            while True:
                request = flow.send(await self._send(request))
        except StopIteration as stop:
            result: T = stop.value
            return result

    async def _send(self, request: Request) -> Reply:
        if request.delay:
            await self._sleep(request.delay)
        return await self._sender.send(request)
