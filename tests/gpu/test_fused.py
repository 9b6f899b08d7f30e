"""`gemmsmith.linear` with what follows it, and `addmm` of a bias under `gemmsmith.patch`.

The reference is FP64 of the very operands; gradients are compared with autograd of it. What needs
no CUDA runs on the host as well, with stand-in kernels: tests/unit/ops/test_fused.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

import gemmsmith
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.operation import Epilogue, Operation
from gemmsmith.core.problem import Problem
from tests.gpu.support.choosing import Files, Ground, first_kernels, tuned
from tests.gpu.support.layers import (
    BOUND,
    GRADIENT_BOUND,
    Layer,
    Operands,
    close,
    compare,
    leaf,
    step,
    warm_up,
)
from tests.support.patched import is_patched

CASES = 300
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu": functional.gelu,
    "silu": functional.silu,
    "relu2": lambda x: functional.relu(x).square(),
}
KINDS: tuple[tuple[str | None, tuple[str, ...]], ...] = (
    *((activation, ("bias",)) for activation in ACTIVATIONS),
    (None, ("bias",)),
    (None, ("bias", "residual")),
    (None, ("residual",)),
)
"""Activation, and operands beside x and weight."""
FACTORS: tuple[tuple[str | None, tuple[str, ...]], ...] = (
    (None, ("residual", "column_scale")),
    (None, ("bias", "residual", "column_scale")),
    (None, ("row_scale",)),
    (None, ("bias", "row_scale")),
)
"""The same of layers with factors."""

OPERATIONS = (
    *(
        Operation.of("bf16", epilogue=each)
        for each in Epilogue
        if not each.is_gated and each.backward is None
    ),
    Operation.of("bf16", "tt"),
    Operation.of("bf16", "nt"),
    Operation.of("bf16", "tt", epilogue="bias"),
)
"""Forwards, and the bare products of the backward pass; `addmm` of a matrix that lies in rows."""


@pytest.fixture(scope="module")
def ground(model: DeviceModel) -> Ground:
    problems = [Problem.of(operation, 4096, 768, 1024) for operation in OPERATIONS]
    return Ground.of(model, first_kernels(problems))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(20261123)


def operands(parts: tuple[str, ...], rows: tuple[int, ...], n: int, k: int) -> Operands:
    """Factors of rows take no part in autograd."""
    drawn = {
        "bias": lambda: leaf(n),
        "residual": lambda: leaf(*rows, n),
        "column_scale": lambda: leaf(n),
        "row_scale": lambda: torch.rand(rows, device="cuda") + 0.5,
    }
    weight = leaf(n, k, scale=k**-0.5)
    return {"x": leaf(*rows, k), "weight": weight, **{part: drawn[part]() for part in parts}}


def of(activation: str | None, call: Layer = gemmsmith.linear) -> Layer:
    return partial(call, activation=activation)


def exact(activation: str | None) -> Layer:
    def layer(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        column_scale: torch.Tensor | None = None,
        row_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = functional.linear(x, weight)
        out = out if row_scale is None else out * row_scale.unsqueeze(-1)
        out = out if bias is None else out + bias
        out = out if activation is None else ACTIVATIONS[activation](out)
        out = out if column_scale is None else out * column_scale
        return out if residual is None else out + residual

    return layer


@pytest.mark.parametrize(("kinds", "cases"), [(KINDS, CASES), (FACTORS, CASES // 3)])
def test_random_layers_against_fp64(
    ground: Ground,
    kinds: tuple[tuple[str | None, tuple[str, ...]], ...],
    cases: int,
    record_property: Callable[[str, object], None],
) -> None:
    """Forwards and backwards, by a kernel or by torch: some sizes no kernel reads."""
    chance = random.Random(20261123)
    launched_ones = 0
    for case in range(cases):
        activation, parts = kinds[case % len(kinds)]
        m, n, k = (max(16, round(ground.largest ** chance.random())) for _ in range(3))
        if chance.random() < 0.9:
            n, k = -(-n // 8) * 8, -(-k // 8) * 8
        rows = (2, m // 2) if chance.random() < 0.5 else (m,)
        drawn = operands(parts, rows, n, k)
        dy = torch.randn(*rows, n, device="cuda").bfloat16()
        with tuned(ground) as launched:
            outputs = step(of(activation), drawn, dy)
            launched_ones += launched()
        compare(outputs, exact(activation), drawn, dy)
    record_property("by_tuned_kernels", launched_ones)
    assert launched_ones > cases * 2


@pytest.mark.parametrize(("activation", "parts"), [*KINDS, *FACTORS])
def test_a_graph_is_replayed_with_other_operands(
    ground: Ground, activation: str | None, parts: tuple[str, ...]
) -> None:
    drawn = operands(parts, (512,), 768, 256)
    dy = torch.randn(512, 768, device="cuda").bfloat16()
    with tuned(ground) as launched:
        warm_up(lambda: step(of(activation), drawn, dy))
        assert launched() == 3
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = step(of(activation), drawn, dy)
        assert launched() == 3
    for _ in range(3):
        with torch.no_grad():
            for tensor in (*drawn.values(), dy):
                tensor.copy_(torch.randn_like(tensor))
        graph.replay()
        compare(outputs, exact(activation), drawn, dy)


@pytest.mark.parametrize(
    ("activation", "parts"),
    [
        (None, ("bias", "residual")),
        ("gelu_tanh", ("bias",)),
        ("silu", ("bias",)),
        (None, ("bias", "residual", "column_scale")),
        (None, ("bias", "row_scale")),
    ],
)
def test_compiled_functions_hold_fused_kernels(
    ground: Ground, activation: str | None, parts: tuple[str, ...]
) -> None:
    drawn = operands(parts, (4, 128), 768, 256)
    dy = torch.randn(4, 128, 768, device="cuda").bfloat16()
    for options in ground.compilers:
        with tuned(ground) as launched:
            compiled = torch.compile(gemmsmith.linear, fullgraph=True, **options)
            outputs = [one.clone() for one in step(of(activation, compiled), drawn, dy)]
            assert launched() >= 3
        compare(outputs, exact(activation), drawn, dy)


def test_equal_inputs_give_equal_bits(ground: Ground) -> None:
    drawn = operands(("bias",), (1024,), 768, 1024)
    dy = torch.randn(1024, 768, device="cuda").bfloat16()
    with tuned(ground, deterministic=True) as launched:
        first = step(of("gelu"), drawn, dy)
        assert launched() == 3
        for _ in range(20):
            again = step(of("gelu"), drawn, dy)
            for one, other in zip(first, again, strict=True):
                assert torch.equal(one, other)


def test_autocast_trains_an_fp32_layer(ground: Ground) -> None:
    layer = nn.Linear(256, 768, device="cuda")
    x = torch.randn(512, 256, device="cuda", requires_grad=True)
    with tuned(ground) as launched, torch.autocast("cuda", dtype=torch.bfloat16):
        out = gemmsmith.linear(x, layer.weight, layer.bias, activation="gelu_tanh")
        assert launched() == 1
    out.float().sum().backward()
    wanted = functional.gelu(layer.double()(x.double()), approximate="tanh")
    close(out, wanted.detach(), BOUND)
    assert x.grad is not None
    assert x.grad.dtype is torch.float32


@pytest.mark.parametrize("expanded", [False, True])
def test_addmm_of_a_bias_runs_below_unchanged_code(ground: Ground, expanded: bool) -> None:
    x, weight, bias = operands(("bias",), (1024,), 768, 512).values()
    added = bias.expand(1024, 768) if expanded else bias
    with tuned(ground) as launched, gemmsmith.patch():
        out = torch.addmm(added, x, weight.t())
        assert launched() == 1
        rows = torch.addmm(added, x, weight.t().contiguous())
        assert launched() == 1
        torch.addmm(added, x, weight.t(), beta=0.5)
        assert launched() == 0
    wanted = functional.linear(x.double(), weight.double(), bias.double()).detach()
    close(out, wanted, BOUND)
    close(rows, wanted, BOUND)


@pytest.mark.parametrize("rows", ["fewer rows", "other sizes"])
def test_what_no_winner_fits_runs_torchs_kernels(ground: Ground, rows: str) -> None:
    """A real snapshot's winner for the layer at 1024 rows, or for another layer: the same bits."""
    k = 768 if rows == "fewer rows" else 64
    problem = Problem(m=1024, n=1024, k=768, dtype="bf16.then_bias_gelu")
    model = nn.Sequential(nn.Linear(k, 1024), nn.GELU(), nn.Linear(1024, k))
    model = nn.Sequential(model).to(ground.device, torch.bfloat16)
    few, many = (torch.randn(m, k, device=ground.device).bfloat16() for m in (8, 1024))
    source = (ground.snapshot([problem]), Files(ground.store))
    with torch.no_grad():
        wanted = model(few)
        with tuned(ground, source) as launched, gemmsmith.patch(model):
            assert is_patched(model[0]) is (rows == "fewer rows")
            for _ in range(3):
                assert torch.equal(model(few), wanted)
            assert launched() == 0
            model(many)
            assert launched() == is_patched(model[0])


def test_a_model_of_bias_layers_trains_as_torchs(ground: Ground) -> None:
    """Every gradient within rounding of FP32, eager and compiled, by `patch()` alone."""
    model = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512)).to("cuda")
    narrow = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512))
    narrow = narrow.to("cuda", torch.bfloat16)
    narrow.load_state_dict(model.state_dict())
    model.load_state_dict(narrow.state_dict())
    x = torch.randn(8, 64, 512, device="cuda").bfloat16()
    wanted = model(x.float())
    wanted.square().sum().backward()
    for call in (narrow, torch.compile(narrow)):
        narrow.zero_grad()
        with tuned(ground), gemmsmith.patch():
            out = call(x)
            out.float().square().sum().backward()
        close(out, wanted.detach().double(), BOUND)
        for mine, theirs in zip(narrow.parameters(), model.parameters(), strict=True):
            assert theirs.grad is not None
            close(mine.grad, theirs.grad.double(), GRADIENT_BOUND)


def test_training_stays_within_torchs_own_distance(ground: Ground) -> None:
    """200 steps of a small MLP: the loss is as far from torch's as torch's is from its own in
    another order of the batch's rows, at most three times.
    """

    def losses(order: torch.Tensor, *, fused: bool) -> torch.Tensor:
        torch.manual_seed(7)
        up, down = nn.Linear(256, 1024), nn.Linear(1024, 256)
        layers = nn.ModuleList([up, down]).to("cuda", torch.bfloat16)
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.02)
        x = torch.randn(512, 256, device="cuda").bfloat16()[order]
        y = torch.sin(x.float()).bfloat16()
        found = []
        for _ in range(200):
            if fused:
                hidden = gemmsmith.linear(x, up.weight, up.bias, activation="gelu_tanh")
                out = gemmsmith.linear(hidden, down.weight, down.bias, residual=x)
            else:
                out = down(functional.gelu(up(x), approximate="tanh")) + x
            loss = functional.mse_loss(out.float(), y.float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        return torch.stack(found)

    same = torch.arange(512, device="cuda")
    torchs = losses(same, fused=False)
    others = losses(same.flip(0), fused=False)
    with tuned(ground) as launched:
        mine = losses(same, fused=True)
        assert launched() >= 200 * 4
    allowed = 3 * (torchs - others).abs().max() + 1e-3 * torchs.max()
    assert (mine - torchs).abs().max() <= allowed
    assert mine[-1] < mine[0]
