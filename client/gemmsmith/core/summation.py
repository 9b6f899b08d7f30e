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
column's. Kernels that multiply the other way round have no order here. All grouped kernels multiply
the two factors first, so their rows may differ from a single product's in the last bit.

Grouped products are `sequential`. By rows, a token's row is added as that of a single product,
whatever group its tile is in and whatever is in the tile's other rows; 16-bit rows have the bits of
the single product with the group's matrix. By depth, a group's tokens are the terms: they are added
in their order from the group's first, so the bits depend on them and on no other group's.

A class holds on one architecture: an order says nothing about a GPU of another one.
"""

from __future__ import annotations

import re

from gemmsmith.core.choices import not_one_of
from gemmsmith.errors import InvalidProblem

SEQUENTIAL, PROMOTED, MMA = "sequential", "promoted", "mma"

MOST_SPLITS = 4096

EXAMPLES = (SEQUENTIAL, PROMOTED, MMA, "split_2", "split_4", "promoted_split_2")
"""Some orders, for messages."""

_SPLIT = re.compile(r"(?:promoted_)?split_([1-9][0-9]{0,3})", re.ASCII)


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


def check(order: str, *, exists: bool, promotes: bool, is_grouped: bool) -> None:
    """Raise InvalidProblem if an operation cannot demand the order.

    Args:
        order: the order.
        exists: whether the operation has orders. Sums of rows have none; other types could have
            one, but nothing verifies it yet.
        promotes: whether there are kernels of such operands that promote sums.
        is_grouped: whether the product is grouped: its kernels neither split K nor promote sums.
    """
    if splits_of(order) is None:
        raise not_one_of("dtype", (f"sum_{name}" for name in EXAMPLES), f"sum_{order}")
    if not exists:
        raise InvalidProblem(
            "dtype",
            f"sum_{order} does not exist for this operation: products of bf16 and fp16, and of FP8 "
            "with factors of rows, have an order of sums, without sums of rows",
        )
    if is_grouped and order != SEQUENTIAL:
        raise InvalidProblem(
            "dtype", f"sum_{order} does not exist for grouped products: sum_{SEQUENTIAL} does"
        )
    if order.startswith(PROMOTED) and not promotes:
        raise InvalidProblem("dtype", f"sum_{order} does not exist for 16 bits: for FP8 it does")
