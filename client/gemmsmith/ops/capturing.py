"""`gemmsmith.capture`: which matrix products a piece of code runs, and how often.

Calls are recorded below autograd (`gemmsmith.program.calls`), where nn.Linear and compiled graphs,
forward and backward, call plain products with operands as they lie in memory. This module converts
the recorded calls to problems. Products for which no kernels exist are counted, not listed. So are
FP8 products without fast accumulation, for which winners are not measured, and those with block
factors. For sharded tensors (DTensor) and other compositions, the products of the parts are
recorded, because these are what this process computes.
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
from gemmsmith.ops.products import gated as _gated  # noqa: F401 - the same
from gemmsmith.ops.products import grouped as _grouped  # noqa: F401 - the same
from gemmsmith.ops.products import integer as _integer  # noqa: F401 - the same
from gemmsmith.ops.products import mixture, scaled
from gemmsmith.ops.products import operators as _operators  # noqa: F401 - the same
from gemmsmith.ops.products.layer import parts
from gemmsmith.ops.products.recording import Multiplied
from gemmsmith.program.calls import Call, Calls, Fusion, Operand, compiled
from gemmsmith.program.captured import Captured

_aten = torch.ops.aten
_own = torch.ops.gemmsmith  # registered by gemmsmith.ops.products.operators

# The form of each operator's product, and the positions of its two operands in the arguments.
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

# Operators that run several products, or a product with an epilogue.
_LAYERS: dict[Any, Callable[[dict[str, Any]], Iterator[Multiplied]]] = {
    _own.scaled_linear: scaled.products,
    _own.scaled_gated_linear: scaled.products,
    _own.experts: mixture.products,
    _own.experts_backward: mixture.products_of_gradients,
    _own.fused_product: lambda values: _fused_with(
        Form.LINEAR, values["x"], values["weight"], values
    ),
    _own.gated_product: lambda values: _fused_with(Form.LINEAR, values["x"], _gate(values), values),
    _own.backward_product: lambda values: _fused_with(
        Form.MATMUL, values["dy"], values["weight"], values
    ),
}


def _fused_with(
    form: Form, a: torch.Tensor, b: torch.Tensor, values: dict[str, Any]
) -> Iterator[Multiplied]:
    yield Multiplied(form, a, b, epilogue=Epilogue(values["epilogue"]))


def _gate(values: dict[str, Any]) -> torch.Tensor:
    return parts(values["weight"], values["up"], values["interleaved"])[0]


class Shapes(Captured):
    """The products that were captured in this process."""

    def __init__(self, calls: Calls | None = None) -> None:
        super().__init__()
        self.calls = Calls() if calls is None else calls
        self._read = Read()

    @property
    def problems(self) -> Counter[Problem]:
        self._update()
        return self._problems

    @property
    def skipped(self) -> Counter[str]:
        self._update()
        return self._skipped

    @property
    def unseen(self) -> Counter[str]:
        return self.calls.unseen + compiled()

    def _update(self) -> None:
        """Add the calls since the last update."""
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
    `FakeTensorMode`, products of tensors without data are counted, too.
    """
    is_fake = active_fake_mode() is not None
    shapes = Shapes(Calls(without_data=is_fake or torch.get_default_device().type == "meta"))
    with shapes.calls.recorded(), _Fakes(shapes.calls) if is_fake else nullcontext():
        yield shapes


class _Fakes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operators that a `FakeTensorMode` computes itself, without calling a kernel."""

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
            # In inference mode they arrive undecomposed.
            with self:
                return func.decompose(*args, **kwargs)
        if packet in _PRODUCTS or packet in _LAYERS:
            self._calls.see(func, args, kwargs)
        return func(*args, **kwargs)


class Read(NamedTuple):
    """The problems of recorded calls.

    Attributes:
        problems: how often each problem ran, or could have run.
        skipped: number of products without kernels, by their types.
    """

    problems: Counter[Problem] = Counter()  # noqa: RUF012 - never changed
    skipped: Counter[str] = Counter()  # noqa: RUF012 - never changed


def read(total: Counter[Call | Fusion]) -> Read:
    """Converts recorded calls to problems."""
    plain: Counter[Problem] = Counter()
    fused: Counter[Problem] = Counter()
    fusions: Counter[Problem] = Counter()
    skipped: Counter[str] = Counter()
    for call, count in total.items():
        for problem, types in problems_of(call):
            if problem is None:
                skipped[types] += count
            elif isinstance(call, Fusion):
                fusions[problem] += count
            else:
                is_plain = problem.operation.epilogue.is_torchs
                (plain if is_plain else fused)[problem] += count
    # A layer may record a fusion that its operator records as well: count it once.
    return Read(plain + (fused | fusions), skipped)


@functools.lru_cache(maxsize=16_384)
def problems_of(call: Call | Fusion) -> tuple[tuple[Problem | None, str], ...]:
    """The problems that a call ran or could run, with their types. None: no kernels exist."""
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
    return (None, types) if epilogue.is_torchs else None


def _multiplied(call: Call | Fusion) -> Iterator[Multiplied]:
    """The products of a call, with tensors without data."""
    if isinstance(call, Fusion):
        epilogue = Epilogue(call.epilogue)
        form = Form.MATMUL if epilogue.backward else Form.LINEAR
        form = Form.GROUPED if call.groups else form
        x, weight = _tensors(call.x), _tensors(call.weight)
        yield Multiplied(form, x, weight, epilogue=epilogue, groups=call.groups)
        return
    packet = call.operator.overloadpacket
    names = [argument.name for argument in call.operator._schema.arguments]
    values = dict(zip(names, map(_tensors, call.arguments), strict=False))
    values |= {name: _tensors(value) for name, value in call.named}
    if packet in _LAYERS:
        yield from _LAYERS[packet](values)
        return
    form, at_a, at_b = _PRODUCTS[packet]
    a, b = values[names[at_a]], values[names[at_b]]
    exact, output = _detail(packet, form, values, a, b)
    offsets = values.get("offs")
    plain = Multiplied(exact, a, b, output, groups=0 if offsets is None else offsets.shape[0])
    if call.is_mirrored:
        half = plain._replace(form=Form.SYMMETRIC)
        problem, _ = _problem_of(half, call.is_tf32) or (None, "")
        # Kernels of half of it exist for rows of 16 bytes.
        exists = problem is not None and problem.n % 8 == problem.contiguous_a % 8 == 0
        yield half if exists else plain
        return
    biased = _adds_row(packet, values)
    # If no kernel adds the bias of an `addmm`, torch computes all of it: no plain kernel helps.
    if not (biased and packet is _aten.addmm):
        yield plain
    if biased:
        yield plain._replace(epilogue=Epilogue.BIAS)


def _tensors(value: Any) -> Any:
    """A recorded argument, with a tensor on the device `meta` for each `Operand`."""
    if isinstance(value, Operand):
        return torch.empty_strided(
            value.size, value.stride, dtype=value.dtype, device=torch.device("meta")
        )
    return [_tensors(element) for element in value] if isinstance(value, tuple) else value


def _adds_row(packet: Any, values: dict[str, Any]) -> bool:
    """Whether the call is a linear layer with a bias that a kernel could add."""
    if packet is _own.linear:
        return values.get("bias") is not None
    if packet is not _aten.addmm or values.get("out_dtype") is not None:
        return False
    return values["self"].dim() == 1 and (values.get("alpha", 1), values.get("beta", 1)) == (1, 1)


def _detail(
    packet: Any, form: Form, values: dict[str, Any], a: torch.Tensor, b: torch.Tensor
) -> tuple[Form | None, torch.dtype | None]:
    """The form that follows from all arguments, and the output's type if they determine it.

    The form is None if no kernel computes it.
    """
    if packet is _own.accumulate:
        into = values["into"].dtype
        # Kernels add only to FP32 sums. For others, the product alone may have a kernel.
        return (form, into) if into is torch.float32 else (Form.WEIGHT_GRADIENT, None)
    if packet is _own.int8_mm:
        factors = (values.get("scale_a"), values.get("scale_b"))
        if None not in factors:
            return Form.ROW_SCALED, torch.bfloat16
        # A single factor is applied after the integer product.
        is_single = factors != (None, None)
        return form, torch.int32 if is_single else values.get("out_dtype", torch.bfloat16)
    if form is Form.SCALED:
        return _scaled(values, a, b), None
    if form.is_grouped:
        scaled = form is Form.GROUPED_SCALED
        precise = scaled and not values.get("use_fast_accum", False)
        return (Form.GROUPED_SCALED_PRECISE if precise else form), values.get("out_dtype")
    output = values.get("out_dtype")
    added = values["self"] if packet in (_aten.addmm, _aten.baddbmm) else None
    if output is None or added is None:
        return form, output
    factors = (values.get("alpha", 1), values.get("beta", 1))
    # The same condition as in `gemmsmith.ops.below.adding`. If it does not hold, torch adds, and a
    # kernel may compute the product.
    adds = factors == (1, 1) and added.dtype is output and added.dim() == a.dim()
    return Form.ADDED if adds else form, output


def _scaled(values: dict[str, Any], a: torch.Tensor, b: torch.Tensor) -> Form | None:
    """The form of an FP8 product, by the sizes of its factors; None if no kernel computes it."""
    # `_scaled_mm_v2` takes lists of factors, with several elements for nested blocks.
    scales = [
        scale
        for name in ("scale_a", "scale_b")
        for scale in (values[name] if isinstance(values[name], list) else [values[name]])
    ]
    by_rows = scales_rows(a, b, *scales) if len(scales) == 2 else None
    if by_rows is None:
        return None
    return Form.scaled(by_rows=by_rows, fast=values.get("use_fast_accum", False))
