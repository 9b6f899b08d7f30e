"""MLPs with backward epilogues: who computes them, their gradients, and what is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.nn import functional

import gemmsmith
from gemmsmith.core.activations import ACTIVATIONS
from gemmsmith.core.epilogue import Epilogue
from gemmsmith.core.problem import Problem
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.products import backward
from tests.support.stand_in import Chooser, deterministic
from tests.unit.ops.test_layers import kept_bytes

BF16 = torch.bfloat16
Runs = Callable[[], int]
M, INNER, K, OUT = 6, 24, 16, 32


def random(*size: int) -> torch.Tensor:
    return (torch.randn(*size) / size[-1] ** 0.5).to(BF16).requires_grad_()


def plain(*leading: int, bias: bool = True) -> list[Any]:
    """x, both weights and biases."""
    return [
        (torch.randn(*(leading or (M,)), K)).to(BF16).requires_grad_(),
        random(INNER, K),
        random(INNER) if bias else None,
        random(OUT, INNER),
        random(OUT) if bias else None,
    ]


def gated(*leading: int, joined: bool) -> list[Any]:
    x = torch.randn(*(leading or (M,)), K).to(BF16).requires_grad_()
    weights = [random(2 * INNER, K), None] if joined else [random(INNER, K), random(INNER, K)]
    return [x, *weights, random(OUT, INNER)]


def mlp(
    x: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    activation: str,
    **options: Any,
) -> torch.Tensor:
    return gemmsmith.mlp(x, w1, w2, bias=b1, down_bias=b2, activation=activation, **options)


def gated_mlp(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    down: torch.Tensor,
    activation: str,
    **options: Any,
) -> torch.Tensor:
    return gemmsmith.mlp(x, gate, down, up=up, activation=activation, **options)


def wanted(given: list[Any], activation: str) -> torch.Tensor:
    """In FP64, differentiable."""
    x, *rest = (None if one is None else one.double() for one in given)
    assert x is not None
    if len(rest) == 4:
        w1, b1, w2, b2 = rest
        h = ACTIVATIONS[activation](functional.linear(x, w1, b1))
        return functional.linear(h, w2, b2)
    gate, up, down = rest
    both = functional.linear(x, gate if up is None else torch.cat([gate, up]))
    first, second = both.chunk(2, -1)
    return functional.linear(ACTIVATIONS[activation](first) * second, down)


def leaves(given: list[Any]) -> list[torch.Tensor]:
    return [one for one in given if one is not None]


def near(ours: Sequence[torch.Tensor], exact: Sequence[torch.Tensor], bound: float = 2e-2) -> None:
    for mine, theirs in zip(ours, exact, strict=True):
        assert (mine.double() - theirs.double()).norm() / theirs.double().norm() < bound


def gradients_agree(out: torch.Tensor, given: list[Any], activation: str) -> None:
    expected = wanted(given, activation)
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=5e-2)
    dy = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves(given), dy)
    right = torch.autograd.grad(expected, leaves(given), dy.double())
    assert {gradient.dtype for gradient in found} == {BF16}
    near(found, right)


def backwards(chooser: Chooser) -> list[Problem]:
    return [p for p in chooser.asked if p.operation.epilogue.backward]


@pytest.mark.parametrize("activation", [*filter(Epilogue.backward_of, ACTIVATIONS)])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_are_those_of_fp64(
    engine: Engine, chooser: Chooser, runs: Runs, activation: str, recompute: bool, bias: bool
) -> None:
    given = plain(2, 3, bias=bias)
    out = mlp(*given, activation, recompute=recompute)
    assert runs() == 2
    gradients_agree(out, given, activation)
    assert runs() == 4  # the fused product, dx and both weights' gradients: no further one
    asked = backwards(chooser)[0]
    suffix = "_act" if recompute else "_bgrad" if bias else ""
    assert (asked.dtype, asked.layout) == (f"bf16.then_d{activation}{suffix}", "tt")
    assert (asked.m, asked.n, asked.k) == (6, INNER, OUT)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("leading", [(M,), (2, 3), (1,)])
def test_gated_gradients_are_those_of_fp64(
    engine: Engine,
    chooser: Chooser,
    runs: Runs,
    activation: str,
    recompute: bool,
    joined: bool,
    leading: tuple[int, ...],
) -> None:
    given = gated(*leading, joined=joined)
    out = gated_mlp(*given, activation, recompute=recompute)
    assert "MLP" in type(out.grad_fn).__name__
    assert runs() == 2  # gate and up in one
    gradients_agree(out, given, activation)
    assert runs() == (4 if joined else 6)
    (asked,) = set(backwards(chooser))
    assert asked.dtype == f"bf16.then_d{activation}_gate{'_act' if recompute else ''}"
    assert (asked.m, asked.n, asked.k) == (torch.Size(leading).numel(), INNER, OUT)


@pytest.mark.parametrize("joined", [False, True])
def test_the_first_layer_is_torchs_or_its_own_kernels_where_nothing_fused_wins_forwards(
    engine: Engine, chooser: Chooser, runs: Runs, joined: bool
) -> None:
    """Of a gate beside its up torch writes each half where it belongs."""
    chooser.answers = lambda problem: (
        problem.operation.epilogue is Epilogue.NONE or bool(problem.operation.epilogue.backward)
    )
    other = gated(2, 3, joined=joined)
    out = gated_mlp(*other, "silu")
    assert runs() == (2 if joined else 1)
    gradients_agree(out, other, "silu")
    given = plain(2, 3, bias=False)
    gradients_agree(mlp(*given, "silu"), given, "silu")


@pytest.mark.parametrize("joined", [False, True])
def test_a_gates_bias_is_torchs_forwards(engine: Engine, runs: Runs, joined: bool) -> None:
    """The backward product's kernel does not care."""
    x, gate, up, down = gated(2, 3, joined=joined)
    bias = random(2 * INNER)
    given = [x, gate, up, down, bias]
    out = gated_mlp(x, gate, up, down, "silu", bias=bias)
    assert "MLP" in type(out.grad_fn).__name__
    runs()
    dy = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves(given), dy)
    assert runs() == (4 if joined else 6)
    wide = [None if one is None else one.double() for one in given]
    whole = wide[1] if joined else torch.cat([wide[1], wide[2]])  # type: ignore[list-item]
    first, second = functional.linear(wide[0], whole, wide[4]).chunk(2, -1)  # type: ignore[arg-type]
    right = functional.linear(functional.silu(first) * second, wide[3])  # type: ignore[arg-type]
    expected = torch.autograd.grad(right, leaves(given), dy.double())
    near([out, *found], [right, *expected])


@pytest.mark.parametrize("wins", [False, True])
@pytest.mark.parametrize("size", [(M, OUT), (OUT,)])
def test_a_residual_is_added(
    engine: Engine, chooser: Chooser, runs: Runs, wins: bool, size: tuple[int, ...]
) -> None:
    """By the second product's kernel, where one does so and takes it as it is."""
    chooser.answers = lambda problem: wins or not problem.operation.epilogue.has_residual
    given = plain()
    residual = random(*size)
    out = mlp(*given, "gelu", residual=residual)
    assert runs() == 2
    fused = "MLP" in type(out.grad_fn).__name__
    assert fused is (wins and size == (M, OUT))
    dy = torch.randn_like(out)
    found = torch.autograd.grad(out, [*given, residual], dy)
    assert runs() == 4
    expected = wanted(given, "gelu") + residual.double()
    right = torch.autograd.grad(expected, [*given, residual], dy.double())
    near([out, *found], [expected, *right])


def test_weights_that_lie_in_columns(engine: Engine, chooser: Chooser, runs: Runs) -> None:
    """As GPT-2's: their gradients lie so too, and autograd copies none."""
    x, w1, b1, w2, b2 = plain()
    for one in (w1, w2):
        one.data = one.data.t().contiguous().t()
    given = [x, w1, b1, w2, b2]
    gradients_agree(mlp(*given, "gelu_tanh"), given, "gelu_tanh")
    assert runs() == 6
    (asked,) = set(backwards(chooser))
    assert (asked.dtype, asked.layout) == ("bf16.then_dgelu_tanh_bgrad", "tn")
    mlp(*given, "gelu_tanh").sum().backward()
    assert w1.grad.stride() == w1.stride()
    assert w2.grad.stride() == w2.stride()


def test_what_no_kernel_computes_is_torchs_to_the_bit(engine: Engine, runs: Runs) -> None:
    given = [one.detach().double().requires_grad_() for one in plain()]
    found, right = mlp(*given, "gelu"), wanted(given, "gelu")
    dy = torch.randn_like(right)
    for mine, theirs in zip(
        [found, *torch.autograd.grad(found, given, dy)],
        [right, *torch.autograd.grad(right, given, dy)],
        strict=True,
    ):
        assert torch.equal(mine, theirs)
    assert runs() == 0
    x, gate, _, down = gated(joined=True)
    assert (
        "MLP" not in type(gated_mlp(x, gate, None, down, "silu", interleaved=True).grad_fn).__name__
    )


def test_deterministic_programs_run_what_is_deterministic(
    engine: Engine, chooser: Chooser, runs: Runs
) -> None:
    given = plain()
    chooser.deterministic = False
    with deterministic():
        out = mlp(*given, "silu")
        out.sum().backward()
        assert runs() == 0
        chooser.deterministic = True
        engine._plans = {}
        first, second = (
            torch.autograd.grad(mlp(*given, "silu").sum(), leaves(given)) for _ in range(2)
        )
    assert runs() == 12
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_without_a_winner_backwards_layers_are_composed(
    engine: Engine, chooser: Chooser, runs: Runs
) -> None:
    chooser.answers = lambda problem: problem.operation.epilogue.backward is None
    given, other = plain(), gated(joined=True)
    out, gated_out = mlp(*given, "gelu"), gated_mlp(*other, "silu")
    for one in (out, gated_out):
        assert "MLP" not in type(one.grad_fn).__name__
    assert runs() == 4  # each activation within the first product
    gradients_agree(out, given, "gelu")
    gradients_agree(gated_out, other, "silu")
    # There is a gate's derivative in a product of some activations only.
    assert "MLP" not in type(gated_mlp(*gated(joined=True), "gelu").grad_fn).__name__


def test_a_kernel_that_is_refused_later_leaves_the_steps_to_torch(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, other = plain(), gated(joined=False)
    out, gated_out = mlp(*given, "silu", recompute=True), gated_mlp(*other, "silu")
    monkeypatch.setattr(backward, "by_kernel", lambda *_: None)
    gradients_agree(out, given, "silu")
    gradients_agree(gated_out, other, "silu")


@pytest.mark.parametrize("recompute", [False, True])
def test_no_more_is_kept_than_by_torch(engine: Engine, recompute: bool) -> None:
    one = M * INNER * 2
    given = plain()
    ours = kept_bytes(lambda: mlp(*given, "gelu_tanh", recompute=recompute), *given)
    assert ours == one * (1 if recompute else 2)
    x, w1, b1, w2, b2 = given

    def torchs() -> torch.Tensor:
        linear = functional.linear(x, w1, b1)
        return functional.linear(functional.gelu(linear, approximate="tanh"), w2, b2)

    assert ours <= kept_bytes(torchs, *given)
    other = gated(joined=True)
    ours = kept_bytes(lambda: gated_mlp(*other, "silu", recompute=recompute), *other)
    assert ours == one * (2 if recompute else 3)

    def torchs_gated() -> torch.Tensor:
        first, second = functional.linear(other[0], other[1]).chunk(2, -1)
        return functional.linear(functional.silu(first) * second, other[3])

    assert ours < kept_bytes(torchs_gated, *other)


def test_only_the_gradients_that_are_wanted_are_computed(engine: Engine, runs: Runs) -> None:
    given = plain()
    for one in (given[0], given[3], given[4]):
        one.requires_grad_(False)
    out = mlp(*given, "silu")
    runs()
    out.sum().backward()
    assert runs() == 2  # the fused product and the first weight's gradient
    assert given[1].grad is not None
    assert given[2].grad is not None
    assert given[3].grad is None
    frozen = plain()
    for one in frozen[:3]:
        one.requires_grad_(False)
    out = mlp(*frozen, "silu")
    out.sum().backward()
    assert frozen[3].grad is not None


def test_a_gradient_of_the_gradient_is_torchs(engine: Engine) -> None:
    def twice(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        (dx,) = torch.autograd.grad(out.double().square().sum(), x, create_graph=True)
        (found,) = torch.autograd.grad(dx.double().square().sum(), weight)
        return found.double()

    cases: list[tuple[Any, str, list[Any], int]] = [
        (mlp, "gelu", plain(), 1),
        *((gated_mlp, "silu", gated(joined=joined), 3) for joined in (True, False)),
    ]
    for compute, activation, given, weight in cases:
        found = twice(compute(*given, activation), given[0], given[weight])
        right = twice(wanted(given, activation), given[0], given[weight])
        near([found], [right], 5e-2)


def test_autocast_casts_what_torchs_layers_cast(engine: Engine, chooser: Chooser) -> None:
    given = [one.detach().float().requires_grad_() for one in plain()]
    with torch.autocast("cpu", dtype=BF16):
        out = mlp(*given, "gelu_tanh")
    assert out.dtype is BF16
    assert backwards(chooser)
    dy = torch.randn_like(out)
    found = torch.autograd.grad(out, given, dy)
    right = torch.autograd.grad(wanted(given, "gelu_tanh"), given, dy.double())
    assert {gradient.dtype for gradient in found} == {torch.float32}
    near(found, right)


@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_as_one_graph(engine: Engine, runs: Runs, recompute: bool) -> None:
    def compiler(graph: Any, _: Any) -> Any:
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()

    backend = aot_autograd(fw_compiler=compiler)
    compiled = torch.compile(mlp, fullgraph=True, backend=backend)
    given = plain(2, 3)
    gradients_agree(compiled(*given, "silu", recompute=recompute), given, "silu")
    assert runs() == 6
    compiled = torch.compile(gated_mlp, fullgraph=True, backend=backend)
    other = gated(joined=False)
    gradients_agree(compiled(*other, "silu", recompute=recompute), other, "silu")
    assert runs() == 8  # two products forwards; the fused one, two of x, three of weights
    torch._dynamo.reset()


def test_there_must_be_such_an_activation() -> None:
    with pytest.raises(ValueError, match="activation must be one of"):
        mlp(*plain(), "tanh")
    with pytest.raises(ValueError, match="activation must be one of"):
        gated_mlp(*gated(joined=True), "tanh")
