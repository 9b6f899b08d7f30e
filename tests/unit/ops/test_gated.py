"""`gemmsmith.gated_linear` and `mlp`: who computes them, what, and their gradients."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import gemmsmith
from gemmsmith.core.epilogue import GATES
from gemmsmith.ops.engine.engine import Engine
from tests.support.stand_in import Chooser
from tuner.suites import load

BF16 = torch.bfloat16
Runs = Callable[[], int]
M, WIDE, K = 6, 24, 16
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "relu": functional.relu,
    "sigmoid": torch.sigmoid,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu": functional.gelu,
}
LAYOUTS = ("halves", "interleaved", "two")


def random(*size: int) -> torch.Tensor:
    return torch.randn(*size).to(BF16).requires_grad_()


def operands(layout: str, *leading: int) -> list[Any]:
    """x, weight and up."""
    weights = [random(WIDE, K), random(WIDE, K)] if layout == "two" else [random(2 * WIDE, K), None]
    return [random(*(leading or (M,)), K), *weights]


def ours(given: list[Any], layout: str, activation: str = "silu", **more: Any) -> torch.Tensor:
    return gemmsmith.gated_linear(
        *given, activation=activation, interleaved=layout == "interleaved", **more
    )


def wanted(given: list[Any], layout: str, activation: str = "silu") -> torch.Tensor:
    """In FP64, differentiable."""
    x, weight, up = (None if one is None else one.double() for one in given)
    if layout == "halves":
        weight, up = weight[:WIDE], weight[WIDE:]
    elif layout == "interleaved":
        weight, up = weight.view(WIDE, 2, K).unbind(1)
    return ACTIVATIONS[activation](x @ weight.t()) * (x @ up.t())


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=8e-2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("leading", [(M,), (2, 3), (1,)])
def test_one_kernel_computes_it_all(
    engine: Engine,
    chooser: Chooser,
    runs: Runs,
    layout: str,
    activation: str,
    leading: tuple[int, ...],
) -> None:
    given = operands(layout, *leading)
    with torch.no_grad():
        out = ours(given, layout, activation)
    assert out.shape == (*leading, WIDE)
    close(out, wanted(given, layout, activation))
    assert runs() == 1
    (asked,) = chooser.asked
    assert asked.dtype == f"bf16.then_{activation}_gate"
    assert (asked.m, asked.n, asked.k) == (torch.Size(leading).numel(), 2 * WIDE, K)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("answered", ["all", "products", "nothing"])
def test_gradients_are_those_of_fp64(
    engine: Engine, chooser: Chooser, runs: Runs, layout: str, activation: str, answered: str
) -> None:
    if answered != "all":
        fused = answered == "products"
        chooser.answers = lambda problem: fused and not problem.operation.is_fused
    given = operands(layout, 2, 3)
    leaves = [one for one in given if one is not None]
    out = ours(given, layout, activation)
    forward = runs()
    dy = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, dy)
    weights = len(leaves) - 1
    backward = runs()
    expected_runs = {"all": (1, 2 * weights), "products": (weights, 2 * weights), "nothing": (0, 0)}
    assert (forward, backward) == expected_runs[answered]
    close(out, wanted(given, layout, activation))
    expected = torch.autograd.grad(wanted(given, layout, activation), leaves, dy.double())
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype is BF16
        error = (mine.double() - theirs.double()).norm() / theirs.double().norm()
        assert error < 2e-2
    if answered == "all":
        (stored,) = {problem.dtype for problem in chooser.asked if "then" in problem.dtype}
        assert stored == f"bf16.then_{activation}_gate_aux"


def test_only_what_the_backward_pass_needs_is_kept(engine: Engine) -> None:
    given = operands("halves")
    out = ours(given, "halves")
    kept = [one for one in out.grad_fn.saved_tensors if one is not None]
    x, weight, _ = given
    assert {one.data_ptr() for one in kept[:2]} == {x.data_ptr(), weight.data_ptr()}
    assert [one.shape for one in kept[2:]] == [(M, 2 * WIDE)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_the_gradients_that_are_wanted_are_computed(
    engine: Engine, runs: Runs, layout: str
) -> None:
    given = operands(layout)
    for one in given[1:]:
        if one is not None:
            one.requires_grad_(False)
    out = ours(given, layout)
    runs()
    out.sum().backward()
    assert runs() == (2 if layout == "two" else 1)
    assert given[0].grad is not None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gradient_of_the_gradient_is_torchs(engine: Engine, layout: str) -> None:
    given = operands(layout)
    x, weight, _ = given

    def twice(out: torch.Tensor) -> torch.Tensor:
        (dx,) = torch.autograd.grad(out.double().square().sum(), x, create_graph=True)
        (found,) = torch.autograd.grad(dx.double().square().sum(), weight)
        return found.double()

    found, plain = twice(ours(given, layout)), twice(wanted(given, layout))
    assert (found - plain).norm() / plain.norm() < 5e-2


@pytest.mark.parametrize("answered", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_gradients_are_added_to_their_sums(
    engine: Engine, chooser: Chooser, layout: str, answered: bool
) -> None:
    chooser.answers = lambda problem: answered
    given = operands(layout)
    leaves = [one for one in given[1:] if one is not None]
    sums = [torch.ones(one.shape) for one in leaves]
    out = ours(given, layout, main_grad=tuple(sums) if layout == "two" else sums[0])
    dy = torch.randn_like(out)
    out.backward(dy)
    expected = torch.autograd.grad(wanted(given, layout), leaves, dy.double())
    for weight, mine, theirs in zip(leaves, sums, expected, strict=True):
        assert weight.grad is None
        error = (mine.double() - 1 - theirs.double()).norm() / theirs.double().norm()
        assert error < 2e-2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_an_engine_it_is_torchs(layout: str) -> None:
    given = operands(layout)
    close(ours(given, layout, "gelu_tanh"), wanted(given, layout, "gelu_tanh"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_bias_is_added_before_the_gate(engine: Engine, runs: Runs, layout: str) -> None:
    given = operands(layout)
    bias = random(2 * WIDE)
    out = ours(given, layout, bias=bias)
    x, weight, up = given
    if up is None:
        both = functional.linear(x.double(), weight.double(), bias.double())
        halves = both.view(M, WIDE, 2).unbind(2) if layout == "interleaved" else both.chunk(2, -1)
    else:
        first, second = bias.double().chunk(2)
        halves = (
            functional.linear(x.double(), weight.double(), first),
            functional.linear(x.double(), up.double(), second),
        )
    close(out, functional.silu(halves[0]) * halves[1])
    (gradient,) = torch.autograd.grad(out.sum(), bias)
    assert gradient.shape == (2 * WIDE,)


def test_weights_that_lie_differently_are_torchs(
    engine: Engine, chooser: Chooser, runs: Runs
) -> None:
    x, gate, _ = operands("two")
    up = torch.randn(WIDE, K + 8).to(BF16)[:, :K]
    chooser.answers = lambda problem: problem.operation.is_fused
    with torch.no_grad():
        close(gemmsmith.gated_linear(x, gate, up), wanted([x, gate, up], "two"))
    assert runs() == 0


def test_an_up_that_starts_between_16_bytes_is_torchs(
    engine: Engine, chooser: Chooser, runs: Runs
) -> None:
    """Interleaved rows of K elements: up starts one row after the gate."""
    chooser.answers = lambda problem: problem.operation.is_fused
    x, weight = random(M, 12), random(2 * WIDE, 12)
    with torch.no_grad():
        found = gemmsmith.gated_linear(x, weight, interleaved=True)
    gate, up = weight.double().view(WIDE, 2, 12).unbind(1)
    close(found, functional.silu(x.double() @ gate.t()) * (x.double() @ up.t()))
    assert runs() == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "relu2"}, "silu, gelu_tanh, gelu"),
        ({"weight": torch.zeros(5, K)}, "2 \\* I"),
        ({"up": torch.zeros(WIDE, K)}, "like weight"),
        ({"up": torch.zeros(2 * WIDE, K), "interleaved": True}, "one weight"),
        ({"main_grad": torch.zeros(2, 2)}, "main_grad"),
        ({"main_grad": (torch.zeros(WIDE, K), torch.zeros(WIDE, K))}, "pair"),
    ],
)
def test_what_does_not_go_together_is_refused(change: dict[str, Any], message: str) -> None:
    given = {"x": torch.zeros(M, K), "weight": torch.zeros(2 * WIDE, K)} | change
    with pytest.raises(ValueError, match=message):
        gemmsmith.gated_linear(**given)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_autocast_casts_what_torchs_does(engine: Engine, runs: Runs, layout: str) -> None:
    given = [None if one is None else one.detach().float() for one in operands(layout)]
    for one in given:
        if one is not None:
            one.requires_grad_()
    with torch.autocast("cpu", dtype=BF16):
        out = ours(given, layout)
    assert out.dtype is BF16
    assert runs() == 1
    close(out, wanted(given, layout))
    out.sum().backward()
    assert given[1].grad.dtype is torch.float32


def test_deterministic_algorithms_want_deterministic_kernels(
    engine: Engine, chooser: Chooser, runs: Runs
) -> None:
    chooser.deterministic = False
    given = operands("halves")
    torch.use_deterministic_algorithms(True)
    try:
        close(ours(given, "halves"), wanted(given, "halves"))
    finally:
        torch.use_deterministic_algorithms(False)
    assert runs() == 0


def test_a_kernel_that_fails_is_replaced_by_torch(
    engine: Engine, chooser: Chooser, runs: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    chooser.name = "fails"
    with caplog.at_level(logging.WARNING, "gemmsmith"):
        for layout in LAYOUTS:
            given = operands(layout)
            out = ours(given, layout)
            close(out, wanted(given, layout))
            dy = torch.randn_like(out)
            found = torch.autograd.grad(out, given[1], dy)[0]
            (expected,) = torch.autograd.grad(wanted(given, layout), given[1], dy.double())
            assert (found.double() - expected.double()).norm() / expected.double().norm() < 2e-2
    assert runs() == 0
    assert caplog.records


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("trained", [False, True])
def test_a_compiled_function_holds_the_whole(
    engine: Engine, runs: Runs, layout: str, trained: bool
) -> None:
    given = operands(layout)
    leaves = [one.requires_grad_(trained) for one in given if one is not None]
    call = torch.compile(lambda: ours(given, layout), fullgraph=True, backend="aot_eager")
    out = call()
    assert runs() == 1
    close(out, wanted(given, layout))
    if trained:
        dy = torch.randn_like(out)
        found = torch.autograd.grad(out, leaves, dy)
        expected = torch.autograd.grad(wanted(given, layout), leaves, dy.double())
        for mine, theirs in zip(found, expected, strict=True):
            assert (mine.double() - theirs.double()).norm() / theirs.double().norm() < 2e-2
        assert runs() > 0


def test_the_operators_say_what_they_are(engine: Engine) -> None:
    x, weight, _ = operands("halves")
    torch.library.opcheck(
        torch.ops.gemmsmith.gated_linear.default,
        (x, weight, None, None, "gelu", True),
        test_utils=("test_schema", "test_faketensor"),
    )
    for epilogue in ("silu_gate", "silu_gate_aux"):
        torch.library.opcheck(
            torch.ops.gemmsmith.gated_product.default,
            (x.detach(), weight.detach(), None, False, epilogue),
            test_utils=("test_schema", "test_faketensor"),
        )


@pytest.mark.parametrize("trained", [False, True])
def test_what_could_be_fused_is_captured(trained: bool, tmp_path: Path) -> None:
    aux = "_aux" if trained else ""
    with gemmsmith.capture() as found:
        for layout in ("halves", "two"):
            given = operands(layout)
            for one in given:
                if one is not None:
                    one.requires_grad_(trained)
            ours(given, layout)
    counted = {(problem.dtype, problem.n): count for problem, count in found.problems.items()}
    assert counted == {
        ("bf16", 2 * WIDE): 1,
        ("bf16", WIDE): 2,
        (f"bf16.then_silu_gate{aux}", 2 * WIDE): 2,
    }
    found.save(tmp_path / "captured.toml")
    again = load(tmp_path / "captured.toml")
    assert {str(problem) for _, problem in again.problems("bf16")} == set(map(str, found.problems))


@pytest.mark.parametrize("kind", ["plain", "halves", "interleaved", "two"])
@pytest.mark.parametrize("residual", [False, True])
def test_an_mlp_is_its_layers(engine: Engine, runs: Runs, kind: str, residual: bool) -> None:
    x, down, bias = random(M, K), random(K, WIDE), random(K)
    added = random(M, K) if residual else None
    if kind == "plain":
        weight, inner_bias = random(WIDE, K), random(WIDE)
        out = gemmsmith.mlp(
            x, weight, down, bias=inner_bias, down_bias=bias, activation="gelu", residual=added
        )
        hidden = functional.gelu(
            functional.linear(x.double(), weight.double(), inner_bias.double())
        )
    else:
        _, weight, up = operands(kind)
        out = gemmsmith.mlp(
            x,
            weight,
            down,
            up=up,
            down_bias=bias,
            interleaved=kind == "interleaved",
            residual=added,
        )
        hidden = wanted([x, weight, up], kind)
    assert runs() == 2
    expected = functional.linear(hidden, down.double(), bias.double())
    expected = expected if added is None else expected + added.double()
    error = (out.double() - expected).norm() / expected.norm()
    assert error < 1e-2
    out.sum().backward()
    assert weight.grad is not None


def test_an_mlp_says_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="a gated layer's weight has 48 rows"):
        gemmsmith.mlp(torch.zeros(M, K), torch.zeros(7, K), torch.zeros(K, WIDE))


def test_gates_are_listed() -> None:
    assert set(GATES) == set(ACTIVATIONS)
