"""Reads requests into the structs of `service.http.requests`.

A request that does not fit its struct is taken apart: each field is converted by itself, so that
the refusal names every field that is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar, cast
from urllib.parse import parse_qsl

import msgspec
from fastapi import Depends
from msgspec import Struct, inspect
from starlette.requests import Request

from service.errors import (
    NO_OBJECT,
    UNKNOWN_FIELD,
    FieldError,
    Reason,
    invalid,
    invalid_field,
    not_a_choice,
)
from service.http.bodies import json_body
from service.http.parameters import WrongValue, integer_in

_BOOLEANS = dict.fromkeys(("true", "1", "t", "yes", "y", "on"), True) | dict.fromkeys(
    ("false", "0", "f", "no", "n", "off"), False
)
"""How a query may write a boolean, in letters of any case."""

_NOT_FINITE = ("inf", "-inf", "nan")

S = TypeVar("S", bound=Struct)


class QuestionReader(Generic[S]):
    """Reads values into a struct, or names every field that is wrong.

    Attributes:
        kind: the struct.
    """

    def __init__(self, kind: type[S], *, keeps_empty: bool = True) -> None:
        self.kind = kind
        self._keeps_empty = keeps_empty  # fields of a query that are there but empty
        self._fields = msgspec.structs.fields(kind)
        info = cast(inspect.StructType, inspect.type_info(kind))
        self._types = {field.name: _bare(field.type) for field in info.fields}
        self._forbids_unknown = info.forbid_unknown_fields
        self._reads: dict[str, Callable[[Any], Any]] = {
            name: (field_type.extra or {})["read"]
            for name, field_type in self._types.items()
            if isinstance(field_type, inspect.Metadata)
        }
        readers: dict[type[inspect.Type], Callable[[str], Any]] = {
            inspect.IntType: integer_in,
            inspect.FloatType: _number_in,
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
        text = query.decode("latin-1")
        return self.texts(dict(parse_qsl(text, keep_blank_values=self._keeps_empty)))

    def texts(self, texts: dict[str, str]) -> S:
        """As `query`, for values that are unquoted."""
        values: dict[str, Any] = texts.copy()
        for name in self._from_text.keys() & texts.keys():
            values[name] = self._from_text[name](texts[name])
        return self.document(values, text=True)

    def document(self, values: Any, *, text: bool = False) -> S:
        """The struct of a JSON document or, with `text`, of the values of a query.

        Raises:
            ProblemError: 422, names every field that is wrong.
        """
        try:
            if isinstance(values, dict):
                for name in self._reads.keys() & values.keys():
                    values = {**values, name: self._reads[name](values[name])}
            return msgspec.convert(values, self.kind)
        except (msgspec.ValidationError, WrongValue):
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
                if field.name in self._reads:
                    value = self._reads[field.name](value)
                msgspec.convert(value, field.type)
                continue
            except WrongValue as error:
                message, accepted = error.reason
            except msgspec.ValidationError:
                message, accepted = _reason(self._types[field.name], value, text)
            yield FieldError(field=field.name, message=message, accepted=accepted)
        for name in values:
            if self._forbids_unknown and name not in self._types:
                place = name or ("query" if text else "body")
                yield FieldError(field=place, message=UNKNOWN_FIELD)

    async def of_query(self, request: Request) -> S:
        return self.query(request.scope["query_string"])

    async def of_body(self, request: Request) -> S:
        content = await json_body(request)
        if not content:
            raise invalid_field("body", NO_OBJECT)
        return self.document(msgspec.json.decode(content))


def query_of(kind: type[Struct], *, keeps_empty: bool = True) -> Any:
    """The query as a parameter of a route, for `Annotated`."""
    return Depends(QuestionReader(kind, keeps_empty=keeps_empty).of_query)


def body_of(kind: type[Struct]) -> Any:
    """The JSON body as a parameter of a route, for `Annotated`."""
    return Depends(QuestionReader(kind).of_body)


def integer_reason(value: object, low: int, high: int) -> Reason:
    """Why to refuse a value that is not an integer in low … high."""
    accepted = f"an integer in {low} … {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        return f"must be an integer, got {repr(value)[:40]}", accepted
    shown = str(value) if abs(value) < 10**19 else "a far larger number"
    return f"is out of range: {shown}", accepted


def _number_in(text: str) -> float | str:
    try:
        number = float(text)
    except ValueError:
        return text
    return number if math.isfinite(number) else str(number)


def _bare(field_type: inspect.Type) -> inspect.Type:
    """The type without its description, and without the None that an optional field may be.

    A type whose values are read by a function keeps that.
    """
    if isinstance(field_type, inspect.Metadata):
        return field_type if field_type.extra else _bare(field_type.type)
    return _bare(field_type.types[0]) if isinstance(field_type, inspect.UnionType) else field_type


def _reason(field_type: inspect.Type, value: Any, text: bool) -> Reason:
    """Why a value is not of that type."""
    match field_type:
        case inspect.Metadata(type=read_type):
            return _reason(read_type, value, text)
        case inspect.IntType(ge=int(low), le=int(high)):
            return integer_reason(value, low, high)
        case inspect.EnumType(cls=choices):
            return not_a_choice(value, choices)
        case inspect.FloatType(ge=least):
            if isinstance(value, float):
                return f"Input should be greater than or equal to {least}", None
            if value in _NOT_FINITE:
                return "Input should be a finite number", None
            return "Input should be a valid number, unable to parse string as a number", None
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
