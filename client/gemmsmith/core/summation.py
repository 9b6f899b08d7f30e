"""The orders in which kernels add up a product's terms along K: classes of equal bits.

Kernels of one order, and all their launches, give a row of D the same bits: at every M, wherever
the row is, at any tile, cluster and schedule, with swapped operands or not. All orders add in FP32
in the tensor core's accumulator, one instruction's K after the other. They differ in what becomes
of those sums:

- `sequential`: one accumulator along all of K, by warpgroup instructions (`wgmma`; on sm100,
  `tcgen05`). FP8 with fast accumulation, too: its sums stay in the tensor core.
- `promoted`: FP8 only. The sums of every 128 terms are added to FP32 registers.
- `mma`: one accumulator along all of K, by CUTLASS 2.x's `mma.sync`, whose K is shorter.
- `split_S`: K has S equal slices. The sums of each are sequential, and are added in their order.
- `promoted_split_S`: the same of promoted sums.

Of FP8 with factors of rows and columns, sums are multiplied by the row's factor, then by the
column's. Kernels that multiply the other way round have no order here.

A class holds on one architecture: an order says nothing about a GPU of another one.
"""

from __future__ import annotations

import re

from gemmsmith.core.choices import not_one_of
from gemmsmith.errors import InvalidProblem

INVARIANT = "invariant"
"""The value of `numerics` that demands one order of sums for all products of a program."""

SEQUENTIAL, PROMOTED, MMA = "sequential", "promoted", "mma"

MOST_SPLITS = 4096

EXAMPLES = (SEQUENTIAL, PROMOTED, MMA, "split_2", "split_4", "promoted_split_2")
"""Some orders, for messages."""

_SPLIT = re.compile(r"(?:promoted_)?split_([1-9][0-9]{0,3})", re.ASCII)


def checked(numerics: str | None, name: str = "numerics") -> bool:
    """Whether rows must have the same bits at every M. Raises ValueError for another word."""
    if numerics not in (None, INVARIANT):
        raise ValueError(f'{name} must be "{INVARIANT}" or not set, got {numerics!r}')
    return numerics is not None


def split(order: str, splits: int) -> str:
    """The order in which `splits` equal slices of K, each summed in `order`, are added."""
    return f"split_{splits}" if order == SEQUENTIAL else f"{order}_split_{splits}"


def splits_of(order: str) -> int | None:
    """The number of slices of K, 1 if it is not sliced. Returns None if there is no such order."""
    if order in (SEQUENTIAL, PROMOTED, MMA):
        return 1
    count = _SPLIT.fullmatch(order)
    splits = int(count[1]) if count else 0
    return splits if 2 <= splits <= MOST_SPLITS else None


def check(order: str, *, exists: bool, promotes: bool) -> None:
    """Raise InvalidProblem if an operation cannot demand the order.

    Args:
        order: the order.
        exists: whether the operation has orders. Sums of rows have none; grouped products and
            other types could have one, but nothing verifies it yet.
        promotes: whether there are kernels of the operation that promote sums.
    """
    if splits_of(order) is None:
        raise not_one_of("dtype", (f"sum_{name}" for name in EXAMPLES), f"sum_{order}")
    if not exists:
        raise InvalidProblem(
            "dtype",
            f"sum_{order} does not exist for this operation: products of bf16 and fp16, and of FP8 "
            "with factors of rows, have an order of sums, single or batched, without sums of rows",
        )
    if order.startswith(PROMOTED) and not promotes:
        raise InvalidProblem("dtype", f"sum_{order} does not exist for 16 bits: for FP8 it does")
