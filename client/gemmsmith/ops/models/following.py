"""Follows the rows of a batch through the calls of a model's modules, or of a module's operators.

What a call reads and returns is noted when it happens: its shape, or a hash of each row's bits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import fields, is_dataclass
from fractions import Fraction
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

PART = 1 << 22
"""Elements that are hashed or compared at a time: 32 MB as 64-bit integers."""

SAME = Fraction(1)
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Key = tuple[str, int]  # a module or an operator, and which of its calls
Calls = dict[Key, dict[str, Any]]  # notes of a call's tensors, by path
Note = Callable[[Key, str, torch.Tensor], Any]


class Follower(TorchDispatchMode):
    """Notes the tensors of calls, in the order in which the calls end.

    With a target, notes the operators within that call, and keeps a copy of its result.

    Attributes:
        calls: notes by path. Paths begin with `read` or `returned`.
    """

    def __init__(self, note: Note, target: Key | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Calls = {}
        self.result: dict[str, torch.Tensor] = {}
        self.operators = Follower(note) if target else self
        self.inside = ExitStack()
        self._note, self._target = note, target
        self._counts: Counter[str] = Counter()
        self._open: list[tuple[Key, dict[str, Any]]] = []

    def begin(self, name: str, values: Any) -> None:
        key = (name, self._counts[name])
        self._counts[name] += 1
        self._open.append((key, self._notes(key, "read", values)))
        if key == self._target:
            self.inside.enter_context(self.operators)

    def end(self, name: str, values: Any) -> None:
        key, notes = self._open.pop()
        while key[0] != name:  # a call that raised did not end
            key, notes = self._open.pop()
        if key == self._target:
            self.inside.close()
            self.result = {path: tensor.clone() for path, tensor in tensors("returned", values)}
        self.calls[key] = notes | self._notes(key, "returned", values)

    def _notes(self, key: Key, side: str, values: Any) -> dict[str, Any]:
        if self._target and key != self._target:
            return {}
        return {path: self._note(key, path, tensor) for path, tensor in tensors(side, values)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, named = str(func.overloadpacket), kwargs or {}
        self.begin(name, (args, {key: value for key, value in named.items() if key != "out"}))
        result = func(*args, **named)
        if "empty" not in name:  # memory that holds anything
            self.end(name, result)
        return result


def tensors(path: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors whose memory holds bits, by their paths in what a call reads or returns."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, torch.Tensor):
        holds_bits = value.layout is torch.strided and not (value.is_meta or value.is_quantized)
        if holds_bits and not bool(is_traceable_wrapper_subclass(value)):
            tensor = value.detach().resolve_conj().resolve_neg()
            yield path, torch.view_as_real(tensor) if tensor.is_complex() else tensor
    elif isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, tuple | list):
        items = enumerate(value)
    elif is_dataclass(value) and not isinstance(value, type):
        items = [(field.name, getattr(value, field.name)) for field in fields(value)]
    for name, item in items:
        yield from tensors(f"{path}.{name}", item)


class Rows:
    """Finds the batch's rows in the tensors of calls, by the shapes of two runs.

    A dimension has the rows if it doubled with the batch, and no other did.

    Args:
        batch: notes of shapes of a run of the batch.
        doubled: the same with twice the rows.
        count: rows of the batch.
    """

    def __init__(self, batch: Calls, doubled: Calls, count: int) -> None:
        self._count = count
        self._forms: dict[tuple[Key, str], tuple[torch.Size, int | None]] = {}
        for key in batch.keys() & doubled.keys():
            for path in batch[key].keys() & doubled[key].keys():
                shape, other = batch[key][path], doubled[key][path]
                grown = [a for a, size in enumerate(shape) if other[a : a + 1] != (size,)]
                axis = grown[0] if grown else None
                expected = [size * (1 + (a == axis)) for a, size in enumerate(shape)]
                if list(other) == expected and (axis is None or shape[axis] % count == 0):
                    self._forms[key, path] = (shape, axis)

    def matrices(
        self, key: Key, path: str, tensor: torch.Tensor, count: int, stretch: Fraction = SAME
    ) -> list[torch.Tensor]:
        """A matrix with a row for each of the `count` rows of a run's batch, without the padding.

        If the batch is merged with another dimension, there are two: with the batch as the outer
        and as the inner one. Only the right one can have equal rows in two runs. Empty if rows
        cannot be followed. A matrix of one row if the tensor has no batch.

        `stretch` is the length of the padded sequence, in lengths of the batch's own.
        """
        shape, axis = self._forms.get((key, path), (None, None))
        if shape is None or tensor.ndim != len(shape):
            return []
        views, goal = [tensor[None]], [1, *shape]
        if axis is not None:
            before, after = tensor.shape[:axis], tensor.shape[axis + 1 :]
            size, rest = divmod(tensor.shape[axis], count)
            if rest:
                return []
            outer = tensor.reshape(*before, count, size, *after).movedim((axis, axis + 1), (0, 1))
            inner = tensor.reshape(*before, size, count, *after).movedim((axis + 1, axis), (0, 1))
            views = [outer, inner] if size > 1 else [outer]
            goal = [count, shape[axis] // self._count, *shape[:axis], *shape[axis + 1 :]]
        for dim, size in enumerate(goal):
            if views[0].shape[dim] not in (size, size * stretch):
                return []
            views = [view.narrow(dim, 0, size) for view in views]
        return [view.reshape(goal[0], math.prod(goal[1:])) for view in views]

    def hashes(self, key: Key, path: str, tensor: torch.Tensor) -> list[tuple[int, ...]]:
        """Note of a run of the batch: a hash of each row."""
        return [_hashes(matrix) for matrix in self.matrices(key, path, tensor, self._count)]

    def differences(self, batch: Calls, order: list[int], stretch: Fraction) -> Note:
        """Note of a run with other rows: which of them differ, by the hashes of the batch.

        A bool, whether all differ, for a tensor without rows. None if it cannot be compared.
        """

        def note(key: Key, path: str, tensor: torch.Tensor) -> list[bool] | bool | None:
            old = batch.get(key, {}).get(path)
            if old is None:  # an argument of this batch alone, such as a mask
                return False
            new = [_hashes(m) for m in self.matrices(key, path, tensor, len(order), stretch)]
            if not (old and new):
                return None
            if len(old[0]) == 1:
                return bool(old != new)
            layouts = zip(old, new, strict=True)
            differing = ([a[row] != x for row, x in zip(order, b, strict=True)] for a, b in layouts)
            return min(differing, key=sum)

        return note


def _parts(matrix: torch.Tensor) -> Iterator[torch.Tensor]:
    """The bits of a matrix as integers, some columns at a time."""
    bits = matrix.view(_INTEGERS[matrix.element_size()])
    width = max(1, PART // len(bits))
    return (bits[:, start : start + width] for start in range(0, bits.shape[1], width))


def _hashes(matrix: torch.Tensor) -> tuple[int, ...]:
    """A hash of each row's bits: their sum, each multiplied by an odd number of its place."""
    total = torch.zeros(len(matrix), dtype=torch.int64, device=matrix.device)
    start = 1
    for part in _parts(matrix):
        place = torch.arange(start, start + part.shape[1], device=matrix.device)
        weight = place * 0x1E3779B97F4A7C15
        weight = (weight ^ (weight >> 29)) * 0x3F58476D1CE4E5B9 | 1
        value = part.long() * 0x14D049BB133111EB
        total += ((value ^ (value >> 32)) * weight).sum(1)
        start += part.shape[1]
    return tuple(total.tolist())


def ulps(left: torch.Tensor, right: torch.Tensor) -> int:
    """The largest difference in units in the last place; of integers, their difference."""
    largest = 0
    for bits, others in zip(_parts(left), _parts(right), strict=True):
        a, b = bits.long(), others.long()
        if left.is_floating_point():  # integers in the order of the numbers
            lowest = torch.iinfo(bits.dtype).min
            a, b = a.where(a >= 0, lowest - a), b.where(b >= 0, lowest - b)
        largest = max(largest, int((a - b).abs().max()))
    return largest


def rows_of(notes: dict[str, Any], side: str) -> list[list[bool]]:
    """The differences of tensors with rows that a call `read` or `returned`."""
    return [n for path, n in notes.items() if path.startswith(side) and isinstance(n, list)]


def begins(notes: dict[str, Any]) -> bool:
    """Whether a row is read with the bits that it has in the batch, and returned with others."""
    read, returned = rows_of(notes, "read"), rows_of(notes, "returned")
    others = [n for path, n in notes.items() if path.startswith("read") and not isinstance(n, list)]
    if not read or any(note is not False for note in others):
        return False
    return any(
        any(after) and not any(before)
        for before, after in zip(zip(*read, strict=True), zip(*returned, strict=True), strict=False)
    )
