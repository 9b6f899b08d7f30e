"""The operations that the store has problems of, as filters and menus offer them."""

from __future__ import annotations

from contextlib import suppress

from gemmsmith.core.operation import Operation
from gemmsmith.errors import InvalidProblem
from service.pages.addresses import PLAIN
from tuner.store import Store


def known(store: Store) -> list[Operation]:
    """All of them, in order; one that only a newer version knows is left out."""
    found = []
    for key in store.overview.operations():
        with suppress(InvalidProblem):
            found.append(Operation.parse(key))
    return found


def further(operation: Operation) -> str:
    """What an operation's `dtype` says behind its short name, as the list's filter has it."""
    return operation.dtype.partition(".")[2] or PLAIN
