"""The interface of a family of operations, and the few types that all families share.

A family draws operands, says how the C ABI gets them, what the exact product is and how far from
it an output may lie, and which calls a torch program has for it today. What it takes in memory is
in `footprint`; least bytes and operations are the problem's own (`operand_bytes`, `flops`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import Problem
from gemmsmith.runtime.abi import Arguments

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """How one launch's tokens are divided.

    Attributes:
        spread: the name of their distribution over the groups.
        ends: where each group's tokens end; the last end may leave some to no group.
        offsets: the same, int32 on the device.
    """

    spread: str
    ends: tuple[int, ...]
    offsets: torch.Tensor

    @property
    def runs(self) -> tuple[slice, ...]:
        """Each group's tokens."""
        return tuple(map(slice, (0, *self.ends), self.ends))


@dataclass(frozen=True, kw_only=True, slots=True)
class OperandSet:
    """One launch's operands, as [matrices, rows, columns] views in the problem's layout.

    There is one matrix per batch entry or group, and a single one of what groups share. Where what
    an activation is applied to is stored as well, it is the second matrix of D; of gated ones the
    second and the third, by rows of D's width, gate and up in turns.

    Attributes:
        scale_a, scale_b: FP32 factors: [1] of tensor scaling; [matrices, m, 1] and
            [matrices, 1, n] of row scaling; None without.
        groups: of a grouped operation.
        bias, residual: of an epilogue that has them: [1, 1, n] and [1, m, n].
        aux: what a backward epilogue reads: [1, m, n], or [1, m, 2n] of gate and up.
        scale_d: of an FP8 D: [1], FP32, by which it is multiplied before it is rounded.
        amax: likewise: [1], FP32, the largest absolute value before that, of all launches so far.
        row_scale: of an epilogue with a factor for each row: [1, m, 1], FP32.
        column_scale: of one with a factor for each column: [1, 1, n].
    """

    a: torch.Tensor
    b: torch.Tensor
    d: torch.Tensor
    scale_a: torch.Tensor | None = None
    scale_b: torch.Tensor | None = None
    groups: Groups | None = None
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    aux: torch.Tensor | None = None
    scale_d: torch.Tensor | None = None
    amax: torch.Tensor | None = None
    row_scale: torch.Tensor | None = None
    column_scale: torch.Tensor | None = None


def drawn_with(part: T | None) -> T:
    """That part of a set, of an operation that has it."""
    assert part is not None  # noqa: S101 - drawn with it
    return part


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One launch that is verified.

    Attributes:
        written: leading rows of D that it writes; those after them are to stay as they are.
        sigmas: expected standard deviation of an element of D; several: of each matrix of D, which
            is then judged by itself, because a mistake in a small one is lost beside a large one.
        name: what tells it from the others.
    """

    operands: OperandSet
    written: int
    sigmas: tuple[float, ...]
    name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """What a workload drew.

    Attributes:
        sets: what launches rotate over.
        check: one more output, for a second run of the same launch.
        start: what D holds before a launch that adds to it; None where D is only written.
        sigma: expected standard deviation of an element of D after one launch.
        cases: what is verified, where that is more than the first set.
    """

    sets: tuple[OperandSet, ...]
    check: torch.Tensor
    start: torch.Tensor | None = None
    sigma: float
    cases: tuple[Case, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomSource:
    """Where operands are drawn: the device, and its generator of random numbers."""

    place: torch.device
    generator: torch.Generator


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A part of the output: ranges of its matrices, their rows and columns."""

    batches: slice
    rows: slice
    columns: slice

    def of(self, output: torch.Tensor) -> torch.Tensor:
        """That part of a [matrices, m, n] tensor."""
        return output[self.batches, self.rows, self.columns]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """Bounds on the Frobenius error and on the largest error.

    Attributes:
        floor: the norm of the reference counts as at least this share of what the distribution of
            D predicts, where that is small by chance.
        amax: bound on the relative error of the largest absolute value, where that is an output.
    """

    error: float
    max_error: float
    floor: float = 0.5
    amax: float = 0.0


Launch = Callable[[], torch.Tensor]
"""Enqueue one launch on torch's current stream; gives D, or where the result lies instead: as
[m, n], or [batch, m, n]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way that a torch program has today of computing a problem.

    Attributes:
        name: the calls, as the record shows them.
        launches: of a problem, its operand sets, and bytes that copies of operands may take: a
            launch per set, or for as many sets as copies of them fit. Nothing is launched yet.
        takes: whether torch accepts the problem's extents.
        rival: an alternative that may well beat the default: the finals time it too.
        is_to_be_beaten: a rival that needs to know nothing more than the default does: no kernel is
            recommended that does not beat it as well.
    """

    name: str
    launches: Callable[[Problem, Sequence[OperandSet], int], list[Launch]]
    takes: Callable[[Problem], bool] = lambda _: True
    rival: bool = False
    is_to_be_beaten: bool = False


class Workload(Protocol):
    """A family of operations. Has no state: everything follows from the problem."""

    def covers(self, operation: Operation) -> bool:
        """Whether the operation is of this family."""

    def draw(self, problem: Problem, count: int, source: RandomSource) -> Drawn:
        """Sets of operands of realistic spread, in memory for `count`; the same for a seed."""

    def arguments(self, problem: Problem, operands: OperandSet, d: torch.Tensor) -> Arguments:
        """The C ABI's arguments of a set with output `d`; device and launch are left out."""

    def precision(self, problem: Problem) -> torch.dtype:
        """The type in which the reference is computed."""

    def product(self, problem: Problem, operands: OperandSet, block: Block) -> torch.Tensor:
        """That block of one launch's product, in `precision`, without what D held before."""

    def tolerance(self, problem: Problem, *, fast_accumulation: bool) -> Tolerance:
        """How far from the reference an output may lie."""

    def defaults(self, problem: Problem) -> Sequence[Way]:
        """What a program runs without us, best first; the first that torch takes is the default."""

    def alternatives(self, problem: Problem) -> Sequence[Way]:
        """The other ways a user has, whatever they compute less exactly or more slowly."""
