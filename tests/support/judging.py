"""Right answers of products with an epilogue, and how a workload's reference judges an answer.

All on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.nn import functional

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import AnyKernel
from tests.support.candidates import KERNEL
from tests.support.replacing import replace
from tuner.trial import Failure
from tuner.workloads.operands import Operands
from tuner.workloads.reference import Reference

SMALL = DeviceModel(name="host", arch="sm90", sm_count=1, memory_bytes=16 * 2**30, l2_bytes=100_000)


def judged(operands: Operands, answer: torch.Tensor) -> tuple[float, Failure | None]:
    """The ratio of an output's error to its bound, and the reason if it is rejected."""
    reference = Reference(operands)
    operands.sets[0].d.copy_(answer)
    operands.check.copy_(answer)
    problem = operands.problem
    kernel: AnyKernel = replace(KERNEL, dtype=problem.dtype, layout=problem.layout)
    correctness, failure = reference.check(kernel, claims_order=True)
    if correctness is None:
        return math.inf, failure
    return correctness.error / (correctness.tolerance or 1.0), None


ACTIVATIONS: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    None: lambda x: x,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu": functional.gelu,
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "relu2": lambda x: x.clamp(min=0) ** 2,
    "relu": lambda x: x.clamp(min=0),
    "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
}


def exact(operands: Operands, terms: int | None = None) -> torch.Tensor:
    """All outputs of the first set by FP64 and torch's functions, [outputs, M, columns].

    They lie as in memory: each row of a gate's aux is two. `terms` is the part of K that is summed.
    """
    s, epilogue = operands.sets[0], operands.problem.operation.epilogue
    x = torch.bmm(s.a[:, :, :terms].double(), s.b[:, :terms].double())
    if epilogue.backward is not None:
        return _backward(operands, x[0])
    for factor in (s.scale_a, s.scale_b, s.row_scale):
        x = x if factor is None else x * factor.double()
    x = x if s.bias is None else x + s.bias.double()
    gate, up = x.chunk(2, -1) if epilogue.is_gated else (x, None)
    residual_first = epilogue.activation is not None and s.residual is not None
    if residual_first:
        gate = x = x + s.residual.double()
    y = ACTIVATIONS[epilogue.activation](gate)
    y = y if up is None else y * up
    y = y if s.column_scale is None else y * s.column_scale.double()
    y = y if s.residual is None or residual_first else y + s.residual.double()
    return torch.cat([y, x.view(-1, *y.shape[1:])]) if epilogue.stores_aux else y


def _backward(operands: Operands, product: torch.Tensor) -> torch.Tensor:
    """By autograd; the sums of rows are one more row."""
    s, n = operands.sets[0], operands.problem.n
    parts = operands.problem.operation.epilogue.backward
    assert parts is not None
    assert s.aux is not None
    aux = s.aux[0].double().requires_grad_()
    value = ACTIVATIONS[parts.activation](aux[:, :n])
    if parts.gated:
        value = value * aux[:, n:]
    (gradient,) = torch.autograd.grad(value, aux, product)
    if parts.bias_gradient:
        return torch.cat([gradient, gradient.sum(0, keepdim=True)])[None]
    outputs = [gradient[:, :n], gradient[:, n:]][: parts.halves]
    return torch.stack([*outputs, value.detach()][: len(s.d)])


def right_answer(operands: Operands) -> torch.Tensor:
    """The exact outputs, rounded once."""
    return exact(operands).to(operands.sets[0].d.dtype)
