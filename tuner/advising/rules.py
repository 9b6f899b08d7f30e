"""The rules: what of a step may have a faster form. A further rule is a function in `RULES`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from gemmsmith import linear_cross_entropy
from gemmsmith.program.observed import (
    ObservedCall,
    ObservedFunction,
    ObservedOptimizer,
    ObservedStep,
    ObservedTensor,
)
from tuner.advising.activations import FUNCTIONS, WrittenActivation, activations
from tuner.advising.part import Forms, Run, StepPart, both_ways, dtype_of, like

FUSED = ("AdamW", "Adam", "SGD", "Adagrad")
"""Optimizers of torch that have a fused step."""

_TAKEN = (
    *("betas", "eps", "weight_decay", "amsgrad"),  # of Adam
    *("momentum", "dampening", "nesterov", "maximize"),
)

ROOM = 0.8
"""Share of a GPU's free memory that the forms of an optimizer may take."""

HOST_ROOM = 2**31
"""The same on the host, in bytes."""

_PAD = 64
_WIDE = 1024  # a softmax over fewer columns is not over a vocabulary


def fused_optimizer(step: ObservedStep) -> Iterator[StepPart]:
    """Optimizers that step over lists of parameters, or over one after another."""
    for observed in step.optimizers:
        options = observed.options
        if observed.kind not in FUSED or options.get("fused") or options.get("differentiable"):
            continue
        foreach = options.get("foreach")
        is_loop = foreach is False or (foreach is None and step.device == "cpu")
        way = "in a loop over parameters" if is_loop else "with foreach"
        count = sum(map(len, observed.groups))
        yield StepPart(
            rule="optimizer",
            what=f"{observed.kind} steps {count} parameters {way}",
            change=f"torch.optim.{observed.kind}(..., fused=True)",
            place="",
            calls=1,
            forms=partial(_optimizers, observed),
        )


def _optimizers(observed: ObservedOptimizer, device: torch.device) -> Forms:
    sizes = [(dtype_of(dtype), size) for group in observed.groups for dtype, size in group]
    whole = sum(dtype.itemsize * math.prod(size) for dtype, size in sizes)
    # A parameter, its gradient and two states in each of two optimizers.
    room = ROOM * torch.cuda.mem_get_info()[0] if device.type == "cuda" else HOST_ROOM
    every = max(1, math.ceil(6 * whole / room))
    kept = iter(range(len(sizes)))
    groups = [
        [_parameter(dtype_of(dtype), size, device) for dtype, size in group
         if next(kept) % every == 0]
        for group in observed.groups
    ]  # fmt: skip
    groups = [group for group in groups if group]
    sample = sum(p.element_size() * p.numel() for group in groups for p in group)
    known = _defaults(observed)

    def stepping(**way: Any) -> Run:
        lists = [{"params": group} for group in groups]
        optimizer = getattr(torch.optim, observed.kind)(lists, **known, **way)

        def run() -> Sequence[torch.Tensor]:
            optimizer.step()
            return ()

        return run

    return Forms(
        stepping(foreach=observed.options.get("foreach")), stepping(fused=True), whole / sample
    )


def _defaults(observed: ObservedOptimizer) -> dict[str, Any]:
    """Options that the class takes, but for how it steps and what changes no time."""
    return {name: value for name, value in observed.options.items() if name in _TAKEN} | {"lr": 0.0}


def _parameter(dtype: torch.dtype, size: tuple[int, ...], device: torch.device) -> torch.Tensor:
    parameter = torch.randn(size, device=device).to(dtype).requires_grad_()
    parameter.grad = torch.randn(size, device=device).to(dtype)
    return parameter


def written_activation(step: ObservedStep) -> Iterator[StepPart]:
    """An activation written in several operators, each of which reads and writes a tensor."""
    for function in step.functions:
        for activation in activations(function.calls):
            name = activation.code.removeprefix("F.").partition("(")[0]
            yield StepPart(
                rule="activation",
                what=f"{name} of {_size(activation.x)} in {len(activation.calls)} operators",
                change=activation.code,
                place=function.place(activation.calls[-1]),
                calls=function.count,
                forms=partial(_activations, activation),
            )


def _activations(activation: WrittenActivation, device: torch.device) -> Forms:
    x, steps = like(activation.x, device), activation.written
    function = FUNCTIONS[activation.code]
    return Forms(both_ways(lambda: steps(x), x), both_ways(lambda: function(x), x))


def unaligned_product(step: ObservedStep) -> Iterator[StepPart]:
    """Products of linear layers whose rows do not begin at multiples of 16 bytes."""
    for function, call in _calls(step, "mm", "addmm"):
        a, b = call.tensors[-2:]
        (m, k), (_, n) = a.size, b.size
        unit = 16 // dtype_of(a.dtype).itemsize
        if b.stride[0] != 1 or (n % unit == 0 and k % unit == 0) or min(m, n, k) < unit:
            continue
        padded = (_up(n) if n % unit else n, _up(k) if k % unit else k)
        sides = [f"{old} → {new}" for old, new in zip((n, k), padded, strict=True) if old != new]
        yield StepPart(
            rule="padding",
            what=f"linear layer {k} → {n} of {m} rows, {a.dtype}",
            change=f"nn.Linear({padded[1]}, {padded[0]}): pad {' and '.join(sides)}, and ignore "
            "what is added",
            place=function.place(call),
            calls=function.count,
            forms=partial(_padded, a, b, padded),
        )


def _up(extent: int) -> int:
    return -(-extent // _PAD) * _PAD


def _padded(
    a: ObservedTensor, b: ObservedTensor, padded: tuple[int, int], device: torch.device
) -> Forms:
    m, k = a.size

    def layer(n: int, k: int) -> Run:
        x = torch.randn(m, k, device=device).to(dtype_of(a.dtype)).requires_grad_(a.needs_grad)
        weight = torch.randn(n, k, device=device).to(x.dtype).requires_grad_(b.needs_grad)
        both = both_ways(lambda: functional.linear(x, weight), x, weight)

        def run() -> Sequence[torch.Tensor]:
            both()
            return ()  # results of different sizes are not compared

        return run

    return Forms(layer(b.size[1], k), layer(*padded))


def whole_logits(step: ObservedStep) -> Iterator[StepPart]:
    """FP32 logits of a 16-bit head, written to memory for the loss."""
    heads = {
        call.tensors[-1].size[1]: call
        for _, call in _calls(step, "mm", "addmm")
        if call.tensors[-1].is_half and call.tensors[-1].stride[0] == 1
    }
    for function, call in _calls(step, "_log_softmax"):
        logits = call.tensors[0]
        columns = logits.size[-1]
        head = heads.get(columns)
        is_fp32 = logits.dtype == "float32" or True in call.arguments[2:]
        if head is None or not is_fp32 or columns < _WIDE or len(logits.size) != 2:
            continue
        yield StepPart(
            rule="logits",
            what=f"head and loss with FP32 logits {_size(logits)}",
            change="gemmsmith.linear_cross_entropy(x, head.weight, labels), if nothing else reads "
            "the logits",
            place=function.place(call),
            calls=function.count,
            forms=partial(_losses, head, logits.size[0]),
        )


def _losses(head: ObservedCall, rows: int, device: torch.device) -> Forms:
    a, b = head.tensors[-2:]
    k, columns = b.size
    dtype = dtype_of(a.dtype)
    x = torch.randn(rows, k, device=device).to(dtype).requires_grad_(a.needs_grad)
    weight = (torch.randn(columns, k, device=device) / k**0.5).to(dtype)
    weight.requires_grad_(b.needs_grad)
    labels = torch.randint(columns, (rows,), device=device)
    return Forms(
        both_ways(
            lambda: functional.cross_entropy(functional.linear(x, weight).float(), labels),
            x,
            weight,
        ),
        both_ways(lambda: linear_cross_entropy(x, weight, labels), x, weight),
    )


def without_tf32(step: ObservedStep) -> Iterator[StepPart]:
    """Products of FP32 matrices that TF32 could multiply."""
    if step.device != "cuda":
        return
    for function, call in _calls(step, "mm", "addmm", "bmm"):
        a, b = call.tensors[-2:]
        if a.dtype == "float32" and not call.is_tf32:
            yield StepPart(
                rule="tf32",
                what=f"FP32 product {_size(a)} by {_size(b)} without TF32",
                change='torch.set_float32_matmul_precision("high"), which rounds operands to 10 '
                "bits",
                place=function.place(call),
                calls=function.count,
                forms=partial(_precisions, a, b),
            )


def _precisions(a: ObservedTensor, b: ObservedTensor, device: torch.device) -> Forms:
    left, right = like(a, device), like(b, device)
    run = both_ways(lambda: left @ right, left, right)

    def with_precision(precision: str) -> Run:
        def product() -> Sequence[torch.Tensor]:
            before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision(precision)
            try:
                return run()
            finally:
                torch.set_float32_matmul_precision(before)

        return product

    return Forms(with_precision("highest"), with_precision("high"))


def written_attention(step: ObservedStep) -> Iterator[StepPart]:
    """Attention with its scores in memory: a product, a softmax, and a product."""
    for function in step.functions:
        calls = [call for call in function.calls if call.packet in ("bmm", "baddbmm", "_softmax")]
        scores = list(zip(calls, calls[1:], calls[2:], strict=False))
        for first, softmax, second in scores:
            if softmax.packet != "_softmax" or "_softmax" in (first.packet, second.packet):
                continue
            q, k = first.tensors[-2:]
            weights, v = second.tensors[-2:]
            read = softmax.tensors[0]
            if weights.size != (*q.size[:2], k.size[2]) or read.size[-2:] != weights.size[1:]:
                continue
            between = function.calls[function.calls.index(first) : function.calls.index(softmax)]
            masks = any(_masks(call, read) for call in between)
            yield StepPart(
                rule="attention",
                what=f"attention of {q.size[0]} heads, {q.size[1]} × {k.size[2]} scores in memory",
                change='attn_implementation="sdpa" of the model'
                if function.file.startswith("transformers")
                else f"F.scaled_dot_product_attention(q, k, v{', mask' if masks else ''})",
                place=function.place(softmax),
                calls=function.count,
                forms=lambda device, q=q, k=k, v=v, read=read, masks=masks: _attentions(  # type: ignore[misc]
                    (q, k, v), read.dtype, masks, device
                ),
            )


def _masks(call: ObservedCall, scores: ObservedTensor) -> bool:
    """Whether a call applies a mask to scores."""
    others = [tensor for tensor in call.tensors if tensor.size[-2:] == scores.size[-2:]]
    return call.packet in ("add", "masked_fill") and len(others) > 1


def _attentions(
    operands: tuple[ObservedTensor, ObservedTensor, ObservedTensor],
    read: str,
    masks: bool,
    device: torch.device,
) -> Forms:
    q, k, v = (like(tensor, device).detach()[None] for tensor in operands)
    k = k.transpose(-1, -2).contiguous()
    for leaf, tensor in zip((q, k, v), operands, strict=True):
        leaf.requires_grad_(tensor.needs_grad)
    mask = None
    if masks:
        ones = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=device)
        mask = torch.zeros_like(ones, dtype=q.dtype).masked_fill(ones.triu(1), float("-inf"))

    def steps() -> torch.Tensor:
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        scores = scores if mask is None else scores + mask
        return torch.softmax(scores, -1, dtype=dtype_of(read)).to(v.dtype) @ v

    def kernel() -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return Forms(both_ways(steps, q, k, v), both_ways(kernel, q, k, v))


def _calls(step: ObservedStep, *packets: str) -> Iterator[tuple[ObservedFunction, ObservedCall]]:
    for function in step.functions:
        for call in function.calls:
            if call.packet in packets:
                yield function, call


def _size(tensor: ObservedTensor) -> str:
    return f"[{', '.join(map(str, tensor.size))}]"


RULES = (
    fused_optimizer,
    written_activation,
    unaligned_product,
    whole_logits,
    without_tf32,
    written_attention,
)
