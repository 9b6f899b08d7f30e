"""What tracers are given of our operators is what they give: sizes, types, strides, aliases.

Every operator of `gemmsmith::` is tried, by kernels and by torch, with sizes of 0 and 1, odd ones,
and operands that lie in memory in other ways than plainly. A compiled graph reads what an operator
gave by the strides of the fake one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from gemmsmith.core.epilogue import Epilogue
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.in_use import install
from gemmsmith.ops.products import (  # noqa: F401 - registers gemmsmith::…
    feedforward,
    integer,
    losses,
    scaled,
)
from gemmsmith.ops.products.routing import route

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
K, N, INNER, GROUPS = 16, 32, 24, 3
ROWS = (0, 1, 5)

Lay = Callable[[torch.Tensor], torch.Tensor]
"""The same values, lying in memory in another way."""


def plain(one: torch.Tensor) -> torch.Tensor:
    return one


def turned(one: torch.Tensor) -> torch.Tensor:
    return one.mT.contiguous().mT if one.dim() > 1 else one


def cut(one: torch.Tensor) -> torch.Tensor:
    wide = one.new_empty(*one.shape[:-1], one.shape[-1] + 8)
    wide[..., : one.shape[-1]] = one
    return wide[..., : one.shape[-1]]


def shifted(one: torch.Tensor) -> torch.Tensor:
    base = one.new_empty(one.numel() + 1)
    base[1:] = one.flatten()
    return base[1:].view(one.shape)


def expanded(one: torch.Tensor) -> torch.Tensor:
    return one[:1].expand(one.shape) if one.dim() > 1 else one


LAYS: tuple[Lay, ...] = (plain, turned, cut, shifted, expanded)


def random(*size: int) -> torch.Tensor:
    return torch.randn(size).to(BF16)


def one() -> torch.Tensor:
    return torch.ones(1)


def experts_operands(m: int, lay: Lay) -> tuple[Any, ...]:
    index = torch.randint(GROUPS + 1, (m, 2))
    gate_up, down = random(GROUPS, 2 * INNER, K), random(GROUPS, K, INNER)
    return lay(random(m, K)), lay(index), lay(random(m, 2)), lay(gate_up), lay(down)


def experts_backward(m: int, lay: Lay) -> tuple[Any, ...]:
    tokens, index, shares, gate_up, down = experts_operands(m, lay)
    needs = [bool(m % 2), True, m != 1, m != 2]
    kept = (tokens if needs[2] else None, shares, gate_up if needs[0] else None, down)
    return needs, lay(random(m, K)), *kept, random(2 * m, 2 * INNER), *route(index, GROUPS)


def grouped(m: int, lay: Lay) -> tuple[Any, ...]:
    ends = torch.tensor([m // 2, m // 2, m], dtype=torch.int32)
    return random(m, K), random(GROUPS, N, K).mT if lay is turned else random(GROUPS, K, N), ends


def by_depth(m: int, lay: Lay) -> tuple[Any, ...]:
    ends = torch.tensor([m // 2, m // 2, m], dtype=torch.int32)
    return random(m, K).t(), random(m, N), ends


def scaled_operands(m: int, lay: Lay) -> tuple[Any, ...]:
    return lay(random(m, K)).to(FP8), random(N, K).to(FP8), one(), one()


def loss_operands(m: int, lay: Lay) -> tuple[Any, ...]:
    """x[m, K], weight, bias and labels."""
    return lay(random(m, K)), lay(random(N, K)), random(N), torch.arange(m) - 1


LOSS = (-1, 0.1, 20.0, 1e-3)

Sample = tuple[str, Callable[[int, Lay], tuple[Any, ...]]]

GATE = Epilogue.made_of(activation="silu", gate=True, aux=True)
FUSED = Epilogue.made_of(bias=True, activation="gelu", aux=True)
RESIDUAL = Epilogue.made_of(bias=True, residual=True)
BACKWARD = Epilogue.backward_of("gelu", bias_gradient=True)
GATED_BACKWARD = Epilogue.backward_of("silu", gated=True, activated=True)

SAMPLES: tuple[Sample, ...] = (
    ("linear", lambda m, lay: (lay(random(m, K)), lay(random(N, K)), random(N))),
    ("linear", lambda m, lay: (lay(random(2, m, K)), lay(random(N, K)))),
    ("matmul", lambda m, lay: (lay(random(m, K)), lay(random(K, N)))),
    ("matmul", lambda m, lay: (lay(random(3, m, K)), lay(random(3, K, N)))),
    ("weight_gradient", lambda m, lay: (lay(random(m, N)), lay(random(m, K)))),
    ("weight_gradient", lambda m, lay: (lay(random(2, m, N)), lay(random(2, m, K)))),
    ("accumulate", lambda m, lay: (torch.zeros(N, K), lay(random(m, N)), lay(random(m, K)))),
    ("scaled_mm", lambda m, lay: (
        lay(random(m, K)).to(FP8), random(N, K).to(FP8).t(), one(), one(),
    )),
    ("int8_mm", lambda m, lay: (
        lay(torch.ones(m, K, dtype=torch.int8)), torch.ones(N, K, dtype=torch.int8).t(),
    )),
    ("grouped_mm", grouped),
    ("grouped_mm", by_depth),
    ("fused_linear", lambda m, lay: (
        lay(random(m, K)), lay(random(N, K)), random(N), None, "gelu",
    )),
    ("fused_linear", lambda m, lay: (
        lay(random(2, m, K)), lay(random(N, K)), random(N), lay(random(2, m, N)),
    )),
    ("fused_linear", lambda m, lay: (
        lay(random(m, K)), random(N, K), None, None, None, None, None, torch.rand(m),
    )),
    ("fused_product", lambda m, lay: (
        lay(random(m, K)), lay(random(N, K)), random(N), None, FUSED,
    )),
    ("fused_product", lambda m, lay: (
        lay(random(2, m, K)), lay(random(N, K)), random(N), lay(random(2, m, N)), RESIDUAL,
    )),
    ("gated_linear", lambda m, lay: (lay(random(2, m, K)), lay(random(2 * N, K)))),
    ("gated_linear", lambda m, lay: (
        lay(random(m, K)), lay(random(2 * N, K)), None, random(2 * N), "silu", True,
    )),
    ("gated_product", lambda m, lay: (lay(random(m, K)), lay(random(2 * N, K)), None, True, GATE)),
    ("gated_product", lambda m, lay: (
        lay(random(2, m, K)), lay(random(N, K)), lay(random(N, K)), False, GATE,
    )),
    ("backward_product", lambda m, lay: (
        lay(random(m, N)), lay(random(N, INNER)), lay(random(m, INNER)), BACKWARD,
    )),
    ("backward_product", lambda m, lay: (
        lay(random(2, m, N)), lay(random(N, INNER)), lay(random(2, m, 2 * INNER)), GATED_BACKWARD,
    )),
    ("mlp", lambda m, lay: (
        lay(random(m, K)), lay(random(INNER, K)), lay(random(N, INNER)), None, random(INNER), None,
        lay(random(m, N)), "gelu", False, False,
    )),
    ("scaled_linear", lambda m, lay: (
        *scaled_operands(m, lay), random(N), "gelu", FP8, one(), one(), True,
    )),
    ("scaled_linear", lambda m, lay: (
        *scaled_operands(m, lay), None, None, BF16, None, None, False,
    )),
    ("scaled_gated_linear", lambda m, lay: (
        *scaled_operands(m, lay), None, "silu", False, FP8, one(), one(), True,
    )),
    ("experts", experts_operands),
    ("experts", lambda m, lay: (*experts_operands(m, lay), False)),
    ("experts_backward", experts_backward),
    ("linear_cross_entropy", lambda m, lay: (*loss_operands(m, lay), None, None, *LOSS, "mean")),
    ("linear_cross_entropy", lambda m, lay: (
        *loss_operands(m, lay), None, random(m, N), *LOSS, "none",
    )),
    ("cross_entropy_gradients", lambda m, lay: (
        *loss_operands(m, lay), torch.rand(m), random(m, N), [True, True, True], *LOSS, "none",
    )),
    ("cross_entropy_gradients", lambda m, lay: (
        *loss_operands(m, lay), torch.rand(1), None, [False, m != 1, False], *LOSS, "sum",
    )),
    ("cross_entropy_gradients", lambda m, lay: (
        *loss_operands(m, lay), None, None, [True, True, True], *LOSS, "none",
    )),
)  # fmt: skip


def named(name: str) -> Any:
    return getattr(torch.ops.gemmsmith, name).default


def described(found: Any) -> list[tuple[Any, ...]]:
    """Of each result; the strides where they mean something."""
    results = found if isinstance(found, (tuple, list)) else [] if found is None else [found]
    return [
        (
            tuple(one.shape),
            one.dtype,
            one.device.type,
            [
                step if size > 1 and one.numel() else None
                for size, step in zip(one.shape, one.stride(), strict=True)
            ],
        )
        for one in results
    ]


def faked(name: str, arguments: tuple[Any, ...], mode: FakeTensorMode) -> Any:
    with mode:
        given = [
            mode.from_tensor(one) if isinstance(one, torch.Tensor) else one for one in arguments
        ]
        return named(name)(*given)


def test_every_operator_is_here() -> None:
    every = {
        name.partition("::")[2].partition(".")[0]
        for name in map(str, torch._C._dispatch_get_all_op_names())
        if name.startswith("gemmsmith::")
    }
    assert every == {name for name, _ in SAMPLES}


@pytest.mark.parametrize("computing", ["kernels", "torch"])
@pytest.mark.parametrize("lay", LAYS, ids=lambda lay: lay.__name__)
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample[0])
def test_a_fake_is_as_the_real_one(
    engine: Engine, sample: Sample, lay: Lay, computing: str
) -> None:
    if computing == "torch":
        install(None)
    name, operands = sample
    for m in ROWS:
        arguments = operands(m, lay)
        with torch.no_grad():
            real = named(name)(*arguments)
        assert described(faked(name, arguments, FakeTensorMode())) == described(real), m
        results = real if isinstance(real, tuple) else () if real is None else (real,)
        mine = {one.untyped_storage().data_ptr() for one in results if one.numel()}
        theirs = {
            one.untyped_storage().data_ptr()
            for one in arguments
            if isinstance(one, torch.Tensor) and one.numel()
        }
        assert len(mine) == sum(bool(one.numel()) for one in results)  # none views another
        assert not mine & theirs


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample[0])
def test_a_fake_of_any_size(engine: Engine, sample: Sample) -> None:
    name, operands = sample
    arguments = operands(5, plain)
    with torch.no_grad():
        real = named(name)(*arguments)
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False)
    assert described(faked(name, arguments, mode)) == described(real)
