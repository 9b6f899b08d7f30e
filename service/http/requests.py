"""What requests may say: pydantic at the edge, and nothing of it further in.

Unknown fields are refused, so that a misspelt one is not silently the default. What a single value
accepts is in `service.http.parameters`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, StrictBool, model_validator

from gemmsmith.core.config import Use
from gemmsmith.core.operation import Element, Epilogue, Grouping, Operation, Scaling
from gemmsmith.core.problem import DType, Layout, Problem
from gemmsmith.core.tuning import Effort, JobState
from gemmsmith.http.requests import problem_of
from service.http.parameters import (
    Calls,
    Cursor,
    DeadlineSeconds,
    DTypeName,
    Extent,
    JobLimit,
    KeyLife,
    KeyName,
    LayoutName,
    Number,
    PageLimit,
    Priority,
    QueryExtent,
    Sha256,
    Slug,
    WinnerCursor,
)
from service.lookup.devices import Arch
from tuner.store.audit import Action
from tuner.store.keys import Scope
from tuner.trial import Phase

_GROUPS = Field(description="The batch of a grouped operation")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Operation(_Strict):
    """What of the operation is another than its `dtype` says."""

    out: Annotated[Element | None, Field(description="Element type of D")] = None
    scaling: Scaling | None = None
    grouping: Grouping | None = None
    epilogue: Epilogue | None = None
    accumulate: Annotated[bool | None, Field(description="Add to D")] = None

    @property
    def parts(self) -> dict[str, Any]:
        parts = {name: getattr(self, name) for name in _Operation.model_fields}
        return {name: part for name, part in parts.items() if part is not None}


class _Problem(_Operation):
    """A problem, however its sizes are written."""

    m: int
    n: int
    k: int
    batch: int = 1
    groups: int | None = None
    dtype: DTypeName = DType.BF16.value
    layout: LayoutName = Layout.TN

    def problem(self) -> Problem:
        """The problem asked about.

        Raises:
            InvalidProblem: there is no such operation.
        """
        return problem_of(**{name: getattr(self, name) for name in _Problem.model_fields})


class HistoryQuery(_Problem):
    """The query of `GET /winners/history`. `after` is the last page's last revision."""

    m: QueryExtent
    n: QueryExtent
    k: QueryExtent
    batch: QueryExtent = 1
    groups: Annotated[QueryExtent | None, _GROUPS] = None
    arch: Arch | None = None
    device: Slug | None = None
    after: Number | None = None
    limit: PageLimit = 50


class _ProblemBody(_Problem):
    """A problem as JSON."""

    m: Extent
    n: Extent
    k: Extent
    batch: Extent = 1
    groups: Annotated[Extent | None, _GROUPS] = None
    accumulate: Annotated[StrictBool | None, Field(description="Add to D")] = None


class TuneBody(_ProblemBody):
    """A tuning job to request. An empty `device` means any worker."""

    effort: Effort = Effort.DEFAULT
    priority: Annotated[Priority, Field(description="Jobs with a higher priority run first")] = 0
    calls: Annotated[
        Calls,
        Field(
            description="How often the caller runs this problem, in any span that is the same for "
            "all its problems (a training step, a day). At equal priority, the job that is "
            "expected to save most time in all its calls runs first. The calls of requests that "
            "join a job add up."
        ),
    ] = 0
    deadline_s: Annotated[
        DeadlineSeconds | None,
        Field(
            description="Seconds from now after which a job without a winner fails. If requests "
            "join a job, the latest deadline applies, or none if one of them has none."
        ),
    ] = None
    device: Slug = ""


class WinnerBody(_ProblemBody):
    """A problem's winner on a device model."""

    arch: Arch | None = None
    device: Slug | None = None


class PinBody(WinnerBody):
    """A revision of a problem's winner."""

    revision: Annotated[Extent, Field(description="Its number, see /winners/history")]


class KeyBody(_Strict):
    """An API key to create."""

    name: KeyName
    scope: Annotated[Scope, Field(description="Each scope includes the previous ones")] = Scope.READ
    expires_in_s: Annotated[KeyLife | None, Field(description="Seconds; null: never")] = None
    job_limit: Annotated[
        JobLimit | None,
        Field(description="Limit of waiting and running jobs; null: the service's default"),
    ] = None


class KeysQuery(_Strict):
    """The query of `GET /keys`."""

    inactive: bool = False
    after: Cursor | None = None
    limit: PageLimit = 50


class AuditQuery(_Strict):
    """The query of `GET /audit`."""

    action: Action | None = None
    actor: Annotated[str, Field(max_length=200)] | None = None
    after: Cursor | None = None
    limit: PageLimit = 100


class JobsQuery(_Strict):
    """The query of `GET /jobs`."""

    state: JobState | None = None
    after: Annotated[str, Field(max_length=200)] | None = None
    limit: PageLimit = 50


class PacksQuery(_Strict):
    """The query of `GET /packs`. `after` is a pack's hash, `toolchain` a toolchain's digest."""

    toolchain: Sha256 | None = None
    after: Sha256 | None = None
    limit: PageLimit = 50


class Format(StrEnum):
    """How a list is written. Tables have the link to the next page in a Link header."""

    JSON = "json"  # a page of documents with a link to the next
    CSV = "csv"  # the same page as a table
    PARQUET = "parquet"  # the same table with types; needs pyarrow where the service runs


Fields = Annotated[
    str,
    Field(
        max_length=1000,
        description="Columns to give, separated by commas, in this order. JSON rows are then as "
        "flat as those of tables; without, JSON has whole documents, tables all columns.",
    ),
]
FormatName = Annotated[
    Format | None, Field(description="Takes precedence over the Accept header; without both, JSON")
]


class ListQuery(_Strict):
    """How a list is cut into pages and written."""

    limit: PageLimit = 100
    format: FormatName = None
    fields: Fields | None = None


class WinnersQuery(ListQuery, _Operation):
    """The query of `GET /winners`. Sizes that are not given may be any."""

    device: Slug | None = None
    dtype: DTypeName | None = None
    layout: LayoutName | None = None
    use: Use | None = None
    m: QueryExtent | None = None
    n: QueryExtent | None = None
    k: QueryExtent | None = None
    batch: QueryExtent | None = None
    groups: Annotated[QueryExtent | None, _GROUPS] = None
    min_speedup: Annotated[
        float | None, Field(ge=0, allow_inf_nan=False, description="Least gain over cuBLAS, 1.05")
    ] = None
    after: WinnerCursor | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that are given, by name."""
        batch = self.batch if self.groups is None else self.groups
        sizes = {"m": self.m, "n": self.n, "k": self.k, "batch": batch}
        return {name: size for name, size in sizes.items() if size is not None}

    @property
    def whole_dtype(self) -> str | None:
        """The operation's `dtype` with what else is given of it; None where it may be any.

        Raises:
            InvalidProblem: there is no such operation.
        """
        if not self.parts:
            return self.dtype
        return Operation.of(self.dtype or DType.BF16, self.layout or Layout.TN, **self.parts).dtype


class ResultsQuery(ListQuery):
    """The query of `GET /results`. A problem is given whole, or not at all."""

    m: QueryExtent | None = None
    n: QueryExtent | None = None
    k: QueryExtent | None = None
    batch: QueryExtent = 1
    dtype: DTypeName | None = None
    layout: LayoutName | None = None
    device: Slug | None = None
    phase: Phase | None = None
    job: Annotated[str, Field(max_length=200)] | None = None
    after: Cursor | None = None

    @model_validator(mode="after")
    def _whole_problem(self) -> Self:
        sizes = [self.m, self.n, self.k]
        if any(size is None for size in sizes) and any(size is not None for size in sizes):
            raise ValueError("m, n and k belong together: give all three, or none")
        return self

    def problem(self) -> Problem | None:
        """The problem asked about, if one was.

        Raises:
            InvalidProblem: the layout is not one that the element types support.
        """
        if self.m is None or self.n is None or self.k is None:
            return None
        return Problem(
            m=self.m,
            n=self.n,
            k=self.k,
            batch=self.batch,
            dtype=self.dtype or DType.BF16,
            layout=self.layout or Layout.TN,
        )
