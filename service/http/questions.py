"""What lookups may ask: one struct for each query and body, which is the only schema of them.

A question that does not fit its struct is taken apart: each field is converted by itself, so that
the refusal names every field that is wrong. The OpenAPI description of these calls comes from the
same structs (`service.http.openapi`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Generic, TypeVar, cast
from urllib.parse import parse_qsl

import msgspec
from msgspec import Meta, Struct, inspect

from gemmsmith.core.operation import DType, Element, Epilogue, Grouping, Layout, Scaling
from gemmsmith.core.problem import MAX_EXTENT, Problem
from gemmsmith.http.requests import problem_of
from service.errors import NO_OBJECT, UNKNOWN_FIELD, FieldError, Reason, invalid, not_a_choice
from service.http.parameters import canonical_dtype, dtype_reason, integer_in, integer_reason
from service.http.response_schemas import ref
from service.lookup.devices import Arch

MAX_BATCH_PROBLEMS = 10_000

_BOOLEANS = dict.fromkeys(("true", "1", "t", "yes", "y", "on"), True) | dict.fromkeys(
    ("false", "0", "f", "no", "n", "off"), False
)
"""How a query may write a boolean, in letters of any case."""


class DTypeName(str):
    """The canonical `dtype` of an operation; it may be written under any of its names."""

    __slots__ = ()

    plain = frozenset(DType.__members__.values())
    read = staticmethod(canonical_dtype)
    reason = staticmethod(dtype_reason)


class LayoutName(str):
    """A layout; it may be written in letters of any case."""

    __slots__ = ()

    plain = frozenset(Layout.__members__.values())

    @staticmethod
    def read(value: Any) -> str:
        return Layout(value.lower() if isinstance(value, str) else value)

    @staticmethod
    def reason(value: Any) -> Reason:
        return not_a_choice(value.lower() if isinstance(value, str) else value, Layout)


Extent = Annotated[int, Meta(ge=1, le=MAX_EXTENT)]
Slug = Annotated[str, Meta(max_length=200, description="A device model's slug, see /devices")]


class ProblemBody(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A problem as JSON."""

    out: Annotated[Element | None, Meta(description="Element type of D")] = None
    scaling: Scaling | None = None
    grouping: Grouping | None = None
    epilogue: Epilogue | None = None
    accumulate: Annotated[bool | None, Meta(description="Add to D")] = None
    m: Extent
    n: Extent
    k: Extent
    batch: Extent = 1
    groups: Annotated[Extent | None, Meta(description="The batch of a grouped operation")] = None
    # Plain strings, because msgspec writes the defaults into the schema.
    dtype: DTypeName = cast(DTypeName, DType.BF16.value)
    layout: LayoutName = cast(LayoutName, Layout.TN.value)

    def problem(self) -> Problem:
        """The problem that is meant.

        Raises:
            InvalidProblem: the operation does not exist; names the field.
        """
        return problem_of(**{name: getattr(self, name) for name in ProblemBody.__struct_fields__})


class BestQuery(ProblemBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
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


S = TypeVar("S", bound=Struct)


class QuestionReader(Generic[S]):
    """Reads values into a struct, or names every field that is wrong."""

    def __init__(self, kind: type[S]) -> None:
        self._kind = kind
        self._fields = msgspec.structs.fields(kind)
        info = cast(inspect.StructType, inspect.type_info(kind))
        self._types = {field.name: _bare(field.type) for field in info.fields}
        readers: dict[type[inspect.Type], Callable[[str], Any]] = {
            inspect.IntType: integer_in,
            inspect.BoolType: lambda text: _BOOLEANS.get(text.lower(), text),
        }
        self._from_text = {
            name: readers[type(field_type)]
            for name, field_type in self._types.items()
            if type(field_type) in readers
        }

    def query(self, query: bytes) -> S:
        """The struct of a query string.

        Raises:
            ProblemError: 422, names every field that is wrong.
        """
        values: dict[str, Any] = dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True))
        for name in self._from_text.keys() & values.keys():
            values[name] = self._from_text[name](values[name])
        return self.document(values, text=True)

    def document(self, values: Any, *, text: bool = False) -> S:
        """The struct of a JSON document or, with `text`, of the values of a query.

        Raises:
            ProblemError: 422, names every field that is wrong.
        """
        try:
            return msgspec.convert(values, self._kind, dec_hook=_read_name)
        except msgspec.ValidationError:
            raise invalid([*self._errors(values, text)]) from None

    def _errors(self, values: Any, text: bool) -> Iterator[FieldError]:
        if not isinstance(values, dict):
            yield FieldError(field="body", message=NO_OBJECT)
            return
        for field in self._fields:
            if field.name not in values:
                if field.required:
                    yield FieldError(field=field.name, message="is required")
                continue
            value = values[field.name]
            try:
                msgspec.convert(value, field.type, dec_hook=_read_name)
            except msgspec.ValidationError:
                message, accepted = _reason(self._types[field.name], value, text)
                yield FieldError(field=field.name, message=message, accepted=accepted)
        for name in [name for name in values if name not in self._types]:
            place = name or ("query" if text else "body")
            yield FieldError(field=place, message=UNKNOWN_FIELD)


def _read_name(kind: type[DTypeName | LayoutName], value: Any) -> str:
    return kind(value if value in kind.plain else kind.read(value))


def _bare(field_type: inspect.Type) -> inspect.Type:
    """The type without what describes it, and without the None that an optional field may be."""
    if isinstance(field_type, inspect.Metadata):
        return _bare(field_type.type)
    return _bare(field_type.types[0]) if isinstance(field_type, inspect.UnionType) else field_type


def _reason(field_type: inspect.Type, value: Any, text: bool) -> Reason:
    """Why a value is not of that type."""
    match field_type:
        case inspect.IntType(ge=int(low), le=int(high)):
            return integer_reason(value, low, high)
        case inspect.EnumType(cls=choices):
            return not_a_choice(value, choices)
        case inspect.CustomType(cls=name):
            return cast(type[DTypeName | LayoutName], name).reason(value)
        case inspect.BoolType():
            how = ", unable to interpret input" if text else ""
            return f"Input should be a valid boolean{how}", None
        case inspect.StrType(max_length=longest):
            if isinstance(value, str):
                return f"String should have at most {longest} characters", None
            return "Input should be a valid string", None
        case inspect.ListType(max_length=most) if isinstance(value, list):
            limit = f"at most {most} items" if value else "at least 1 item"
            return f"List should have {limit} after validation, not {len(value)}", None
    return "Input should be a valid list", None
