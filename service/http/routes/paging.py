"""How a page of a list leads to the next one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar
from urllib.parse import urlencode

import msgspec

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
    query: msgspec.Struct,
    records: Sequence[T],
    cursor: Callable[[T], object],
) -> str | None:
    """The next page's address, None where the page is not full: there is nothing behind it.

    `query` has a `limit` and an `after`; `cursor` gives the `after` of the page behind a record.
    """
    values = msgspec.structs.asdict(query)
    if len(records) < values["limit"]:
        return None
    filters = {
        field.name: values[field.name]
        for field in msgspec.structs.fields(query)
        if field.name != "after" and values[field.name] != field.default
    }
    return f"{path}?{urlencode({**filters, 'after': cursor(records[-1])})}"
