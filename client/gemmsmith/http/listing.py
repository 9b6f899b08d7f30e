"""Reads listings of a service page by page. Each page links to the next, and never back."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from gemmsmith.core.bounds import exceeded
from gemmsmith.errors import ServiceFault
from gemmsmith.http.replies import SCHEMA, check, document
from gemmsmith.http.requests import Request, get
from gemmsmith.http.session import Session

PAGE = 200
"""Requested rows per page."""

MAX_LINK = 8_192
"""Longest link to a next page, in characters: services accept no longer URL."""

Row = dict[str, Any]


async def pages(
    session: Session,
    path: str,
    name: str,
    filters: dict[str, Any],
    limit: int | None,
    *,
    lookup: bool = False,
) -> AsyncGenerator[list[Row], None]:
    """Yields the rows of each page, from its list `name`. At most `limit` rows in all.

    Raises:
        ServiceFault: a reply is not a page of this listing or has a newer schema, a page links to
            an earlier page, or the listing is longer than its bounds.
        NotTuned: with `lookup`, the service knows nothing about the problem of the listing.
    """
    size = PAGE if limit is None else min(PAGE, limit)
    request: Request | None = get(path, **filters, limit=size)
    bounds, seen, read = session.setup.bounds, set[Request](), 0
    while request is not None and limit != 0:
        response = check(await session.exchange(request), lookup=lookup)
        page = document(response)
        rows = _rows(page, name)[:limit]
        limit = None if limit is None else limit - len(rows)
        read += len(response.body)
        seen.add(request)
        request = _next_page(page) if rows and limit != 0 else None
        if request is not None:
            if request in seen:
                raise _fault(f"a page of {request.path} links back to an earlier one")
            for length, bound in ((len(seen), "pages"), (read, "listing_bytes")):
                if length >= getattr(bounds, bound):
                    reason = exceeded(f"the list {request.path}", bound, bounds)
                    raise ServiceFault(200, "Answer refused", reason)
        yield rows


async def rows(
    session: Session, path: str, name: str, filters: dict[str, Any], limit: int | None
) -> AsyncGenerator[Row, None]:
    async for page in pages(session, path, name, filters, limit):
        for row in page:
            yield row


def _rows(page: dict[str, Any], name: str) -> list[Row]:
    schema = page.get("schema", 1)
    if not isinstance(schema, int) or schema > SCHEMA:
        raise _fault(f"schema {schema}, this gemmsmith reads {SCHEMA}: upgrade")
    listed = page.get(name)
    if not isinstance(listed, list) or not all(isinstance(row, dict) for row in listed):
        raise _fault(f"a page without a list `{name}` of objects")
    return listed


def _next_page(page: dict[str, Any]) -> Request | None:
    """The request for the page that `links.next.href` names. Returns None after the last page."""
    link: Any = page
    for name in ("links", "next", "href"):
        link = link.get(name) if isinstance(link, dict) else None
    if not isinstance(link, str) or not link:
        return None
    try:
        parts = urlsplit(link)
    except ValueError:
        parts = urlsplit("")
    if not (parts.path.startswith("/") and link.isprintable() and len(link) <= MAX_LINK):
        raise _fault(f"a page links to {link[:200]!r}, which is not a page")
    # Only the path and the query of the link are used. The request goes to the same server as the
    # first, so that no other server gets the key.
    return get(parts.path, **dict(parse_qsl(parts.query)))


def _fault(reason: str) -> ServiceFault:
    return ServiceFault(200, "Unreadable answer", reason)
