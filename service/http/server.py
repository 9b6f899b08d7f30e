"""uvicorn as gemmsmith runs it: its protocol, its limits, its silence."""

from __future__ import annotations

import functools
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from service.http.connections import Connections, Limits
from service.http.protocol import Protocol
from service.settings import Settings


def server_config(app: ASGIApp, settings: Settings, **more: Any) -> uvicorn.Config:
    """What `uvicorn.Server` takes; `more` is passed on."""
    connections = Connections(
        Limits.of(settings),
        idle_s=settings.idle_timeout_s,
        request_s=settings.request_timeout_s,
    )
    return uvicorn.Config(
        app,
        http=cast(type[Protocol], functools.partial(Protocol, connections=connections)),
        loop="uvloop",  # asyncio's own logs without end while no file can be opened
        ws="none",  # a connection that spoke another protocol would go by no limit
        # uvicorn's default believes what any program on this machine says about its address.
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=settings.trusted_proxies,
        log_config=None,  # ours: see service.logging
        access_log=False,
        server_header=False,
        **more,
    )
