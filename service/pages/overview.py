"""`/ui`: the overview: winners by family and GPU, the time they save, workers and jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter
from starlette.responses import Response

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.operation import DType
from gemmsmith.core.tuning import JobState
from service.charts import rooflines
from service.http.state import Service
from service.pages import addresses
from service.pages.fields import DeviceQuery, Reader, page_query_of
from service.pages.render import page
from service.report.glance import families
from service.report.roofs import Roof, measured_roof, nominal_roof
from tuner.store.listing import Listed

router = APIRouter(include_in_schema=False)

DRAWN = 1_000
"""Most winners in the roofline: with more, discs hide each other."""

LATEST = 6
"""Jobs shown; the jobs' page has all."""


@router.get(addresses.OVERVIEW)
def overview(
    service: Service, caller: Reader, query: Annotated[DeviceQuery, page_query_of(DeviceQuery)]
) -> Response:
    model = service.catalogue.resolve(None, query.device)
    slug = model.slug if model else ""
    models = service.catalogue.known()
    glance = service.glances.at(slug)
    winners = service.store.listing.winners(slug, limit=DRAWN)
    roofs = _roofs(model, winners.items) if model else []
    counts = service.queue.counts()
    standings = {(item.dtype, item.device): item for item in glance.standings}
    return page(
        "overview.html",
        nav=addresses.OVERVIEW,
        caller=caller,
        model=model,
        device=slug,
        devices=models,
        columns=[column for column in models if any(slug == column.slug for _, slug in standings)],
        families=families(glance.standings),
        standings=standings,
        unusable=glance.unusable,
        suites=glance.suites,
        roofline=rooflines.of_winners(winners.items, roofs),
        drawn=len(winners.items),
        more=winners.following is not None,
        jobs=service.queue.list(limit=LATEST),
        counts=counts,
        busy=counts[JobState.RUNNING] > 0,
        workers=service.queue.workers.alive(),
    )


def _roofs(model: DeviceModel, listed: Sequence[Listed]) -> list[tuple[str, Roof]]:
    """Return a roof for each width of the winners' operands, and its name, the highest first.

    It is the highest measured roof of the types of that width, or the nominal one.
    """
    types = {item.problem.operation.types: item.problem.operation.a.bits for item in listed}
    roofs = []
    for bits in sorted(set(types.values())):
        names = [dtype.value for dtype in DType if types.get(dtype) == bits]
        measured = [roof for name in names if (roof := measured_roof(model, name))]
        nominal = nominal_roof(model, names[0])
        roof = max(measured, key=lambda roof: roof.peak, default=nominal)
        if roof is not None:
            rate = f"{roof.peak / 1e12:.0f} TFLOP/s"
            roofs.append((f"{', '.join(names)}: {rate}, {roof.source}", roof))
    return sorted(roofs, key=lambda named: named[1].peak, reverse=True)
