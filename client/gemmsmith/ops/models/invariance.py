"""`gemmsmith.check_invariance`: finds the first module whose rows depend on the rest of the batch.

The model runs with its rows in batches of different composition. Hooks note a hash of each row of
what modules read and return; tensors are kept only of the module that differs first. A dimension
is the batch's if it doubles when the batch does. A difference begins in a call if a row that it
reads has the bits that it has in the caller's batch, and the row that it returns has not.

Hooks may change what a model runs: a fused layer calls its children if they have hooks. So the
model runs without hooks first, and hooks go only as deep as its result keeps its bits.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

from gemmsmith.ops.models.following import SAME, Follower, Key, Note, Rows, begins, rows_of, ulps

_REMEDIES = {
    "rand|normal|uniform|bernoulli|dropout": "random numbers depend on the place in the batch: draw"
    " them for each row by itself",
    "attention|encoder|multi_head": "attention shares out the keys by the batch's size: use a"
    " kernel with a fixed number of splits, or torch's SDPBackend.MATH, and check again",
    "mm|mv$|linear|matmul": "the library picks another order of summation at another number of"
    " rows: pad the batch to one size, or set CUBLAS_WORKSPACE_CONFIG=:0:0 (slower), and check"
    " again",
    "norm|var|std": "torch's norms may sum a row in another order at another number of rows: use"
    " one that sums each row in a fixed order; batch norm needs model.eval()",
    "sum|mean|softmax|prod": "torch shares out a reduction by the shape of the whole tensor: sum"
    " each row in a fixed order",
    "conv|rnn": "the library picks an algorithm by the shape: pad the batch to one size",
}
"""What is known to help, by a pattern of the operator's name."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first call of a module that gives a row other bits in another batch.

    Attributes:
        module: the module's qualified name; empty for the model itself.
        kind: the module's class.
        call: which of its calls in a run of the model, from 0.
        operator: the first operator inside that differs, such as `aten.addmm`; empty if rows cannot
            be followed through its operators.
        batch: `again` (the same batch), `alone`, `halves`, `reordered`, `among` (shuffled among
            copies of other rows), `repeated` or `padded`: the first of these in which rows differ.
        rows: how many rows of such batches differ.
        of: how many rows such batches have.
        ulp: the largest difference, in units in the last place of `dtype`; 0 for -0 and 0.
        dtype: type of the result.
    """

    module: str
    kind: str
    call: int
    operator: str
    batch: str
    rows: int
    of: int
    ulp: int
    dtype: torch.dtype

    @property
    def remedy(self) -> str:
        """What is known to help; empty if nothing is."""
        if self.batch == "again":
            return "the same batch gives other bits: try torch.use_deterministic_algorithms(True)"
        name = self.operator.rpartition(".")[2]
        return next((text for key, text in _REMEDIES.items() if re.search(key, name)), "")


@dataclass(frozen=True, kw_only=True)
class InvarianceReport:
    """What `check_invariance` found. True if no row of a module's result differs.

    Attributes:
        first: the first difference, in the order in which calls end. None if nothing differs.
        modules: number of modules whose results were compared, with the model itself.
        unread: number of the others: they did not run, no result of theirs has the batch's rows, or
            hooks on them change what the model runs.
        batches: the kinds of batches, as in `Difference.batch`.
    """

    first: Difference | None
    modules: int
    unread: int
    batches: tuple[str, ...]

    def __bool__(self) -> bool:
        return self.first is None

    def __str__(self) -> str:
        lines = ["gemmsmith: each row has the same bits in all batches"]
        if first := self.first:
            call = f", call {first.call + 1}" if first.call else ""
            dtype = str(first.dtype).removeprefix("torch.")
            lines = ["gemmsmith: the bits of a row depend on its batch"]
            lines += [f"  module:   {first.module or 'the model'} ({first.kind}){call}"]
            lines += [f"  operator: {first.operator or 'inside; rows cannot be followed there'}"]
            lines += [f"  batch:    {first.batch}; {first.rows} of {first.of} rows differ"]
            lines[-1] += f", by up to {first.ulp} ULP of {dtype}"
            lines += [f"  help:     {first.remedy}"] if first.remedy else []
        lines += [f"  compared: {self.modules} of {self.modules + self.unread} modules"]
        return "\n".join([*lines, f"  batches:  {', '.join(self.batches)}"])


def check_invariance(
    model: Callable[..., Any],
    inputs: torch.Tensor | tuple[Any, ...] | Mapping[str, Any],
    *,
    dim: int = 0,
    sequence: int | None = None,
    seed: int = 0,
) -> InvarianceReport:
    """Find whether a row of a model's result has the same bits whatever else is in the batch.

    The model runs without gradients, in the mode that it is in, some 2·(rows + 9) times: the same
    batch again, each row alone, halves of the batch, rows reordered, shuffled among copies of other
    rows, and twice as many. Each run gets copies of the inputs and the caller's random state.

    Args:
        model: a module, or another callable, of which only the result is compared.
        inputs: what the model takes: a tensor, a tuple of arguments, or a dictionary of keyword
            arguments. What is no tensor, has one row or no dimension `dim` is the same in all runs.
        dim: the batch's dimension in the inputs.
        sequence: the sequence's dimension in the inputs, which must have an `attention_mask`. The
            batch then also runs half as long again, padded on the right, with zeros in the mask.
        seed: of the orders of rows.

    Raises:
        ValueError: the inputs have no tensor, no dimension `dim`, fewer than two rows, or tensors
            on several devices or on another than the model; dropout or statistics of the batch
            are on; or no result has rows.
    """
    check = _Check(model, inputs, dim, sequence, seed)
    compared = plain = check.compare(0)
    for depth in range(max(map(_depth, check.hookable), default=0), 0, -1):
        compared = check.compare(depth)
        if compared.result == plain.result or (plain.first and plain.first[1] == "again"):
            break
        compared = plain
    if not compared.names:
        raise ValueError(f"no result grows with dimension {dim} of the inputs: is dim the batch's?")
    return InvarianceReport(
        first=check.explain(*compared.first) if compared.first else None,
        modules=len(compared.names),
        unread=max(len(check.modules), 1) - len(compared.names),
        batches=tuple(check.batches),
    )


def _depth(name: str) -> int:
    return name.count(".") + 1


def _takes_hooks(modules: Mapping[str, torch.nn.Module], name: str) -> bool:
    """Whether a module runs hooks, outside all compiled code."""
    parts = name.split(".")
    around = [modules[".".join(parts[:count])] for count in range(len(parts))]
    closed = any(
        isinstance(module, torch.jit.ScriptModule) or module._compiled_call_impl is not None
        for module in (modules[name], *around)
    )
    return not closed and not any(hasattr(module, "_orig_mod") for module in around)


def _orders(rows: int, seed: int) -> dict[str, list[list[int]]]:
    """Rows of the batches of each kind."""
    draw, batch = random.Random(seed), list(range(rows))  # noqa: S311
    shuffled = draw.sample(batch, rows)
    return {
        "again": [batch],
        "alone": [[row] for row in batch],
        **({"halves": [shuffled[: rows // 2], shuffled[rows // 2 :]]} if rows > 3 else {}),
        "reordered": [shuffled if shuffled != batch else batch[::-1]],
        "among": [draw.sample(batch * 2, rows + rows // 2)],
        "repeated": [batch * 2],
    }


def _refuse_unfit(modules: Mapping[str, torch.nn.Module], device: torch.device) -> None:
    for name, module in modules.items():
        rates = [value for key, value in vars(module).items() if "dropout" in key]
        rates += [module.p] if isinstance(module, _DropoutNd) else []
        drops = any(type(rate) in (float, int) and rate > 0 for rate in rates)
        if module.training and (drops or isinstance(module, _BatchNorm)):
            what = f"{'dropout' if drops else 'statistics of the batch'} of {name or 'the model'}"
            raise ValueError(f"{what} ({type(module).__name__}) are on: call model.eval() first")
    devices = {tensor.device for module in modules.values() for tensor in module.parameters()}
    if len(devices) == 1 and device not in devices:
        raise ValueError(f"inputs are on {device}, the model is on {devices.pop()}: move one")


class _Compared(NamedTuple):
    """Names of what was compared; notes of the model's results; where rows differ first."""

    names: set[str]
    result: list[dict[str, Any]]
    first: tuple[Key, str, int] | None


class _Check:
    """A model and the batches that it runs with."""

    def __init__(
        self, model: Callable[..., Any], inputs: Any, dim: int, sequence: int | None, seed: int
    ) -> None:
        named = dict(inputs) if isinstance(inputs, Mapping) else {}
        args = () if named else tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
        self._values, self._form = pytree.tree_flatten((args, named))
        tensors = [value for value in self._values if isinstance(value, torch.Tensor)]
        if not tensors:
            raise ValueError("the inputs have no tensor: pass the tensors that the model takes")
        device, *others = {tensor.device for tensor in tensors}
        if others or device.type == "meta":
            raise ValueError("the inputs must have data, and be on one device: move them")
        sizes = {tensor.shape[dim] for tensor in tensors if -tensor.ndim <= dim < tensor.ndim}
        if not sizes:
            raise ValueError(f"no input has a dimension {dim}: add the batch's dimension")
        if max(sizes) < 2 or len(sizes - {1}) > 1:
            numbers = " or ".join(map(str, sorted(sizes)))
            raise ValueError(f"inputs have {numbers} rows in dimension {dim}: pass two or more")
        self.modules = dict(model.named_modules()) if isinstance(model, torch.nn.Module) else {}
        _refuse_unfit(self.modules, device)
        names = filter(None, self.modules)
        self.hookable = [name for name in names if _takes_hooks(self.modules, name)]
        self._model, self._dim, self._sequence = model, dim, sequence
        self._batch = list(range(max(sizes)))
        self.batches = _orders(len(self._batch), seed)
        self._mask, self._length = named.get("attention_mask"), 0
        if sequence is not None:
            if self._mask is None or not -self._mask.ndim <= sequence < self._mask.ndim:
                raise ValueError(f"padding needs an attention_mask with a dimension {sequence}")
            self._length = self._mask.shape[sequence]
            self._padding = self._length // 2 + 1
            self.batches["padded"] = [self._batch]

    def compare(self, depth: int) -> _Compared:
        """Compare the results of the modules down to a depth, and of the model, in all batches."""
        hooked = [name for name in self.hookable if _depth(name) <= depth]
        rows = self._rows(hooked)
        base = self._run(self._batch, hooked, rows.hashes).calls
        result, names, begun, differ = [base["", 0]], set(), set(), Counter[tuple[Key, str]]()
        for kind, orders in self.batches.items():
            for order in orders:
                note = rows.differences(base, order, self._stretch(kind))
                calls = self._run(order, hooked, note, kind).calls
                result.append(calls["", 0])
                for key, notes in calls.items():
                    if returned := rows_of(notes, "returned"):
                        names.add(key[0])
                        differ[key, kind] += sum(map(any, zip(*returned, strict=True)))
                    if begins(notes):
                        begun.add((key, kind))
        calls_and_kinds = ((key, kind) for key in base for kind in self.batches)
        first = next((begin for begin in calls_and_kinds if begin in begun), None)
        return _Compared(names, result, first and (*first, differ[first]))

    def explain(self, key: Key, kind: str, differing: int) -> Difference:
        """Run the batches of a kind again, and compare the call's operators and whole result."""
        hooked = [key[0]] if key[0] else []
        rows, outer = self._rows(hooked, key), self._rows(hooked)
        base = self._run(self._batch, hooked, rows.hashes, target=key)
        operator, apart = "", []
        for order in self.batches[kind]:
            stretch = self._stretch(kind)
            note = rows.differences(base.operators.calls, order, stretch)
            run = self._run(order, hooked, note, kind, key)
            begun = (inner[0] for inner, notes in run.operators.calls.items() if begins(notes))
            operator = operator or next(begun, "")
            for path in base.result.keys() & run.result.keys():
                old = outer.matrices(key, path, base.result[path], len(self._batch))
                new = outer.matrices(key, path, run.result[path], len(order), stretch)
                if old and new and len(old[0]) > 1:
                    least = min(ulps(a[order], b) for a, b in zip(old, new, strict=True))
                    apart.append((least, run.result[path].dtype))
        ulp, dtype = max(apart, key=lambda pair: pair[0], default=(0, torch.float32))
        return Difference(
            module=key[0],
            kind=type(self.modules.get(key[0], self._model)).__name__,
            call=key[1],
            operator=operator,
            batch=kind,
            rows=differing,
            of=sum(map(len, self.batches[kind])),
            ulp=ulp,
            dtype=dtype,
        )

    def _rows(self, hooked: Collection[str], target: Key | None = None) -> Rows:
        runs = [
            self._run(order, hooked, lambda _key, _path, tensor: tensor.shape, target=target)
            for order in (self._batch, self._batch * 2)
        ]
        batch, doubled = [run.operators.calls for run in runs]
        return Rows(batch, doubled, len(self._batch))

    def _stretch(self, kind: str) -> Fraction:
        return 1 + Fraction(self._padding, self._length) if kind == "padded" else SAME

    def _run(
        self,
        order: list[int],
        hooked: Collection[str],
        note: Note,
        kind: str = "",
        target: Key | None = None,
    ) -> Follower:
        """Run the model with these rows, and with hooks on these modules."""
        follower = Follower(note, target)

        def before(name: str, _module: torch.nn.Module, args: Any, named: Any) -> None:
            follower.begin(name, (args, named))

        def after(name: str, _module: torch.nn.Module, _args: Any, result: Any) -> None:
            follower.end(name, result)

        args, named = self._take(order, is_padded=kind == "padded")
        is_used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        devices = range(torch.cuda.device_count()) if is_used else ()
        with ExitStack() as hooks, follower.inside, torch.no_grad(), torch.random.fork_rng(devices):
            for name in hooked:
                module = self.modules[name]
                early = module.register_forward_pre_hook(partial(before, name), with_kwargs=True)
                late = module.register_forward_hook(partial(after, name))
                hooks.callback(early.remove)
                hooks.callback(late.remove)
            follower.begin("", (args, named))
            follower.end("", self._model(*args, **named))
        return follower

    def _take(self, order: list[int], *, is_padded: bool) -> tuple[Any, Any]:
        """Arguments with copies of these rows."""
        values = []
        for value in self._values:
            taken = value
            if isinstance(value, torch.Tensor):
                dim, index = self._dim, torch.tensor(order, device=value.device)
                has_rows = -value.ndim <= dim < value.ndim and value.shape[dim] > 1
                taken = value.index_select(dim, index) if has_rows else value.clone()
                if is_padded:
                    taken = self._padded(taken, value is self._mask)
            values.append(taken)
        args, named = pytree.tree_unflatten(values, self._form)
        return args, named

    def _padded(self, tensor: torch.Tensor, is_mask: bool) -> torch.Tensor:
        """Longer by copies of its last position; a mask by zeros."""
        axis = self._sequence or 0
        if not -tensor.ndim <= axis < tensor.ndim or tensor.shape[axis] != self._length:
            return tensor
        last = tensor.narrow(axis, self._length - 1, 1)
        last = torch.zeros_like(last) if is_mask else last
        return torch.cat([tensor, *[last] * self._padding], dim=axis)
