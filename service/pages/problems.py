"""`/ui/problems`: the current winners of a device model, searched and sorted, page by page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter
from msgspec import Struct, structs
from starlette.responses import Response

from gemmsmith.core.config import Use
from gemmsmith.core.operation import DType, Layout, Operation
from service.errors import FieldError
from service.http.parameters import Cursor, LayoutName, Text
from service.http.state import Service
from service.pages import addresses, operations
from service.pages.fields import Reader, page_query_of
from service.pages.render import page
from service.pages.search import ACCEPTED, SearchError, models_named, parse
from tuner.store.listing import NARROW, Order, Search

router = APIRouter(include_in_schema=False)

PAGE = 50

ORDERS = {
    Order.GAIN: "gain, greatest first",
    Order.LOSS: "gain, least first",
    Order.TIME: "time, longest first",
    Order.SIZE: "size",
}


class Filters(Struct, frozen=True):
    """The list's query.

    Attributes:
        operation: the part of an operation's `dtype` after its short name; `dtype` is the short
            name.
        after: the page begins after this winner.
    """

    q: Text = ""
    operation: Text | None = None
    dtype: DType | None = None
    layout: LayoutName | None = None
    use: Use | None = None
    sort: Order = Order.GAIN
    device: Text | None = None
    after: Cursor | None = None

    def narrow(self, search: Search, known: Sequence[Operation]) -> Search:
        """Return the search, limited to the chosen operations and library."""
        search = replace(search, use=self.use)
        if not (self.operation or self.dtype or self.layout):
            return search
        keys = [
            operation.key
            for operation in known
            if (search.operations is None or operation.key in search.operations)
            and self.operation in (None, "", operations.suffix(operation))
            and self.dtype in (None, operation.types)
            and self.layout in (None, operation.layout)
        ]
        return replace(search, operations=tuple(keys))


@router.get(addresses.PROBLEMS)
def problems(
    service: Service, caller: Reader, filters: Annotated[Filters, page_query_of(Filters)]
) -> Response:
    """A page of winners."""
    order = filters.sort
    model = service.catalogue.resolve(None, filters.device)
    known = operations.known(service.store)
    error: FieldError | None = None
    search = Search()
    try:
        search = parse(filters.q, known)
    except SearchError as wrong:
        error = FieldError(field="q", message=str(wrong), accepted=ACCEPTED)
    slug = model.slug if model else ""
    winners = service.store.listing.winners(
        slug, filters.narrow(search, known), order, after=filters.after, limit=PAGE
    )
    query = structs.asdict(structs.replace(filters, after=None))
    following = None
    if winners.following is not None:
        following = addresses.with_query(addresses.PROBLEMS, **query | {"after": winners.following})
    return page(
        "problems.html",
        status=422 if error else 200,
        nav=addresses.PROBLEMS,
        caller=caller,
        q=filters.q,
        models=models_named(filters.q),
        error=error,
        chosen={name: query[name] for name in ("operation", "dtype", "layout", "use")},
        filters={
            "operation": ("Operation", sorted({operations.suffix(item) for item in known})),
            "dtype": ("Type", [name for name in DType if any(x.types is name for x in known)]),
            "layout": ("Layout", [*Layout]),
            "use": ("Served", [*Use]),
        },
        orders=ORDERS,
        order=winners.order,
        too_wide=winners.order is not order,
        narrow=NARROW,
        device=slug,
        model=model,
        devices=service.catalogue.known(),
        winners=winners,
        first=filters.after is None,
        restart=addresses.with_query(addresses.PROBLEMS, **query),
        following=following,
    )
