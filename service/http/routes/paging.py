"""How a page of a list leads to the next one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar
from urllib.parse import urlencode

from service.http.requests import (
    AuditQuery,
    HistoryQuery,
    JobsQuery,
    KeysQuery,
    ListQuery,
    PacksQuery,
)

C = TypeVar("C")
T = TypeVar("T")


def filled(
    read: Callable[..., Sequence[T]],
    keep: Callable[[T], bool],
    *,
    cursor: Callable[[T], C],
    after: C | None,
    limit: int,
) -> list[T]:
    """The first `limit` records behind `after` that are to be kept.

    `read` takes `after` and gives `limit` records; another page is read where too few of the last
    are kept, as clients take a page that is not full for the last.
    """
    kept: list[T] = []
    while True:
        page = read(after=after)
        kept += filter(keep, page)
        if len(kept) >= limit or len(page) < limit:
            return kept[:limit]
        after = cursor(page[-1])


def next_page(
    path: str,
    query: AuditQuery | HistoryQuery | JobsQuery | KeysQuery | ListQuery | PacksQuery,
    records: Sequence[T],
    cursor: Callable[[T], object],
) -> str | None:
    """The next page's address, None where the page is not full: there is nothing behind it.

    `cursor` gives what `after` must be for the page behind a record.
    """
    if len(records) < query.limit:
        return None
    filters = query.model_dump(
        mode="json", exclude_none=True, exclude_defaults=True, exclude={"after"}
    )
    return f"{path}?{urlencode({**filters, 'after': cursor(records[-1])})}"
