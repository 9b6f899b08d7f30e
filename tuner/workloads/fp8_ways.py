"""torch's calls for a product whose output, after an activation, is FP8.

Programs compute the 16-bit output first (`fused_ways`, `gated_ways`), then read it twice: for its
largest value, and to multiply, clamp and cast it. The default does so by torch's eager kernels, in
the fewest possible passes. The finals time the same code through `torch.compile` beside it, and
after a bare bias also cuBLASLt's own FP8 output. That computes no largest value, but a kernel must
beat it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from gemmsmith.core.activations import ACTIVATIONS
from gemmsmith.core.operation import Epilogue
from gemmsmith.core.problem import Problem
from gemmsmith.runtime.launch import torch_dtype
from tuner.workloads.fp8_output import LARGEST
from tuner.workloads.fused_ways import compiled, multiplied
from tuner.workloads.scaled import factors, is_taken, scaled_mm
from tuner.workloads.ways import then
from tuner.workloads.workload import Launch, Launches, OperandSet, Way, drawn_with


def defaults(ways: Sequence[Way]) -> Sequence[Way]:
    """The calls for a 16-bit output, followed by eager code that casts it."""
    return [
        replace(
            way,
            name=f"{way.name}, then amax, mul, clamp and cast",
            launches=_cast_after(way.launches),
        )
        for way in ways
    ]


def alternatives(problem: Problem) -> Sequence[Way]:
    """Sequences that may be faster than eager calls."""
    if not is_taken(problem):
        return ()
    ways = [Way.to_beat("torch.compile of the same", _compiled)]
    if problem.operation.epilogue is Epilogue.BIAS:
        ways.append(Way.to_beat("torch._scaled_mm into FP8, without amax", _by_library))
    return ways


def _wide(problem: Problem, sets: Sequence[OperandSet]) -> list[OperandSet]:
    # One 16-bit output for all launches: the allocator would give the same memory again.
    dtype = torch_dtype(problem.operation.bias)
    output = torch.empty_like(sets[0].d, dtype=dtype)
    return [replace(s, d=output) for s in sets]


def _cast_after(launches: Launches) -> Launches:
    def followed(problem: Problem, sets: Sequence[OperandSet], room: int) -> list[Launch]:
        wide = _wide(problem, sets)
        scaled = torch.empty_like(wide[0].d)
        # Launches of copies may be fewer than the sets.
        return [
            then(launch, partial(_cast, s, wide[0].d, scaled))
            for launch, s in zip(launches(problem, wide, room), sets, strict=False)
        ]

    return followed


def _cast(s: OperandSet, value: torch.Tensor, scaled: torch.Tensor) -> torch.Tensor:
    amax = drawn_with(s.amax)
    torch.maximum(amax, torch.linalg.vector_norm(value, float("inf")), out=amax)
    torch.mul(value, drawn_with(s.scale_d).view(()), out=scaled)
    return s.d.copy_(scaled.clamp_(-LARGEST, LARGEST))[0]


def _compiled(problem: Problem, sets: Sequence[OperandSet], _: int) -> list[Launch]:
    """The whole sequence as one compiled function, which allocates its outputs."""
    epilogue, dtype = problem.operation.epilogue, torch_dtype(problem.operation.d)
    activate = ACTIVATIONS[epilogue.activation] if epilogue.activation else None

    def sequence(s: OperandSet) -> tuple[torch.Tensor, ...]:
        value = multiplied(s)
        if epilogue.is_gated and activate is not None:
            gate, up = value.chunk(2, -1)
            value = activate(gate) * up
        elif activate is not None:
            value = activate(value)
        amax = torch.maximum(drawn_with(s.amax), value.abs().amax())
        return (value * drawn_with(s.scale_d)).clamp(-LARGEST, LARGEST).to(dtype), amax

    return compiled(sequence, _wide(problem, sets))


def _by_library(_: Problem, sets: Sequence[OperandSet], __: int) -> list[Launch]:
    """The library's own output in FP8."""
    # torch 2.11 does not apply `scale_result` on CUDA, so A's factor and the bias include D's.
    launches: list[Launch] = []
    for s in sets:
        scale_a, scale_b = factors(s)
        scale_d = drawn_with(s.scale_d).view(())
        bias = (drawn_with(s.bias) * scale_d).to(drawn_with(s.bias).dtype).view(-1)
        operands = (s.a[0], s.b[0], scale_a * scale_d, scale_b, s.d[0])
        launches.append(partial(scaled_mm, *operands, bias=bias))
    return launches
