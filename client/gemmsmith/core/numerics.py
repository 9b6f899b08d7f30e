"""`numerics=invariant`: another spelling of an operation with an order of sums.

A row of such an operation has the same bits at every M. The word always means the order
`sequential`, whatever the sizes are, so that training, serving and all ranks agree without
exchanging a choice. Who wants another order names it: `bf16.sum_split_4` is faster if N is small
and K is long.

FP8 without fast accumulation, which a question cannot name, has the order `promoted`.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

from gemmsmith.core.choices import member
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import Problem
from gemmsmith.core.summation import PROMOTED, SEQUENTIAL
from gemmsmith.errors import InvalidProblem


class Numerics(StrEnum):
    """What a question demands of a result's bits."""

    INVARIANT = "invariant"  # a row has the same bits at every M


def demands_order(numerics: str | None, name: str = "numerics") -> bool:
    """Whether a program's rows must have the same bits at every M. None demands nothing.

    Raises:
        InvalidProblem: there is no such word; the message calls it `name`.
    """
    return numerics is not None and member(name, Numerics, numerics) is Numerics.INVARIANT


def invariant(operation: Operation, *, precise: bool = False) -> Operation:
    """The operation with the order of sums that invariant numerics means.

    `precise` is FP8 without fast accumulation.

    Raises:
        InvalidProblem: it names an order already, or has none. The sums of integers are the same
            in every order.
    """
    reason = ""
    if operation.summation is not None:
        reason = "names its order of sums already"
    elif operation.a.is_integer:
        reason = "adds up integers, whose sum is the same in every order"
    if reason:
        raise InvalidProblem("numerics", f"{operation.dtype} {reason}: leave out numerics")
    try:
        return replace(operation, summation=PROMOTED if precise else SEQUENTIAL)
    except InvalidProblem as error:
        raise InvalidProblem("numerics", str(error)) from None


def is_invariant(operation: Operation) -> bool:
    """Whether the operation is the result of `invariant`."""
    return operation.summation in (SEQUENTIAL, PROMOTED)


def with_numerics(problem: Problem, numerics: str | None) -> Problem:
    """The problem with what `numerics` demands; None demands nothing.

    Raises:
        InvalidProblem: there is no such word, or as `invariant`.
    """
    if not demands_order(numerics):
        return problem
    return replace(problem, dtype=invariant(problem.operation).dtype)
