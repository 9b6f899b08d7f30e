"""What candidates come down to in numbers: a row for each thing described, read in columns.

Rows are made once. Looking up hundreds of them and turning them into arrays takes a few dozen
microseconds; to describe a candidate anew takes as long.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

T = TypeVar("T")

MOST = 1 << 16
"""Rows kept; beyond, all are made anew. Some 10 MB."""


class Rows(Generic[T]):
    """Threads share one.

    Args:
        key: what tells two things apart.
        describe: the numbers, always as many, that follow from the key.
    """

    def __init__(
        self, key: Callable[[T], Hashable], describe: Callable[[T], Sequence[float]]
    ) -> None:
        self._key = key
        self._describe = describe
        self._lock = threading.Lock()
        self._places: dict[Hashable, int] = {}
        self._values: NDArray[float64]  # a column for each row

    def columns(self, things: Sequence[T]) -> NDArray[float64]:
        """A column for each number, with an entry for each of `things`, which are not none."""
        keys = list(map(self._key, things))
        with self._lock:
            try:
                places = list(map(self._places.__getitem__, keys))
            except KeyError:
                self._add(dict(zip(keys, things, strict=True)))
                places = list(map(self._places.__getitem__, keys))
            return self._values.take(places, axis=1)

    def _add(self, things: dict[Hashable, T]) -> None:
        import numpy

        if len(self._places) > MOST:
            self._places.clear()
        new = {key: thing for key, thing in things.items() if key not in self._places}
        made = numpy.array([self._describe(thing) for thing in new.values()], dtype=float).T
        self._values = numpy.concatenate([self._values, made], axis=1) if self._places else made
        for key in new:
            self._places[key] = len(self._places)
