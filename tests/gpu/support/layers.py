"""A layer's output and gradients, compared with autograd of an exact one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

BOUND = 1e-2
"""Relative error in the Frobenius norm: rounding of a result in bf16."""
GRADIENT_BOUND = 2e-2
"""And of what was rounded between the products: an activation's argument, and gradients."""

Layer = Callable[..., torch.Tensor]
Operands = Mapping[str, torch.Tensor]


def leaf(*size: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(size, device="cuda") * scale).bfloat16().requires_grad_()


def near(output: torch.Tensor, reference: torch.Tensor, bound: float = BOUND) -> bool:
    difference = torch.linalg.vector_norm(output.detach().double() - reference)
    return bool(difference <= bound * torch.linalg.vector_norm(reference))


def close(
    output: torch.Tensor | None, reference: torch.Tensor, bound: float, what: str = ""
) -> None:
    assert output is not None
    assert output.shape == reference.shape
    difference = (output.detach().double() - reference).abs()
    error = torch.linalg.vector_norm(difference) / torch.linalg.vector_norm(reference)
    assert near(output, reference, bound), (
        f"{what} {list(output.shape)}: relative error {float(error):.4f}, bound {bound}; "
        f"{int((difference > bound * reference.abs()).sum())} elements are off by more, the most "
        f"by {float(difference.max()):.4g} at {int(difference.argmax())}"
    )


def step(layer: Layer, operands: Operands, dy: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of the operands that need one."""
    out = layer(**operands)
    leaves = [operand for operand in operands.values() if operand.requires_grad]
    return [out, *torch.autograd.grad(out, leaves, dy)]


def compare(
    outputs: list[torch.Tensor],
    exact: Layer,
    operands: Operands,
    dy: torch.Tensor,
    case: str = "",
) -> None:
    """The result of `step` is that of the exact layer in FP64; `case` names it in messages."""
    wide = {
        name: operand.detach().double().requires_grad_(operand.requires_grad)
        for name, operand in operands.items()
    }
    out, *gradients = step(exact, wide, dy.double())
    close(outputs[0], out.detach(), BOUND, f"{case} output")
    names = (name for name, operand in operands.items() if operand.requires_grad)
    for name, gradient, reference in zip(names, outputs[1:], gradients, strict=True):
        close(gradient, reference, GRADIENT_BOUND, f"{case} gradient of {name}")


def warm_up(call: Callable[[], object]) -> None:
    """Call on another stream, as before a capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
