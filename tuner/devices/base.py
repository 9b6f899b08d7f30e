"""The interface between a tuning run and a device, real or recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.device import DeviceModel, Environment
from gemmsmith.core.launch import Algorithm
from gemmsmith.core.problem import Problem
from tuner.measure.policy import Policy
from tuner.trial import Finals, Trial


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """A candidate and, on a real device, the pack file that holds its kernel."""

    candidate: Candidate
    pack: Path | None = None


class Device(Protocol):
    """A GPU, real or recorded. A context manager, which holds a GPU only while it is entered.

    Attributes:
        name: as the user typed it: `cuda:0`, `replay:<file>`.
        model: the GPU model that its trials count for.
        replayed: whether trials come from a recording; these never override measured ones.
        needs_packs: whether contenders must have a pack.
    """

    name: str
    model: DeviceModel
    replayed: bool
    needs_packs: bool

    @property
    def environment(self) -> Environment:
        """Software and GPU that the trials are, or were, measured with."""

    def recorded(self, problem: Problem) -> Sequence[Candidate] | None:
        """Candidates that a recording holds for the problem.

        Returns None on a real device, which can measure any candidate.

        Raises:
            NotRecorded: the recording does not hold the problem; the message names some it holds.
        """

    def baseline_kernels(self, problem: Problem) -> tuple[str, ...]:
        """Names of the kernels and memsets of one launch of cuBLAS, in order.

        Information only: returns an empty tuple if the names are not known, whatever the reason.
        """

    def proposals(
        self, problem: Problem, library: Contender, *, start: Algorithm | None, most: int
    ) -> list[Candidate]:
        """Return at most `most` algorithms of a library for the problem, as candidates.

        `library` is the library's kernel and its pack. With `start`, the algorithms are neighbours
        of that algorithm; if it is of another version of the library, only the algorithm with the
        same settings in the device's version. Returns an empty list on any error, and always for a
        recording.
        """

    def screen(
        self, problem: Problem, contenders: Sequence[Contender], policy: Policy
    ) -> Iterator[Trial]:
        """Verify and briefly time the contenders, and yield each trial as soon as it exists.

        Every contender gives exactly one trial, possibly a failed one. A hang or a crash fails the
        contender that was running, and no other.
        """

    def finals(self, problem: Problem, contenders: Sequence[Contender], policy: Policy) -> Finals:
        """Time the contenders and cuBLAS against each other, round by round.

        A GPU does so in every regime; a recording holds the sustained regime only. Contenders that
        fail here are in `Finals.failures`, not in `Finals.candidates`.
        """

    def warm(self) -> None:
        """Begin what takes seconds before the device can measure, without using the GPU yet.

        Entering the device goes on with it, and `close` ends it.
        """

    def close(self) -> None:
        """End what `warm` or entering has begun. The device can be used again afterwards."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...
