"""`/docs`: the OpenAPI document as a page, with an example command for every call."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from service.http import examples
from service.pages.fields import Reader
from service.pages.render import page

router = APIRouter(include_in_schema=False)

PATH = "/docs"


@router.get(PATH)
def docs(caller: Reader, request: Request) -> Response:
    """Every call with its parameters, its responses, and an example of both."""
    api = request.app.openapi()
    origin = str(request.base_url).rstrip("/")
    commands = {
        operation["operationId"]: examples.curl(
            method, path, operation.get("parameters", []), origin
        )
        for path, operations in api["paths"].items()
        for method, operation in operations.items()
    }
    return page("docs.html", nav=PATH, caller=caller, api=api, commands=commands, pretty=_pretty)


def _pretty(example: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(example), indent=2).decode()
