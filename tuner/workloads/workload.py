"""The interface of a family of operations, and the types that all families share.

A family draws operands, passes them to the C ABI, computes the reference and its tolerance, and
lists the calls that a torch program has for the operation. Its memory is in `footprint`; least
bytes and operations are the problem's own (`operand_bytes`, `flops`).
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
    """How one launch's tokens are divided into groups.

    Attributes:
        spread: the name of their distribution over the groups.
        ends: the offsets at which the groups' tokens end; tokens may be left over after the last.
        offsets: the same, int32 on the device.
    """

    spread: str
    ends: tuple[int, ...]
    offsets: torch.Tensor

    @property
    def runs(self) -> tuple[slice, ...]:
        return tuple(map(slice, (0, *self.ends), self.ends))


@dataclass(frozen=True, kw_only=True, slots=True)
class OperandSet:
    """One launch's operands, as [matrices, rows, columns] views in the problem's layout.

    There is one matrix per batch entry or group, or a single matrix if groups share it. An
    activation's argument that is stored as well is the second matrix of D; gate and up are the
    second and the third, in rows of D's width that alternate between the two.

    Attributes that the operation does not need are None.

    Attributes:
        scale_a, scale_b: FP32 factors: [1] for tensor scaling, [matrices, m, 1] and
            [matrices, 1, n] for row scaling.
        groups: how tokens are divided, of a grouped operation.
        bias, residual: [1, 1, n] and [1, m, n].
        aux: the argument that a backward epilogue reads: [1, m, n], or [1, m, 2n] of gate and up.
        scale_d: factor on an FP8 D before it is rounded: [1], FP32.
        amax: the largest absolute value of D before `scale_d`, over all launches: [1], FP32.
        row_scale: factors of an epilogue for each row: [1, m, 1], FP32.
        column_scale: factors of an epilogue for each column: [1, 1, n].
        row_gradient: an output, sums that add up to the gradients of row_scale: [m, slabs], FP32.
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
    row_gradient: torch.Tensor | None = None


def drawn_with(part: T | None) -> T:
    """An optional part of a set, of an operation that needs it."""
    assert part is not None  # noqa: S101 - drawn with it
    return part


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One launch that is verified.

    Attributes:
        written: number of leading rows of D that it writes; the other rows must not change.
        sigmas: expected standard deviation of an element of D. If there are several, they are those
            of D's matrices, each of which is judged by itself: a mistake in a small matrix does not
            show beside a large one.
        name: distinguishes the case from others in messages.
        beside: examines what the launch wrote beside D, by a bound on the relative error. Returns
            what is wrong, or None.
    """

    operands: OperandSet
    written: int
    sigmas: tuple[float, ...]
    name: str = ""
    beside: Callable[[float], str | None] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """Operands that a workload has drawn.

    Attributes:
        sets: the sets that launches rotate over.
        check: one more output, for a second run of the same launch.
        start: initial values of a D that is accumulated into; None if D is only written.
        sigma: expected standard deviation of an element of D after one launch.
        cases: the launches that are verified; empty if that is the first set.
    """

    sets: tuple[OperandSet, ...]
    check: torch.Tensor
    start: torch.Tensor | None = None
    sigma: float
    cases: tuple[Case, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomSource:
    """The device on which operands are drawn, and its generator of random numbers."""

    place: torch.device
    generator: torch.Generator


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A part of the output: ranges of its matrices, rows and columns."""

    batches: slice
    rows: slice
    columns: slice

    def of(self, output: torch.Tensor) -> torch.Tensor:
        return output[self.batches, self.rows, self.columns]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """Bounds on the Frobenius error and on the largest error.

    Attributes:
        floor: the reference's norm counts as at least this share of the norm that the distribution
            of D predicts, in case it is small by chance.
        amax: bound on the relative error of the largest absolute value, if that is an output.
    """

    error: float
    max_error: float
    floor: float = 0.5
    amax: float = 0.0


Launch = Callable[[], torch.Tensor]
"""Enqueues one launch on torch's current stream. Returns D, or another tensor with the result, as
[m, n] or [batch, m, n]."""

Launches = Callable[[Problem, Sequence[OperandSet], int], list[Launch]]
"""Takes a problem, its operand sets, and the bytes that copies of operands may take. Returns one
launch per set, or per set of which a copy fits. Launches nothing itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """A sequence of calls with which a torch program computes a problem.

    Attributes:
        name: the calls, as recorded results name them.
        launches: prepares the calls for operand sets.
        takes: whether torch accepts the problem's extents.
        rival: whether it may be faster than the default, so that the finals time it too.
        is_to_be_beaten: whether a kernel must beat it to be recommended. True of rivals that use no
            more knowledge than the default does.
    """

    name: str
    launches: Launches
    takes: Callable[[Problem], bool] = lambda _: True
    rival: bool = False
    is_to_be_beaten: bool = False

    @classmethod
    def to_beat(cls, name: str, launches: Launches) -> Way:
        return cls(name=name, launches=launches, rival=True, is_to_be_beaten=True)


class Workload(Protocol):
    """A family of operations. It has no state: everything follows from the problem."""

    def covers(self, operation: Operation) -> bool:
        """Whether the operation is of this family."""

    def draw(self, problem: Problem, count: int, source: RandomSource) -> Drawn:
        """Operands of realistic spread, in the memory of `count` sets; determined by the seed."""

    def arguments(self, problem: Problem, operands: OperandSet, d: torch.Tensor) -> Arguments:
        """The C ABI's arguments of a set with output `d`, without device and launch."""

    def precision(self, problem: Problem) -> torch.dtype:
        """The type in which the reference is computed."""

    def product(self, problem: Problem, operands: OperandSet, block: Block) -> torch.Tensor:
        """A block of one launch's result, in `precision`, without D's initial values."""

    def tolerance(self, problem: Problem, *, fast_accumulation: bool) -> Tolerance:
        """Bounds on the difference between an output and the reference."""

    def defaults(self, problem: Problem) -> Sequence[Way]:
        """The calls of a torch program, best first. The first that torch takes is the default."""

    def alternatives(self, problem: Problem) -> Sequence[Way]:
        """Other sequences that a user could run, perhaps less exact or slower."""
