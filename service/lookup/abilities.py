"""What a caller can read and run, and what it is answered therefore.

Clients say in the header `Gemmsmith-Runs` which backends' kernels they can run. A winner of any
other backend is reported to them as what it means for them: run cuBLAS. Release 0.1 of the client
sends no such header, and refuses a whole document for one word that it does not know: it gets the
operations and the backends of its time, and nothing of others. People, with curl or a browser, see
everything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any

from fastapi import Depends, Header, Request

from gemmsmith.answers.answer import Answer
from gemmsmith.core.config import Use
from gemmsmith.core.kernel import CUTLASS_KERNELS, AnyKernel, Backend
from gemmsmith.core.operation import DType
from gemmsmith.core.problem import Problem
from gemmsmith.http.requests import RUNS
from tuner.trial import Winner

RUNS_DESCRIPTION = (
    "Backends whose kernels the caller can run, separated by spaces; winners of others are "
    "reported as `use: cublas`. Without it, everything is reported."
)

_CLIENT = b"gemmsmith-client"
_RUNS = RUNS.lower().encode()


@dataclass(frozen=True, kw_only=True, slots=True)
class Abilities:
    """What one caller knows.

    Attributes:
        backends: whose kernels it can run; None: all of them.
        dtypes: the operations that it knows; None: it leaves out by itself what it does not know.
    """

    backends: frozenset[str] | None = None
    dtypes: frozenset[str] | None = None

    def knows(self, problem: Problem) -> bool:
        return self.dtypes is None or problem.dtype in self.dtypes

    def runs(self, backend: Backend | None) -> bool:
        """Whether it can run that backend's kernels; every caller can run cuBLAS (None)."""
        return backend is None or self.backends is None or backend in self.backends

    def reads(self, problem: Problem, kernel: AnyKernel) -> bool:
        if self.dtypes is None:  # rows of trials are taken as they come
            return True
        return self.knows(problem) and self.runs(kernel.backend)

    def report(self, winner: Winner) -> Winner:
        """The winner as the caller can use it."""
        candidate = winner.candidate
        if candidate is None or self.runs(candidate.kernel.backend):
            return winner
        return replace(without_candidate(winner), use=Use.CUBLAS)


EVERYTHING = Abilities()
_RELEASE_0_1 = Abilities(
    backends=frozenset(CUTLASS_KERNELS),
    dtypes=frozenset({DType.BF16, DType.FP16, DType.FP8_E4M3, DType.FP8_E5M2}),
)


def abilities_of(headers: Iterable[tuple[bytes, bytes]]) -> Abilities:
    """What the caller who sends these headers knows."""
    agent, runs = b"", None
    for name, value in headers:
        if name == _RUNS:
            runs = value
        elif name == b"user-agent":
            agent = value
    if runs is not None:
        return _listed(runs)
    return _RELEASE_0_1 if agent.startswith(_CLIENT) else EVERYTHING


@lru_cache(maxsize=256)
def _listed(runs: bytes) -> Abilities:
    words = runs.decode("latin-1").lower().split()
    backends = frozenset(backend for backend in Backend if backend in words)
    return EVERYTHING if backends == {*Backend} else Abilities(backends=backends)


UNMEASURED: dict[str, Any] = {
    "statistics": None, "speedup": None, "correctness": None, "ties": (), "power_penalty": None,
    "regimes": (),
}  # fmt: skip
"""What a winner and an answer say of a candidate, if they have none."""


def without_candidate(winner: Winner) -> Winner:
    """The winner without all that is about its candidate, which cannot be run there."""
    return replace(winner, candidate=None, pack=None, **UNMEASURED)


def without_config(answer: Answer) -> Answer:
    """The answer to a caller who cannot run its config: cuBLAS, and nothing of the config."""
    return replace(answer, use=Use.CUBLAS, config=None, predicted_us=None, **UNMEASURED)


async def _asking(
    request: Request,
    gemmsmith_runs: Annotated[
        str | None,
        Header(description=RUNS_DESCRIPTION),
    ] = None,
) -> Abilities:
    del gemmsmith_runs  # here to be described; lookups read the header without FastAPI
    return abilities_of(request.scope["headers"])


Asking = Annotated[Abilities, Depends(_asking)]
"""What the caller knows, as a parameter of a route."""
