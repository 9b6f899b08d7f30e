"""The one interface a tuning run has to a device, whether it is real or recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.device import DeviceModel, Environment
from gemmsmith.core.launch import Algorithm
from gemmsmith.core.problem import Problem
from tuner.measure.policy import Policy
from tuner.trial import Finals, Trial


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """A candidate ready to run: with the pack file that holds its kernel, on a real device."""

    candidate: Candidate
    pack: Path | None = None


class Device(Protocol):
    """A GPU, real or recorded. Use as a context manager; it holds no GPU outside of one.

    Attributes:
        name: what the user typed: `cuda:0`, `replay:<file>`.
        model: the GPU model that its trials count for.
        replayed: trials come from a recording; they never override measured ones.
        needs_packs: contenders must carry a pack.
    """

    name: str
    model: DeviceModel
    replayed: bool
    needs_packs: bool

    @property
    def environment(self) -> Environment:
        """Software and GPU the trials are made with; for a recording, those it was made with."""
        ...

    def recorded(self, problem: Problem) -> Sequence[Candidate] | None:
        """Candidates a recording holds for the problem; None on a real device (anything goes).

        Raises:
            NotRecorded: the recording does not hold the problem; the message lists what it holds.
        """
        ...

    def baseline_kernels(self, problem: Problem) -> tuple[str, ...]:
        """Names of the kernels and memsets of one launch of cuBLAS, in order.

        A hint: empty where it cannot be known, never an error, whatever goes wrong.
        """
        ...

    def proposals(
        self, problem: Problem, library: Contender, *, start: Algorithm | None, most: int
    ) -> list[Candidate]:
        """At most `most` algorithms that a library has for the problem, as candidates.

        `library` is its kernel with the pack; with `start`, what lies near that algorithm. Empty
        where there is no library, never an error, whatever goes wrong; a recording has none.
        """
        ...

    def screen(
        self, problem: Problem, contenders: Sequence[Contender], policy: Policy
    ) -> Iterator[Trial]:
        """Verify and time each contender briefly, yielding each trial as soon as it exists.

        Every contender gives exactly one trial, failed ones included; a hang or a crash costs
        that contender only.
        """
        ...

    def finals(self, problem: Problem, contenders: Sequence[Contender], policy: Policy) -> Finals:
        """Time the contenders and cuBLAS against each other, round by round.

        A GPU does so at its power limit and rested; a recording holds the former alone.

        Contenders that fail here are in `Finals.failures`, not in `Finals.candidates`.
        """
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
