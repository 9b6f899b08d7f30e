"""The process's engine: which one decides here, and whether it must keep one order of sums.

`gemmsmith.use` installs it. While a block of `demanded` is open, its twin under
`numerics="invariant"` is in use, in every thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from gemmsmith.core.numerics import demands_order
from gemmsmith.errors import NotInvariant
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.plan import Plan
from gemmsmith.ops.engine.recomputing import as_computed, saved_tensors_hooks
from gemmsmith.ops.engine.settings import PERMISSIONS
from gemmsmith.ops.engine.watching import Watcher


class _Pinned(Engine):
    """An engine as it is now: its decisions stay if winners, kernels or torch's settings change.

    A kernel runs only if the engine would run it now. Otherwise the caller computes the product as
    after a kernel that refused, and saves the same tensors.
    """

    def __init__(self, engine: Engine) -> None:
        vars(self).update(vars(engine))
        self._engine, self._refreshing = engine, None
        self._kept = engine.watcher, engine.snapshot
        self._permitted = {permission: permission() for permission in PERMISSIONS}

    @property
    def watcher(self) -> Watcher | None:
        return self._kept[0]

    @property
    def snapshot(self) -> object:
        return self._kept[1]

    def run(self, plan: Plan | None, *product: Any) -> torch.Tensor | None:
        """By the engine itself, if it may run the plan now."""
        may_run = (
            plan is not None
            and not plan.has_failed
            and self._engine is in_use()
            and self._engine._permits(plan)
        )
        return self._engine.run(plan if may_run else None, *product)

    def _permits(self, plan: Plan) -> bool:
        return all(self._permitted[permission] for permission in plan.needs)

    def _make_room(self) -> None:
        """Keeps all: the decisions must stay, and regions of a model are few."""


class _InUse:
    """The process's engine, which is None until `use` is called, and what follows it."""

    engine: Engine | None = None
    last: Engine | None = None
    installed: Engine | None = None  # by `use`; `engine` may run it in one order of sums
    demands = 0
    lock = threading.Lock()
    why_none = "call gemmsmith.use(...) first"
    reactions: list[Callable[[], None]] = []  # noqa: RUF012 - one a process


def in_use() -> Engine | None:
    """Returns None without `use`."""
    return _InUse.engine


def current() -> Engine | None:
    """The engine that decides here: the process's; in a checkpointed region, as it was at first."""
    return _InUse.last if is_dynamo_compiling() else eager()


def eager() -> Engine | None:
    """As `current`, outside of a graph that is being compiled."""
    hooks = saved_tensors_hooks(True)  # in graphs that are traced, too
    return _InUse.engine if hooks is None else as_computed(hooks[0], _pinned, _InUse.engine)


def _pinned() -> Engine | None:
    engine = _InUse.engine
    return None if engine is None else _Pinned(engine)


def why_none() -> str:
    """Why the process has no engine, as a clause for people."""
    return _InUse.why_none


def install(engine: Engine | None, why_none: str = _InUse.why_none) -> Engine | None:
    """Make `engine` the process's. None: everything runs torch, for this reason.

    Returns the engine that was installed before.
    """
    with _InUse.lock:
        before, _InUse.installed, _InUse.why_none = _InUse.installed, engine, why_none
    _choose()
    return before


@contextmanager
def demanded(numerics: str | None) -> Iterator[None]:
    """Run the process's engine under `numerics="invariant"` until the last of such blocks ends.

    Raises:
        NotInvariant: there is no engine.
    """
    if not demands_order(numerics):
        yield
        return
    if _InUse.installed is None:
        raise NotInvariant(f"numerics='invariant' needs winners: {_InUse.why_none}")
    try:
        _demand(1)
        yield
    finally:
        _demand(-1)


def is_demanded_now() -> bool:
    """Whether a block of `demanded` is open."""
    return _InUse.demands > 0


def _demand(change: int) -> None:
    with _InUse.lock:
        _InUse.demands += change
    _choose()


def _choose() -> None:
    with _InUse.lock:
        engine = _InUse.installed
        if engine is not None and _InUse.demands:
            engine = engine.invariant
        _InUse.engine = engine
        _InUse.last = engine or _InUse.last
    for react in _InUse.reactions:
        react()


def on_install(react: Callable[[], None]) -> None:
    _InUse.reactions.append(react)
