"""Grouped products of a layer of experts together with its gate, forwards and backwards.

Each is one kernel where that wins, instead of a product and a pass over memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch

from gemmsmith.core.epilogue import Epilogue
from gemmsmith.ops.engine import observers
from gemmsmith.ops.engine.forms import Form, Spec
from gemmsmith.ops.engine.functions import Decided, Outputs
from gemmsmith.ops.engine.in_use import current
from gemmsmith.ops.engine.operands import Operands, present
from gemmsmith.ops.engine.plan import Plan
from gemmsmith.ops.products import passes
from gemmsmith.ops.products.recording import is_recording, record
from gemmsmith.runtime.abi import ROW_GRADIENT_COLUMNS

PASS_BYTES_PER_US = 4.8e6
"""Device memory moved in a microsecond by the pass that a gated kernel saves, at most."""


ACTIVATION = "silu"
"""That of the layers of experts that are understood."""


def gate_epilogue(*, keep: bool) -> Epilogue:
    return cast("Epilogue", Epilogue.made_of(activation=ACTIVATION, gate=True, aux=keep))


def backward_epilogue(*, activated: bool) -> Epilogue:
    epilogue = Epilogue.backward_of(ACTIVATION, gated=True, activated=activated)
    return cast("Epilogue", epilogue)


def gated_plan(rows: Spec, gate_up: torch.Tensor, gate: torch.Tensor, *, keep: bool) -> Plan | None:
    """The plan of the first product with its gate. Returns None if a product and a pass are faster.

    Args:
        rows: [R, K], tokens sorted by expert.
        gate_up: [E, K, 2 * I].
        gate: [E, K, I], its first half.
        keep: whether gate and up are stored as well.
    """
    return _fused_plan(rows, gate, gate_epilogue(keep=keep), gate_up, moved=3)


def _fused_plan(
    rows: Spec, weight: torch.Tensor, epilogue: Epilogue, bare: torch.Tensor, *, moved: int
) -> Plan | None:
    """The plan of a product with its epilogue, or None.

    Such a kernel has won over torch's product and a pass. If a kernel for the product alone has won
    too, the fused one must save as much time as the pass takes. Where rows must have the same bits
    at every M, times do not matter: a fused product is rounded otherwise.

    Args:
        rows: of the product.
        weight: of the fused product.
        epilogue: of the fused product.
        bare: the weight of the product alone.
        moved: matrices [R, I] that the pass reads and writes.
    """
    engine, groups = current(), weight.shape[0]
    if engine is None or not observers.unobserved():
        return None
    plan = engine.plan(Form.GROUPED, rows, weight, groups=groups, epilogue=epilogue)
    if plan is None or engine.is_invariant:
        return plan
    product = engine.plan(Form.GROUPED, rows, bare, groups=groups)
    if product is None:
        return plan
    if plan.time_us is None or product.time_us is None:
        return None
    problem = plan.shape.problem
    of_pass = moved * problem.m * problem.columns * problem.operation.d.bytes / PASS_BYTES_PER_US
    return plan if plan.time_us <= product.time_us + of_pass else None


def gated_by(
    plan: Plan,
    rows: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    factors: torch.Tensor,
    offs: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`factors[R] * silu(gate) * up`, [R, I], and gate and up, [R, 2 * I], empty if not stored.

    Returns None if the kernel does not take these very operands.
    """
    results = _run(plan, rows, gate, {"up": up, "row_scale": factors, "offsets": offs})
    if results is None:
        return None
    d, written = results
    return d, written["aux"] if written else rows.new_empty(0)


def _run(
    plan: Plan, rows: torch.Tensor, weight: torch.Tensor, operands: Operands
) -> Outputs | None:
    engine = current()
    if engine is None:
        return None
    return Decided(engine, plan, Form.GROUPED, rows, weight, operands).run()


class Saved(NamedTuple):
    """What the backward pass of a layer of experts reads.

    Attributes:
        tokens: None if gate_up's gradient is not needed.
        shares: of the layer.
        gate_up: None if the tokens' gradient is not needed.
        down: [E, width, inner]. None if only its own gradient is needed.
        opened: result of the first product.
        slots: of the routing.
        places: of the routing.
        ends: of the routing.
        opening: what follows the first product.
        turned: whether gate_up, and down, lie in memory as [E, K, N]: their gradients then do, too.
    """

    tokens: Any
    shares: torch.Tensor
    gate_up: Any
    down: Any
    opened: torch.Tensor
    slots: torch.Tensor
    places: torch.Tensor
    ends: torch.Tensor
    opening: passes.Opening = passes.SWIGLU
    turned: tuple[bool, bool] = (False, False)


def differentiate(
    multiply: Callable[..., torch.Tensor],
    gradient: torch.Tensor,
    saved: Saved,
    needs: tuple[bool, bool, bool],
    *,
    fuses: bool,
) -> tuple[torch.Tensor | None, passes.ActivateGradients]:
    """The rows of the result's gradient, and `passes.activate_backward` of their product with down.

    The rows are None if the activation's value is not needed: then neither is down's gradient.

    Args:
        multiply: a grouped product.
        gradient: of the layer's result, [T, width].
        saved: of the layer.
        needs: of `passes.activate_backward`.
        fuses: whether one kernel may compute all of it.
    """
    _, shares, _, down, opened, slots, places, ends, opening, _ = saved
    needs_opened, needs_shares, needs_value = needs
    epilogue = backward_epilogue(activated=needs_value)
    fuses = fuses and needs_opened and opening.is_swiglu
    size = (slots.shape[0], gradient.shape[1])
    of_rows = Spec(gradient.dtype, gradient.device, size, (size[1], 1))
    plan = None
    if fuses:
        plan = _fused_plan(of_rows, down, epilogue, down, moved=5 + needs_value)
    if plan is None:
        rows = passes.scatter(gradient, places)
    else:
        rows, factors = passes.scatter_with_shares(gradient, shares, places)
        sums = None
        if needs_shares:
            slabs = -(-down.shape[2] // ROW_GRADIENT_COLUMNS)
            sums = factors.new_empty(size[0], slabs)
        operands = {"aux": opened, "row_scale": factors, "offsets": ends}
        operands |= present(row_gradient=sums)
        results = _run(plan, rows, down, operands) if plan.suits(operands) else None
        if results is not None:
            of_opened, written = results
            of_shares = None
            if sums is not None:
                of_shares = passes.gather_shares(sums, places, ends[-1:]).to(shares.dtype)
            gradients = passes.ActivateGradients(of_opened, of_shares, written.get("activated"))
            return rows if needs_value else None, gradients
    if fuses and is_recording():
        record(rows, down, epilogue, down.shape[0])
    of_hidden = multiply(rows, down, ends)
    kept = rows if needs_value else None
    del rows  # among the largest tensors of a step
    used = ends[-1:]
    return kept, passes.activate_backward(opened, shares, slots, used, of_hidden, needs, opening)
