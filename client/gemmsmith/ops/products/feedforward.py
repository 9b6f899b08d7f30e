"""`gemmsmith.mlp`: a feed-forward layer, plain or gated, whose passes are fused where kernels win.

The forward pass is `linear` or `gated_linear`, then `linear`. In the backward pass the gradient of
the activation needs the next layer's input gradient, and one kernel computes both. Where such a
backward product (`gemmsmith.ops.products.backward`) has a winner for these sizes, `MLP` runs both
layers as one autograd function. Elsewhere they are composed.

The backward pass keeps x, what the activation is applied to (of a gated layer gate and up in one
tensor) and the input of the second layer: no more than torch keeps, and of a gated layer less. With
`recompute` that input is not kept either: the backward product computes it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from gemmsmith.core.activations import activated, check_activation
from gemmsmith.core.epilogue import Activation, Backward, Epilogue
from gemmsmith.ops.engine import fallback, functions, observers
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.forms import Form
from gemmsmith.ops.engine.in_use import current
from gemmsmith.ops.engine.operands import present
from gemmsmith.ops.products import backward, fused, gated, layer, recording
from gemmsmith.ops.products.registry import (
    CallWay,
    as_cast,
    fused_or_composed,
    register,
    wants_gradient,
)


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
    layers = Layers(x, weight, down, up, bias, down_bias, residual)
    call = MlpCall(*layers, activation, interleaved, recompute)
    _check(call)
    if recording.is_recording():
        call.record()
        return run_composed(*call)
    return call.run()


class Layers(NamedTuple):
    """The tensors of `mlp`, in the order of its operator."""

    x: torch.Tensor
    weight: torch.Tensor
    down: torch.Tensor
    up: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None


class MlpCall(NamedTuple):
    """The arguments of the operator `mlp`, in its order; see `mlp`."""

    x: torch.Tensor
    weight: torch.Tensor
    down: torch.Tensor
    up: torch.Tensor | None
    bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    residual: torch.Tensor | None
    activation: str
    interleaved: bool = False
    recompute: bool = False

    @property
    def layers(self) -> Layers:
        return Layers(*self[:7])

    @property
    def is_gated(self) -> bool:
        """Whether half of the first product gates the other half."""
        return self.up is not None or self.weight.shape[0] == 2 * self.down.shape[1]

    @property
    def backward_epilogues(self) -> tuple[Epilogue, ...]:
        return backward_epilogues(
            self.activation, is_gated=self.is_gated, bias=self.bias, recompute=self.recompute
        )

    def record(self) -> None:
        if not self.interleaved and wants_gradient(self.x, self.weight, self.up, self.bias):
            backward.record(self.x, self.down, self.backward_epilogues)

    def wins(self, engine: Engine) -> bool:
        """Whether a backward product with an epilogue has won, of what autocast gives."""
        if not functions.sizes_are_numbers(self.x, self.weight, self.down):
            return False
        operands = (as_cast(self.x), as_cast(self.down))
        return backward.choose(engine, *operands, self.backward_epilogues) is not None

    def lacks(self, engine: Engine) -> bool:
        """Whether it is decided that no backward product has won."""
        operands = (as_cast(self.x), as_cast(self.down))
        return backward.lacks(engine, *operands, self.backward_epilogues)

    def saves_little(self, _engine: Engine | None) -> bool:
        """A fused backward product saves passes over the largest tensors, whatever its kernel."""
        return False

    def run_if_fused(
        self, _way: CallWay, engine: Engine | None, *, patched: bool = False
    ) -> torch.Tensor | None:
        """Both layers as one function. Returns None if no backward product with an epilogue won."""
        del patched  # a backward kernel saves enough
        x, residual = self.x, self.residual
        if self.interleaved or not wants_gradient(x, self.weight, self.up, self.bias):
            return None
        if not functions.sizes_are_numbers(x, self.weight, self.down):
            return None
        epilogue = backward.choose(engine, x, self.down, self.backward_epilogues)
        if epilogue is None:
            return None
        layers, added = self.layers, None
        if residual is not None and not _adds(engine, self):
            layers, added = layers._replace(residual=None), residual
        d: torch.Tensor = MLP.apply(*layers, epilogue)[0]  # type: ignore[no-untyped-call]
        return d if added is None else d + added

    def run(self) -> torch.Tensor:
        return _mlp(*self)


def _check(call: MlpCall) -> None:
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


def run_composed(*arguments: Any) -> torch.Tensor:
    """Layer after layer."""
    call = MlpCall(*arguments)
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
    """The epilogues that the backward product of the second layer may have, the best first."""
    sums = bias is not None and bias.requires_grad and not is_gated
    of = Epilogue.backward_of
    choices = (
        of(activation, gated=is_gated, activated=True) if recompute else None,
        of(activation, gated=is_gated, bias_gradient=True) if sums else None,
        of(activation, gated=is_gated),
    )
    return tuple(epilogue for epilogue in choices if epilogue is not None)


def _adds(engine: Engine | None, call: MlpCall) -> bool:
    """Whether a kernel computes the second product and adds the residual."""
    x, down = call.x, call.down
    epilogue = Epilogue.made_of(bias=call.down_bias is not None, residual=True)
    if engine is None or epilogue is None:
        return False
    hidden = functions.contiguous(x, (*x.shape[:-1], down.shape[1]))
    plan = engine.plan(Form.LINEAR, hidden, down, epilogue=epilogue)
    return plan is not None and plan.suits(present(bias=call.down_bias, residual=call.residual))


class MLP(torch.autograd.Function):
    """`mlp` with a backward epilogue. Gate and up lie in one tensor in both passes.

    Gives what the activation is applied to as well, so that gradients of gradients need no more
    than is kept. Its arguments are those of `Layers`, and the epilogue.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> layer.Outputs:
        """The second layer's output, and aux."""
        epilogue, layers = arguments[-1], Layers(*arguments[:-1])
        parts = epilogue.backward
        assert parts is not None  # noqa: S101 - chosen among such
        hidden, aux = _hidden(layers, parts)
        x, weight, down, up, _, down_bias, residual = layers
        needs_x, needs_weight, needs_down, needs_up, needs_bias = ctx.needs_input_grad[:5]
        needs_weights = needs_weight or needs_up
        first_weights = (weight, up) if needs_x or needs_weights else (None, None)
        ctx.save_for_backward(
            x if needs_weights else None,
            *first_weights,
            down if needs_x or needs_weights or needs_bias or needs_down else None,
            aux,
            hidden if needs_down and not parts.activated else None,
        )
        ctx.epilogue = epilogue
        ctx.set_materialize_grads(False)
        adding = Epilogue.made_of(bias=down_bias is not None, residual=True)
        if residual is None or adding is None:
            return backward.linear(hidden, down, down_bias), aux
        operands = present(bias=down_bias, residual=residual)
        return layer.run_fused(hidden, down, operands, layer.LinearFusion(adding))[0], aux

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Gradients of all tensors."""
        dy: Any
        daux: Any
        dy, daux = (None if grad is None else observers.dense(grad) for grad in grads)
        if dy is None and daux is None:
            return (None,) * 8
        x, weight, up, down, aux, hidden = ctx.saved_tensors
        needs: Any = Layers(*ctx.needs_input_grad[:7])
        epilogue: Epilogue = ctx.epilogue
        parts, sums, ddown = epilogue.backward, None, None
        assert parts is not None  # noqa: S101 - chosen among such
        is_torchs = observers.only_torch_differentiates(dy if daux is None else daux)
        if dy is not None:
            if not is_torchs:
                dy = dy.contiguous()
            if needs.x or needs.bias or needs.weight or needs.up:
                if is_torchs:  # by torch's operators, to be differentiated
                    product = fallback.product(Form.MATMUL, dy, down)
                    part = backward.through(parts, product, aux)
                else:
                    part, value, sums = backward.product(dy, down, aux, epilogue)
                    hidden = value if hidden is None else hidden
                if daux is not None:
                    part, sums = daux + part, None
                daux = part
            if needs.down and (is_torchs or hidden is None):
                hidden = activated(parts, aux)
            _, (ddown,) = backward.gradients([dy], hidden, [down], (False, needs.down))
        dx = dweight = dup = dbias = None
        if daux is not None:
            products = [daux] if up is None else daux.chunk(2, -1)
            needed = (needs.x, needs.weight, needs.up)
            dx, (dweight, dup) = backward.gradients(products, x, (weight, up), needed)
        if needs.bias and daux is not None:
            dbias = functions.column_sums(daux) if sums is None or not sums.numel() else sums
        return (
            dx,
            dweight,
            ddown,
            dup,
            dbias,
            functions.column_sums(dy) if needs.down_bias and dy is not None else None,
            dy if needs.residual else None,
            None,
        )


def _hidden(layers: Layers, parts: Backward) -> tuple[torch.Tensor, torch.Tensor]:
    """The input of the second layer, and aux: by one kernel where one wins. Below autograd."""
    x, weight, _, up, bias, *_ = layers
    epilogue = Epilogue.made_of(
        bias=bias is not None, activation=parts.activation, gate=parts.gated, aux=True
    )
    if epilogue is not None:
        operands = present(up=up) if parts.gated else present(bias=bias)
        decided = layer.decide(functions.engine_here(), x, weight, operands, epilogue)
        if decided is not None:
            fusion = layer.LinearFusion(epilogue, decided=decided)
            value, stored = layer.run_fused(x, weight, operands, fusion)
            if stored is not None:
                return value, stored
    aux = backward.linear(x, weight, bias) if up is None else _side_by_side(x, weight, up, bias)
    aux = aux.contiguous()
    return activated(parts, aux), aux


def _side_by_side(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`x·gateᵀ | x·upᵀ`, and the bias. Below autograd.

    Kernels of ours write packed rows; cuBLAS writes the halves where they belong.
    """
    biases = (None, None) if bias is None else bias.chunk(2)
    if not observers.unobserved():
        layers = zip((gate, up), biases, strict=True)
        return torch.cat([backward.linear(x, weight, part) for weight, part in layers], -1)
    engine, rows, width = current(), x.reshape(-1, x.shape[-1]), gate.shape[0]
    both = x.new_empty((rows.shape[0], 2 * width))
    for weight, part, half in zip((gate, up), biases, both.chunk(2, -1), strict=True):
        if engine is not None:
            engine.run(None, Form.LINEAR, x, weight)  # for the report: torch computes it
        if part is None:
            torch.mm(rows, weight.t(), out=half)
        else:
            torch.addmm(part, rows, weight.t(), out=half)
    return both.view(*x.shape[:-1], 2 * width)


def _compute(*arguments: Any) -> torch.Tensor:
    return run_composed(*arguments).contiguous()


def _fake(*arguments: Any) -> torch.Tensor:
    call = MlpCall(*arguments)
    return fused.fake(fused.LinearCall(call.x, call.down, residual=call.residual))


_mlp: Callable[..., torch.Tensor] = register(
    "mlp(Tensor x, Tensor weight, Tensor down, Tensor? up, Tensor? bias, Tensor? down_bias, "
    "Tensor? residual, str activation, bool interleaved, bool recompute) -> Tensor",
    _compute,
    _fake,
    fused_or_composed(MlpCall, run_composed),
    by_torch=run_composed,
    needs_engine=True,
    casts=6,
)
