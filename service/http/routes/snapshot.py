"""`GET /snapshot`: all current winners of a device model, to choose from without asking again."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Annotated

from fastapi import APIRouter, Header, Query
from starlette.responses import Response

from service.http import documents
from service.http.abilities import Asking
from service.http.access import Scope, needs
from service.http.errors import not_found
from service.http.requests import SnapshotQuery
from service.http.state import Service
from service.lookup.cache import VARY
from tuner.compile import ArtifactStore
from tuner.store import Store
from tuner.trial import Winner

router = APIRouter(tags=["lookup"])


@router.get("/snapshot", dependencies=[needs(Scope.READ)])
def snapshot(
    service: Service,
    asking: Asking,
    query: Annotated[SnapshotQuery, Query()],
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    """All current winners of a GPU model in one document, and the revision that they make.

    The same winners, packs included, have the same revision, and with that and the same key the
    same ETag. Packs that nobody who is believed here has signed are not named.
    """
    device = service.catalogue.resolve(query.arch, query.device)
    if device is None:
        raise not_found(
            "Snapshot",
            "No device model has a winner yet. Order a tuning job: POST /tune.",
            {"tune": {"href": "/tune", "method": "POST"}, "devices": {"href": "/devices"}},
        )
    winners = service.store.winners(device=device.slug)
    found = documents.snapshot(
        device.slug,
        (asking.told(found) for found in winners if asking.knows(found.problem)),
        pack_of=_packs(service.artifacts, service.store),
        signer=service.signer,
    )
    headers = {"ETag": f'"{found.tag}"', "Cache-Control": "no-cache", "Vary": VARY}
    # Quoted, a hash is inside a list of tags, weak ones too, only as one of them. Clients that
    # check no signatures name the revision alone.
    known = (f'"{tag}"' in (if_none_match or "") for tag in (found.tag, found.revision))
    if any(known):
        return Response(status_code=304, headers=headers)
    return Response(found.document, media_type="application/json", headers=headers)


def _packs(artifacts: ArtifactStore, store: Store) -> Callable[[Winner], str | None]:
    """Tells a winner's pack: its own, else the newest with its kernel, if it may be handed on."""
    believed = artifacts.believed()
    newest = cache(store.pack_for)

    def pack_of(winner: Winner) -> str | None:
        assert winner.candidate is not None  # noqa: S101 - as documents.snapshot asks
        name = winner.candidate.kernel.name
        for pack in (winner.pack, newest(name)):
            if pack in believed and name in believed[pack].held:
                return pack
        return None

    return pack_of
