"""`gemmsmith.capture`: which matrix products a piece of code runs, and how often.

What runs is noted below autograd (`gemmsmith.program.calls`), as nn.Linear and compiled graphs come
down to it, forward and backward, with the operands as they lie in memory; here it is read. Products
of types or sizes that no kernel is for are counted, not listed; so are FP8 products without fast
accumulation, which winners are not measured for, and those with factors of blocks. Of a tensor that
is sharded (DTensor) or else made of others, the products of its parts are recorded: what this
process multiplies.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch._guards import active_fake_mode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from gemmsmith.core.operation import Epilogue
from gemmsmith.core.problem import Problem
from gemmsmith.errors import InvalidProblem
from gemmsmith.ops.below.scaling import scales_rows
from gemmsmith.ops.engine.forms import Form, Spec, shapes
from gemmsmith.ops.products import backward as _backward  # noqa: F401 - registers gemmsmith::…
from gemmsmith.ops.products import fused as _fused  # noqa: F401 - the same
from gemmsmith.ops.products import gated, mixture, scaled, scaled_gated
from gemmsmith.ops.products import grouped as _grouped  # noqa: F401 - the same
from gemmsmith.ops.products import integer as _integer  # noqa: F401 - the same
from gemmsmith.ops.products import operators as _operators  # noqa: F401 - the same
from gemmsmith.ops.products.recording import Multiplied
from gemmsmith.program.calls import Call, Calls, Fusion, Operand, compiled
from gemmsmith.program.captured import Captured

_aten = torch.ops.aten
_own = torch.ops.gemmsmith  # registered by gemmsmith.ops.products.operators

# Which product an operator is, and where its two operands are among the arguments.
_PRODUCTS: dict[Any, tuple[Form, int, int]] = {
    _aten.mm: (Form.MATMUL, 0, 1),
    _aten.bmm: (Form.MATMUL, 0, 1),
    _aten._int_mm: (Form.MATMUL, 0, 1),
    _aten.addmm: (Form.MATMUL, 1, 2),
    _aten.addmm_: (Form.MATMUL, 1, 2),
    _aten.baddbmm: (Form.MATMUL, 1, 2),
    _aten._addmm_activation: (Form.MATMUL, 1, 2),
    _aten._scaled_mm: (Form.SCALED, 0, 1),
    _own.linear: (Form.LINEAR, 0, 1),
    _own.matmul: (Form.MATMUL, 0, 1),
    _own.weight_gradient: (Form.WEIGHT_GRADIENT, 0, 1),
    _own.accumulate: (Form.ADDED_GRADIENT, 1, 2),
    _own.scaled_mm: (Form.SCALED, 0, 1),
    _own.int8_mm: (Form.MATMUL, 0, 1),
    _own.grouped_mm: (Form.GROUPED, 0, 1),
}
for _name, _form in (
    ("_scaled_mm_v2", Form.SCALED),
    ("_grouped_mm", Form.GROUPED),
    ("_scaled_grouped_mm", Form.GROUPED_SCALED),
    ("_scaled_grouped_mm_v2", Form.GROUPED_SCALED),
):
    if hasattr(_aten, _name):  # newer than the oldest torch
        _PRODUCTS[getattr(_aten, _name)] = (_form, 0, 1)

# What else runs products, or what follows one as well.
_LAYERS: dict[Any, Callable[[dict[str, Any]], Iterator[Multiplied]]] = {
    _own.scaled_linear: scaled.products,
    _own.scaled_gated_linear: scaled_gated.products,
    _own.experts: mixture.products,
    _own.experts_backward: mixture.products_of_gradients,
    _own.fused_product: lambda given: _followed(Form.LINEAR, given["x"], given["weight"], given),
    _own.gated_product: lambda given: _followed(Form.LINEAR, given["x"], _gate(given), given),
    _own.backward_product: lambda given: _followed(
        Form.MATMUL, given["dy"], given["weight"], given
    ),
}


def _followed(
    form: Form, a: torch.Tensor, b: torch.Tensor, given: dict[str, Any]
) -> Iterator[Multiplied]:
    yield Multiplied(form, a, b, epilogue=Epilogue(given["epilogue"]))


def _gate(given: dict[str, Any]) -> torch.Tensor:
    return gated.parts(given["weight"], given["up"], given["interleaved"])[0]


class Shapes(Captured):
    """The products that were captured in this process."""

    def __init__(self, calls: Calls | None = None) -> None:
        super().__init__()
        self.calls = Calls() if calls is None else calls
        self._read = Read()

    @property
    def problems(self) -> Counter[Problem]:
        """How often each ran."""
        self._settle()
        return self._problems

    @property
    def skipped(self) -> Counter[str]:
        """Products that no kernel is for, by their types."""
        self._settle()
        return self._skipped

    @property
    def unseen(self) -> Counter[str]:
        """What else may have run products, described, and how often it did."""
        return self.calls.unseen + compiled()

    def _settle(self) -> None:
        """Add what has run since the last time."""
        now, before = read(self.calls.total), self._read
        self._read = now
        for problem, count in now.problems.items():
            self._problems[problem] += count - before.problems[problem]
        for types, count in now.skipped.items():
            self._skipped[types] += count - before.skipped[types]


@contextmanager
def capture() -> Iterator[Shapes]:
    """Record every matrix product in the block, including those of backward passes.

    Products of all threads are recorded. If the block begins on the device `meta` or under a
    `FakeTensorMode`, products of tensors without data count, too.
    """
    is_fake = active_fake_mode() is not None
    shapes = Shapes(Calls(without_data=is_fake or torch.get_default_device().type == "meta"))
    with shapes.calls.recorded(), _Fakes(shapes.calls) if is_fake else nullcontext():
        yield shapes


class _Fakes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what a `FakeTensorMode` answers by itself, without a call of any kernel."""

    supports_higher_order_operators = True

    def __init__(self, calls: Calls) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = calls

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        packet = getattr(func, "overloadpacket", None)
        if packet in (_aten.linear, _aten.matmul):
            # Inference mode shows them whole: see what they are made of.
            with self:
                return func.decompose(*args, **kwargs)
        if packet in _PRODUCTS or packet in _LAYERS:
            self._calls.see(func, args, kwargs)
        return func(*args, **kwargs)


class Read(NamedTuple):
    """What calls come to.

    Attributes:
        problems: how often each ran, or could have.
        skipped: products that no kernel is for, by their types.
    """

    problems: Counter[Problem] = Counter()  # noqa: RUF012 - never changed
    skipped: Counter[str] = Counter()  # noqa: RUF012 - never changed


def read(total: Counter[Call | Fusion]) -> Read:
    """The problems of calls."""
    plain: Counter[Problem] = Counter()
    fused: Counter[Problem] = Counter()
    fusions: Counter[Problem] = Counter()
    skipped: Counter[str] = Counter()
    for call, count in total.items():
        for problem, types in _problems_of(call):
            if problem is None:
                skipped[types] += count
            elif isinstance(call, Fusion):
                fusions[problem] += count
            else:
                is_plain = problem.operation.epilogue in _PLAIN
                (plain if is_plain else fused)[problem] += count
    # A layer may note what its operator shows as well.
    return Read(plain + (fused | fusions), skipped)


_PLAIN = (Epilogue.NONE, Epilogue.BIAS)


@functools.lru_cache(maxsize=16_384)
def _problems_of(call: Call | Fusion) -> tuple[tuple[Problem | None, str], ...]:
    """The problems that a call ran, or could run; None for types that no kernel is for."""
    with _disable_current_modes():
        return tuple(
            problem
            for product in _multiplied(call)
            if 0 not in (*product.a.shape, *product.b.shape)
            and (problem := _problem_of(product, call.is_tf32)) is not None
        )


def _problem_of(product: Multiplied, is_tf32: bool) -> tuple[Problem | None, str] | None:
    form, a, b, output, epilogue, groups = product
    types = f"{a.dtype} × {b.dtype}".replace("torch.", "")
    if form is not None and form.is_precise:
        return None, f"{types} without use_fast_accum"
    if form is not None and (is_tf32 or a.dtype is not torch.float32):
        with suppress(InvalidProblem):
            for shape in shapes(form, Spec.of(a), Spec.of(b), output, groups, epilogue):
                return shape.problem, types
    return (None, types) if epilogue in _PLAIN else None


def _multiplied(call: Call | Fusion) -> Iterator[Multiplied]:
    """What a call multiplies. Its tensors are made anew, without data."""
    if isinstance(call, Fusion):
        epilogue = Epilogue(call.epilogue)
        form = Form.MATMUL if epilogue.backward else Form.LINEAR
        form = Form.GROUPED if call.groups else form
        x, weight = _made(call.x), _made(call.weight)
        yield Multiplied(form, x, weight, epilogue=epilogue, groups=call.groups)
        return
    packet = call.operator.overloadpacket
    names = [one.name for one in call.operator._schema.arguments]
    given = dict(zip(names, map(_made, call.arguments), strict=False))
    given |= {name: _made(value) for name, value in call.named}
    if packet in _LAYERS:
        yield from _LAYERS[packet](given)
        return
    form, at_a, at_b = _PRODUCTS[packet]
    a, b = given[names[at_a]], given[names[at_b]]
    exact, output = _detail(packet, form, given, a, b)
    offs = given.get("offs")
    plain = Multiplied(exact, a, b, output, groups=0 if offs is None else offs.shape[0])
    biased = _adds_row(packet, given)
    # `addmm` without a kernel that adds the bias is torch's: no product runs alone there.
    if not (biased and packet is _aten.addmm):
        yield plain
    if biased:
        yield plain._replace(epilogue=Epilogue.BIAS)


def _made(value: Any) -> Any:
    if isinstance(value, Operand):
        return torch.empty_strided(
            value.size, value.stride, dtype=value.dtype, device=torch.device("meta")
        )
    return [_made(one) for one in value] if isinstance(value, tuple) else value


def _adds_row(packet: Any, given: dict[str, Any]) -> bool:
    """Whether the product is a linear layer's, with a bias that a kernel could add."""
    if packet is _own.linear:
        return given.get("bias") is not None
    if packet is not _aten.addmm or given.get("out_dtype") is not None:
        return False
    return given["self"].dim() == 1 and (given.get("alpha", 1), given.get("beta", 1)) == (1, 1)


def _detail(
    packet: Any, form: Form, given: dict[str, Any], a: torch.Tensor, b: torch.Tensor
) -> tuple[Form | None, torch.dtype | None]:
    """The form by the other arguments of a call, and the output's type where they say it.

    None as a form: no kernel computes it.
    """
    if packet is _own.accumulate:
        into = given["into"].dtype
        # What is not summed in FP32 is no kernel's; its product alone may be.
        return (form, into) if into is torch.float32 else (Form.WEIGHT_GRADIENT, None)
    if packet is _own.int8_mm:
        factors = (given.get("scale_a"), given.get("scale_b"))
        if None not in factors:
            return Form.ROW_SCALED, torch.bfloat16
        # One factor alone follows the product of integers.
        alone = factors != (None, None)
        return form, torch.int32 if alone else given.get("out_dtype", torch.bfloat16)
    if form is Form.SCALED:
        return _scaled(given, a, b), None
    if form.is_grouped:
        scaled = form is Form.GROUPED_SCALED
        precise = scaled and not given.get("use_fast_accum", False)
        return (Form.GROUPED_SCALED_PRECISE if precise else form), given.get("out_dtype")
    output = given.get("out_dtype")
    added = given["self"] if packet in (_aten.addmm, _aten.baddbmm) else None
    if output is None or added is None:
        return form, output
    factors = (given.get("alpha", 1), given.get("beta", 1))
    # As `gemmsmith.ops.below.adding` has it: else torch's, with a product that a kernel may do
    # alone.
    adds = factors == (1, 1) and added.dtype is output and added.dim() == a.dim()
    return Form.ADDED if adds else form, output


def _scaled(given: dict[str, Any], a: torch.Tensor, b: torch.Tensor) -> Form | None:
    """The form of an FP8 product, by the sizes of its factors."""
    # The second version of the operator takes lists, with more than one for nested blocks.
    scales = [
        one
        for name in ("scale_a", "scale_b")
        for one in (given[name] if isinstance(given[name], list) else [given[name]])
    ]
    by_rows = scales_rows(a, b, *scales) if len(scales) == 2 else None
    if by_rows is None:
        return None
    return Form.scaled(by_rows=by_rows, fast=given.get("use_fast_accum", False))
