"""A problem as it is asked for: straight from bytes to a `Problem`.

`service.http.requests` takes the same, a hundred times slower, and says what is wrong with what it
does not take. Nothing further in knows how a question was written.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from gemmsmith.core.operation import DType, Element, Epilogue, Grouping, Layout, Scaling
from gemmsmith.core.problem import MAX_EXTENT, Problem
from gemmsmith.http.requests import problem_of

_Extent = Annotated[int, msgspec.Meta(ge=1, le=MAX_EXTENT)]


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of a question, as `service.http.requests.ProblemBody` has them."""

    m: _Extent
    n: _Extent
    k: _Extent
    batch: _Extent = 1
    groups: _Extent | None = None
    dtype: str = DType.BF16
    layout: Layout = Layout.TN
    out: Element | None = None
    scaling: Scaling | None = None
    grouping: Grouping | None = None
    epilogue: Epilogue | None = None
    accumulate: bool | None = None

    def problem(self) -> Problem:
        """The problem meant.

        Raises:
            InvalidProblem: there is no such operation; names the field.
        """
        return problem_of(
            self.m,
            self.n,
            self.k,
            batch=self.batch,
            groups=self.groups,
            dtype=self.dtype,
            layout=self.layout,
            out=self.out,
            scaling=self.scaling,
            grouping=self.grouping,
            epilogue=self.epilogue,
            accumulate=self.accumulate,
        )
