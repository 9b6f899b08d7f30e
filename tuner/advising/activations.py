"""Recognizes an activation that is written in several operators, by what these compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch.nn import functional

from gemmsmith.program.observed import ObservedCall, ObservedTensor

Function = Callable[[torch.Tensor], torch.Tensor]

FUNCTIONS: Mapping[str, Function] = {
    'F.gelu(x, approximate="tanh")': partial(functional.gelu, approximate="tanh"),
    "F.gelu(x)": functional.gelu,
    "F.silu(x)": functional.silu,
}
"""Functions of torch that are one kernel, by the code that calls them."""

NEAR = 1e-5
"""Largest difference, in FP64, of the same function: constants are written in few digits."""

_CURVES = ("tanh", "erf", "sigmoid", "exp")

_POINTWISE = (*_CURVES, "add", "sub", "mul", "div", "pow", "neg", "reciprocal")


class WrittenActivation(NamedTuple):
    """An activation that is written in several operators.

    Attributes:
        code: calls the same function of torch; of `FUNCTIONS`.
        x: its argument.
        calls: the operators.
    """

    code: str
    x: ObservedTensor
    calls: list[ObservedCall]

    @property
    def written(self) -> Function:
        """A function that runs the operators."""
        return _written(self.calls, self.x.name)


def activations(calls: Sequence[ObservedCall]) -> Iterator[WrittenActivation]:
    """The activations that calls of a function compute."""
    pointwise = [call for call in calls if call.result is not None and _is_pointwise(call)]
    by_result = {_result(call): call for call in pointwise}
    for curve in pointwise:
        if curve.packet not in _CURVES:
            continue
        before = _before(_result(curve), by_result, stop=-1)
        sources = {t.name: t for call in reversed(before) for t in call.tensors}
        for x in sources.values():
            if activation := _of(x, curve, pointwise):
                yield activation
                break


def _of(
    x: ObservedTensor, curve: ObservedCall, calls: Sequence[ObservedCall]
) -> WrittenActivation | None:
    """The activation of tensor `x` around a curve, the longest if there are several."""
    of_x, of_curve = {x.name}, set[int]()
    inside: dict[int, ObservedCall] = {}
    for call in calls:
        names = {tensor.name for tensor in call.tensors}
        if names <= of_x:
            of_x.add(_result(call))
            inside[_result(call)] = call
            if call is curve or names & of_curve:
                of_curve.add(_result(call))
    for end in reversed([name for name in inside if name in of_curve]):
        chain = _before(end, inside, stop=x.name)
        if len(chain) > 1 and (code := _recognized(_written(chain, x.name))):
            return WrittenActivation(code, x, chain)
    return None


def _before(end: int, by_result: Mapping[int, ObservedCall], stop: int) -> list[ObservedCall]:
    """The calls that compute `end`, back to the tensor `stop`, in their order."""
    names, open_ = set[int](), [end]
    while open_:
        name = open_.pop()
        if name != stop and name in by_result and name not in names:
            names.add(name)
            open_ += [tensor.name for tensor in by_result[name].tensors]
    return [call for name, call in by_result.items() if name in names]


def _is_pointwise(call: ObservedCall) -> bool:
    sizes = {tensor.size for tensor in (*call.tensors, call.result) if tensor is not None}
    return len(sizes) == 1 and call.packet in _POINTWISE


def _result(call: ObservedCall) -> int:
    return -1 if call.result is None else call.result.name


def _written(chain: Sequence[ObservedCall], name: int) -> Function:
    """A function that runs the chain's operators on the tensor `name`."""
    steps = [(getattr(torch.ops.aten, call.packet), call) for call in chain]

    def run(x: torch.Tensor) -> torch.Tensor:
        values = {name: x}
        result = x
        for operator, call in steps:
            arguments = [
                values[value.name] if isinstance(value, ObservedTensor) else value
                for value in call.arguments
            ]
            result = values[_result(call)] = operator(*arguments, **dict(call.named))
        return result

    return run


def _recognized(written: Function) -> str | None:
    """The code of the function that this one computes; None if it is not among `FUNCTIONS`."""
    x = torch.linspace(-6, 6, 4001, dtype=torch.float64)
    try:
        value = written(x)
    except (RuntimeError, TypeError):
        return None
    for code, function in FUNCTIONS.items():
        if float((function(x) - value).abs().max()) < NEAR:
            return code
    return None
