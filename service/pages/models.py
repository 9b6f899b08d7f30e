"""`/ui/models`: the models of the suites; and a model's products, before and after."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from msgspec import Struct
from starlette.responses import Response

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.operation import DType
from service.errors import not_found
from service.http.parameters import DTypeName, Extent, Text
from service.http.state import Service, State
from service.lookup import find
from service.pages import addresses
from service.pages.fields import DeviceQuery, Reader, page_query_of
from service.pages.render import page
from service.report.of_model import ModelRow, rows_of, step_time
from tuner.models import Layer, by_model, products, tokens_of
from tuner.suites import Pass

router = APIRouter(include_in_schema=False)


class ModelQuery(Struct, frozen=True):
    """What a model's page shows; without `tokens`, the number for which most products are tuned."""

    tokens: Extent | None = None
    dtype: DTypeName = DType.BF16.value
    device: Text | None = None


@router.get(addresses.MODELS)
def models(caller: Reader, query: Annotated[DeviceQuery, page_query_of(DeviceQuery)]) -> Response:
    return page(
        "models.html",
        nav=addresses.MODELS,
        caller=caller,
        models=by_model(),
        device=query.device,
        tokens_of=tokens_of,
    )


@router.get(addresses.MODELS + "/{name}")
def model(
    service: Service,
    caller: Reader,
    name: str,
    query: Annotated[ModelQuery, page_query_of(ModelQuery)],
) -> Response:
    layers = by_model().get(name)
    if layers is None:
        links = {"models": {"href": addresses.MODELS}}
        raise not_found("Model", f"There is no model {name!r:.80} in the suites.", links)
    gpu = service.catalogue.resolve(None, query.device)
    offered = tokens_of(name)
    counts = [query.tokens] if query.tokens else offered
    tables = {tokens: _rows(service, gpu, layers, tokens, query.dtype) for tokens in counts}
    tokens = max(tables, key=lambda count: step_time(tables[count]).tuned)
    rows = tables[tokens]
    return page(
        "model.html",
        nav=addresses.MODELS,
        caller=caller,
        name=name,
        tokens=tokens,
        offered=offered,
        dtype=query.dtype,
        types=dict.fromkeys((*DType, query.dtype)),
        model=gpu,
        device=gpu.slug if gpu else "",
        devices=service.catalogue.known(),
        rows=rows,
        is_grouped=any(layer.groups for layer in layers),
        whole=step_time(rows),
        passes={which: step_time(rows, which) for which in Pass},
    )


def _rows(
    service: State, gpu: DeviceModel | None, layers: tuple[Layer, ...], tokens: int, dtype: str
) -> tuple[ModelRow, ...]:
    made = products(list(layers), tokens, dtype)
    problems = list(dict.fromkeys(product.problem for product in made))
    if gpu is None:
        return rows_of(made, {})
    return rows_of(made, find.find_many(service.store, problems, gpu, accepted=find.EXACT))
