"""The search text of the problems' page: problems as they are printed, or parts of them.

`8×512×512×512 bf16.group_rows tn` is a problem as every page and command prints it. Of its parts,
`4096x6144` is M and N, `4096x6144x1024` K too, a fourth before them the batch, and `*` any size;
`n=4096` names one, and a bare `4096` is M, N or K. `bf16` is an element type, `bf16.group_rows` an
operation, `group_rows` what follows an operation's element type, and `tn` a layout.
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
from tuner.store.listing import Search

ACCEPTED = (
    "problems such as 8x512x512x512 bf16.group_rows tn, sizes such as 4096x6144, *x6144 or n=4096, "
    f"element types ({', '.join(DType)}), operations such as group_rows, and layouts "
    f"({', '.join(Layout)})"
)

_SIZES = re.compile(r"(?:[0-9]{1,10}|\*)(?:x(?:[0-9]{1,10}|\*)){1,3}", re.ASCII)
_NAMED = re.compile(r"(m|n|k|batch)=([0-9]{1,10})", re.ASCII)


class SearchError(ValueError):
    """A word that is none of those a search takes."""


def parse(text: str, known: Sequence[Operation] = ()) -> Search:
    """The search that a text means; of words that contradict each other, the last one counts.

    `known` lists the operations among which `group_rows` and the like choose.

    Raises:
        SearchError: a word of it cannot be read; the message names it.
    """
    met: dict[str, Any] = {"extents": ()}
    further = None
    for word in text.lower().replace("×", "x").replace(",", " ").split():
        dtype, layout = named_layout(word)
        if dtype.partition(".")[0] in list(DType):
            met["dtype"] = _dtype(dtype)
            met |= {"layout": Layout(layout)} if layout else {}
        elif word in list(Layout):
            met["layout"] = Layout(word)
        elif _follows_types(word):
            further = word
        elif named := _NAMED.fullmatch(word):
            met[named[1]] = _extent(named[2], word)
        elif _SIZES.fullmatch(word):
            sizes = word.split("x")
            pairs = zip(("batch", "m", "n", "k")[len(sizes) < 4 :], sizes, strict=False)
            met |= {name: _extent(size, word) for name, size in pairs if size != "*"}
        elif word.isascii() and word.isdigit():
            met["extents"] += (_extent(word, word),)
        else:
            words = [*DType, *Layout, PLAIN, *map(operations.further, known)]
            raise SearchError(f"cannot be read: {word!r:.80}{suggestion(word, words)}")
    if further == PLAIN or (further and "dtype" not in met):
        types = met.pop("dtype", None)
        met["operations"] = tuple(
            each.key
            for each in known
            if operations.further(each) == further and types in (None, each.types)
        )
    elif further:
        met["dtype"] = _dtype(f"{met['dtype'].partition('.')[0]}.{further}")
    return Search(**met)


def _follows_types(word: str) -> bool:
    """Whether a word is what some operation's `dtype` says behind its element type."""
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
