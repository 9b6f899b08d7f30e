"""The search text of the problems' page: sizes, element types and layouts, separated by spaces.

`4096x6144` is M and N, `4096x6144x1024` K too, `*` any size; `n=4096` names one, a bare `4096` is
M, N or K. `bf16` and `tn` mean what they say.
"""

from __future__ import annotations

import re
from typing import Any

from gemmsmith.errors import InvalidProblem
from gemmsmith.operation import DType, Layout, of_dtype
from gemmsmith.problem import MAX_EXTENT
from tuner.store.listing import Search

ACCEPTED = (
    "sizes such as 4096x6144, 4096x6144x4096, *x6144 or n=4096, element types "
    f"({', '.join(DType)}) and layouts ({', '.join(Layout)})"
)

_SIZES = re.compile(r"([0-9]{1,10}|\*)(?:x([0-9]{1,10}|\*))(?:x([0-9]{1,10}|\*))?", re.ASCII)
_NAMED = re.compile(r"(m|n|k|batch)=([0-9]{1,10})", re.ASCII)


class SearchError(ValueError):
    """A word that is none of those a search takes."""


def parse(text: str) -> Search:
    """The search that a text means; of words that contradict each other, the last one counts.

    Raises:
        SearchError: a word of it cannot be read; the message names it.
    """
    met: dict[str, Any] = {"extents": ()}
    for word in text.lower().replace("×", "x").replace(",", " ").split():
        if word.partition(".")[0] in list(DType):
            met["dtype"] = _dtype(word)
        elif word in list(Layout):
            met["layout"] = Layout(word)
        elif named := _NAMED.fullmatch(word):
            met[named[1]] = _extent(named[2], word)
        elif sizes := _SIZES.fullmatch(word):
            given = zip("mnk", sizes.groups(), strict=True)
            met |= {name: _extent(size, word) for name, size in given if size and size != "*"}
        elif word.isascii() and word.isdigit():
            met["extents"] += (_extent(word, word),)
        else:
            raise SearchError(f"cannot be read: {word!r:.80}")
    return Search(**met)


def _dtype(word: str) -> str:
    try:
        return of_dtype(word).dtype
    except InvalidProblem as error:
        raise SearchError(str(error)) from None


def _extent(digits: str, word: str) -> int:
    if len(digits) > 10 or not 1 <= int(digits) <= MAX_EXTENT:
        raise SearchError(f"{word!r:.80}: sizes are integers in 1 … {MAX_EXTENT}")
    return int(digits)
