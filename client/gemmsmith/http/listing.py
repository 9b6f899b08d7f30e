"""A listing of a service, page by page: each page links to the next, and never back."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl, urlsplit

from gemmsmith.bounds import exceeded
from gemmsmith.errors import ServiceFault
from gemmsmith.http.replies import SCHEMA, check, document
from gemmsmith.http.requests import Request, get
from gemmsmith.http.session import Flow, Session

PAGE = 200
"""Rows asked for at once in a listing."""

MAX_LINK = 8_192
"""Characters of a link to a next page: a service takes no longer URL."""


class Pages:
    """Where a reader is in a listing, of which at most `limit` rows are read."""

    def __init__(
        self,
        session: Session,
        path: str,
        name: str,
        filters: dict[str, Any],
        limit: int | None,
    ) -> None:
        self.finished = limit == 0
        self._session = session
        self._bytes = 0
        self._seen: set[Request] = set()
        self._name = name
        self._left = limit
        self._next = get(path, **filters, limit=PAGE if limit is None else min(PAGE, limit))

    def rows(self, *, lookup: bool = False) -> Flow[list[dict[str, Any]]]:
        """The rows of the next page.

        Raises:
            ServiceFault: not a page of this listing, or of a newer schema; or it links to a page
                that was read before, or the listing is longer than its bounds.
            NotTuned: with `lookup`, nothing is known of the problem that the listing is about.
        """
        response = check((yield from self._session.exchange(self._next)), lookup=lookup)
        page = document(response)
        schema = page.get("schema", 1)
        if not isinstance(schema, int) or schema > SCHEMA:
            raise self._fault(f"schema {schema}, this gemmsmith reads {SCHEMA}: upgrade")
        rows = page.get(self._name)
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise self._fault(f"a page without a list `{self._name}` of objects")
        if self._left is not None:
            rows = rows[: self._left]
            self._left -= len(rows)
        self._bytes += len(response.body)
        following = _next_page(page)
        self.finished = not rows or self._left == 0 or not following
        if not self.finished:
            self._follow(following)
        return rows

    def _follow(self, link: str) -> None:
        """Go on with the page at a link.

        Only its path and query count: wherever the service believes to be, it is asked where it
        was, and nothing else gets the key.
        """
        try:
            parts = urlsplit(link)
        except ValueError:
            parts = urlsplit("")
        if not (parts.path.startswith("/") and link.isprintable() and len(link) <= MAX_LINK):
            raise self._fault(f"a page links to {link[:200]!r}, which is not a page")
        self._seen.add(self._next)
        self._next = get(parts.path, **dict(parse_qsl(parts.query)))
        listing, bounds = f"the list {parts.path}", self._session.bounds
        if self._next in self._seen:
            raise self._fault(f"a page of {parts.path} links back to an earlier one")
        for length, bound in ((len(self._seen), "pages"), (self._bytes, "listing_bytes")):
            if length >= getattr(bounds, bound):
                raise ServiceFault(200, "Answer refused", exceeded(listing, bound, bounds))

    @staticmethod
    def _fault(reason: str) -> ServiceFault:
        return ServiceFault(200, "Unreadable answer", reason)


def _next_page(page: dict[str, Any]) -> str:
    """The link to the next page; empty if this is the last."""
    link: Any = page
    for name in ("links", "next", "href"):
        link = link.get(name) if isinstance(link, dict) else None
    return link if isinstance(link, str) else ""
