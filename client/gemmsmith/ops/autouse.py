"""Runs tuned kernels in a program that does not use gemmsmith, if `GEMMSMITH` is set.

`start` is called in every process that uses a GPU, as soon as it may run kernels
(`gemmsmith.startup.hook`). The current winners are pinned. The ranks of a job agree on them through
the store of their process group: all ranks run the winners of rank 0, or all run torch's operators.
Only deterministic kernels are used, because a program may request determinism at any time. Kernels
run through the compiled binding only: a program with its own torch function modes would notice
another mode.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gemmsmith.answers.snapshot import Snapshot
from gemmsmith.distributed import agreed_snapshot
from gemmsmith.errors import PackError, PackIncompatible, ServiceUnavailable
from gemmsmith.http.address import DEFAULT_URL
from gemmsmith.http.client import Client
from gemmsmith.http.replies import Response
from gemmsmith.http.sending import ask
from gemmsmith.ops.below.dispatch import Dispatch
from gemmsmith.ops.engine import source
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.in_use import demanded, in_use, install
from gemmsmith.ops.engine.planning import PackSource
from gemmsmith.ops.models.automatic import every_model, every_norm
from gemmsmith.ops.models.patching import patch
from gemmsmith.program.variables import VARIABLE
from gemmsmith.showing import line
from gemmsmith.winners.bundle import Bundle, kept_bundle
from gemmsmith.winners.lookup import Lookup
from gemmsmith.winners.packs import Packs, asking, believe

log = logging.getLogger("gemmsmith")

URL_VARIABLE = "GEMMSMITH_URL"
"""The variable with the service that `auto` tries first."""

TIMEOUT_S = 5.0
"""Time-out of the service in seconds. It is short because the program waits for each answer."""

AWAY_S = 60.0
"""Seconds without a request for a pack after a time-out: a step has many products, and must not
wait for each of them."""

MEETING_S = 60.0
"""Seconds that a rank waits for the others. All ranks reach this point at about the same time."""


def start(value: str, numerics: str | None = None) -> None:
    """Run the winners that `value` names from now on. A further call fetches them again.

    `numerics` is as of `gemmsmith.patch`. The program's own winners must keep to it too.

    Raises:
        GemmsmithError, OSError, ValueError: there are no winners; torch's own operators run.
    """
    try:
        _start(value, numerics)
    except Exception as error:
        if in_use() is None:
            install(None, line(f"{VARIABLE}={value} is ignored: {error}"))
        raise


def _start(value: str, numerics: str | None) -> None:
    _State.running.close()
    _State.demand.close()
    with ExitStack() as stack:
        # Opened within `_agreed`, so that a rank that fails reports it to the other ranks.
        winners = cache(lambda: _opened(value, source.local_model(), stack))
        engines: list[Engine] = []
        snapshot = _agreed(
            lambda: winners().fetch(),
            lambda fetched: engines.append(_engine_for(winners(), fetched)),
        )
        (engine,) = engines
        stack.callback(install, install(engine))
        stack.enter_context(patch(numerics=numerics))
        stack.enter_context(every_model() if _fuses(snapshot) else every_norm())
        _State.demand.enter_context(demanded(numerics))
        _State.running = stack.pop_all()
    source.on_use(_State.running.close)
    revision = snapshot.revision[:16]
    log.info("%s=%s: winners of %s, snapshot %s", VARIABLE, line(value), snapshot.device, revision)


def _fuses(snapshot: Snapshot) -> bool:
    """Whether there are winners that need patched layers. Without them, layers stay fast."""
    operations = [row.problem.operation for row in snapshot.rows if not row.use.is_default]
    return any(operation.is_grouped or not operation.epilogue.is_torchs for operation in operations)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Winners:
    """A source of winners and of their packs.

    `model` is the slug of this machine's GPU model; None without a GPU. `url` is the URL of a
    service; None for a bundle.
    """

    fetch: Callable[[], Snapshot]
    packs: Callable[[Snapshot], PackSource]
    check: Callable[[Snapshot], None]
    model: str | None
    url: str | None


def _opened(value: str, model: str | None, stack: ExitStack) -> _Winners:
    """The source that `value` names, for the GPU `model`. `stack` closes it."""
    if value.lower() == "auto":
        value = _nearest(model)
    if value.startswith(("http://", "https://")):
        client = stack.enter_context(Client(value, timeout=TIMEOUT_S, retries=1))
        return _Winners(
            fetch=lambda: client.snapshot(model),
            packs=lambda snapshot: _Bounded(Packs.of(client, signed=lambda: snapshot)),
            check=lambda snapshot: believe(snapshot, asking(client)),
            model=model,
            url=value,
        )
    bundle = Bundle.open(value)

    def check(snapshot: Snapshot) -> None:
        believe(snapshot)
        missing = set(snapshot.packs()) - set(bundle.snapshot.packs())
        if missing:
            raise PackError(f"{value} is another file here: it lacks {len(missing)} packs")

    return _Winners(
        fetch=lambda: bundle.snapshot,
        packs=lambda _: bundle.packs,
        check=check,
        model=model,
        url=None,
    )


def _engine_for(winners: _Winners, snapshot: Snapshot) -> Engine:
    """An engine for a snapshot.

    Raises:
        PackError: this process cannot run the snapshot's kernels, or does not trust them.
    """
    winners.check(snapshot)
    if winners.model is not None and snapshot.device != winners.model:
        raise PackIncompatible(
            f"the winners are those of {snapshot.device}, and this is {winners.model}"
        )
    lookup = Lookup(snapshot, pin=True, url=winners.url)
    engine = Engine(lookup, winners.packs(snapshot), deterministic=True)
    kind = engine.platform.kind
    if kind is not None and Dispatch.of(kind) is None:
        raise PackIncompatible(
            "gemmsmith's compiled binding is not available: install the wheel, or a C++ compiler"
        )
    return engine


def _nearest(model: str | None) -> str:
    """The service of `GEMMSMITH_URL`, else the user's own bundle, else a service on this machine.

    Raises:
        FileNotFoundError: none of them exists.
    """
    if url := os.environ.get(URL_VARIABLE):
        return url
    kept = None if model is None else kept_bundle(model)
    if kept is not None and kept.is_file():
        return str(kept)
    reply = ask(DEFAULT_URL, "/healthz", timeout=1.0)
    if isinstance(reply, Response) and reply.status == 200:
        return DEFAULT_URL
    raise FileNotFoundError(
        f"no winners are found: {URL_VARIABLE} is not set, there is no {kept}, and no "
        f"service at {DEFAULT_URL}. `gemmsmith run --tune -- COMMAND` makes the file"
    )


def _agreed(fetch: Callable[[], Snapshot], take: Callable[[Snapshot], None]) -> Snapshot:
    """The winners for this process. In a job of several ranks, all ranks get those of rank 0.

    `take` is called with them, and raises if this process cannot use them.
    """
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        snapshot = fetch()
        take(snapshot)
        return snapshot
    _State.meetings += 1
    return agreed_snapshot(
        fetch,
        PrefixStore(f"gemmsmith/{_State.meetings}", dist.distributed_c10d._get_default_store()),
        dist.get_rank(),
        dist.get_world_size(),
        check=take,
        timeout_s=MEETING_S,
    )


class _State:
    running = ExitStack()
    demand = ExitStack()  # stays when the program calls `gemmsmith.use`
    meetings = 0


class _Bounded:
    """Packs of a service. After a time-out, it is not asked again for a while."""

    def __init__(self, packs: Packs) -> None:
        self._packs = packs
        self._away_until = 0.0

    def path(self, pack_hash: str) -> Path:
        if time.monotonic() < self._away_until:
            raise ServiceUnavailable("the service is away; packs not fetched yet are not used")
        try:
            return self._packs.path(pack_hash)
        except ServiceUnavailable:
            self._away_until = time.monotonic() + AWAY_S
            raise
