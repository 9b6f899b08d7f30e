"""`gemmsmith.experts`: a mixture of experts' layer, from its router's choice to its output.

A layer is two grouped products in the forward pass and four in the backward pass, each by its
winner or by torch, and few passes over memory between them (passes.py). Tokens are gathered once.
The activation multiplies by the router's shares (in the first product's kernel, if one with a gate
wins), so that a token's experts are just added up. The backward pass gathers again instead of
keeping the gathered tokens, and computes only the gradients that are needed. Nothing waits for the
device.

torch's own operators compute the same steps for tensors that kernels cannot have (`registry.ours`),
and for gradients of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from gemmsmith.ops.engine.by_triton import is_derived
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.forms import Form, Spec
from gemmsmith.ops.engine.observers import is_traced
from gemmsmith.ops.products import passes
from gemmsmith.ops.products.gates import (
    backward_epilogue,
    differentiate,
    gate_epilogue,
    gated_by,
    gated_plan,
)
from gemmsmith.ops.products.grouped import BEGIN, aligned, derivable, grouped_below
from gemmsmith.ops.products.recording import Multiplied, is_recording, record
from gemmsmith.ops.products.registry import CallWay, ours, register, wants_gradient
from gemmsmith.ops.products.routing import Routing, route

_TYPES = (torch.bfloat16, torch.float16, torch.float32)

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Tokens, index, shares, gate_up and down of `experts`."""


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
        hidden_states: [T, width], bf16 or fp16. Its rows, and those of `inner` elements, must be
            multiples of 16 bytes.
        top_k_index: [T, chosen] integers; other numbers than 0 to E - 1 are experts of other ranks
            and add 0.
        top_k_weights: [T, chosen], of any float type; has a gradient.
        gate_up: [E, 2 * inner, width], each expert's gate rows, then its up rows.
        down: [E, width, inner].

    Raises:
        ValueError: sizes, types or devices do not match; the message names them.
    """
    operands = (hidden_states, top_k_index, top_k_weights, gate_up, down)
    reason = refusal(*operands)
    if reason is not None:
        raise ValueError(reason)
    if not ours(*operands):
        return _compute(*operands, keep=False, multiply=derivable)[0]
    return computed(*operands)


def computed(*operands: *Operands) -> torch.Tensor:
    """`experts` of operands that are `ours` and have no `refusal`."""
    keep, is_compiling = wants_gradient(*operands), torch.compiler.is_compiling()
    run = torch.ops.gemmsmith.experts if is_compiling else partial(_autograd, CallWay.EAGER, None)
    result: torch.Tensor = run(*operands, keep)[0]
    return result


def refusal(
    tokens: torch.Tensor,
    index: torch.Tensor,
    shares: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> str | None:
    """Why `experts` does not take these operands. Returns None if it does."""
    operands = (tokens, index, shares, gate_up, down)
    if tokens.dim() != 2 or gate_up.dim() != 3 or down.dim() != 3 or index.dim() != 2:
        return (
            "experts takes hidden_states [T, width], top_k_index [T, chosen], gate_up "
            f"[E, 2 * inner, width] and down [E, width, inner], not {list(tokens.shape)}, "
            f"{list(index.shape)}, {list(gate_up.shape)} and {list(down.shape)}"
        )
    width, inner, number = tokens.shape[1], down.shape[2], gate_up.shape[0]
    sizes = ((number, 2 * inner, width), (number, width, inner), index.shape)
    actual = (gate_up.shape, down.shape, shares.shape)
    for name, size, has in zip(("gate_up", "down", "top_k_weights"), sizes, actual, strict=True):
        if tuple(has) != tuple(size):
            return f"{name} must be {list(size)} here, not {list(has)}"
    if index.shape[0] != tokens.shape[0]:
        return f"top_k_index has {index.shape[0]} rows for {tokens.shape[0]} tokens"
    if not number:
        return "gate_up and down must hold at least one expert"
    if not gate_up.dtype == down.dtype == tokens.dtype:
        types = f"{tokens.dtype}, {gate_up.dtype} and {down.dtype}"
        return f"hidden_states, gate_up and down must have one type, not {types}"
    if tokens.dtype not in _TYPES:
        return f"hidden_states must be of 16 or 32 bit floats, not {tokens.dtype}"
    if not shares.is_floating_point():
        return f"top_k_weights must be floats, not {shares.dtype}"
    if index.is_floating_point() or index.is_complex() or index.dtype is torch.bool:
        return f"top_k_index must be integers, not {index.dtype}"
    if any(operand.device != tokens.device for operand in operands):
        devices = ", ".join(str(operand.device) for operand in operands)
        return f"all of experts' operands must be on one device, not on {devices}"
    step = BEGIN // tokens.element_size()
    for name, extent in (("width", width), ("inner", inner)):
        if extent % step:
            return (
                f"experts' {name} is {extent} and must be a multiple of {step}, so that rows of "
                f"{tokens.dtype} begin on {BEGIN} bytes: pad the operands with zeros"
            )
    return None


Computed = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""The result; for the backward pass gate and up of each row, empty if not kept, and the routing."""


def _product(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """A grouped product by its winner or by torch, also of no rows and of any layout of weights."""
    if 0 in (*a.shape, *b.shape):
        size = (a.shape[0], b.shape[-1])
        return a.new_zeros(size if b.dim() == 3 else (len(ends), *size))
    return grouped_below(a, aligned(b) if b.dim() == 3 else b, ends)


def _compute(
    tokens: torch.Tensor,
    index: torch.Tensor,
    shares: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    keep: bool = True,
    multiply: Callable[..., torch.Tensor] = _product,
) -> Computed:
    routing = route(index, gate_up.shape[0])
    opened, hidden = _open(tokens, shares, gate_up.mT, routing, keep, multiply)
    out = multiply(hidden, down.mT, routing.ends)
    result = passes.gather_sum(out, routing.places, routing.used)
    return result, opened if keep else opened.new_empty(0), *routing


def _open(
    tokens: torch.Tensor,
    shares: torch.Tensor,
    gate_up: torch.Tensor,
    routing: Routing,
    keep: bool,
    multiply: Callable[..., torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up of each row, which may be empty if not kept, and the second product's operand.

    One kernel computes them, or a product and a pass.
    """
    slots = routing.slots
    gate, up = gate_up.chunk(2, dim=-1)
    size = (slots.shape[0], tokens.shape[1])
    of_rows = Spec(tokens.dtype, tokens.device, size, (size[1], 1))
    plan = gated_plan(of_rows, gate_up, gate, keep=keep) if multiply is _product else None
    if plan is not None:
        rows, factors = passes.scatter_with_shares(tokens, shares, routing.places)
        outputs = gated_by(plan, rows, gate, up, factors, routing.ends)
        if outputs is not None:
            hidden, opened = outputs
            return opened, hidden
    else:
        rows = passes.scatter(tokens, routing.places)
    if is_recording():
        record(rows, gate, gate_epilogue(keep=keep), gate_up.shape[0])
    opened = multiply(rows, gate_up, routing.ends)
    return opened, passes.activate(opened, shares, slots, routing.used)


def _differentiate(
    needs: Sequence[bool],
    gradient: torch.Tensor | None,
    of_opened: torch.Tensor | None,
    tokens: Any,
    shares: torch.Tensor,
    gate_up: Any,
    down: Any,
    opened: torch.Tensor,
    slots: torch.Tensor,
    places: torch.Tensor,
    ends: torch.Tensor,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of tokens, shares, gate_up and down; None for those that are not needed.

    Args:
        needs: which of the four.
        gradient: of the result, if it has one.
        of_opened: gradient of `opened` itself, in gradients of gradients.
        tokens: None if gate_up's gradient is not needed.
        shares: of the layer.
        gate_up: None if the tokens' gradient is not needed.
        down: None if only its own gradient is needed.
        opened: result of the first product.
        slots: of the routing.
        places: of the routing.
        ends: of the routing.
    """
    needs_tokens, needs_shares, needs_gate_up, needs_down = needs
    opens, used = needs_tokens or needs_gate_up, ends[-1:]
    hidden: Any
    again = is_derived(gradient, tokens, shares, gate_up, down, opened, of_opened)
    multiply = derivable if again else _product
    of_tokens = of_shares = of_gate_up = of_down = None
    # Rows are the largest tensors of a step: none is kept longer than it is read.
    if gradient is not None:
        rows: Any
        if opens or needs_shares:
            routing, of = (slots, places, ends), (opens, needs_shares, needs_down)
            rows, (through, of_shares, hidden) = differentiate(
                multiply, gradient, down, opened, shares, routing, of, fuses=not again
            )
            of_opened = through if of_opened is None or through is None else of_opened + through
            del through
        else:
            rows = passes.scatter(gradient, places)
            hidden = passes.activate(opened, shares, slots, used)
        if needs_down:
            of_down = multiply(rows.mT, hidden, ends)
        del rows, hidden
    if of_opened is not None and needs_tokens:
        of_tokens = passes.gather_sum(multiply(of_opened, gate_up, ends), places, used)
    if of_opened is not None and needs_gate_up:
        of_gate_up = multiply(of_opened.mT, passes.scatter(tokens, places), ends)
    return of_tokens, of_shares, of_gate_up, of_down


def _gradients(
    needs: Sequence[bool], gradient: torch.Tensor, *saved: Any
) -> tuple[torch.Tensor, ...]:
    """The operator's results: empty for gradients that are not needed."""
    gradients = _differentiate(needs, gradient, None, *saved)
    return tuple(gradient.new_empty(0) if made is None else made for made in gradients)


class Experts(torch.autograd.Function):
    """`experts` with its backward pass."""

    @staticmethod
    def forward(ctx: Any, *operands: *Operands) -> Any:
        """The result first; the rest is for the backward pass alone."""
        tokens, _, shares, gate_up, down = operands
        needs_tokens, _, needs_shares, needs_gate_up, _ = ctx.needs_input_grad
        results = _below(operands, keep=True)
        ctx.save_for_backward(
            tokens if needs_gate_up else None,
            shares,
            gate_up if needs_tokens else None,
            down if needs_tokens or needs_shares or needs_gate_up else None,
            *results[1:],
        )
        ctx.mark_non_differentiable(*results[2:])
        ctx.set_materialize_grads(False)  # else torch writes zeros as large as each output
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Gradients of the tokens, the shares and both weights.

        Gate and up of each row are results too, and have a gradient in gradients of gradients.
        """
        gradient, of_opened, *_ = gradients
        needs = [ctx.needs_input_grad[at] for at in (0, 2, 3, 4)]
        saved = ctx.saved_tensors
        if gradient is None and of_opened is None:
            return (None,) * 5
        if of_opened is None and _is_traced(gradient) and not wants_gradient(gradient, *saved):
            parts = torch.ops.gemmsmith.experts_backward(needs, gradient, *saved)
            parts = tuple(part if need else None for part, need in zip(parts, needs, strict=True))
        else:
            parts = _differentiate(needs, gradient, of_opened, *saved)
        return parts[0], None, *parts[1:]


def _autograd(_way: CallWay, _engine: Engine | None, *arguments: Any) -> Any:
    return _run(arguments[:5], keep=arguments[5:] != (False,))


def _run(operands: Operands, *, keep: bool) -> Any:
    if wants_gradient(*operands):
        return Experts.apply(*operands)  # type: ignore[no-untyped-call]
    return _below(operands, keep=keep)


def _below(operands: Operands, *, keep: bool) -> Any:
    """The layer below autograd: one operator where a graph is made of it."""
    if _is_traced(operands[0]):
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.gemmsmith.experts(*operands, keep)
    return _compute(*operands, keep=keep)


def _is_traced(tensor: torch.Tensor) -> bool:
    return torch.compiler.is_compiling() or is_traced(tensor)


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


def _fake_gradients(
    needs: Sequence[bool],
    gradient: torch.Tensor,
    _tokens: torch.Tensor | None,
    shares: torch.Tensor,
    _gate_up: torch.Tensor | None,
    _down: torch.Tensor | None,
    opened: torch.Tensor,
    *routing: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    number, width, both = routing[-1].shape[0], gradient.shape[1], opened.shape[1]
    sizes = (gradient.shape, shares.shape, (number, both, width), (number, width, both // 2))
    types = (opened.dtype, shares.dtype, opened.dtype, opened.dtype)
    return tuple(
        opened.new_empty(size, dtype=dtype) if need else opened.new_empty(0)
        for need, size, dtype in zip(needs, sizes, types, strict=True)
    )


def products(arguments: dict[str, Any]) -> Iterator[Multiplied]:
    """What a call of the operator multiplies."""
    tokens, gate_up, down = arguments["tokens"], arguments["gate_up"].mT, arguments["down"].mT
    number, count = gate_up.shape[0], arguments["index"].numel()
    rows = tokens.new_empty(count, tokens.shape[1])
    hidden = tokens.new_empty(count, down.shape[1])
    yield Multiplied(Form.GROUPED, rows, gate_up, groups=number)
    yield Multiplied(Form.GROUPED, hidden, down, groups=number)
    gate, epilogue = gate_up.chunk(2, dim=-1)[0], gate_epilogue(keep=arguments.get("keep", True))
    yield Multiplied(Form.GROUPED, rows, gate, epilogue=epilogue, groups=number)


def products_of_gradients(arguments: dict[str, Any]) -> Iterator[Multiplied]:
    """The same for the operator of the backward pass."""
    needs_tokens, needs_shares, needs_gate_up, needs_down = arguments["needs"]
    gate_up, down, opened = arguments["gate_up"], arguments["down"], arguments["opened"]
    number = arguments["ends"].shape[0]
    rows = opened.new_empty(opened.shape[0], arguments["gradient"].shape[1])
    hidden = opened.new_empty(opened.shape[0], opened.shape[1] // 2)
    for need, a, b in (
        (needs_tokens or needs_shares or needs_gate_up, rows, down),
        (needs_down, rows.mT, hidden),
        (needs_tokens, opened, gate_up),
        (needs_gate_up, opened.mT, rows),
    ):
        if need:
            yield Multiplied(Form.GROUPED, a, b, groups=number)
    if needs_tokens or needs_gate_up:
        epilogue = backward_epilogue(activated=needs_down)
        yield Multiplied(Form.GROUPED, rows, down, epilogue=epilogue, groups=number)


register(
    "experts(Tensor tokens, Tensor index, Tensor shares, Tensor gate_up, Tensor down, "
    "bool keep=True) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _compute,
    _fake,
    _autograd,
)
register(
    "experts_backward(bool[4] needs, Tensor gradient, Tensor? tokens, Tensor shares, "
    "Tensor? gate_up, Tensor? down, Tensor opened, Tensor slots, Tensor places, Tensor ends) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _gradients,
    _fake_gradients,
)
