"""Parses the search text of the problems' page: a problem as it is printed, or parts of it.

`8×512×512×512 bf16.group_rows tn` is a problem as every page and command prints it. Its parts:
`4096x6144` is M and N, `4096x6144x1024` also K, and with a fourth size the first is the batch; `*`
is any size; `n=4096` is an N, and a bare `4096` is M, N or K. `bf16` is an element type,
`bf16.group_rows` an operation, `group_rows` the suffix of an operation, and `tn` a layout. `llama`
is every layer of the models of the suites whose name contains it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from gemmsmith.core.choices import suggestion
from gemmsmith.core.names import named_layout
from gemmsmith.core.operation import DType, Layout, Operation, of_dtype
from gemmsmith.core.problem import MAX_EXTENT
from gemmsmith.errors import InvalidProblem
from service.pages import operations
from service.pages.addresses import PLAIN
from tuner.models import by_model
from tuner.store.listing import Search

ACCEPTED = (
    "problems such as 8x512x512x512 bf16.group_rows tn, sizes such as 4096x6144, *x6144 or n=4096, "
    f"element types ({', '.join(DType)}), operations such as group_rows, layouts "
    f"({', '.join(Layout)}), and models of the suites such as llama-3-8b"
)

_SIZES = re.compile(r"(?:[0-9]{1,10}|\*)(?:x(?:[0-9]{1,10}|\*)){1,3}", re.ASCII)
_NAMED = re.compile(r"(m|n|k|batch)=([0-9]{1,10})", re.ASCII)


class SearchError(ValueError):
    """A word of the search text cannot be read; the message names it."""


def parse(text: str, known: Sequence[Operation] = ()) -> Search:
    """Parse a search text. If words contradict each other, the last one counts.

    A suffix such as `group_rows` without an element type means those of the `known` operations that
    have it.

    Raises:
        SearchError: a word cannot be read.
    """
    fields: dict[str, Any] = {"extents": ()}
    suffix = None
    for word in text.lower().replace("×", "x").replace(",", " ").split():
        dtype, layout = named_layout(word)
        if dtype.partition(".")[0] in list(DType):
            fields["dtype"] = _dtype(dtype)
            fields |= {"layout": Layout(layout)} if layout else {}
        elif word in list(Layout):
            fields["layout"] = Layout(word)
        elif _is_suffix(word):
            suffix = word
        elif named := _NAMED.fullmatch(word):
            fields[named[1]] = _extent(named[2], word)
        elif _SIZES.fullmatch(word):
            sizes = word.split("x")
            pairs = zip(("batch", "m", "n", "k")[len(sizes) < 4 :], sizes, strict=False)
            fields |= {name: _extent(size, word) for name, size in pairs if size != "*"}
        elif word.isascii() and word.isdigit():
            fields["extents"] += (_extent(word, word),)
        elif layers := _layers(word):
            fields["layers"] = layers
        else:
            words = [*DType, *Layout, PLAIN, *map(operations.suffix, known), *by_model()]
            raise SearchError(f"cannot be read: {word!r:.80}{suggestion(word, words)}")
    if suffix == PLAIN or (suffix and "dtype" not in fields):
        types = fields.pop("dtype", None)
        fields["operations"] = tuple(
            operation.key
            for operation in known
            if operations.suffix(operation) == suffix and types in (None, operation.types)
        )
    elif suffix:
        fields["dtype"] = _dtype(f"{fields['dtype'].partition('.')[0]}.{suffix}")
    return Search(**fields)


def _layers(word: str) -> tuple[tuple[int, int], ...]:
    """Out and in features of all layers of the models whose name contains the word."""
    models = [layers for name, layers in by_model().items() if word in name and len(word) > 2]
    return tuple({(layer.out, layer.inner): None for layers in models for layer in layers})


def _is_suffix(word: str) -> bool:
    """Whether a word is the suffix of some operation's `dtype`."""
    if word == PLAIN:
        return True
    for types in DType:
        with suppress(InvalidProblem):
            return of_dtype(f"{types}.{word}").dtype != types
    return False


def _dtype(word: str) -> str:
    try:
        return of_dtype(word).dtype
    except InvalidProblem as error:
        raise SearchError(str(error)) from None


def _extent(digits: str, word: str) -> int:
    if len(digits) > 10 or not 1 <= int(digits) <= MAX_EXTENT:
        raise SearchError(f"{word!r:.80}: sizes are integers in 1 … {MAX_EXTENT}")
    return int(digits)
