"""`gemmsmith.capture`: which matrix products a piece of code runs, and how often.

A dispatch mode sees what autograd and `nn.Linear` come down to, forward and backward, with the
operands as they lie in memory. Products of types or sizes that no kernel is for are counted, not
listed; so are FP8 products without fast accumulation, which winners are not measured for. Compiled
functions run uncompiled under it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gemmsmith.errors import InvalidProblem
from gemmsmith.files import publish
from gemmsmith.ops import operators as _operators  # noqa: F401 - registers gemmsmith::…
from gemmsmith.ops.forms import Form, Spec, shapes
from gemmsmith.problem import Layout, Problem

if TYPE_CHECKING:
    from gemmsmith.client import Client
    from gemmsmith.handles import TuningJob

_aten = torch.ops.aten
_own = torch.ops.gemmsmith  # registered by gemmsmith.ops.operators

# Which product an operator is, and where its two operands are among the arguments.
_PRODUCTS: dict[Any, tuple[Form, int, int]] = {
    _aten.mm: (Form.MATMUL, 0, 1),
    _aten.bmm: (Form.MATMUL, 0, 1),
    _aten.addmm: (Form.MATMUL, 1, 2),
    _aten.addmm_: (Form.MATMUL, 1, 2),
    _aten.baddbmm: (Form.MATMUL, 1, 2),
    _aten._addmm_activation: (Form.MATMUL, 1, 2),
    _aten._scaled_mm: (Form.SCALED, 0, 1),
    _own.linear: (Form.LINEAR, 0, 1),
    _own.matmul: (Form.MATMUL, 0, 1),
    _own.weight_gradient: (Form.WEIGHT_GRADIENT, 0, 1),
    _own.accumulate: (Form.WEIGHT_GRADIENT, 1, 2),
    _own.scaled_mm: (Form.SCALED, 0, 1),
}


class Shapes:
    """What was captured.

    Attributes:
        problems: how often each ran.
        skipped: products that no kernel is for, by their types.
    """

    def __init__(self) -> None:
        self.problems: Counter[Problem] = Counter()
        self.skipped: Counter[str] = Counter()

    def record(self, form: Form, a: torch.Tensor, b: torch.Tensor) -> None:
        """Count one product."""
        if 0 in (*a.shape, *b.shape):
            return
        try:
            found = shapes(form, _spec(a), _spec(b))
        except InvalidProblem:
            found = ()
        types = f"{a.dtype} × {b.dtype}".replace("torch.", "")
        if form is Form.SCALED_PRECISE:
            self.skipped[f"{types} without use_fast_accum"] += 1
        elif found:
            self.problems[found[0].problem] += 1
        else:
            self.skipped[types] += 1

    def save(self, path: str | PathLike[str]) -> None:
        """Write a suite for `gemmsmith tune --suite`, most frequent product first.

        A suite is for any element type, so products that differ in that alone are one entry.

        Raises:
            OSError: the file cannot be written.
        """
        calls: Counter[tuple[Layout, int, int, int, int]] = Counter()
        types: dict[tuple[Layout, int, int, int, int], set[str]] = {}
        for problem, count in self.problems.items():
            key = (problem.layout, problem.m, problem.n, problem.k, problem.batch)
            calls[key] += count
            types.setdefault(key, set()).add(problem.dtype)
        used = ", ".join(sorted({dtype for found in types.values() for dtype in found}))
        lines = [
            "# Matrix products captured from a run, and how often each ran.",
            f"# Element types: {used or 'none'}.",
            'name = "captured"',
        ]
        for key, count in sorted(calls.items(), key=lambda item: (-item[1], item[0])):
            layout, m, n, k, batch = key
            sizes = f"m = {m}\nn = {n}\nk = {k}" + (f"\nbatch = {batch}" if batch > 1 else "")
            lines += [
                "",
                "[[problem]]",
                f'name = "captured {" ".join(sorted(types[key]))}"',
                'group = "captured"',
                sizes,
                f'layout = "{layout}"',
                f"calls = {count}",
            ]
        publish(Path(path), ("\n".join(lines) + "\n").encode())

    def tune(self, client: Client) -> list[TuningJob]:
        """Order a tuning job for every problem, with how often it ran.

        Raises:
            as `Client.tune`.
        """
        return [
            client.tune(
                problem.m,
                problem.n,
                problem.k,
                batch=problem.batch,
                dtype=problem.dtype,
                layout=problem.layout,
                calls=count,
            )
            for problem, count in self.problems.most_common()
        ]


@contextmanager
def capture() -> Iterator[Shapes]:
    """Record every matrix product of the block, those of backward passes included."""
    found = Shapes()
    with _Recorder(found.record):
        yield found


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, record: Callable[[Form, torch.Tensor, torch.Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._record = record

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        known = _PRODUCTS.get(packet)
        if known is not None:
            form, at_a, at_b = known
            names = [one.name for one in func._schema.arguments]
            given = dict(zip(names, args, strict=False)) | kwargs
            if form is Form.SCALED and not given.get("use_fast_accum", False):
                form = Form.SCALED_PRECISE
            self._record(form, given[names[at_a]], given[names[at_b]])
        elif packet in (_aten.linear, _aten.matmul):
            # Inference mode shows them whole: look at what they are made of.
            with self:
                return func.decompose(*args, **kwargs)
        return func(*args, **kwargs)


def _spec(tensor: torch.Tensor) -> Spec:
    return Spec(tensor.dtype, tensor.device, tensor.size(), tensor.stride())
