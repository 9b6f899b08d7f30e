"""The OpenAPI description that the tests compare; `python -m tests.support.openapi` writes it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from starlette.routing import Mount

from service.http.app import create_app
from service.settings import Settings

SNAPSHOT = Path(__file__).resolve().parents[1] / "integration" / "openapi.json"
REFRESH = ".venv/bin/python -m tests.support.openapi"


def routes(items: Iterable[Any]) -> Iterator[tuple[str, str, Any]]:
    """Yields every route with its method and path, including those of included routers."""
    for route in items:
        if (router := getattr(route, "original_router", None)) is not None:
            yield from routes(router.routes)
        elif isinstance(route, Mount):
            assert route.path == "/ui/static", "a mount is asked for no key"
        else:
            for method in sorted(route.methods - {"HEAD"}):
                yield method, route.path, route


def described() -> dict[str, Any]:
    document: dict[str, Any] = create_app(Settings.load({})).openapi()
    return document


def text(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


if __name__ == "__main__":
    SNAPSHOT.write_text(text(described()), encoding="utf-8")
