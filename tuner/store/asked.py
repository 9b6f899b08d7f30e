"""Many problems in one query: they are one JSON parameter, so that its text never changes.

Written out as VALUES, thousands of parameters would cost more than the query itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from sqlalchemy import (
    ColumnElement,
    Integer,
    Select,
    String,
    and_,
    bindparam,
    cast,
    column,
    func,
    select,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import aliased

from gemmsmith.core.problem import Problem
from tuner.store.dictionary import problem_identity
from tuner.store.models import ProblemRow

_ASKED = bindparam("asked", type_=String)
_IDENTITY = {"operation": String, "batch": Integer, "m": Integer, "n": Integer, "k": Integer}


def parameters(problems: Iterable[Problem]) -> dict[str, Any]:
    return {_ASKED.key: msgspec.json.encode([*map(problem_identity, problems)]).decode()}


def ids(*, on_sqlite: bool) -> Select[int]:
    """Ids of those problems that are recorded."""
    # For `IN`: joined directly, SQLite would go through all winners, as it cannot know how few
    # problems there are.
    problem = aliased(ProblemRow)
    if on_sqlite:
        rows = func.json_each(_ASKED).table_valued("value", name="asked")
        cells: dict[str, ColumnElement[Any]] = {
            name: func.json_extract(rows.c.value, f"$.{name}") for name in _IDENTITY
        }
    else:
        typed: list[ColumnElement[Any]] = [column(name, kind) for name, kind in _IDENTITY.items()]
        table = func.jsonb_to_recordset(cast(_ASKED, JSONB)).table_valued(*typed, name="asked")
        rows = table.render_derived(with_types=True)
        cells = {name: rows.c[name] for name in _IDENTITY}
    same = (getattr(problem, name) == cell for name, cell in cells.items())
    return select(problem.id).join(rows, and_(*same))
