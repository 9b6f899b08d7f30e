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
from typing import Any

import torch

from gemmsmith.ops.engine.by_triton import is_derived
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.forms import Form, Spec
from gemmsmith.ops.engine.observers import is_traced
from gemmsmith.ops.products import passes
from gemmsmith.ops.products.gates import (
    Saved,
    backward_epilogue,
    differentiate,
    gate_epilogue,
    gated_by,
    gated_plan,
)
from gemmsmith.ops.products.grouped import BEGIN, aligned, derivable, grouped_below
from gemmsmith.ops.products.mixture_operands import ExpertsOperands, refusal
from gemmsmith.ops.products.recording import Multiplied, is_recording, record
from gemmsmith.ops.products.registry import CallWay, ours, register, wants_gradient
from gemmsmith.ops.products.routing import Routing, route


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
    operands = ExpertsOperands(hidden_states, top_k_index, top_k_weights, gate_up, down)
    reason = refusal(*operands[:5])
    if reason is not None:
        raise ValueError(reason)
    if not ours(*operands):
        return _compute(operands, keep=False, multiply=derivable)[0]
    return computed(operands)


def computed(operands: ExpertsOperands) -> torch.Tensor:
    """The layer of operands that are `ours` and have no `refusal`.

    In a compiled graph it is SwiGLU without biases.
    """
    keep, result = wants_gradient(*operands), None
    if torch.compiler.is_compiling():
        result = torch.ops.gemmsmith.experts(*operands[:5], keep)[0]
    else:
        result = _run(operands, keep=keep)[0]
    return result if operands.down_bias is None else _add_biases(result, operands)


def _add_biases(result: torch.Tensor, operands: ExpertsOperands) -> torch.Tensor:
    """Adds the biases of each token's experts, times its shares: one more product, of depth E."""
    index, shares, bias = operands.numbers, operands.shares, operands.down_bias
    assert bias is not None  # noqa: S101 - the caller has asked
    there = (index >= 0) & (index < len(bias))
    by_expert = shares.new_zeros(len(index), len(bias))
    by_expert = by_expert.scatter_add(1, index.where(there, 0).long(), shares.where(there, 0))
    return torch.addmm(result, by_expert.to(bias.dtype), bias)


Computed = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""The result; for the backward pass gate and up of each row, empty if not kept, and the routing."""


def _product(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """A grouped product by its winner or by torch, also of no rows and of any layout of weights."""
    if 0 in (*a.shape, *b.shape):
        size = (a.shape[0], b.shape[-1])
        return a.new_zeros(size if b.dim() == 3 else (len(ends), *size))
    return grouped_below(a, aligned(b) if b.dim() == 3 else b, ends)


def _compute(
    operands: ExpertsOperands, keep: bool = True, multiply: Callable[..., torch.Tensor] = _product
) -> Computed:
    routing = route(operands.numbers, operands.gate_up.shape[0])
    opened, hidden = _open(operands, routing, keep, multiply)
    out = multiply(hidden, operands.down.mT, routing.ends)
    result = passes.gather_sum(out, routing.places, routing.used)
    return result, opened if keep else opened.new_empty(0), *routing


def _opening(operands: ExpertsOperands) -> passes.Opening:
    bias = operands.bias
    return passes.Opening(operands.gate, bias, None if bias is None else operands.numbers)


def _open(
    operands: ExpertsOperands, routing: Routing, keep: bool, multiply: Callable[..., torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up of each row, which may be empty if not kept, and the second product's operand.

    One kernel computes them, or a product and a pass.
    """
    tokens, shares, gate_up = operands.tokens, operands.shares, operands.gate_up.mT
    slots, opening = routing.slots, _opening(operands)
    gate, up = gate_up.chunk(2, dim=-1)
    size = (slots.shape[0], tokens.shape[1])
    of_rows = Spec(tokens.dtype, tokens.device, size, (size[1], 1))
    plan = None
    if multiply is _product and opening.is_swiglu:
        plan = gated_plan(of_rows, gate_up, gate, keep=keep)
    if plan is not None:
        rows, factors = passes.scatter_with_shares(tokens, shares, routing.places)
        outputs = gated_by(plan, rows, gate, up, factors, routing.ends)
        if outputs is not None:
            hidden, opened = outputs
            return opened, hidden
    else:
        rows = passes.scatter(tokens, routing.places)
    if opening.is_swiglu and is_recording():
        record(rows, gate, gate_epilogue(keep=keep), gate_up.shape[0])
    opened = multiply(rows, gate_up, routing.ends)
    return opened, passes.activate(opened, shares, slots, routing.used, opening)


def _differentiate(
    needs: Sequence[bool],
    gradient: torch.Tensor | None,
    of_opened: torch.Tensor | None,
    saved: Saved,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of tokens, shares, gate_up, down and bias; None for those that are not needed.

    Args:
        needs: which of the five.
        gradient: of the result, if it has one.
        of_opened: gradient of `opened` itself, in gradients of gradients.
        saved: of the layer.
    """
    needs_tokens, needs_shares, needs_gate_up, needs_down, needs_bias = needs
    opens, ends, places = needs_tokens or needs_gate_up or needs_bias, saved.ends, saved.places
    hidden: Any
    again = is_derived(gradient, of_opened, *saved)
    multiply = derivable if again else _product
    of_tokens = of_shares = of_gate_up = of_down = of_bias = None
    # Rows are the largest tensors of a step: none is kept longer than it is read.
    if gradient is not None:
        rows: Any
        if opens or needs_shares:
            of = (opens, needs_shares, needs_down)
            rows, (through, of_shares, hidden) = differentiate(
                multiply, gradient, saved, of, fuses=not again
            )
            if needs_bias:  # which is not in what `opened` holds
                of_bias = _column_sums(multiply, through, ends)
            of_opened = through if of_opened is None or through is None else of_opened + through
            del through
        else:
            rows = passes.scatter(gradient, places)
            opened, shares, slots = saved.opened, saved.shares, saved.slots
            hidden = passes.activate(opened, shares, slots, ends[-1:], saved.opening)
        if needs_down:
            of_down = _of_weight(multiply, rows, hidden, ends, saved.turned[1])
        del rows, hidden
    if of_opened is not None and needs_tokens:
        rows = multiply(of_opened, saved.gate_up, ends)
        of_tokens = passes.gather_sum(rows, places, ends[-1:])
        del rows
    if of_opened is not None and needs_gate_up:
        rows = passes.scatter(saved.tokens, places)
        of_gate_up = _of_weight(multiply, of_opened, rows, ends, saved.turned[0])
        del rows
    return of_tokens, of_shares, of_gate_up, of_down, of_bias


def _column_sums(
    multiply: Callable[..., torch.Tensor], rows: Any, ends: torch.Tensor
) -> torch.Tensor:
    """Sums of each expert's rows: a product with ones, of the fewest columns that it may have."""
    ones = rows.new_ones(rows.shape[0], BEGIN // rows.element_size())
    return multiply(rows.mT, ones, ends)[..., 0].contiguous()


def _of_weight(
    multiply: Callable[..., torch.Tensor],
    dy: torch.Tensor,
    x: torch.Tensor,
    ends: torch.Tensor,
    is_turned: bool,
) -> torch.Tensor:
    """The gradient of experts' weights, which lies in memory as they do."""
    return multiply(x.mT, dy, ends).mT if is_turned else multiply(dy.mT, x, ends)


def _gradients(
    needs: Sequence[bool], gradient: torch.Tensor, *saved: Any
) -> tuple[torch.Tensor, ...]:
    """The operator's results: empty for gradients that are not needed."""
    *gradients, _ = _differentiate((*needs, False), gradient, None, Saved(*saved))
    return tuple(gradient.new_empty(0) if made is None else made for made in gradients)


class Experts(torch.autograd.Function):
    """A layer of experts without down's bias, and with its backward pass.

    Takes the fields of `ExpertsOperands` before that, all or the first five.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        """The result first; the rest is for the backward pass alone."""
        operands = ExpertsOperands(*arguments)
        tokens, index, shares, gate_up, down, bias, *_ = operands
        needs_tokens, _, needs_shares, needs_gate_up, needs_down, *of_bias = ctx.needs_input_grad
        needs_bias = any(of_bias)
        results = _below(operands, keep=True)
        opens = needs_tokens or needs_gate_up or needs_bias
        ctx.save_for_backward(
            tokens if needs_gate_up else None,
            shares,
            gate_up if needs_tokens else None,
            down if opens or needs_shares else None,
            *results[1:],
            bias,
            None if bias is None else index,
        )
        ctx.needs = needs_tokens, needs_shares, needs_gate_up, needs_down, needs_bias
        ctx.gate, ctx.turned = operands.gate, (gate_up.stride(-2) == 1, down.stride(-2) == 1)
        ctx.mark_non_differentiable(*results[2:])
        ctx.set_materialize_grads(False)  # else torch writes zeros as large as each output
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Gradients of the tokens, the shares, both weights and the bias.

        Gate and up of each row are results too, and have a gradient in gradients of gradients.
        """
        gradient, of_opened, *_ = gradients
        *saved, bias, index = ctx.saved_tensors
        needs, opening = ctx.needs, passes.Opening(ctx.gate, bias, index)
        if gradient is None and of_opened is None:
            return (None,) * 7
        is_operator = of_opened is None and opening.is_swiglu and _is_traced(gradient)
        if is_operator and not wants_gradient(gradient, *saved):
            made = torch.ops.gemmsmith.experts_backward(needs[:4], gradient, *saved)
            parts = [part if need else None for part, need in zip(made, needs[:4], strict=True)]
            return parts[0], None, *parts[1:], None, None
        whole = Saved(*saved)._replace(opening=opening, turned=ctx.turned)
        of_tokens, *others = _differentiate(needs, gradient, of_opened, whole)
        return of_tokens, None, *others, None


def _autograd(_way: CallWay, _engine: Engine | None, *arguments: Any) -> Any:
    return _run(ExpertsOperands(*arguments[:5]), keep=arguments[5:] != (False,))


def _run(operands: ExpertsOperands, *, keep: bool) -> Any:
    if wants_gradient(*operands[:6]):
        return Experts.apply(*operands[:7])  # type: ignore[no-untyped-call]
    return _below(operands, keep=keep)


def _below(operands: ExpertsOperands, *, keep: bool) -> Any:
    """The layer below autograd: one operator where a graph is made of it."""
    if _opening(operands).is_swiglu and _is_traced(operands.tokens):
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.gemmsmith.experts(*operands[:5], keep)
    return _compute(operands, keep=keep)


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
    lambda *arguments: _compute(ExpertsOperands(*arguments[:5]), *arguments[5:]),
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
