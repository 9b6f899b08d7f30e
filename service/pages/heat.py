"""`/ui/map`: what is served over M and N, for a K, element types, layout and device model."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from gemmsmith.core.operation import DType, Layout
from service.charts.heatmap import heatmap
from service.http.parameters import DTypeName, LayoutName, QueryExtent
from service.http.state import Service, State
from service.pages import addresses, operations
from service.pages.fields import Blank, Device, Reader
from service.pages.render import page

router = APIRouter(include_in_schema=False)

MOST = 600
"""At most this many cells are drawn, about 24 by 24: ratios in smaller cells were unreadable."""

_Extent = Annotated[QueryExtent | None, Blank, Query()]


@router.get(addresses.MAP)
def heat_map(
    service: Service,
    caller: Reader,
    dtype: Annotated[DTypeName | None, Blank, Query()] = None,
    layout: Annotated[LayoutName | None, Blank, Query()] = None,
    k: _Extent = None,
    batch: _Extent = None,
    device: Device = None,
) -> Response:
    """The map; without `k`, of the K that most problems have."""
    model = service.catalogue.resolve(None, device)
    slug = model.slug if model else ""
    dtype, layout = dtype or DType.BF16.value, layout or Layout.TN
    depths = service.store.listing.depths(dtype, layout)
    fitting = [
        (depth, count)
        for depth, count, _ in depths
        if k in (None, depth) and batch in (None, count)
    ]
    k, batch = fitting[0] if fitting else (k or 1, batch or 1)
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
