"""`/ui`: what there is at a glance: winners by operation and GPU, what they save, who works."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter
from starlette.responses import Response

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.operation import DType, of_dtype
from service.charts import rooflines
from service.http.state import Service
from service.pages import addresses
from service.pages.callers import Reader
from service.pages.fields import Device
from service.pages.render import page
from service.report.roofs import Roof, ceilings_of, measured_roof, nominal_roof
from tuner.store.listing import Listed

router = APIRouter(include_in_schema=False)

DRAWN = 1_000
"""Winners under the roofline at most: with more, discs hide each other."""

LATEST = 6
"""Jobs shown; the jobs' page has all."""


@router.get(addresses.OVERVIEW)
def overview(service: Service, caller: Reader, device: Device = None) -> Response:
    """The first page."""
    model = service.catalogue.resolve(None, device)
    slug = model.slug if model else ""
    models = service.catalogue.known()
    glance = service.glances.at(slug)
    found = service.store.listing.winners(slug, limit=DRAWN)
    roofs = _roofs(model, found.items) if model else []
    standings = {(each.dtype, each.device): each for each in glance.standings}
    return page(
        "overview.html",
        nav=addresses.OVERVIEW,
        caller=caller,
        model=model,
        device=slug,
        devices=models,
        columns=[each for each in models if any(slug == each.slug for _, slug in standings)],
        dtypes=sorted({dtype for dtype, _ in standings}, key=_order),
        standings=standings,
        suites=glance.suites,
        roofline=rooflines.of_winners(found.items, roofs),
        drawn=len(found.items),
        more=found.following is not None,
        jobs=service.queue.list(limit=LATEST),
        counts=service.queue.counts(),
        workers=service.queue.workers.alive(),
    )


def _order(dtype: str) -> tuple[int, str]:
    return [*DType].index(of_dtype(dtype).types), dtype


def _roofs(model: DeviceModel, listed: Sequence[Listed]) -> list[tuple[str, Roof]]:
    """A roof for each width of operands among the winners, with the types that it bounds.

    The measured one, the highest of its types; the nominal one where none was measured.
    """
    ceilings = ceilings_of(model.slug)
    types = {item.problem.operation.types: item.problem.operation.a.bits for item in listed}
    found = []
    for bits in sorted(set(types.values())):
        of_width = [each.value for each in DType if types.get(each) == bits]
        measured = [roof for each in of_width if (roof := measured_roof(ceilings, each))]
        nominal = nominal_roof(model, of_width[0])
        roof = max(measured, key=lambda roof: roof.peak, default=nominal)
        if roof is not None:
            source = "measured" if roof.measured else "nominal"
            found.append((f"{', '.join(of_width)}: {roof.peak / 1e12:.0f} TFLOP/s, {source}", roof))
    return sorted(found, key=lambda named: named[1].peak, reverse=True)
