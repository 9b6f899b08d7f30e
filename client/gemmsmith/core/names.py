"""How operations are written: the parts of a `dtype`, its short forms, and the layout."""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache

from gemmsmith.core.choices import suggestion
from gemmsmith.core.elements import Element, Layout, TypeName, spelt
from gemmsmith.core.epilogue import Epilogue
from gemmsmith.core.operands import OPERANDS, DType, Grouping, Scaling
from gemmsmith.core.summation import EXAMPLES
from gemmsmith.errors import InvalidProblem

ACCUMULATE, SYMMETRIC = "accumulate", "symmetric"
_FLAGS = (ACCUMULATE, SYMMETRIC)
"""Parts without a value."""
SUM = "sum"
_PARTS: dict[str, type[StrEnum]] = {
    "out": Element,
    "scale": Scaling,
    "group": Grouping,
    "then": Epilogue,
}
"""The words that begin the parts of a `dtype`, and the values that may follow each word."""


@lru_cache(maxsize=4096)
def whole(dtype: TypeName) -> str:
    """The full `dtype` for a name or a short form: `bfloat16`, or `out_f32` for `bf16.out_f32`."""
    text = spelt(dtype, OPERANDS)
    words = (*_PARTS, SUM)
    begins_with_part = text.partition("_")[0] in words or text.partition(".")[0] in _FLAGS
    return f"{DType.BF16.value}.{text}" if begins_with_part else text


def named_layout(text: str) -> tuple[str, str | None]:
    """The `dtype` in a text, and the layout if the text has it: `bf16.out_f32.nt`, `bf16 nt`."""
    dtype, _, last = text.replace(" ", ".").rpartition(".")
    return (dtype, last.lower()) if dtype and last.lower() in list(Layout) else (text, None)


def part_of(part: str, dtype: str) -> tuple[str, str]:
    """The word and the value of a part of a `dtype`: `out` and `f32` for `out_f32`.

    Raises:
        InvalidProblem: there is no such part; the message suggests similar parts.
    """
    word, _, value = part.partition("_")
    if word not in (*_PARTS, SUM) and part not in _FLAGS:
        meant = suggestion(part, _parts()) or suggestion(f"then_{part}", _parts())
        raise InvalidProblem("dtype", f"dtype {dtype!r} has an unknown part {part!r}{meant}")
    return word, value


@lru_cache
def _parts() -> tuple[str, ...]:
    parts = [f"{word}_{value}" for word, values in _PARTS.items() for value in values]
    return (*parts, *_FLAGS, *(f"{SUM}_{order}" for order in EXAMPLES))
