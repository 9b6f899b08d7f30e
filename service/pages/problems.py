"""`/ui/problems`: the current winners of a device model, searched and sorted, page by page."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from gemmsmith.core.config import Use
from gemmsmith.core.operation import DType, Layout
from service.http.errors import FieldError
from service.http.parameters import Cursor, LayoutName
from service.http.state import Service
from service.pages import addresses, operations
from service.pages.callers import Reader
from service.pages.fields import Blank, Device, Text
from service.pages.render import page
from service.pages.search import ACCEPTED, SearchError, parse
from tuner.store.listing import NARROW, Order, Search

router = APIRouter(include_in_schema=False)

PAGE = 50

ORDERS = {
    Order.GAIN: "gain, greatest first",
    Order.LOSS: "gain, least first",
    Order.TIME: "time, longest first",
    Order.SIZE: "size",
}


@router.get(addresses.PROBLEMS)
def problems(
    service: Service,
    caller: Reader,
    q: Annotated[str, Query(max_length=200)] = "",
    operation: Text = None,
    dtype: Annotated[DType | None, Blank, Query()] = None,
    layout: Annotated[LayoutName | None, Blank, Query()] = None,
    use: Annotated[Use | None, Blank, Query()] = None,
    sort: Annotated[Order | None, Blank, Query()] = None,
    device: Device = None,
    after: Annotated[Cursor | None, Blank, Query()] = None,
) -> Response:
    """A page of winners; `after` continues behind a winner.

    `operation` is what a `dtype` says behind its short name, which `dtype` is here.
    """
    order = sort or Order.GAIN
    model = service.catalogue.resolve(None, device)
    known = operations.known(service.store)
    error: FieldError | None = None
    search = Search()
    try:
        search = parse(q, known)
    except SearchError as wrong:
        error = FieldError(field="q", message=str(wrong), accepted=ACCEPTED)
    chosen = {"operation": operation, "dtype": dtype, "layout": layout, "use": use}
    if operation or dtype or layout:
        fitting = [
            each.key
            for each in known
            if (search.operations is None or each.key in search.operations)
            and operation in (None, "", operations.further(each))
            and dtype in (None, each.types)
            and layout in (None, each.layout)
        ]
        search = replace(search, operations=tuple(fitting))
    search = replace(search, use=use)
    slug = model.slug if model else ""
    found = service.store.listing.winners(slug, search, order, after=after, limit=PAGE)
    asked = {"q": q, **chosen, "sort": order, "device": device}
    following = None
    if found.following is not None:
        following = addresses.with_query(addresses.PROBLEMS, **asked, after=found.following)
    return page(
        "problems.html",
        status=422 if error else 200,
        nav=addresses.PROBLEMS,
        caller=caller,
        q=q,
        error=error,
        chosen=chosen,
        filters={
            "operation": ("Operation", sorted({operations.further(each) for each in known})),
            "dtype": ("Type", [each for each in DType if any(one.types is each for one in known)]),
            "layout": ("Layout", [*Layout]),
            "use": ("Served", [*Use]),
        },
        orders=ORDERS,
        order=found.order,
        too_wide=found.order is not order,
        narrow=NARROW,
        device=slug,
        model=model,
        devices=service.catalogue.known(),
        found=found,
        first=after is None,
        restart=addresses.with_query(addresses.PROBLEMS, **asked),
        following=following,
    )
