"""`gemmsmith.capture`: which matrix products a piece of code runs, and how often.

A dispatch mode sees what autograd and `nn.Linear` come down to, forward and backward, with the
operands as they lie in memory. Products of types or sizes that no kernel is for are counted, not
listed; so are FP8 products without fast accumulation, which winners are not measured for, and those
with factors of blocks. Compiled functions run uncompiled under it. Of a tensor that is sharded
(DTensor) or else made of others, the products of its parts are recorded: what this process
multiplies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch._guards import active_fake_mode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from gemmsmith.captured import Captured
from gemmsmith.errors import InvalidProblem
from gemmsmith.operation import Epilogue
from gemmsmith.ops.below.scaling import scales_rows
from gemmsmith.ops.engine.forms import Form, Shape, Spec, present_shapes
from gemmsmith.ops.engine.functions import is_traced
from gemmsmith.ops.products import grouped as _grouped  # noqa: F401 - registers gemmsmith::…
from gemmsmith.ops.products import integer as _integer  # noqa: F401 - likewise
from gemmsmith.ops.products import mixture, scaled, scaled_gated, telling
from gemmsmith.ops.products import operators as _operators  # noqa: F401 - likewise
from gemmsmith.ops.products.telling import Multiplied

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

# What else runs a product, and what follows it.
_LAYERS: dict[Any, Callable[[dict[str, Any]], Iterator[Multiplied]]] = {
    _own.scaled_linear: scaled.products,
    _own.scaled_gated_linear: scaled_gated.products,
    _own.experts: mixture.products,
    _own.experts_backward: mixture.products_of_gradients,
}


class Shapes(Captured):
    """The products that were captured in this process.

    If it starts on the device `meta` or under a `FakeTensorMode`, products of tensors without data
    are counted; otherwise they are not.
    """

    def __init__(self) -> None:
        super().__init__()
        meant = torch.get_default_device().type == "meta" or active_fake_mode() is not None
        self._without_data = meant

    def record(
        self,
        form: Form | None,
        a: torch.Tensor,
        b: torch.Tensor,
        output: torch.dtype | None = None,
        groups: int = 0,
        epilogue: Epilogue = Epilogue.NONE,
    ) -> None:
        """Count one product.

        Args:
            form: which; None: one that no kernel computes.
            a: left operand.
            b: right operand.
            output: element type of the result; None: as torch gives it.
            groups: how many, of a grouped product.
            epilogue: what follows it, which a kernel could do as well; what runs where nothing
                fused wins, is counted by itself.
        """
        # What a compiler traces runs later; DTensor tries its operators on tensors without data.
        if 0 in (*a.shape, *b.shape) or ((a.is_meta or is_traced(a)) and not self._without_data):
            return
        found: tuple[Shape, ...] = ()
        if form is not None:
            with suppress(InvalidProblem):
                found = present_shapes(form, Spec.of(a), Spec.of(b), output, groups, epilogue)
        types = f"{a.dtype} × {b.dtype}".replace("torch.", "")
        if form is not None and form.is_precise:
            self.skipped[f"{types} without use_fast_accum"] += 1
        elif found:
            self.problems[found[0].problem] += 1
        elif epilogue in (Epilogue.NONE, Epilogue.BIAS):
            self.skipped[types] += 1


@contextmanager
def capture() -> Iterator[Shapes]:
    """Record every matrix product in the block, including those of backward passes."""
    found = Shapes()

    def follows(x: torch.Tensor, weight: torch.Tensor, epilogue: Epilogue, groups: int) -> None:
        form = Form.MATMUL if epilogue.backward else Form.LINEAR
        found.record(Form.GROUPED if groups else form, x, weight, None, groups, epilogue)

    with telling.telling(follows), Recorder(found.record):
        yield found


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells of every product that runs in its block."""

    def __init__(self, record: Callable[..., None]) -> None:
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
            if any(map(is_traceable_wrapper_subclass, (given[names[at_a]], given[names[at_b]]))):
                # A sharded or a quantized one: it comes by again as what it is made of.
                return NotImplemented
            a, b = given[names[at_a]], given[names[at_b]]
            found, output = _detail(packet, form, given, a, b)
            offs = given.get("offs")
            groups = 0 if offs is None else offs.shape[0]
            biased = _adds_row(packet, given)
            # `addmm` without a kernel that adds the bias is torch's: no product runs alone there.
            if not (biased and packet is _aten.addmm):
                self._record(found, a, b, output, groups)
            if biased:
                self._record(found, a, b, output, groups, Epilogue.BIAS)
        elif packet in _LAYERS:
            names = [one.name for one in func._schema.arguments]
            given = dict(zip(names, args, strict=False)) | kwargs
            for one in _LAYERS[packet](given):
                self._record(one.form, one.a, one.b, one.output, one.groups, one.epilogue)
        elif packet in (_aten.linear, _aten.matmul):
            # Inference mode shows them whole: look at what they are made of.
            with self:
                return func.decompose(*args, **kwargs)
        return func(*args, **kwargs)


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
