"""Problems that are padded: larger ones that contain a problem, with rows that TMA can load.

Rows of A, B and D that are not multiples of 16 bytes cannot be loaded or stored by TMA. A weight or
a vocabulary that is padded with zeros to a larger extent gives the same product, and some columns
or rows more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gemmsmith.core.problem import Problem

ROW_BYTES = 16
"""TMA reads and writes rows that begin at multiples of this."""
MULTIPLES = (16, 32, 64, 128)
"""Elements. Tiles are multiples of the first ones; 64 of 16 bits are a line of shared memory."""
MOST = 1.1
"""The largest padded extent, relative to the own one. Of smaller extents, the next multiple."""


def unaligned(problem: Problem) -> dict[str, str]:
    """The operands whose rows (or columns) TMA cannot load, with the extent along these."""
    operation = problem.operation
    along = {
        "A": ("k" if problem.layout.a_row_major else "m", operation.a.bytes),
        "B": ("n" if problem.layout.b_row_major else "k", operation.b.bytes),
        "D": ("n", operation.d.bytes),
    }
    return {
        operand: extent
        for operand, (extent, width) in along.items()
        if getattr(problem, extent) * width % ROW_BYTES
    }


def contains(larger: Problem, problem: Problem) -> bool:
    """Whether the problem is a part of a slightly larger one of the same operation.

    Of a problem that is not aligned, the larger one is: others say nothing of padding.
    """
    if larger.kind != problem.kind or larger == problem:
        return False
    if unaligned(larger) and unaligned(problem):
        return False
    pairs = [(getattr(problem, name), getattr(larger, name)) for name in ("m", "n", "k")]
    return all(own <= other <= max(MOST * own, own + MULTIPLES[0]) for own, other in pairs)


def paddings(problem: Problem) -> Iterator[Problem]:
    """Problems with all unaligned extents padded to a multiple."""
    extents = set(unaligned(problem).values())
    if problem.operation.symmetric and "n" in extents:
        extents.add("m")
    fixed = problem.operation.fixed_extents
    if fixed and not extents <= {*fixed}:
        return
    seen = {problem}
    for multiple in MULTIPLES:
        sizes = {name: -(-getattr(problem, name) // multiple) * multiple for name in extents}
        if any(
            size > max(MOST * getattr(problem, name), MULTIPLES[0]) for name, size in sizes.items()
        ):
            break
        padded = replace(problem, **sizes)
        if padded not in seen:
            seen.add(padded)
            yield padded
