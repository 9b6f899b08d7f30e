"""`/ui/devices`: GPU models, the GPUs that have reported, and the environments of measurements."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from service.http.state import Service
from service.pages import addresses
from service.pages.fields import Reader
from service.pages.render import page
from service.report.roofs import ceilings_of

router = APIRouter(include_in_schema=False)


@router.get(addresses.DEVICES)
def devices(service: Service, caller: Reader) -> Response:
    models = service.catalogue.known(refresh=True)
    return page(
        "devices.html",
        nav=addresses.DEVICES,
        caller=caller,
        models=models,
        local=service.catalogue.local,
        gpus=service.store.gpus.known(),
        environments=service.store.environments(),
        ceilings={model.slug: ceilings_of(model.slug) for model in models},
    )
