"""Parameters of the pages' routes: the caller, the query, and the fields of posted forms."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import parse_qsl

from fastapi import Depends, Request
from msgspec import Struct

from service.errors import ProblemError
from service.http.access import Caller, Scope, needs
from service.http.bodies import FORM
from service.http.parameters import Text
from service.http.questions import query_of

Reader = Annotated[Caller, needs(Scope.READ)]
Tuner = Annotated[Caller, needs(Scope.TUNE)]
Admin = Annotated[Caller, needs(Scope.ADMIN)]
"""The caller, who needs that scope. Pages show only what the caller may do."""


def page_query_of(kind: type[Struct]) -> Any:
    """The query of a page. Browsers send a form's empty fields as empty texts."""
    return query_of(kind, keeps_empty=False)


class DeviceQuery(Struct, frozen=True):
    """The query of a page about a device model, by its slug."""

    device: Text | None = None


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
