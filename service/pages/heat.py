"""`/ui/map`: what is served over M and N, for a K, element types, layout and device model."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from msgspec import Struct
from starlette.responses import Response

from gemmsmith.core.operation import DType, Layout
from service.charts.heatmap import heatmap
from service.http.parameters import DTypeName, Extent, LayoutName, Text
from service.http.state import Service, State
from service.pages import addresses, operations
from service.pages.fields import Reader, page_query_of
from service.pages.render import page

router = APIRouter(include_in_schema=False)

MOST = 600
"""At most this many cells are drawn, about 24 by 24: ratios in smaller cells were unreadable."""


class MapQuery(Struct, frozen=True):
    """What the map shows; without `k`, the K that most problems have."""

    dtype: DTypeName | None = None
    layout: LayoutName = Layout.TN
    k: Extent | None = None
    batch: Extent | None = None
    device: Text | None = None


@router.get(addresses.MAP)
def heat_map(
    service: Service, caller: Reader, query: Annotated[MapQuery, page_query_of(MapQuery)]
) -> Response:
    model = service.catalogue.resolve(None, query.device)
    slug = model.slug if model else ""
    dtype, layout = query.dtype or DType.BF16.value, query.layout
    depths = service.store.listing.depths(dtype, layout)
    fitting = [
        (depth, count)
        for depth, count, _ in depths
        if query.k in (None, depth) and query.batch in (None, count)
    ]
    k, batch = fitting[0] if fitting else (query.k or 1, query.batch or 1)
    listed = service.store.listing.map(slug, dtype, layout, k, batch, MOST + 1)
    return page(
        "map.html",
        nav=addresses.MAP,
        caller=caller,
        dtype=dtype,
        layout=layout,
        k=k,
        batch=batch,
        depths=depths,
        types=_types(service),
        device=slug,
        devices=service.catalogue.known(),
        listed=listed[:MOST],
        more=len(listed) > MOST,
        most=MOST,
        map=heatmap(listed[:MOST], lambda problem: addresses.problem(problem, slug)),
    )


def _types(service: State) -> list[str]:
    known = {operation.dtype for operation in operations.known(service.store)}
    return [*DType, *sorted(known - {*DType})]
