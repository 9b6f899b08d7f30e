"""Reading rows from the wire only if this library knows everything in them that decides what runs.

Services and clients have different versions. A newer one may name an operation, a backend, a trait
of a kernel or a choice of a launch that this library does not know. Such a row is not understood:
dropping the unknown part would leave a row that says something else. Other unknown fields, such as
further statistics, are ignored.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Hashable, Iterable
from typing import Any, TypeVar, get_args

import msgspec
import msgspec.inspect

from gemmsmith.answers.answer import Answer
from gemmsmith.core.config import Config
from gemmsmith.core.kernel import AnyKernel
from gemmsmith.core.launch import Algorithm, Launch
from gemmsmith.core.problem import Problem
from gemmsmith.errors import InvalidProblem
from gemmsmith.showing import line
from gemmsmith.version import VERSION

log = logging.getLogger("gemmsmith")

T = TypeVar("T")


class NotKnownHere(ValueError):
    """The row has the shape of its kind, but a value that this library does not know."""


def decode(document: bytes | msgspec.Raw, kind: type[T]) -> T:
    """The row in a JSON document; raises as `convert`, and msgspec.DecodeError if it is no JSON."""
    return convert(msgspec.json.decode(document), kind)


def convert(values: object, kind: type[T]) -> T:
    """The row of that kind, from dictionaries and lists.

    Raises:
        NotKnownHere: a value is not known to this library.
        msgspec.ValidationError: it has another shape.
    """
    hashable: Any = kind
    if kind is Answer and isinstance(values, dict) and "price" in values:
        values = {"power_penalty": values["price"]} | values  # its name in release 0.1
    if not isinstance(values, dict) or not _required(hashable) <= values.keys():
        return msgspec.convert(values, kind)  # raises
    try:
        msgspec.convert(values, _shape(hashable))
        row = msgspec.convert(values, kind)
        config = getattr(row, "config", None)
        if isinstance(config, Config):
            _ = config.kernel.operation  # raises if it does not exist
    except (msgspec.ValidationError, InvalidProblem) as error:
        raise NotKnownHere(str(error)) from error
    return row


def each(rows: Iterable[object], kind: type[T], name: str) -> list[T]:
    """The rows that are understood; one line in the log says how many are not.

    Rows are dictionaries, or undecoded JSON; `name` is theirs in the log.
    """
    known: list[T] = []
    skipped: list[str] = []
    for row in rows:
        try:
            values = msgspec.json.decode(row) if isinstance(row, msgspec.Raw) else row
            known.append(convert(values, kind))
        except (NotKnownHere, msgspec.DecodeError, InvalidProblem, RecursionError) as error:
            skipped.append(str(error))
    if skipped:
        log.warning(
            "%d %s are not known to gemmsmith %s and are left out; the first: %s",
            len(skipped), name, VERSION, line(skipped[0]),
        )  # fmt: skip
    return known


@functools.cache
def _required(kind: Hashable) -> frozenset[str]:
    return frozenset(field.encode_name for field in _fields(kind) if field.required)


@functools.cache
def _shape(kind: Hashable) -> type[msgspec.Struct]:
    """A row of that kind, with only those fields that decide what runs, and these strict."""
    names = [field.encode_name for field in _fields(kind)]
    parts: dict[str, Any] = {
        "problem": _PROBLEM,
        "measured": _PROBLEM | None,
        "config": _CONFIG | None,
    }
    if kind is not Answer and "answer" in names:
        parts["answer"] = _shape(Answer)
    return msgspec.defstruct(
        "Shape", [(name, parts[name], None) for name in names if name in parts]
    )


def _fields(kind: object) -> tuple[msgspec.inspect.Field, ...]:
    described: Any = msgspec.inspect.type_info(kind)
    fields: tuple[msgspec.inspect.Field, ...] = described.fields
    return fields


def _strict(kind: Any, **parts: Any) -> Any:
    """A row with the kind's fields, of any type, and no others."""
    config = getattr(kind, "__struct_config__", None)  # of kernels alone, which have tags
    tagged: Any = {"tag_field": config.tag_field, "tag": config.tag} if config else {}
    return msgspec.defstruct(
        kind.__name__,
        [(field.encode_name, parts.get(field.encode_name, Any), None) for field in _fields(kind)],
        forbid_unknown_fields=True,
        **tagged,
    )


_PROBLEM = _strict(Problem)
_KERNEL = functools.reduce(operator.or_, map(_strict, get_args(AnyKernel)))
_CONFIG = _strict(Config, kernel=_KERNEL, launch=_strict(Launch, algorithm=_strict(Algorithm)))
