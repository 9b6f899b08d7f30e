"""What forms send: query parameters, where a browser sends an empty field as an empty text, and
the fields of a form that is posted.
"""

from __future__ import annotations

from typing import Annotated
from urllib.parse import parse_qsl

from fastapi import Depends, Query, Request
from pydantic import BeforeValidator

Blank = BeforeValidator(lambda value: None if value == "" else value)
"""Nothing, where a form's field was left empty."""

Device = Annotated[str | None, Blank, Query(max_length=200)]
"""A device model's slug."""


async def posted(request: Request) -> dict[str, str]:
    """The fields of a posted form, as text; the last of each name."""
    body = (await request.body()).decode("utf-8", "replace")
    return dict(parse_qsl(body, keep_blank_values=True))


Posted = Annotated[dict[str, str], Depends(posted)]
"""What `posted` gives, as a parameter of a route."""
