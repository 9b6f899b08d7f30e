"""A layer in one kernel, where one wins: its product, what follows it, and their gradients.

`gemmsmith.core.epilogue` says what follows, in which order, and from which operands; gradients
follow from the same steps. For gradients the kernel also stores what an activation, a gate or
column factors are applied to. The products of the backward pass have winners of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from gemmsmith.core.activations import ACTIVATIONS, FUNCTIONS, follow, gate_gradients, through
from gemmsmith.core.epilogue import Epilogue, StepKind
from gemmsmith.ops.engine import functions, observers
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.forms import Form
from gemmsmith.ops.engine.functions import Decided
from gemmsmith.ops.engine.operands import Operands, present
from gemmsmith.ops.engine.plan import Plan
from gemmsmith.ops.products import backward
from gemmsmith.ops.products.registry import CallWay, as_cast, register

Pair = tuple[torch.Tensor, torch.Tensor]
"""Gate, then up."""

Outputs = tuple[torch.Tensor, torch.Tensor | None]
"""D, and aux if it is stored."""

OPERANDS = ("bias", "residual", "column_scale", "row_scale")
"""What the epilogue of one weight may read."""
_KEPT = ("up", "column_scale", "row_scale")
"""What gradients read beside x, weight and aux. None if the layer does not have it."""
_Kept = Mapping[str, Any]


LAYER_US, LAYER_FLOPS = 20.0, 2**38
"""What a kernel must save for a patched layer in training, and the operations of its product. The
layer costs the host an autograd function in Python: 110 µs with its backward pass, and 1.1 ms on
hosts of H100s and H200s where `F.linear` takes 75 µs. There a step of BERT-large took 1.4 × as long
with kernels for 24 products of 2^36 operations, which saved the GPU 62 µs each (H100, 2026-11-27).
Where a product is larger, a step waits for the GPU."""


class LinearFusion(NamedTuple):
    """How a product and its epilogue are computed.

    Attributes:
        epilogue: what follows the product.
        names: of the tensors after x and weight, in their order: what the epilogue reads, and `up`,
            a gate's second weight.
        main_grads: of the weights, as of `linear` and `gated_linear`.
        interleaved: as of `gated_linear`.
        decided: None: it is decided where the product is computed.
    """

    epilogue: Epilogue
    names: tuple[str, ...] = ()
    main_grads: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    interleaved: bool = False
    decided: Decided | None = None


def parts(whole: torch.Tensor, up: torch.Tensor | None, interleaved: bool = False) -> Pair:
    """The gate's rows and up's, without gradients: autograd would note the slices."""
    if torch.is_grad_enabled():
        whole, up = whole.detach(), None if up is None else up.detach()
    if up is not None:
        return whole, up
    if interleaved:
        return whole[0::2], whole[1::2]
    half = whole.shape[0] // 2
    return whole[:half], whole[half:]


def halves(both: torch.Tensor, interleaved: bool) -> Pair:
    """The gate's columns and up's."""
    return (both[..., 0::2], both[..., 1::2]) if interleaved else both.chunk(2, -1)  # type: ignore[return-value]


def decide(
    engine: Engine | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    operands: Operands,
    epilogue: Epilogue,
    *,
    interleaved: bool = False,
) -> Decided | None:
    """The layer, if one kernel computes it. Returns None if torch must."""
    if epilogue.is_gated:
        weight, up = parts(weight, operands.get("up"), interleaved)
        operands = {"up": up}
    return functions.decide(engine, Form.LINEAR, x, weight, epilogue, operands)


def saves_little(
    engine: Engine | None, x: torch.Tensor, weight: torch.Tensor, epilogue: Epilogue | None
) -> bool:
    """As `is_slight`, of operands before autocast; False without a kernel."""
    if engine is None or epilogue is None:
        return False
    plan = engine.plan(Form.LINEAR, as_cast(x), as_cast(weight), epilogue=epilogue)
    return plan is not None and is_slight(engine, plan)


def is_slight(engine: Engine, plan: Plan) -> bool:
    """Whether the kernel of a layer in training saves the GPU less than the layer costs the host.

    Where rows must have the same bits at every M, times do not matter.
    """
    if engine.is_invariant:
        return False
    is_small = plan.shape.problem.flops < LAYER_FLOPS
    return is_small or (plan.saving_us is not None and plan.saving_us < LAYER_US)


def run(
    way: CallWay,
    x: torch.Tensor,
    weight: torch.Tensor,
    operands: Operands,
    fusion: LinearFusion,
    *,
    has_gradient: bool,
) -> torch.Tensor:
    """D, with its gradients if autograd needs any."""
    if not has_gradient:
        return (compute if way is CallWay.EAGER else run_fused)(x, weight, operands, fusion)[0]
    d: torch.Tensor = FusedLinear.apply(x, weight, *operands.values(), fusion)[0]  # type: ignore[no-untyped-call]
    return d


def run_fused(
    x: torch.Tensor, weight: torch.Tensor, operands: Operands, fusion: LinearFusion
) -> Outputs:
    """The product and its epilogue, by a kernel or by torch. Below autograd."""
    if observers.unobserved():
        return compute(x, weight, operands, fusion)
    if observers.is_watched():
        return _run_by_torch(x, weight, operands, fusion)
    name = fusion.epilogue.value
    with torch._C._AutoDispatchBelowAutograd():
        outputs: Outputs
        if fusion.epilogue.is_gated:
            up = operands.get("up")
            outputs = torch.ops.gemmsmith.gated_product(x, weight, up, fusion.interleaved, name)
        else:
            bias, residual, *factors = map(operands.get, OPERANDS)
            outputs = torch.ops.gemmsmith.fused_product(x, weight, bias, residual, name, *factors)
        return outputs


def compute(
    x: torch.Tensor, weight: torch.Tensor, operands: Operands, fusion: LinearFusion
) -> Outputs:
    """The same on a device, where nothing observes."""
    decided = fusion.decided
    if decided is None:
        engine, interleaved = functions.engine_here(), fusion.interleaved
        decided = decide(engine, x, weight, operands, fusion.epilogue, interleaved=interleaved)
    outputs = None if decided is None else decided.run()
    if outputs is None:
        return _run_by_torch(x, weight, operands, fusion)
    return outputs[0], outputs[1].get("aux")


def _run_by_torch(
    x: torch.Tensor, weight: torch.Tensor, operands: Operands, fusion: LinearFusion
) -> Outputs:
    epilogue, interleaved = fusion.epilogue, fusion.interleaved
    if epilogue.has_row_scale:  # which comes before the bias, and does not change the type
        product, row_scale = functional.linear(x, weight), operands["row_scale"].unsqueeze(-1)
        d, _ = follow(epilogue.steps, product, {**operands, "row_scale": row_scale})
        return d.to(product.dtype), None
    if not epilogue.is_gated:
        product = functional.linear(x, weight, operands.get("bias")).contiguous()
        return follow(epilogue.steps[epilogue.has_bias :], product, operands)
    # One product where the weight is whole: torch's own way.
    both, up = functional.linear(x, weight), operands.get("up")
    gate, raised = halves(both, interleaved) if up is None else (both, functional.linear(x, up))
    d = ACTIVATIONS[epilogue.activation or ""](gate) * raised
    if not epilogue.stores_aux:
        return d, None
    return d, both.contiguous() if up is None and not interleaved else torch.cat([gate, raised], -1)


class FusedLinear(torch.autograd.Function):
    """A layer with an epilogue; gives aux too, so that gradients have gradients.

    Takes x, weight, and the tensors that a `LinearFusion` names, which comes last.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Outputs:
        x, weight, *tensors, fusion = arguments
        operands = dict(zip(fusion.names, tensors, strict=True))
        d, aux = run_fused(x, weight, operands, fusion)
        needs_x, needs_weight, *needs = ctx.needs_input_grad
        needs_weight = needs_weight or ("up" in operands and needs[0])
        ctx.save_for_backward(
            x if needs_weight else None,
            weight if needs_x or needs_weight else None,
            *map(operands.get, _KEPT),
            aux,
        )
        # The decision holds the operands, which may be freed before the backward pass.
        ctx.fusion = fusion._replace(decided=None)
        ctx.set_materialize_grads(False)
        return d, aux

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Gradients of all but row_scale; those of weights are added to main_grads, if set."""
        dy: Any
        daux: Any
        dy, daux = (None if grad is None else observers.dense(grad) for grad in grads)
        fusion: LinearFusion = ctx.fusion
        names = ("x", "weight", *fusion.names)
        if dy is None and daux is None:
            return (None,) * (1 + len(names))
        x, weight, *saved = ctx.saved_tensors
        kept = dict(zip((*_KEPT, "aux"), saved, strict=True))
        needs = dict(zip(names, ctx.needs_input_grad, strict=False))
        gradients: dict[str, torch.Tensor | None] = {}
        if fusion.epilogue.is_gated:
            products = _of_halves(fusion, dy, daux, kept)
        else:
            product, gradients = _of_steps(fusion.epilogue, dy, daux, kept, needs)
            products = (product,)
        needed = (needs["x"], needs["weight"], needs.get("up"))
        gradients["x"], (gradients["weight"], gradients["up"]) = backward.gradients(
            products, x, (weight, kept["up"]), needed, fusion.main_grads
        )
        return (*map(gradients.get, names), None)


def _of_steps(
    epilogue: Epilogue, dy: Any, daux: Any, kept: _Kept, needs: dict[str, bool]
) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    """The gradients of the product and of the operands of its steps, from those of D and aux."""
    gradients: dict[str, torch.Tensor | None] = {}
    for kind, by in reversed(epilogue.steps):
        if kind is StepKind.STORE:
            dy = daux if dy is None else dy if daux is None else daux + dy
        elif dy is None:  # aux alone has a gradient, and is stored before this step
            continue
        elif kind is StepKind.APPLY:
            dy = through(by, dy, kept["aux"])
        elif kind is StepKind.ADD and needs[by]:
            gradients[by] = functions.column_sums(dy) if by == "bias" else dy
        elif by == "column_scale":
            if needs[by]:
                gradients[by] = (dy * kept["aux"]).reshape(-1, dy.shape[-1]).sum(0)
            dy = dy * kept[by]
        elif by == "row_scale":
            dy = (dy * kept[by].unsqueeze(-1)).to(dy.dtype)
    return dy, gradients


def _of_halves(fusion: LinearFusion, dy: Any, daux: Any, kept: _Kept) -> tuple[torch.Tensor, ...]:
    """The gradients of a gate's products, one for each weight, from those of D and aux."""
    activation, joined = fusion.epilogue.activation or "", kept["up"] is None
    in_place = joined and daux is None and observers.unobserved()
    if in_place and not observers.only_torch_differentiates(dy):
        return (_joined_in_place(activation, dy, kept["aux"], fusion.interleaved),)
    pair = None if dy is None else gate_gradients(activation, dy, kept["aux"])
    if daux is not None:
        more: Any = daux.chunk(2, -1)
        pair = more if pair is None else (pair[0] + more[0], pair[1] + more[1])
    assert pair is not None  # noqa: S101 - one of the two has a gradient
    if not joined:
        return pair
    # In the order of one weight's rows, [..., 2·I].
    both = torch.stack(pair, -1).flatten(-2) if fusion.interleaved else torch.cat(pair, -1)
    return (both,)


def _joined_in_place(
    activation: str, dy: torch.Tensor, aux: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """The same of `dy`'s, each gradient written where it belongs; not differentiable."""
    gate, up = aux.chunk(2, -1)
    out = torch.empty_like(aux)
    of_gate, of_up = halves(out, interleaved)
    function = FUNCTIONS[activation]
    value = function.value(gate)
    torch.mul(dy, value, out=of_up)
    function.write_gradient(dy * up, gate, value, of_gate)
    return out


# The operators of a compiled graph, whose aux is empty if it is not stored.

_Product = tuple[torch.Tensor, torch.Tensor, Operands, LinearFusion]


def _of_one_weight(x: torch.Tensor, weight: torch.Tensor, *others: Any) -> _Product:
    bias, residual, epilogue, column_scale, row_scale = (*others, None, None)[:5]
    operands = present(bias=bias, residual=residual, column_scale=column_scale, row_scale=row_scale)
    return x, weight, operands, LinearFusion(Epilogue(epilogue))


def _of_gate(x: torch.Tensor, weight: torch.Tensor, *others: Any) -> _Product:
    up, interleaved, epilogue = others
    return x, weight, present(up=up), LinearFusion(Epilogue(epilogue), interleaved=interleaved)


def _compute(x: torch.Tensor, *product: Any) -> Pair:
    d, aux = compute(x, *product)
    return d, x.new_empty(0) if aux is None else aux


def _fake(x: torch.Tensor, weight: torch.Tensor, operands: Operands, fusion: LinearFusion) -> Pair:
    epilogue, rows = fusion.epilogue, (*x.shape[:-1],)
    columns = weight.shape[0] * (1 + ("up" in operands))
    stored = (*rows, columns) if epilogue.stores_aux else (0,)
    return x.new_empty((*rows, columns // (1 + epilogue.is_gated))), x.new_empty(stored)


register(
    "fused_product(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, str epilogue, "
    "Tensor? column_scale=None, Tensor? row_scale=None) -> (Tensor, Tensor)",
    lambda *arguments: _compute(*_of_one_weight(*arguments)),
    lambda *arguments: _fake(*_of_one_weight(*arguments)),
)
register(
    "gated_product(Tensor x, Tensor weight, Tensor? up, bool interleaved, str epilogue) "
    "-> (Tensor, Tensor)",
    lambda *arguments: _compute(*_of_gate(*arguments)),
    lambda *arguments: _fake(*_of_gate(*arguments)),
)
