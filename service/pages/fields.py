"""What forms send: query parameters, where a browser sends an empty field as an empty text, and
the fields of a form that is posted.
"""

from __future__ import annotations

from typing import Annotated
from urllib.parse import parse_qsl

from fastapi import Depends, Query, Request
from pydantic import BeforeValidator, Field

from service.http.errors import ProblemError
from service.http.wellformed import FORM

Blank = BeforeValidator(lambda value: None if value == "" else value)
"""Nothing, where a form's field was left empty."""

Text = Annotated[Annotated[str, Field(max_length=200)] | None, Blank, Query()]
"""A text that may be left out or empty: the limit is the text's, as None has no length."""

Device = Text
"""A device model's slug."""


async def posted(request: Request) -> dict[str, str]:
    """The fields of a posted form, as text; `service.http.wellformed` has checked them.

    Raises:
        ProblemError: 415, it is no form.
    """
    if not request.headers.get("content-type", "").lower().startswith(FORM.decode()):
        raise ProblemError(
            status=415,
            kind="unsupported-media-type",
            title="Unsupported media type",
            detail=f"Forms are sent with Content-Type: {FORM.decode()}.",
        )
    return dict(parse_qsl((await request.body()).decode(), keep_blank_values=True))


Posted = Annotated[dict[str, str], Depends(posted)]
"""What `posted` gives, as a parameter of a route."""
