"""Parameters of the pages' routes: the caller, query parameters, and the fields of posted forms."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import parse_qsl

from fastapi import Depends, Query, Request
from pydantic import BeforeValidator, Field

from service.errors import ProblemError
from service.http.access import Caller, Scope, needs
from service.http.bodies import FORM

Reader = Annotated[Caller, needs(Scope.READ)]
Tuner = Annotated[Caller, needs(Scope.TUNE)]
Admin = Annotated[Caller, needs(Scope.ADMIN)]
"""The caller, who needs that scope. Pages show only what the caller may do."""

Blank = BeforeValidator(lambda value: None if value == "" else value)
"""Reads an empty text as None: browsers send a form's empty fields as empty texts."""

Text = Annotated[Annotated[str, Field(max_length=200)] | None, Blank, Query()]
"""A text that may be absent or empty. The inner type has the limit, because None has no length."""

Device = Text
"""A device model's slug."""


async def posted(request: Request) -> dict[str, str]:
    """Return the fields of a posted form as text; `service.http.bodies` has checked them.

    Raises:
        ProblemError: 415, the body is not a form.
    """
    if not request.headers.get("content-type", "").lower().startswith(FORM.decode()):
        raise ProblemError(
            status=415,
            kind="unsupported-media-type",
            detail=f"Forms are sent with Content-Type: {FORM.decode()}.",
        )
    return dict(parse_qsl((await request.body()).decode(), keep_blank_values=True))


Posted = Annotated[dict[str, str], Depends(posted)]
"""The result of `posted` as a parameter of a route."""
