"""What came over the wire, read only if this library knows all that it says about what to run.

Services and clients are of different ages. A newer one may name an operation, a backend, a trait
of a kernel or a choice of a launch that this library has never heard of. Then the row is not
understood: it is never read as the plainer one that is left when the unknown part is dropped.
Other fields that are not known here, such as further statistics, are ignored.
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
from gemmsmith.core.kernel import AnyKernel, Kernel
from gemmsmith.core.launch import Algorithm, Launch
from gemmsmith.core.problem import Problem
from gemmsmith.errors import InvalidProblem
from gemmsmith.showing import line
from gemmsmith.version import VERSION

log = logging.getLogger("gemmsmith")

T = TypeVar("T")


class NotKnownHere(ValueError):
    """The row has the shape of its kind, and something in it that this library does not know."""


def decode(document: bytes | msgspec.Raw, kind: type[T]) -> T:
    """The row of that kind in a JSON document.

    Raises:
        NotKnownHere: it says something that this library does not know.
        msgspec.DecodeError: it is not JSON, or has another shape.
    """
    return convert(msgspec.json.decode(document), kind)


def convert(found: object, kind: type[T]) -> T:
    """The row of that kind, from dictionaries and lists.

    Raises:
        NotKnownHere: it says something that this library does not know.
        msgspec.ValidationError: it has another shape.
    """
    of: Any = kind
    if kind is Answer and isinstance(found, dict) and "price" in found:
        found = {"power_penalty": found["price"]} | found  # what release 0.1 called it
    if not isinstance(found, dict) or not _required(of) <= found.keys():
        return msgspec.convert(found, kind)  # for its error
    try:
        msgspec.convert(found, _shape(of))
        row = msgspec.convert(found, kind)
        config = getattr(row, "config", None)
        if isinstance(config, Config):
            _ = config.kernel.operation  # there is such a one, or this raises
    except (msgspec.ValidationError, InvalidProblem) as error:
        raise NotKnownHere(str(error)) from error
    return row


def each(rows: Iterable[object], kind: type[T], what: str) -> list[T]:
    """The rows that are understood; one line in the log says how many are not.

    Rows are dictionaries, or JSON that is still to be read; `what` names them in the log.
    """
    known: list[T] = []
    skipped: list[str] = []
    for row in rows:
        try:
            read = msgspec.json.decode(row) if isinstance(row, msgspec.Raw) else row
            known.append(convert(read, kind))
        except (NotKnownHere, msgspec.DecodeError, InvalidProblem, RecursionError) as error:
            skipped.append(str(error))
    if skipped:
        log.warning(
            "%d %s are not known to gemmsmith %s and are left out; the first: %s",
            len(skipped), what, VERSION, line(skipped[0]),
        )  # fmt: skip
    return known


@functools.cache
def _required(kind: Hashable) -> frozenset[str]:
    return frozenset(field.encode_name for field in _fields(kind) if field.required)


@functools.cache
def _shape(kind: Hashable) -> type[msgspec.Struct]:
    """A row of that kind, of which only the names of what is to be run are looked at."""
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
    found: tuple[msgspec.inspect.Field, ...] = described.fields
    return found


def _strict(kind: Any, **parts: Any) -> Any:
    """A row with the kind's fields and no others, whatever is in them."""
    return msgspec.defstruct(
        kind.__name__,
        [(field.encode_name, parts.get(field.encode_name, Any), None) for field in _fields(kind)],
        forbid_unknown_fields=True,
        **_tagged(kind),
    )


def _tagged(kind: Any) -> dict[str, Any]:
    if not issubclass(kind, Kernel):
        return {}
    config = kind.__struct_config__
    return {"tag_field": config.tag_field, "tag": config.tag}


_PROBLEM = _strict(Problem)
_KERNEL = functools.reduce(operator.or_, map(_strict, get_args(AnyKernel)))
_CONFIG = _strict(Config, kernel=_KERNEL, launch=_strict(Launch, algorithm=_strict(Algorithm)))
