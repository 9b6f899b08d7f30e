"""The operations in the database, for filters and menus."""

from __future__ import annotations

from contextlib import suppress

from gemmsmith.core.operation import Operation
from gemmsmith.errors import InvalidProblem
from service.pages.addresses import PLAIN
from tuner.store import Store


def known(store: Store) -> list[Operation]:
    """Return the operations of the database's problems, in order."""
    operations = []
    for key in store.overview.operations():
        with suppress(InvalidProblem):  # an operation that only a newer version knows
            operations.append(Operation.parse(key))
    return operations


def suffix(operation: Operation) -> str:
    """Return the part of an operation's `dtype` after its short name, such as `group_rows`."""
    return operation.dtype.partition(".")[2] or PLAIN
