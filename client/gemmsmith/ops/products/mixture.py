"""`gemmsmith.experts`: a mixture of experts' layer, from its router's choice to its output.

Two grouped products forwards and four backwards, each by its winner or by torch, and few passes
over memory between them (passes.py): tokens are gathered once, the router's shares are multiplied
in with the activation (by the first product's kernel, where one that does it wins), so that a
token's experts are just added up, and the backward pass gathers again instead of keeping what was
gathered. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from gemmsmith.ops.engine.forms import Form, Spec
from gemmsmith.ops.engine.functions import is_traced
from gemmsmith.ops.products import passes
from gemmsmith.ops.products.grouped import gate_epilogue, gated_by, gated_plan, grouped_below
from gemmsmith.ops.products.registry import register, wants_gradient
from gemmsmith.ops.products.telling import Multiplied, is_told, tell

MOST_EXPERTS, MOST_SLOTS = 256, 2**18
"""That a GPU sorts in two kernels of ours; torch's sort takes about ten, but scales better."""
_SMALL = 255
"""Experts whose numbers, and one for those of other ranks, are sorted as bytes: in one pass."""


class Routing(NamedTuple):
    """Which slot each row of sorted tokens stands for; see passes.py.

    Attributes:
        slots: [R] int64, R = T * chosen.
        places: [T, chosen] int64, the row of each slot.
        ends: [E] int32, where each expert's rows end. Rows from the last on are no expert's here.
    """

    slots: torch.Tensor
    places: torch.Tensor
    ends: torch.Tensor

    @property
    def used(self) -> torch.Tensor:
        """How many rows are some expert's; on the device."""
        return self.ends[-1:]


def experts(
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """The weighted sum of the chosen experts, SwiGLU each, for every token.

    `sum_j top_k_weights[t, j] * down[e] · (silu(gate) * up)`, `gate, up = gate_up[e] · x[t]`, and
    `e = top_k_index[t, j]`, in the tokens' type; sums over experts are FP32. Deterministic.

    Args:
        hidden_states: [T, width], bf16 or fp16.
        top_k_index: [T, chosen] integers; numbers from E on are experts of other ranks and add 0.
        top_k_weights: [T, chosen], of any float type; has a gradient.
        gate_up: [E, 2 * inner, width], each expert's gate rows, then its up rows.
        down: [E, width, inner].

    Raises:
        ValueError: sizes or types do not match; the message names them.
    """
    _check(hidden_states, top_k_index, top_k_weights, gate_up, down)
    operands = (hidden_states, top_k_index, top_k_weights, gate_up, down)
    compute = torch.ops.gemmsmith.experts if torch.compiler.is_compiling() else _autograd
    found: torch.Tensor = compute(*operands, wants_gradient(*operands))[0]
    return found


def route(top_k_index: torch.Tensor, number: int) -> Routing:
    """The routing of tokens to that many experts, [T, chosen] numbers from 0 on."""
    if top_k_index.is_cuda and 0 < number <= MOST_EXPERTS and 0 < top_k_index.numel() <= MOST_SLOTS:
        from gemmsmith.ops.products import triton_routing

        return Routing(*triton_routing.route(top_k_index, number))
    flat = top_k_index.flatten().clamp(max=number)
    if number <= _SMALL:
        flat = flat.to(torch.uint8)
    of_row, slots = flat.sort(stable=True)
    last = torch.arange(number, device=flat.device, dtype=of_row.dtype)
    ends = torch.searchsorted(of_row, last, right=True, out_int32=True)
    rows = torch.arange(len(slots), device=slots.device)
    places = torch.empty_like(slots).scatter_(0, slots, rows)
    return Routing(slots=slots, places=places.view_as(top_k_index), ends=ends)


def _check(
    tokens: torch.Tensor,
    index: torch.Tensor,
    shares: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> None:
    if tokens.dim() != 2 or gate_up.dim() != 3 or down.dim() != 3 or index.dim() != 2:
        raise ValueError(
            "experts takes hidden_states [T, width], top_k_index [T, chosen], gate_up "
            f"[E, 2 * inner, width] and down [E, width, inner], not {list(tokens.shape)}, "
            f"{list(index.shape)}, {list(gate_up.shape)} and {list(down.shape)}"
        )
    width, inner = tokens.shape[1], down.shape[2]
    number = gate_up.shape[0]
    wanted = ((number, 2 * inner, width), (number, width, inner), index.shape)
    given = (gate_up.shape, down.shape, shares.shape)
    for name, want, got in zip(("gate_up", "down", "top_k_weights"), wanted, given, strict=True):
        if tuple(got) != tuple(want):
            raise ValueError(f"{name} must be {list(want)} here, not {list(got)}")
    if index.shape[0] != tokens.shape[0]:
        raise ValueError(f"top_k_index has {index.shape[0]} rows for {tokens.shape[0]} tokens")
    if not gate_up.dtype == down.dtype == tokens.dtype:
        raise ValueError(
            f"hidden_states, gate_up and down must have one type, not {tokens.dtype}, "
            f"{gate_up.dtype} and {down.dtype}"
        )


Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Tokens, index, shares, gate_up, down."""

Computed = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""The result; what the backward pass needs: gate and up of each row, empty where nobody keeps them,
and the routing."""


def _compute(
    tokens: torch.Tensor,
    index: torch.Tensor,
    shares: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    keep: bool = True,
) -> Computed:
    routing = route(index, gate_up.shape[0])
    used = routing.used
    opened, hidden = _open(tokens, shares, gate_up.mT, routing, keep)
    out = grouped_below(hidden, down.mT, routing.ends)
    found = passes.gather_sum(out, routing.places, used)
    return found, opened if keep else opened.new_empty(0), *routing


def _open(
    tokens: torch.Tensor,
    shares: torch.Tensor,
    gate_up: torch.Tensor,
    routing: Routing,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up of each row, which may be empty where they are not kept, and what the second
    product reads: by one kernel, or by a product and a pass.
    """
    slots = routing.slots
    gate, up = gate_up.chunk(2, dim=-1)
    size = (slots.shape[0], tokens.shape[1])
    of_rows = Spec(tokens.dtype, tokens.device, size, (size[1], 1))
    plan = gated_plan(of_rows, gate_up, gate, keep=keep)
    if plan is not None:
        rows, factors = passes.scatter_with_shares(tokens, shares, routing.places)
        found = gated_by(plan, rows, gate, up, factors, routing.ends)
        if found is not None:
            hidden, opened = found
            return opened, hidden
    else:
        rows = passes.scatter(tokens, routing.places)
    if is_told():
        tell(rows, gate, gate_epilogue(keep=keep), gate_up.shape[0])
    opened = grouped_below(rows, gate_up, routing.ends)
    return opened, passes.activate(opened, shares, slots, routing.used)


def _differentiate(
    gradient: torch.Tensor,
    tokens: torch.Tensor,
    shares: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    opened: torch.Tensor,
    slots: torch.Tensor,
    places: torch.Tensor,
    ends: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    used = ends[-1:]
    wanted = passes.scatter(gradient, places)
    of_hidden = grouped_below(wanted, down, ends)
    of_opened, of_shares, hidden = passes.activate_backward(opened, shares, slots, used, of_hidden)
    del of_hidden  # these are the largest tensors of a step: none is kept longer than it is read
    of_down = grouped_below(wanted.mT, hidden, ends)
    del wanted, hidden
    of_tokens = passes.gather_sum(grouped_below(of_opened, gate_up, ends), places, used)
    of_gate_up = grouped_below(of_opened.mT, passes.scatter(tokens, places), ends)
    return of_tokens, of_shares, of_gate_up, of_down


class Experts(torch.autograd.Function):
    """`experts` with its backward pass."""

    @staticmethod
    def forward(ctx: Any, *operands: *Operands) -> Any:
        """The result first; the rest is for the backward pass alone."""
        tokens, _, shares, gate_up, down = operands
        found = _below(operands, keep=True)
        ctx.save_for_backward(tokens, shares, gate_up, down, *found[1:])
        ctx.mark_non_differentiable(*found[1:])
        ctx.set_materialize_grads(False)  # or zeros as large as each output are written for nothing
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Gradients of the tokens, the shares and both weights."""
        if gradients[0] is None:
            return (None,) * 5
        operands = (gradients[0], *ctx.saved_tensors)
        compute = torch.ops.gemmsmith.experts_backward if _is_traced(*operands) else _differentiate
        of_tokens, of_shares, of_gate_up, of_down = compute(*operands)
        return of_tokens, None, of_shares, of_gate_up, of_down


def _autograd(
    tokens: torch.Tensor,
    index: torch.Tensor,
    shares: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    keep: bool = True,
) -> Any:
    operands = (tokens, index, shares, gate_up, down)
    if wants_gradient(*operands):
        return Experts.apply(*operands)  # type: ignore[no-untyped-call]
    return _below(operands, keep=keep)


def _below(operands: Operands, *, keep: bool) -> Any:
    """The layer below autograd: one operator where a graph is made of it."""
    if _is_traced(*operands):
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.gemmsmith.experts(*operands, keep)
    return _compute(*operands, keep=keep)


def _is_traced(*operands: torch.Tensor) -> bool:
    return torch.compiler.is_compiling() or is_traced(operands[0])


def _fake(
    tokens: torch.Tensor,
    index: torch.Tensor,
    shares: torch.Tensor,  # noqa: ARG001
    gate_up: torch.Tensor,
    down: torch.Tensor,  # noqa: ARG001
    keep: bool = True,
) -> Computed:
    rows = index.numel()
    return (
        torch.empty_like(tokens, memory_format=torch.contiguous_format),
        tokens.new_empty((rows, gate_up.shape[1]) if keep else (0,)),
        index.new_empty(rows, dtype=torch.int64),
        index.new_empty(index.shape, dtype=torch.int64),
        index.new_empty(gate_up.shape[0], dtype=torch.int32),
    )


def _fake_gradients(_: torch.Tensor, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    kept = torch.contiguous_format
    return tuple(torch.empty_like(one, memory_format=kept) for one in operands[:4])


def products(given: dict[str, Any]) -> Iterator[Multiplied]:
    """What a call of the operator multiplies, by its arguments."""
    tokens, gate_up, down = given["tokens"], given["gate_up"].mT, given["down"].mT
    number, count = gate_up.shape[0], given["index"].numel()
    rows = tokens.new_empty(count, tokens.shape[1])
    hidden = tokens.new_empty(count, down.shape[1])
    yield Multiplied(Form.GROUPED, rows, gate_up, groups=number)
    yield Multiplied(Form.GROUPED, hidden, down, groups=number)
    gate, epilogue = gate_up.chunk(2, dim=-1)[0], gate_epilogue(keep=given.get("keep", True))
    yield Multiplied(Form.GROUPED, rows, gate, epilogue=epilogue, groups=number)


def products_of_gradients(given: dict[str, Any]) -> Iterator[Multiplied]:
    """The same of its backward pass."""
    gate_up, down, opened = given["gate_up"], given["down"], given["opened"]
    count, number = opened.shape[0], down.shape[0]
    rows = opened.new_empty(count, gate_up.shape[2])
    hidden = opened.new_empty(count, down.shape[2])
    for a, b in ((rows, down), (rows.mT, hidden), (opened, gate_up), (opened.mT, rows)):
        yield Multiplied(Form.GROUPED, a, b, groups=number)


_WEIGHTS = "Tensor shares, Tensor gate_up, Tensor down"
register(
    f"experts(Tensor tokens, Tensor index, {_WEIGHTS}, bool keep=True) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    _compute,
    _fake,
    _autograd,
)
register(
    f"experts_backward(Tensor gradient, Tensor tokens, {_WEIGHTS}, "
    "Tensor opened, Tensor slots, Tensor places, Tensor ends) -> (Tensor, Tensor, Tensor, Tensor)",
    _differentiate,
    _fake_gradients,
)
