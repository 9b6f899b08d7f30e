"""`gemmsmith.patch`: tuned kernels in code that calls torch's own operators.

All products of two matrices, or with a model those of its `nn.Linear` modules, run tuned kernels in
every thread, by a compiled binding below autograd that costs a call a fraction of a microsecond
(`gemmsmith.ops.dispatch`). Products into FP32 and added to FP32 sums, INT8 ones, and FP32 ones
while torch may multiply them in TF32, are among them, and so are the grouped products of experts,
with or without the binding. `addmm` of a bias does so where there are winners that add one, by
Python in its place. A model's products are known by their sizes. Its modules with a bias change
class for the while: parameters, hooks and `state_dict` stay, and a call costs some ten microseconds
more. A product that a compiler makes one `addmm` with a sum, as with a residual of two dimensions,
stays torch's.

Where the binding cannot be had, or a report is wanted, all `nn.Linear` modules of a model change
class; without a model a torch function mode catches `F.linear` and the products of `torch` in this
thread, at one to two microseconds for every call of any torch function. Autograd and
`torch.compile` know all three: a class is guarded on, modes are traced, and compiled graphs are
torch's own and call the products that the binding replaces while a block is open.

Either way the operators' own rules hold: what no kernel is tuned for is torch's.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, TextIO

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gemmsmith.ops import experts, functions, integer, operators
from gemmsmith.ops.adding import PRODUCTS, by_kernel
from gemmsmith.ops.dispatch import Dispatch
from gemmsmith.ops.engine import Engine, current
from gemmsmith.ops.forms import Form, Spec, present_shapes
from gemmsmith.ops.plan import Plan
from gemmsmith.ops.registry import wants_gradient


class TunedLinear(torch.nn.Linear):
    """What a patched model's `nn.Linear` is."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's own name
        """As `nn.Linear`."""
        return operators.linear(input, self.weight, self.bias)


@contextmanager
def patch(
    model: torch.nn.Module | None = None, *, report: bool = False, file: TextIO | None = None
) -> Iterator[None]:
    """Run tuned kernels in `model`, or everywhere, until the end of the block.

    Blocks may be nested: each adds to what the outer ones replace. One may be opened for every
    step: what was decided is kept while it is the same engine and model. A CUDA graph keeps what
    was captured.

    Args:
        model: replace the products of its `nn.Linear` modules (not those of derived classes) and
            the grouped ones with its weights, and with them any of just their sizes elsewhere in
            the process; None: replace the products of `F.linear`, `torch.matmul` and `@`, `mm`,
            `bmm` and `_int_mm`, of `addmm` and `baddbmm` with `out_dtype`, of plain `addmm` with a
            bias, and grouped ones.
        report: print at the end what was computed by what, how often, and the expected gain.
        file: where to; standard error if None.
    """
    engine = current()
    watching = _Report()
    before = None
    if engine is not None and report:
        before, engine.watcher = engine.watcher, watching
    try:
        with (
            _grouped(engine, model),
            _everywhere(engine) if model is None else _within(model, engine),
        ):
            yield
    finally:
        if engine is not None and report:
            engine.watcher = before
        if report:
            print(watching.text(configured=engine is not None), file=file or sys.stderr)


@contextmanager
def _within(model: torch.nn.Module, engine: Engine | None) -> Iterator[None]:
    layers = [module for module in model.modules() if type(module) is torch.nn.Linear]
    with ExitStack() as stack:
        switched_on = _binding(engine)
        if switched_on is not None:
            weights = frozenset((layer.out_features, layer.in_features) for layer in layers)
            stack.enter_context(switched_on(only=weights))
            # The others' products are below; a bias makes one torch's addmm, which is not.
            layers = [layer for layer in layers if layer.bias is not None]
        for layer in layers:
            layer.__class__ = TunedLinear
        try:
            yield
        finally:
            for layer in layers:
                layer.__class__ = torch.nn.Linear


def _everywhere(engine: Engine | None) -> AbstractContextManager[Any]:
    switched_on = _binding(engine)
    return _Everywhere() if switched_on is None else switched_on()


def _grouped(engine: Engine | None, model: torch.nn.Module | None) -> AbstractContextManager[None]:
    if engine is None or engine.platform.kind is None:
        return nullcontext()
    weights = None if model is None else experts.weights_of(model)
    return experts.on(engine, engine.platform.kind, weights)


def _binding(engine: Engine | None) -> Callable[..., AbstractContextManager[None]] | None:
    """`Dispatch.on` with this engine; None where it cannot be had, or a watcher is to be told."""
    if engine is None or engine.platform.kind is None or engine.watcher is not None:
        return None
    dispatch = Dispatch.of(engine.platform.kind)
    return None if dispatch is None else partial(dispatch.on, engine)


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return operators.matmul(a, b) if a.dim() == b.dim() == 2 else torch.mm(a, b)


def _bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    plain = a.dim() == b.dim() == 3 and a.shape[0] == b.shape[0]
    return operators.matmul(a, b) if plain else torch.bmm(a, b)


def _addmm(added: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    # A row added to every row is a linear layer's bias.
    if added.dim() == 1 and a.dim() == b.dim() == 2 and added.shape[0] == b.shape[1]:
        return operators.linear(a, b.t(), added)
    return torch.addmm(added, a, b)


def _int_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    plain = a.dtype == b.dtype == torch.int8 and a.dim() == b.dim() == 2
    ours = plain and a.device == b.device and a.shape[1] == b.shape[0]
    return integer.int8_mm(a, b, out_dtype=torch.int32) if ours else torch._int_mm(a, b)


def _rmatmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return operators.matmul(b, a)


_REPLACED: dict[Any, tuple[Callable[..., torch.Tensor], tuple[str, ...]]] = {
    functional.linear: (operators.linear, ("input", "weight", "bias")),
    torch.matmul: (operators.matmul, ("input", "other")),
    torch.Tensor.matmul: (operators.matmul, ("self", "other")),
    torch.Tensor.__matmul__: (operators.matmul, ("self", "other")),
    torch.Tensor.__rmatmul__: (_rmatmul, ("self", "other")),
    torch.mm: (_mm, ("input", "mat2")),
    torch.Tensor.mm: (_mm, ("self", "mat2")),
    torch.bmm: (_bmm, ("input", "mat2")),
    torch.Tensor.bmm: (_bmm, ("self", "mat2")),
    torch._int_mm: (_int_mm, ("self", "mat2")),
    torch.addmm: (_addmm, ("input", "mat1", "mat2")),
    torch.Tensor.addmm: (_addmm, ("self", "mat1", "mat2")),
}


_WIDE: dict[Any, tuple[int, int]] = {
    getattr(torch, name): (int(adds), dims) for name, dims, adds in PRODUCTS
}
"""How many tensors come before the factors in a call with `out_dtype`, and their dimensions."""


def _wide(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The product in `out_dtype` by a kernel; None where torch computes it, with its gradient."""
    engine, (before, dims) = current(), _WIDE[func]
    rest = dict(kwargs)
    output, out = rest.pop("out_dtype"), rest.pop("out", None)
    if (
        engine is None
        or len(args) != before + 2
        or not rest.keys() <= {"alpha", "beta"}
        or torch.compiler.is_compiling()
        or not functions.unobserved()
        or wants_gradient(*args)
        or any(one.dim() != dims for one in args)
    ):
        return None
    return by_kernel(engine, args[-2], args[-1], output, args[0] if before else None, rest, out)


def _saved_by_hooks() -> bool:
    """Whether somebody decides what is saved for the backward pass: activation checkpointing."""
    if torch.compiler.is_compiling():  # graphs have a checkpointing of their own
        return False
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


class _Everywhere(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # What a checkpoint saves it computes again in the backward pass, where modes are off.
        found = None if _saved_by_hooks() else _REPLACED.get(func)
        kwargs = kwargs or {}
        if func in _WIDE and "out_dtype" in kwargs:
            out = _wide(func, args, kwargs)
            return func(*args, **kwargs) if out is None else out
        if found is not None:
            replacement, names = found
            values = [*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs)]
            # `out`, `alpha` and `beta` are not ours, nor are numbers in a tensor's place.
            if len(values) == len(args) + len(kwargs) and all(
                isinstance(value, torch.Tensor) or value is None for value in values
            ):
                return replacement(*values)
        return func(*args, **kwargs)


class _Report:
    """Counts products by form, problem and who computes them."""

    def __init__(self) -> None:
        self._calls: Counter[tuple[str, str, str]] = Counter()
        self._saved: dict[tuple[str, str, str], float | None] = {}

    def saw(
        self, form: Form, a: torch.Tensor, b: torch.Tensor, plan: Plan | None, groups: int
    ) -> None:
        """One product."""
        if plan is not None:
            key = (str(plan.shape.problem), form.value, plan.config.kernel.name)
            self._saved[key] = plan.saving_us
        else:
            ways = present_shapes(
                form,
                Spec(a.dtype, a.device, a.size(), a.stride()),
                Spec(b.dtype, b.device, b.size(), b.stride()),
                groups=groups,
            )
            what = f"{tuple(a.shape)} and {tuple(b.shape)} {a.dtype}".replace("torch.", "")
            key = (str(ways[0].problem) if ways else what, form.value, "torch")
        self._calls[key] += 1

    def text(self, *, configured: bool) -> str:
        """The report, most called first."""
        if not configured:
            return "gemmsmith: nothing replaced: call gemmsmith.use(...) first"
        if not self._calls:
            return "gemmsmith: no matrix product ran"
        tuned = sum(count for key, count in self._calls.items() if key[2] != "torch")
        lines = [f"gemmsmith: {tuned} of {self._calls.total()} products ran tuned kernels"]
        gain, unknown = 0.0, False
        for key, count in self._calls.most_common():
            problem, form, who = key
            line = f"  {count:6d} × {problem} ({form}): {who}"
            if who != "torch":
                saved = self._saved[key]
                unknown = unknown or saved is None
                gain += count * (saved or 0.0)
                line += "" if saved is None else f", {saved:.2f} µs less each"
            lines.append(line)
        known = f"  expected gain: {gain / 1000:.3f} ms in all"
        if tuned:
            lines.append(known + (" where it is known" if unknown else ""))
        return "\n".join(lines)
