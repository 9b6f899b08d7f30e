"""`/ui/problems`: the current winners of a device model, searched and sorted, page by page."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from service.http.errors import FieldError
from service.http.parameters import Cursor
from service.http.state import Service
from service.pages import addresses
from service.pages.callers import Reader
from service.pages.fields import Blank, Device
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
    sort: Annotated[Order | None, Blank, Query()] = None,
    device: Device = None,
    after: Annotated[Cursor | None, Blank, Query()] = None,
) -> Response:
    """A page of winners; `after` continues behind a winner."""
    order = sort or Order.GAIN
    model = service.catalogue.resolve(None, device)
    error: FieldError | None = None
    search = Search()
    try:
        search = parse(q)
    except SearchError as wrong:
        error = FieldError(field="q", message=str(wrong), accepted=ACCEPTED)
    slug = model.slug if model else ""
    found = service.store.listing.winners(slug, search, order, after=after, limit=PAGE)
    following = None
    if found.following is not None:
        following = addresses.with_query(
            addresses.PROBLEMS, q=q, sort=order, device=device, after=found.following
        )
    return page(
        "problems.html",
        status=422 if error else 200,
        nav=addresses.PROBLEMS,
        caller=caller,
        q=q,
        error=error,
        orders=ORDERS,
        order=found.order,
        too_wide=found.order is not order,
        narrow=NARROW,
        device=slug,
        model=model,
        devices=service.catalogue.known(),
        found=found,
        first=after is None,
        restart=addresses.with_query(addresses.PROBLEMS, q=q, sort=order, device=device),
        following=following,
    )
