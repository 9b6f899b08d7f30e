"""`gemmsmith.mlp`: a feed-forward layer, plain or gated, whose passes are fused where kernels win.

Forwards it is `linear` or `gated_linear`, then `linear`. Backwards two layers can do what one
cannot: the gradient of the activation needs the next layer's input gradient, and one kernel
computes both. `MLP` is the layers as one autograd function, where such a backward product
(`gemmsmith.ops.products.backward`) has a winner for these sizes; else they are composed, as anyone
would write them.

Kept for the backward pass are x, what the activation is applied to (of a gated layer gate and up in
one tensor) and what the second layer takes: no more than torch keeps, and of a gated layer less.
With `recompute` the last is not kept either, and the backward product gives it again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from gemmsmith.core.activations import check_activation
from gemmsmith.core.epilogue import Activation, Backward, Epilogue
from gemmsmith.ops.engine import fallback, functions, observers
from gemmsmith.ops.engine.engine import current
from gemmsmith.ops.engine.forms import Form
from gemmsmith.ops.products import backward, fused, gated, operators, telling
from gemmsmith.ops.products.registry import ours, register, wants_gradient


def mlp(
    x: torch.Tensor,
    weight: torch.Tensor,
    down: torch.Tensor,
    *,
    up: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: str = Activation.SILU.value,
    interleaved: bool = False,
    residual: torch.Tensor | None = None,
    recompute: bool = False,
) -> torch.Tensor:
    """A feed-forward layer: `linear` or `gated_linear`, then `linear`; [..., K] to [..., N].

    Under autocast all but the residual are cast, as torch's layers do.

    Args:
        x: any number of leading dimensions.
        weight: [I, K] for a plain layer; for a gated one [2·I, K], or the gate's if `up` is given.
        down: [N, I].
        up: [I, K] of a gated layer.
        bias: of the first product; see `linear` and `gated_linear`.
        down_bias: [N].
        activation: as in `linear`; for a gated layer as in `gated_linear`.
        interleaved: see `gated_linear`; for such a weight, the backward pass is not fused.
        residual: added to the result.
        recompute: keep one [..., I] tensor less for the backward pass, if a fused kernel is used
            there that computes it again.

    Raises:
        ValueError: `down` takes neither the weight's rows nor half of them; as `linear` and
            `gated_linear` say.
        RuntimeError: raised by torch if sizes or types do not match.
    """
    call = _Call(x, weight, down, up, bias, down_bias, residual, activation, interleaved, recompute)
    _check(call)
    if telling.is_told():
        _tell(call)
        return _composed(call)
    if current() is None or not ours(*call.operands):
        return _composed(call)
    if torch.compiler.is_compiling() or not observers.unobserved():
        out: torch.Tensor = torch.ops.gemmsmith.mlp(*call)
        return out
    return (_autocast if torch.is_autocast_enabled(x.device.type) else _autograd)(*call)


class _Call(NamedTuple):
    """What `mlp` and its operator are called with."""

    x: torch.Tensor
    weight: torch.Tensor
    down: torch.Tensor
    up: torch.Tensor | None
    bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    residual: torch.Tensor | None
    activation: str
    interleaved: bool
    recompute: bool

    @property
    def operands(self) -> tuple[torch.Tensor | None, ...]:
        """All tensors."""
        return self[:7]

    @property
    def is_gated(self) -> bool:
        """Whether half of the first product gates the other half."""
        return is_gated(self.weight, self.up, self.down)


def is_gated(weight: torch.Tensor, up: torch.Tensor | None, down: torch.Tensor) -> bool:
    """Whether `mlp` takes these for a gated layer."""
    return up is not None or weight.shape[0] == 2 * down.shape[1]


def _check(call: _Call) -> None:
    weight, down = call.weight, call.down
    if call.is_gated:
        gated.check(weight, call.up, call.activation, interleaved=call.interleaved)
        return
    check_activation(call.activation)
    rows, inner = weight.shape[0], down.shape[1]
    if rows != inner or call.interleaved:
        raise ValueError(
            f"down {list(down.shape)} takes {inner} columns, and weight {list(weight.shape)} gives "
            f"{rows}: a gated layer's weight has {2 * inner} rows, a plain one's {inner}"
        )


def _composed(call: _Call) -> torch.Tensor:
    """Layer after layer."""
    x, weight, down, up, bias, down_bias, residual, activation, interleaved, _ = call
    if call.is_gated:
        hidden = gated.gated_linear(
            x, weight, up, bias, activation=activation, interleaved=interleaved
        )
    else:
        hidden = fused.linear(x, weight, bias, activation=activation)
    return fused.linear(hidden, down, down_bias, residual=residual)


def backward_epilogues(
    activation: str, *, is_gated: bool, bias: torch.Tensor | None, recompute: bool = False
) -> tuple[Epilogue, ...]:
    """What the backward product of the second layer may take with it, the best first."""
    sums = bias is not None and bias.requires_grad and not is_gated
    of = Epilogue.backward_of
    found = (
        of(activation, gated=is_gated, activated=True) if recompute else None,
        of(activation, gated=is_gated, bias_gradient=True) if sums else None,
        of(activation, gated=is_gated),
    )
    return tuple(one for one in found if one is not None)


def _tell(call: _Call) -> None:
    """Tell listeners of what the backward product could take with it."""
    x, weight, down, up, bias, *_ = call
    if wants_gradient(x, weight, up, bias) and not call.interleaved:
        wanted = backward_epilogues(
            call.activation, is_gated=call.is_gated, bias=bias, recompute=call.recompute
        )
        backward.tell(x, down, wanted)


def _autograd(*given: Any) -> torch.Tensor:
    call = _Call(*given)
    x, weight, down, up, bias, down_bias, residual, activation, interleaved, recompute = call
    wanted = wants_gradient(x, weight, up, bias) and not interleaved
    if wanted and functions.sizes_are_numbers(x, weight, down):
        choices = backward_epilogues(
            activation, is_gated=call.is_gated, bias=bias, recompute=recompute
        )
        epilogue = backward.chosen(x, down, choices)
        if epilogue is not None:
            within = residual if _adds(call) else None
            out: torch.Tensor = MLP.apply(  # type: ignore[no-untyped-call]
                x, weight, down, up, bias, down_bias, within, epilogue
            )[0]
            return out if within is residual or residual is None else out + residual
    return _composed(call)


def _adds(call: _Call) -> bool:
    """Whether a kernel computes the second product and adds the residual."""
    engine, x, down = current(), call.x, call.down
    epilogue = Epilogue.made_of(bias=call.down_bias is not None, residual=True)
    if engine is None or epilogue is None or call.residual is None:
        return False
    hidden = functions.contiguous(x, (*x.shape[:-1], down.shape[1]))
    plan = engine.plan(Form.LINEAR, hidden, down, epilogue=epilogue)
    return plan is not None and plan.suits(call.down_bias, call.residual)


def _autocast(*given: Any) -> torch.Tensor:
    call = _Call(*given)
    dtype = torch.get_autocast_dtype(call.x.device.type)
    cast = (operators.cast(one, dtype) for one in call.operands[:-1])
    return _autograd(*cast, *call[6:])


class MLP(torch.autograd.Function):
    """`mlp` with a backward epilogue; gate and up lie in one tensor throughout.

    Gives what the activation is applied to as well, so that gradients of gradients need no more
    than is kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        down: torch.Tensor,
        up: torch.Tensor | None,
        bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        epilogue: Epilogue,
    ) -> fused.Outputs:
        """The second layer's output, and aux."""
        parts = epilogue.backward
        assert parts is not None  # noqa: S101 - chosen among such
        hidden, aux = _hidden(x, weight, up, bias, parts)
        wants_x, wants_weight, wants_down, wants_up, wants_bias = ctx.needs_input_grad[:5]
        wants_weights = wants_weight or wants_up
        of_first = (weight, up) if wants_x or wants_weights else (None, None)
        ctx.save_for_backward(
            x if wants_weights else None,
            *of_first,
            down if wants_x or wants_weights or wants_bias or wants_down else None,
            aux,
            hidden if wants_down and not parts.activated else None,
        )
        ctx.epilogue = epilogue
        ctx.set_materialize_grads(False)
        adding = Epilogue.made_of(bias=down_bias is not None, residual=residual is not None)
        if residual is not None and adding is not None:
            return fused.with_aux(hidden, down, down_bias, residual, adding)[0], aux
        return backward.linear(hidden, down, down_bias), aux

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Gradients of all operands."""
        dy: Any
        daux: Any
        dy, daux = (None if grad is None else observers.dense(grad) for grad in grads)
        if dy is None and daux is None:
            return (None,) * 8
        x, weight, up, down, aux, hidden = ctx.saved_tensors
        wants_x, *wants_weights = (ctx.needs_input_grad[at] for at in (0, 1, 3))
        wants_down, wants_bias, wants_down_bias, wants_residual = (
            ctx.needs_input_grad[at] for at in (2, 4, 5, 6)
        )
        parts, sums, ddown = ctx.epilogue.backward, None, None
        again = observers.only_torch_differentiates(dy if daux is None else daux)
        if dy is not None:
            if not again:
                dy = dy.contiguous()
            if wants_x or wants_bias or any(wants_weights):
                through, value, sums = _through(ctx.epilogue, dy, down, aux, again=again)
                hidden = value if hidden is None else hidden
                if daux is not None:
                    through, sums = daux + through, None
                daux = through
            if wants_down and (again or hidden is None):
                hidden = backward.activated(parts, aux)
            _, ddown = backward.gradients(False, wants_down, dy, hidden, down)
        dx: torch.Tensor | None = None
        dweights: list[torch.Tensor | None] = [None, None]
        products = [] if daux is None else [daux] if up is None else daux.chunk(2, -1)
        for at, (dp, rows) in enumerate(zip(products, (weight, up), strict=False)):
            part, dweights[at] = backward.gradients(wants_x, wants_weights[at], dp, x, rows)
            dx = part if dx is None or part is None else dx + part if again else dx.add_(part)
        dbias = None
        if wants_bias and daux is not None:
            dbias = functions.column_sums(daux) if sums is None or not sums.numel() else sums
        ddown_bias = functions.column_sums(dy) if wants_down_bias and dy is not None else None
        dweight, dup = dweights
        return dx, dweight, ddown, dup, dbias, ddown_bias, dy if wants_residual else None, None


def _through(
    epilogue: Epilogue, dy: torch.Tensor, down: torch.Tensor, aux: torch.Tensor, *, again: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The gradient of aux; the activation's value and the bias gradient where a kernel gives them.

    `again`: by torch's operators, to be differentiated.
    """
    if not again:
        return backward.product(dy, down, aux, epilogue)
    parts = epilogue.backward
    assert parts is not None  # noqa: S101 - chosen among such
    return backward.through(parts, fallback.product(Form.MATMUL, dy, down), aux), None, None


def _hidden(
    x: torch.Tensor,
    weight: torch.Tensor,
    up: torch.Tensor | None,
    bias: torch.Tensor | None,
    parts: Backward,
) -> fused.Outputs:
    """What the second layer takes, and aux: by one kernel where one wins. Below autograd."""
    engine, is_gated = functions.engine_here(), parts.gated
    epilogue = Epilogue.made_of(
        bias=bias is not None, activation=parts.activation, gate=is_gated, aux=True
    )
    first, second = gated.parts(weight, up) if is_gated else (weight, weight)
    if engine is not None and epilogue is not None:
        plan = engine.plan(Form.LINEAR, x, first, epilogue=epilogue)
        if plan is not None and is_gated and plan.pairs(first, second):
            return gated.with_aux(x, weight, up, False, epilogue)
        if plan is not None and not is_gated and plan.suits(bias, None):
            return fused.with_aux(x, weight, bias, None, epilogue)
    apart = up is not None
    aux = _side_by_side(x, first, second, bias) if apart else backward.linear(x, weight, bias)
    aux = aux.contiguous()
    return backward.activated(parts, aux), aux


def _side_by_side(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`x·gateᵀ | x·upᵀ`, and the bias. Below autograd.

    Kernels of ours write packed rows; cuBLAS writes the halves where they belong.
    """
    biases = (None, None) if bias is None else bias.chunk(2)
    if not observers.unobserved():
        halves = [backward.linear(x, *one) for one in zip((gate, up), biases, strict=True)]
        return torch.cat(halves, -1)
    engine, rows, width = current(), backward.rows(x), gate.shape[0]
    found = x.new_empty((rows.shape[0], 2 * width))
    halves = list(found.chunk(2, -1))
    for weight, added, half in zip((gate, up), biases, halves, strict=True):
        if engine is not None:
            engine.run(None, Form.LINEAR, x, weight)  # torch's: whoever counts products is told
        if added is None:
            torch.mm(rows, weight.t(), out=half)
        else:
            torch.addmm(added, rows, weight.t(), out=half)
    return found.view(*x.shape[:-1], 2 * width)


def _compute(*given: Any) -> torch.Tensor:
    return _composed(_Call(*given)).contiguous()


def _fake(*given: Any) -> torch.Tensor:
    call = _Call(*given)
    return fused.fake(call.x, call.down, residual=call.residual)


register(
    "mlp(Tensor x, Tensor weight, Tensor down, Tensor? up, Tensor? bias, Tensor? down_bias, "
    "Tensor? residual, str activation, bool interleaved, bool recompute) -> Tensor",
    _compute,
    _fake,
    _autograd,
    _autocast,
)
