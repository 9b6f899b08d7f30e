"""`gemmsmith.linear` with what follows it, and `addmm` of a bias under `gemmsmith.patch`.

The reference is FP64 of the very operands; gradients are compared with autograd of it. What needs
no CUDA runs on the host as well, with stand-in kernels: tests/unit/ops/test_fused.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import gemmsmith
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.operation import Epilogue, Operation
from gemmsmith.core.problem import DType, Problem
from tests.gpu.support.building import build
from tests.gpu.support.choosing import Ground, tuned
from tuner.backends import Level, kernels, refusal

CASES = 300
KERNELS = 3
"""Of each operation."""
BOUND = 1e-2
"""Relative error in the Frobenius norm: rounding of a result in bf16."""
GRADIENT_BOUND = 2e-2
"""And of what the activation is applied to, and of its gradient, on the way to the products."""
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu": functional.gelu,
    "silu": functional.silu,
    "relu2": lambda x: functional.relu(x).square(),
}
KINDS: tuple[tuple[str | None, bool, bool], ...] = (
    *((activation, True, False) for activation in ACTIVATIONS),
    (None, True, False),
    (None, True, True),
    (None, False, True),
)
"""Activation, whether there is a bias, and a residual."""

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
    chosen = [
        kernel
        for operation in OPERATIONS
        for kernel in kernels(Problem.of(operation, 4096, 768, 1024), level=Level.CORE)[:KERNELS]
    ]
    store, _ = build(chosen)
    return Ground(
        device=torch.device("cuda:0"),
        model=model,
        types=(DType.BF16,),
        sizes=(528, 784, 1056),
        largest=4096,
        kernels=lambda problem: [one for one in chosen if refusal(one, problem) is None],
        store=store,
        compilers=({}, {"mode": "reduce-overhead"}),
    )


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(20261123)


def leaf(*size: int) -> torch.Tensor:
    return torch.randn(size, device="cuda").bfloat16().requires_grad_()


Given = list[torch.Tensor | None]


def operands(rows: tuple[int, ...], n: int, k: int, *, bias: bool, residual: bool) -> Given:
    """x, weight, bias and residual."""
    weight = (torch.randn(n, k, device="cuda") * k**-0.5).bfloat16().requires_grad_()
    return [leaf(*rows, k), weight, leaf(n) if bias else None, leaf(*rows, n) if residual else None]


def ours(given: Given, activation: str | None) -> torch.Tensor:
    x, weight, bias, residual = given
    assert x is not None
    assert weight is not None
    return gemmsmith.linear(x, weight, bias, activation=activation, residual=residual)


def exact(given: Given, activation: str | None) -> torch.Tensor:
    """In FP64, differentiable."""
    x, weight, bias, residual = (None if one is None else one.double() for one in given)
    assert x is not None
    assert weight is not None
    out = functional.linear(x, weight, bias)
    if activation is not None:
        out = ACTIVATIONS[activation](out)
    return out if residual is None else out + residual


LAYERS: dict[str, tuple[str, ...]] = {
    "scale_residual": ("residual", "column_scale"),
    "bias_scale_residual": ("bias", "residual", "column_scale"),
    "row_scale": ("row_scale",),
    "row_scale_bias": ("bias", "row_scale"),
}
"""What layers with factors are given beside x and weight, by epilogue."""


def layer(epilogue: str, rows: tuple[int, ...], n: int, k: int) -> dict[str, torch.Tensor]:
    """Operands of one of `LAYERS`; factors of rows take no part in autograd."""
    weight = (torch.randn(n, k, device="cuda") * k**-0.5).bfloat16().requires_grad_()
    made = {
        "bias": leaf(n),
        "residual": leaf(*rows, n),
        "column_scale": leaf(n),
        "row_scale": torch.rand(rows, device="cuda") + 0.5,
    }
    return {"x": leaf(*rows, k), "weight": weight, **{p: made[p] for p in LAYERS[epilogue]}}


def layer_step(
    given: dict[str, torch.Tensor],
    dy: torch.Tensor,
    call: Callable[..., torch.Tensor] = gemmsmith.linear,
) -> list[torch.Tensor]:
    """The output, and every gradient."""
    out = call(**given)
    return [
        out,
        *torch.autograd.grad(out, [one for one in given.values() if one.requires_grad], dy),
    ]


def compare_layer(
    found: list[torch.Tensor], given: dict[str, torch.Tensor], dy: torch.Tensor
) -> None:
    """With autograd of FP64."""
    of = {name: one.detach().double() for name, one in given.items()}
    leaves = [of[name].requires_grad_() for name, one in given.items() if one.requires_grad]
    out = functional.linear(of["x"], of["weight"])
    out = out * of["row_scale"].unsqueeze(-1) if "row_scale" in of else out
    out = out + of["bias"] if "bias" in of else out
    out = out * of["column_scale"] if "column_scale" in of else out
    out = out + of["residual"] if "residual" in of else out
    close(found[0], out.detach(), BOUND)
    for mine, theirs in zip(found[1:], torch.autograd.grad(out, leaves, dy.double()), strict=True):
        close(mine, theirs, GRADIENT_BOUND)


def close(found: torch.Tensor | None, wanted: torch.Tensor, bound: float) -> None:
    assert found is not None
    assert found.shape == wanted.shape
    difference = torch.linalg.vector_norm(found.detach().double() - wanted).item()
    assert difference <= bound * torch.linalg.vector_norm(wanted).item()


def step(given: Given, activation: str | None, dy: torch.Tensor) -> list[torch.Tensor]:
    """The output, and every gradient."""
    leaves = [one for one in given if one is not None]
    out = ours(given, activation)
    return [out, *torch.autograd.grad(out, leaves, dy)]


def compare(
    found: list[torch.Tensor], given: Given, activation: str | None, dy: torch.Tensor
) -> None:
    leaves = [one for one in given if one is not None]
    out = exact(given, activation)
    close(found[0], out.detach(), BOUND)
    wanted = torch.autograd.grad(out, leaves, dy.double())
    for mine, theirs in zip(found[1:], wanted, strict=True):
        close(mine, theirs.double(), GRADIENT_BOUND)


def test_300_random_layers_against_fp64(
    ground: Ground, record_property: Callable[[str, object], None]
) -> None:
    """Forwards and backwards, whoever takes it: sizes that no kernel reads are among them."""
    chance = random.Random(20261123)
    launched_ones = 0
    for case in range(CASES):
        activation, bias, residual = KINDS[case % len(KINDS)]
        m, n, k = (max(16, round(ground.largest ** chance.random())) for _ in range(3))
        if chance.random() < 0.9:
            n, k = -(-n // 8) * 8, -(-k // 8) * 8
        rows = (2, m // 2) if chance.random() < 0.5 else (m,)
        given = operands(rows, n, k, bias=bias, residual=residual)
        dy = torch.randn(*rows, n, device="cuda").bfloat16()
        with tuned(ground) as launched:
            found = step(given, activation, dy)
            launched_ones += launched()
        compare(found, given, activation, dy)
    record_property("by_tuned_kernels", launched_ones)
    assert launched_ones > CASES * 2


@pytest.mark.parametrize(("activation", "bias", "residual"), KINDS)
def test_a_graph_is_replayed_with_other_operands(
    ground: Ground, activation: str | None, bias: bool, residual: bool
) -> None:
    given = operands((512,), 768, 256, bias=bias, residual=residual)
    dy = torch.randn(512, 768, device="cuda").bfloat16()
    with tuned(ground) as launched:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step(given, activation, dy)
        torch.cuda.current_stream().wait_stream(stream)
        assert launched() == 3
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step(given, activation, dy)
        assert launched() == 3
    for _ in range(3):
        with torch.no_grad():
            for one in (*given, dy):
                if one is not None:
                    one.copy_(torch.randn_like(one))
        graph.replay()
        compare(found, given, activation, dy)


def test_random_layers_with_factors_against_fp64(ground: Ground) -> None:
    chance = random.Random(20261125)
    launched_ones = 0
    cases = CASES // 3
    for case in range(cases):
        epilogue = list(LAYERS)[case % len(LAYERS)]
        m, n, k = (max(16, round(ground.largest ** chance.random())) for _ in range(3))
        if chance.random() < 0.9:
            n, k = -(-n // 8) * 8, -(-k // 8) * 8
        rows = (2, m // 2) if chance.random() < 0.5 else (m,)
        given = layer(epilogue, rows, n, k)
        dy = torch.randn(*rows, n, device="cuda").bfloat16()
        with tuned(ground) as launched:
            found = layer_step(given, dy)
            launched_ones += launched()
        compare_layer(found, given, dy)
    assert launched_ones > cases * 2


@pytest.mark.parametrize("epilogue", LAYERS)
def test_a_graph_of_factors_is_replayed(ground: Ground, epilogue: str) -> None:
    given = layer(epilogue, (512,), 768, 256)
    dy = torch.randn(512, 768, device="cuda").bfloat16()
    with tuned(ground) as launched:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            layer_step(given, dy)
        torch.cuda.current_stream().wait_stream(stream)
        assert launched() == 3
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = layer_step(given, dy)
        assert launched() == 3
    for _ in range(3):
        with torch.no_grad():
            for one in (*given.values(), dy):
                one.copy_(torch.randn_like(one))
        graph.replay()
        compare_layer(found, given, dy)


@pytest.mark.parametrize("epilogue", ["bias_scale_residual", "row_scale_bias"])
def test_compiled_functions_hold_kernels_with_factors(ground: Ground, epilogue: str) -> None:
    given = layer(epilogue, (4, 128), 768, 256)
    dy = torch.randn(4, 128, 768, device="cuda").bfloat16()
    for options in ground.compilers:
        with tuned(ground) as launched:
            compiled = torch.compile(gemmsmith.linear, fullgraph=True, **options)
            found = [one.clone() for one in layer_step(given, dy, compiled)]
            assert launched() >= 3
        compare_layer(found, given, dy)


@pytest.mark.parametrize("activation", [None, "gelu_tanh", "silu"])
def test_compiled_functions_hold_fused_kernels(ground: Ground, activation: str | None) -> None:
    residual = activation is None
    given = operands((4, 128), 768, 256, bias=True, residual=residual)
    dy = torch.randn(4, 128, 768, device="cuda").bfloat16()
    for options in ground.compilers:
        with tuned(ground) as launched:
            compiled = torch.compile(
                lambda *some: ours(list(some), activation), fullgraph=True, **options
            )
            leaves = [one for one in given if one is not None]
            out = compiled(*given)
            found = [out, *torch.autograd.grad(out, leaves, dy)]
            found = [one.clone() for one in found]
            assert launched() >= 3
        compare(found, given, activation, dy)


def test_equal_inputs_give_equal_bits(ground: Ground) -> None:
    given = operands((1024,), 768, 1024, bias=True, residual=False)
    dy = torch.randn(1024, 768, device="cuda").bfloat16()
    with tuned(ground, deterministic=True) as launched:
        first = step(given, "gelu", dy)
        assert launched() == 3
        for _ in range(20):
            again = step(given, "gelu", dy)
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
    x, weight, bias, _ = operands((1024,), 768, 512, bias=True, residual=False)
    assert x is not None
    assert weight is not None
    assert bias is not None
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
