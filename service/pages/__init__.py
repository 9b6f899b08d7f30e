"""The pages under /ui, and /docs: what the service knows, for people, rendered on the server.

Every page works without a script and without anything from another host. Forms post to /ui and are
answered with a redirect, so that reloading a page repeats nothing. An error under /ui is a page
too; `service.pages.errors` makes it of the problem document that the API would have given.
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.staticfiles import StaticFiles

from service.pages import devices, heat, jobs, login, problem, problems, reference, start, tune
from service.pages.errors import ErrorPages
from service.pages.render import STATIC


def install(app: FastAPI) -> None:
    """Add the pages to `app`."""
    for module in (start, problems, problem, heat, jobs, devices, tune, login, reference):
        app.include_router(module.router)
    app.mount("/ui/static", StaticFiles(directory=STATIC), name="static")
    app.add_middleware(ErrorPages)
