"""What requests may say: one struct for each query and body, which is the only schema of them.

Unknown fields are refused, so that a misspelt one is not silently the default. What a single value
accepts is in `service.http.parameters`. `service.http.questions` reads the structs, and
`service.http.openapi` describes them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from msgspec import Meta, Struct

from gemmsmith.core.config import Use
from gemmsmith.core.numerics import Numerics, with_numerics
from gemmsmith.core.operation import Element, Epilogue, Grouping, Operation, Scaling
from gemmsmith.core.problem import DType, Layout, Problem
from gemmsmith.core.tuning import Effort, JobState
from gemmsmith.http.requests import problem_of
from service.errors import invalid_field
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
    Sha256,
    Slug,
    Text,
    WinnerCursor,
)
from service.http.response_schemas import ref
from service.lookup.devices import Arch
from tuner.store.audit import Action
from tuner.store.keys import Scope
from tuner.trial import Phase

MAX_BATCH_PROBLEMS = 10_000

_Groups = Annotated[Extent | None, Meta(description="The batch of a grouped operation")]


class _OperationParts(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What of the operation is another than its `dtype` says."""

    out: Annotated[Element | None, Meta(description="Element type of D")] = None
    scaling: Scaling | None = None
    grouping: Grouping | None = None
    epilogue: Epilogue | None = None
    accumulate: Annotated[bool | None, Meta(description="Add to D")] = None

    @property
    def parts(self) -> dict[str, Any]:
        parts = {name: getattr(self, name) for name in _OperationParts.__struct_fields__}
        return {name: part for name, part in parts.items() if part is not None}


class ProblemBody(_OperationParts, kw_only=True, frozen=True):
    """A problem as JSON."""

    m: Extent
    n: Extent
    k: Extent
    batch: Extent = 1
    groups: _Groups = None
    dtype: DTypeName = DType.BF16.value
    layout: LayoutName = Layout.TN
    numerics: Annotated[
        Numerics | None, Meta(description="Demand the order of sums `sum_sequential`")
    ] = None

    def problem(self) -> Problem:
        """The problem that is meant.

        Raises:
            InvalidProblem: the operation does not exist; names the field.
        """
        fields = {name: getattr(self, name) for name in ProblemBody.__struct_fields__}
        numerics = fields.pop("numerics")
        return with_numerics(problem_of(**fields), numerics)


class BestQuery(ProblemBody, kw_only=True, frozen=True):
    """The query of `GET /best`."""

    arch: Arch | None = None
    device: Slug | None = None
    exact: bool = False


class BestBatchBody(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Many lookups in one call, checked one by one: an invalid problem fails alone."""

    problems: Annotated[
        list[Any],
        Meta(
            min_length=1,
            max_length=MAX_BATCH_PROBLEMS,
            extra_json_schema={"items": ref("ProblemBody")},
        ),
    ]
    arch: Arch | None = None
    device: Slug | None = None
    exact: bool = False


class SnapshotQuery(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The query of `GET /snapshot`."""

    arch: Arch | None = None
    device: Slug | None = None
    since: Annotated[
        Annotated[str, Meta(max_length=100)] | None,
        Meta(description="Ignored", extra_json_schema={"deprecated": True}),
    ] = None


class ExplainQuery(ProblemBody, kw_only=True, frozen=True):
    """The query of `GET /explain`."""

    arch: Arch | None = None
    device: Slug | None = None


class HistoryQuery(ProblemBody, kw_only=True, frozen=True):
    """The query of `GET /winners/history`. `after` is the last page's last revision."""

    arch: Arch | None = None
    device: Slug | None = None
    after: Number | None = None
    limit: PageLimit = 50


class TuneBody(ProblemBody, kw_only=True, frozen=True):
    """A tuning job to request. An empty `device` means any worker."""

    effort: Effort = Effort.DEFAULT
    priority: Annotated[Priority, Meta(description="Jobs with a higher priority run first")] = 0
    calls: Annotated[
        Calls,
        Meta(
            description="How often the caller runs this problem, in any span that is the same for "
            "all its problems (a training step, a day). At equal priority, the job that is "
            "expected to save most time in all its calls runs first. The calls of requests that "
            "join a job add up."
        ),
    ] = 0
    deadline_s: Annotated[
        DeadlineSeconds | None,
        Meta(
            description="Seconds from now after which a job without a winner fails. If requests "
            "join a job, the latest deadline applies, or none if one of them has none."
        ),
    ] = None
    device: Slug = ""


class WinnerBody(ProblemBody, kw_only=True, frozen=True):
    """A problem's winner on a device model."""

    arch: Arch | None = None
    device: Slug | None = None


class PinBody(WinnerBody, kw_only=True, frozen=True):
    """A revision of a problem's winner."""

    revision: Annotated[Extent, Meta(description="Its number, see /winners/history")]


class KeyBody(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """An API key to create."""

    name: KeyName
    scope: Annotated[Scope, Meta(description="Each scope includes the previous ones")] = Scope.READ
    expires_in_s: Annotated[KeyLife | None, Meta(description="Seconds; null: never")] = None
    job_limit: Annotated[
        JobLimit | None,
        Meta(description="Limit of waiting and running jobs; null: the service's default"),
    ] = None


class KeysQuery(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The query of `GET /keys`."""

    inactive: bool = False
    after: Cursor | None = None
    limit: PageLimit = 50


class AuditQuery(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The query of `GET /audit`."""

    action: Action | None = None
    actor: Text | None = None
    after: Cursor | None = None
    limit: PageLimit = 100


class JobsQuery(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The query of `GET /jobs`."""

    state: JobState | None = None
    after: Text | None = None
    limit: PageLimit = 50


class PacksQuery(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
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
    Meta(
        max_length=1000,
        description="Columns to give, separated by commas, in this order. JSON rows are then as "
        "flat as those of tables; without, JSON has whole documents, tables all columns.",
    ),
]
FormatName = Annotated[
    Format | None, Meta(description="Takes precedence over the Accept header; without both, JSON")
]


class WinnersQuery(_OperationParts, kw_only=True, frozen=True):
    """The query of `GET /winners`. Sizes that are not given may be any."""

    limit: PageLimit = 100
    format: FormatName = None
    fields: Fields | None = None
    device: Slug | None = None
    dtype: DTypeName | None = None
    layout: LayoutName | None = None
    use: Use | None = None
    m: Extent | None = None
    n: Extent | None = None
    k: Extent | None = None
    batch: Extent | None = None
    groups: _Groups = None
    min_speedup: Annotated[
        Annotated[float, Meta(ge=0)] | None, Meta(description="Least gain over cuBLAS, 1.05")
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


class ResultsQuery(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The query of `GET /results`. A problem is given whole, or not at all."""

    limit: PageLimit = 100
    format: FormatName = None
    fields: Fields | None = None
    m: Extent | None = None
    n: Extent | None = None
    k: Extent | None = None
    batch: Extent = 1
    dtype: DTypeName | None = None
    layout: LayoutName | None = None
    device: Slug | None = None
    phase: Phase | None = None
    job: Text | None = None
    after: Cursor | None = None

    def problem(self) -> Problem | None:
        """The problem asked about, if one was.

        Raises:
            InvalidProblem: the layout is not one that the element types support.
            ProblemError: 422, only some of the sizes are given.
        """
        if self.m is None or self.n is None or self.k is None:
            if (self.m, self.n, self.k) != (None, None, None):
                reason = "m, n and k belong together: give all three, or none"
                raise invalid_field("query", reason)
            return None
        return Problem(
            m=self.m,
            n=self.n,
            k=self.k,
            batch=self.batch,
            dtype=self.dtype or DType.BF16,
            layout=self.layout or Layout.TN,
        )


class EventsQuery(Struct, kw_only=True, frozen=True):
    """The query of `GET /jobs/{job_id}/events`, which ignores what it does not know."""

    after: Annotated[Number, Meta(description="Event to continue after")] = 0
