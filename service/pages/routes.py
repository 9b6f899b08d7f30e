"""All pages, as routes of the application."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.staticfiles import StaticFiles

from service.pages import (
    devices,
    finding,
    heat,
    jobs,
    login,
    models,
    overview,
    problem,
    problems,
    reference,
    tune,
)
from service.pages.errors import ErrorPages
from service.pages.render import STATIC


def install(app: FastAPI) -> None:
    """Add the pages to `app`."""
    parts = (
        overview, finding, problems, problem, heat, models, jobs, devices, tune, login, reference
    )  # fmt: skip
    for module in parts:
        app.include_router(module.router)
    app.mount("/ui/static", StaticFiles(directory=STATIC), name="static")
    app.add_middleware(ErrorPages)
