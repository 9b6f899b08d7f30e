"""Tuned kernels in a program that knows nothing of them: what `GEMMSMITH` switches on.

`start` is called in every process that uses a GPU, when it may run kernels
(`gemmsmith.startup.hook`). The winners of that moment are pinned. The ranks of a job agree on them
by the store of their process group: all run those that rank 0 got, or none does. Only kernels that
give the same bits for the same inputs are run, since a program may ask for such at any time.
Kernels run by the compiled binding alone: modes of torch's would be noticed by a program that opens
some of its own.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gemmsmith.answers.snapshot import Choice, Snapshot
from gemmsmith.core.operation import Epilogue
from gemmsmith.core.problem import Problem
from gemmsmith.distributed import agreed_snapshot
from gemmsmith.errors import InvalidProblem, PackError, PackIncompatible, ServiceUnavailable
from gemmsmith.http.address import DEFAULT_URL
from gemmsmith.http.client import Client
from gemmsmith.http.replies import Response
from gemmsmith.http.requests import problem_of
from gemmsmith.http.sending import ask
from gemmsmith.ops.below.dispatch import Dispatch
from gemmsmith.ops.engine import source
from gemmsmith.ops.engine.engine import Engine, install
from gemmsmith.ops.engine.planning import PackSource
from gemmsmith.ops.models.automatic import every_model, every_norm
from gemmsmith.ops.models.patching import patch
from gemmsmith.program.captured import tune_command
from gemmsmith.program.variables import CAPTURE_VARIABLE, VARIABLE, is_first_rank
from gemmsmith.showing import line
from gemmsmith.winners.bundle import Bundle, kept_bundle
from gemmsmith.winners.lookup import Lookup
from gemmsmith.winners.packs import Packs, asking, believe

log = logging.getLogger("gemmsmith")

URL_VARIABLE = "GEMMSMITH_URL"
"""Where `auto` looks first."""

TIMEOUT_S = 5.0
"""A service that does not answer for so long is away: programs wait for its winners, or a pack."""

AWAY_S = 60.0
"""So long no pack is asked for then: a step meets many products, and may not wait at each."""

MEETING_S = 60.0
"""How long a rank waits for the others, who come by at about the same line of the same program."""

_PLAIN = (Epilogue.NONE, Epilogue.BIAS)
"""Products that are seen without their layer."""

MATTERS = 0.05
"""Share of the operations of all products met, each counted once, from which one is reported."""


def start(value: str) -> None:
    """Run the winners that `value` names from now on; called again, those of that moment.

    Raises:
        GemmsmithError, OSError, ValueError: there are none; torch's own operators run.
    """
    _State.running.close()
    with ExitStack() as stack:
        # What keeps this rank from running the winners is said before the ranks agree on them.
        opened = cache(lambda: _opened(value, source.local_model(), stack))
        ready: list[tuple[_Noting, Engine]] = []
        snapshot = _agreed(
            lambda: opened().fetch(), lambda found: ready.append(_made(opened(), found))
        )
        ((lookup, engine),) = ready
        stack.callback(install, install(engine))
        stack.enter_context(patch())
        stack.enter_context(every_model() if _fuses(snapshot) else every_norm())
        _State.running = stack.pop_all()
    source.on_use(_State.running.close)
    _State.lookup = lookup
    if is_first_rank() and not _State.reports:
        _State.reports = True
        atexit.register(_report, opened().url)
    revision = snapshot.revision[:16]
    log.info("%s=%s: winners of %s, snapshot %s", VARIABLE, line(value), snapshot.device, revision)


def _fuses(snapshot: Snapshot) -> bool:
    """Whether there are winners that only whole layers can run: others are not slowed down."""
    operations = [row.problem.operation for row in snapshot.rows if not row.use.is_default]
    return any(one.is_grouped or one.epilogue not in _PLAIN for one in operations)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Winners:
    """Where winners come from: how to get them, and then their packs.

    `model` is the slug of the GPU that is here; None without one.
    """

    fetch: Callable[[], Snapshot]
    packs: Callable[[Snapshot], PackSource]
    check: Callable[[Snapshot], None]
    model: str | None
    url: str | None


def _opened(value: str, model: str | None, stack: ExitStack) -> _Winners:
    """What `value` names, for the GPU `model`; closed with `stack`."""
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


def _made(winners: _Winners, snapshot: Snapshot) -> tuple[_Noting, Engine]:
    """What runs a snapshot's winners here.

    Raises:
        PackError: this process cannot, or may not.
    """
    winners.check(snapshot)
    if winners.model is not None and snapshot.device != winners.model:
        raise PackIncompatible(
            f"the winners are those of {snapshot.device}, and this is {winners.model}"
        )
    lookup = _Noting(snapshot, pin=True)
    engine = Engine(lookup, winners.packs(snapshot), deterministic=True)
    kind = engine.platform.kind
    if kind is not None and Dispatch.of(kind) is None:
        raise PackIncompatible(
            "gemmsmith's compiled binding is not available: install the wheel, or a C++ compiler"
        )
    return lookup, engine


def _nearest(model: str | None) -> str:
    """The service of `GEMMSMITH_URL`, else the user's own bundle, else a service on this machine.

    Raises:
        FileNotFoundError: there is none of them.
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
    """The winners for this process; in a job of several ranks those of rank 0, on all of them.

    `take` raises where this process does not take them.
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
    """What runs in this process."""

    running = ExitStack()
    lookup: _Noting | None = None
    meetings = 0
    reports = False


class _Noting(Lookup):
    """Notes which problems nothing is known of."""

    def __init__(self, snapshot: Snapshot, *, pin: bool) -> None:
        super().__init__(snapshot, pin=pin)
        self.asked: set[Problem] = set()
        self.unknown: set[Problem] = set()

    def _miss(self, key: tuple[str, str, int, int, int, int]) -> Choice | None:
        found = super()._miss(key)
        dtype, layout, m, n, k, batch = key
        try:
            problem = problem_of(m, n, k, batch=batch, dtype=dtype, layout=layout)
        except InvalidProblem:
            return found
        self.asked.add(problem)
        if found is None and self.snapshot.row_for(problem) is None:
            self.unknown.add(problem)
        return found

    def matter(self) -> list[Problem]:
        """The unknown ones that are a good part of what was met, the largest first."""
        whole = sum(problem.flops for problem in self.asked)
        found = [one for one in self.unknown if one.flops >= MATTERS * whole]
        return sorted(found, key=lambda one: (-one.flops, one))


class _Bounded:
    """Packs of a service that may go away: one wait, and then none for a while."""

    def __init__(self, packs: Packs) -> None:
        self._packs = packs
        self._away_until = 0.0

    def path(self, pack_hash: str) -> Path:
        """As `Packs.path`."""
        if time.monotonic() < self._away_until:
            raise ServiceUnavailable("the service is away; packs not fetched yet are not used")
        try:
            return self._packs.path(pack_hash)
        except ServiceUnavailable:
            self._away_until = time.monotonic() + AWAY_S
            raise


def _report(url: str | None) -> None:
    """Name the products that matter and have no winner, once, when the program ends."""
    lookup = _State.lookup
    matter = [] if lookup is None else lookup.matter()
    if not matter or CAPTURE_VARIABLE in os.environ:  # whoever captures reports better
        return
    lines = [f"gemmsmith: {len(matter)} large products have no winner:"]
    lines += [line(f"  {one}: {tune_command(one, url)}") for one in matter]
    sys.stderr.write("\n".join(lines) + "\n")
