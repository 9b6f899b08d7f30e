"""What the tests of schedules ask of the process that launches kernels, and its answer."""

from __future__ import annotations

import msgspec

from gemmsmith.core.kernel import AnyKernel
from gemmsmith.core.launch import Launch
from gemmsmith.core.problem import Problem


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """`check` is a function of tests.gpu.support.checks; launches are taken in turn."""

    check: str
    kernel: AnyKernel
    launches: tuple[Launch, ...]
    pack: str
    problem: Problem


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Why the check failed, or nothing; `figures` are for the report."""

    failure: str | None = None
    figures: dict[str, float] = {}
