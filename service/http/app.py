"""The FastAPI application: routes, one shape of error, and what is open while it runs.

The database must exist and be at this version's schema; `gemmsmith serve` sees to that. Nothing
here imports torch: measuring happens in the worker's process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

from fastapi import FastAPI

from gemmsmith.version import VERSION
from service import errors
from service.http import openapi
from service.http.bodies import CheckRequest
from service.http.lookup_routes import ServeLookups
from service.http.middleware import AnswerHead, Observe
from service.http.routes import (
    best,
    devices,
    docs,
    explain,
    exports,
    health,
    jobs,
    kernels,
    keys,
    snapshot,
    winners,
)  # fmt: skip
from service.http.state import State
from service.http.turns import TakeTurns
from service.pages import routes as pages
from service.settings import Settings
from tuner.store import Store

DESCRIPTION = (
    "Finds the fastest kernel, with its launch parameters, for a matrix product on a GPU. "
    "Errors are RFC 9457 problem documents."
)


def create_app(settings: Settings) -> FastAPI:
    """The application for `settings`; it opens the store and its keys when the server starts it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        store = Store.open(settings.database)
        try:
            app.state.service = state = State(settings, store)
            with (
                state.access,
                state.denials,
                closing(state.metrics),
                closing(state.readiness),
                state.watcher,
                state.reader.chart,
            ):
                yield
                state.stopping.set()
        finally:
            store.close()

    app = FastAPI(
        title="gemmsmith",
        description=DESCRIPTION,
        version=VERSION,
        lifespan=lifespan,
        docs_url=None,  # FastAPI's page loads scripts from elsewhere; ours works offline
        redoc_url=None,
        openapi_url=None,  # served by service.http.routes.docs, which asks for a key
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,  # what generated clients call it
    )
    errors.install(app)
    lookups = [*best.routes, *snapshot.routes]
    app.add_middleware(ServeLookups, routes=lookups)
    app.add_middleware(TakeTurns)
    app.add_middleware(CheckRequest, limit=settings.max_body_bytes)
    app.add_middleware(Observe)
    app.router.routes += lookups
    for module in (jobs, kernels, explain, exports, winners, devices, keys, health, docs):
        app.include_router(module.router)
    pages.install(app)
    app.add_middleware(AnswerHead)  # outermost, so that it sees error pages too
    openapi.install(app)
    return app
