"""`gemmsmith.linear` with what follows it: who computes it, what, and its gradients."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.nn import functional

import gemmsmith
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.problem import Problem
from tests.support.stand_in import Chooser, Host
from tuner.suites import load

BF16 = torch.bfloat16
Runs = Callable[[], int]
M, N, K = 6, 24, 16
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu": functional.gelu,
    "silu": functional.silu,
    "relu2": lambda x: functional.relu(x).square(),
}
CASES = [
    *((activation, True, False) for activation in ACTIVATIONS),
    (None, True, True),
    (None, False, True),
]


def random(*size: int) -> torch.Tensor:
    return torch.randn(*size).to(BF16).requires_grad_()


def operands(*leading: int, bias: bool = True, residual: bool = False) -> list[Any]:
    """x, weight, bias and residual."""
    rows = leading or (M,)
    return [
        random(*rows, K),
        random(N, K),
        random(N) if bias else None,
        random(*rows, N) if residual else None,
    ]


def ours(given: list[Any], activation: str | None) -> torch.Tensor:
    x, weight, bias, residual = given
    return gemmsmith.linear(x, weight, bias, activation=activation, residual=residual)


def wanted(given: list[Any], activation: str | None) -> torch.Tensor:
    """In FP64, differentiable."""
    x, weight, bias, residual = (None if one is None else one.double() for one in given)
    out = functional.linear(x, weight, bias)
    if activation is not None:
        out = ACTIVATIONS[activation](out)
    return out if residual is None else out + residual


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize(("activation", "bias", "residual"), CASES)
@pytest.mark.parametrize("leading", [(M,), (2, 3), (1,)])
def test_one_kernel_computes_it_all(
    engine: Engine,
    chooser: Chooser,
    runs: Runs,
    activation: str | None,
    bias: bool,
    residual: bool,
    leading: tuple[int, ...],
) -> None:
    given = operands(*leading, bias=bias, residual=residual)
    with torch.no_grad():
        close(ours(given, activation), wanted(given, activation))
    assert runs() == 1
    (asked,) = chooser.asked
    words = ["bias"] * bias + [activation or ""] * bool(activation) + ["residual"] * residual
    assert asked.dtype == f"bf16.then_{'_'.join(words)}"
    assert (asked.m, asked.n, asked.k) == (torch.Size(leading).numel(), N, K)


@pytest.mark.parametrize(("activation", "bias", "residual"), CASES)
def test_gradients_are_those_of_fp64(
    engine: Engine,
    chooser: Chooser,
    runs: Runs,
    activation: str | None,
    bias: bool,
    residual: bool,
) -> None:
    given = operands(2, 3, bias=bias, residual=residual)
    leaves = [one for one in given if one is not None]
    out = ours(given, activation)
    assert runs() == 1
    dy = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, dy)
    assert runs() == 2  # both products of the backward pass
    expected = torch.autograd.grad(wanted(given, activation), leaves, dy.double())
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype is BF16
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=5e-2, atol=0.15)
    stored = {problem.dtype for problem in chooser.asked if "then" in problem.dtype}
    (operation,) = stored
    assert operation.endswith("_aux") is (activation is not None)


def test_only_the_gradients_that_are_wanted_are_computed(engine: Engine, runs: Runs) -> None:
    x, weight, bias, _ = operands()
    x.requires_grad_(False)
    weight.requires_grad_(False)
    out = gemmsmith.linear(x, weight, bias, activation="silu")
    runs()
    out.sum().backward()
    assert runs() == 0
    assert bias.grad is not None
    assert x.grad is None


def test_the_gradient_lies_as_its_weight_does(engine: Engine, chooser: Chooser) -> None:
    """GPT-2's weights are [K, N]: no copy of their gradients."""
    x, _, bias, _ = operands()
    weight = random(K, N)
    out = gemmsmith.linear(x, weight.t(), bias, activation="gelu_tanh")
    out.sum().backward()
    assert weight.grad is not None
    assert weight.grad.stride() == weight.stride()
    assert Problem(m=K, n=N, k=M, layout="nt") in chooser.asked
    expected = torch.autograd.grad(wanted([x, weight.t(), bias, None], "gelu_tanh").sum(), weight)
    torch.testing.assert_close(weight.grad, expected[0], rtol=5e-2, atol=0.15)


def test_a_gradient_of_the_gradient_is_torchs(engine: Engine) -> None:
    x, weight, bias, _ = operands()

    def twice(out: torch.Tensor) -> torch.Tensor:
        (dx,) = torch.autograd.grad(out.double().square().sum(), x, create_graph=True)
        (found,) = torch.autograd.grad(dx.double().square().sum(), weight)
        return found

    found = twice(gemmsmith.linear(x, weight, bias, activation="gelu"))
    plain = twice(functional.gelu(functional.linear(x, weight, bias)))
    torch.testing.assert_close(
        found.double(), plain.double(), rtol=0.1, atol=0.05 * plain.abs().max().item()
    )


def test_a_weights_gradient_is_added_to_its_sum(engine: Engine) -> None:
    given = operands()
    x, weight, bias, _ = given
    main_grad = torch.ones(N, K)
    out = gemmsmith.linear(x, weight, bias, activation="relu2", main_grad=main_grad)
    dy = torch.randn_like(out)
    out.backward(dy)
    assert weight.grad is None
    (expected,) = torch.autograd.grad(wanted(given, "relu2"), weight, dy.double())
    torch.testing.assert_close(main_grad.double() - 1, expected.double(), rtol=5e-2, atol=0.15)
    with pytest.raises(ValueError, match="main_grad must be"):
        gemmsmith.linear(x, weight, bias, activation="relu2", main_grad=torch.ones(2, 2))


@pytest.mark.parametrize(("activation", "bias", "residual"), CASES)
def test_torch_follows_the_product_where_nothing_fused_wins(
    engine: Engine,
    chooser: Chooser,
    runs: Runs,
    activation: str | None,
    bias: bool,
    residual: bool,
) -> None:
    chooser.answers = lambda problem: not problem.operation.is_fused
    given = operands(bias=bias, residual=residual)
    out = ours(given, activation)
    close(out, wanted(given, activation))
    assert runs() == 1  # the product's own winner
    out.sum().backward()
    chooser.answers = lambda problem: False


def test_without_an_engine_it_is_torchs() -> None:
    given = operands(residual=True)
    x, weight, bias, residual = given
    expected = functional.linear(x, weight, bias) + residual
    assert torch.equal(gemmsmith.linear(x, weight, bias, residual=residual), expected)
    expected = functional.silu(functional.linear(x, weight, bias))
    assert torch.equal(gemmsmith.linear(x, weight, bias, activation="silu"), expected)


@pytest.mark.parametrize(
    "residual",
    [
        pytest.param(lambda: torch.randn(M, N), id="fp32"),
        pytest.param(lambda: random(N), id="broadcast"),
        pytest.param(lambda: random(N, M).t(), id="columns"),
        pytest.param(lambda: random(M, N + 8)[:, :N], id="gaps"),
    ],
)
def test_a_residual_that_no_kernel_reads_is_torchs(
    engine: Engine, runs: Runs, residual: Callable[[], torch.Tensor]
) -> None:
    added = residual()
    x, weight, bias, _ = operands()
    found = gemmsmith.linear(x, weight, bias, residual=added)
    expected = functional.linear(x, weight, bias) + added
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    close(found, expected.double())


@pytest.mark.parametrize(
    "bias", [torch.randn(N), torch.randn(2 * N).to(BF16)[::2]], ids=["fp32", "gaps"]
)
def test_a_bias_that_no_kernel_reads_leaves_it_to_torch(
    engine: Engine, runs: Runs, bias: torch.Tensor
) -> None:
    x, weight, _, residual = operands(bias=False, residual=True)
    if bias.dtype is not BF16:
        with pytest.raises(RuntimeError):  # torch's own
            gemmsmith.linear(x, weight, bias, residual=residual)
        return
    found = gemmsmith.linear(x, weight, bias, residual=residual)
    close(found, (functional.linear(x, weight, bias) + residual).double())


def test_an_activation_and_a_residual_are_two_steps(engine: Engine, runs: Runs) -> None:
    given = operands(residual=True)
    close(ours(given, "silu"), wanted(given, "silu"))
    assert runs() == 1


def test_an_activation_is_one_of_the_list(engine: Engine) -> None:
    x, weight, bias, _ = operands()
    with pytest.raises(ValueError, match="gelu_tanh, gelu, silu, relu2"):
        gemmsmith.linear(x, weight, bias, activation="tanh")


def test_a_bias_alone_is_added_by_the_kernel(engine: Engine, chooser: Chooser, runs: Runs) -> None:
    chooser.saving_us = None  # a pass of its own would not be known to pay
    x, weight, bias, _ = operands()
    out = gemmsmith.linear(x, weight, bias)
    assert runs() == 1
    assert chooser.asked[0].dtype == "bf16.then_bias"
    close(out, functional.linear(x.double(), weight.double(), bias.double()))
    out.sum().backward()
    torch.testing.assert_close(bias.grad, torch.full((N,), float(M), dtype=BF16))


def test_autocast_casts_what_torchs_does(engine: Engine, runs: Runs) -> None:
    x, weight, bias = (torch.randn(*size).requires_grad_() for size in ((M, K), (N, K), (N,)))
    residual = torch.randn(M, N)
    with torch.autocast("cpu", dtype=BF16):
        out = gemmsmith.linear(x, weight, bias, activation="gelu")
        assert out.dtype is BF16
        assert runs() == 1
        summed = gemmsmith.linear(x, weight, bias, residual=residual)
        assert summed.dtype is torch.float32
    close(out, wanted([x, weight, bias, None], "gelu"))
    close(summed, wanted([x, weight, bias, residual], None))
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is torch.float32


def test_deterministic_algorithms_want_deterministic_kernels(
    engine: Engine, chooser: Chooser, runs: Runs
) -> None:
    chooser.deterministic = False
    given = operands()
    torch.use_deterministic_algorithms(True)
    try:
        close(ours(given, "silu"), wanted(given, "silu"))
    finally:
        torch.use_deterministic_algorithms(False)
    assert runs() == 0
    ours(given, "silu")
    assert runs() == 1


def test_a_capture_launches_only_what_was_launched_before(
    engine: Engine, host: Host, runs: Runs
) -> None:
    given = operands()
    host.is_capturing = True
    with torch.no_grad():
        close(ours(given, "gelu"), wanted(given, "gelu"))
        assert runs() == 0
        host.is_capturing = False
        ours(given, "gelu")
        host.is_capturing = True
        ours(given, "gelu")
    assert runs() == 2


def test_a_kernel_that_fails_is_replaced_by_torch(
    engine: Engine, chooser: Chooser, runs: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    chooser.name = "fails"
    given = operands()
    with torch.no_grad(), caplog.at_level(logging.WARNING, "gemmsmith"):
        close(ours(given, "gelu"), wanted(given, "gelu"))
        close(ours(given, "gelu"), wanted(given, "gelu"))
    assert runs() == 0
    assert caplog.records


@pytest.mark.parametrize(("activation", "bias", "residual"), CASES)
def test_a_compiled_function_holds_the_whole(
    engine: Engine, runs: Runs, activation: str | None, bias: bool, residual: bool
) -> None:
    seen: list[str] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    given = operands(2, 3, bias=bias, residual=residual)

    @torch.compile(backend=backend, fullgraph=True)
    def compiled(*given: Any) -> torch.Tensor:
        return ours(list(given), activation)

    leaves = [one for one in given if one is not None]
    out = compiled(*given)
    close(out, wanted(given, activation))
    dy = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, dy)
    expected = torch.autograd.grad(wanted(given, activation), leaves, dy.double())
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=5e-2, atol=0.15)
    assert seen.count("gemmsmith.fused_product.default") == 1
    assert runs() == 3


def test_a_compiled_function_without_winners_holds_torchs_own(
    engine: Engine, chooser: Chooser
) -> None:
    chooser.answers = lambda problem: False
    seen: list[str] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    given = operands()
    compiled = torch.compile(
        lambda *given: ours(list(given), "gelu"),
        backend=aot_autograd(fw_compiler=keep, bw_compiler=keep),
        fullgraph=True,
    )
    close(compiled(*given), wanted(given, "gelu"))
    assert seen
    assert not [name for name in seen if "gemmsmith" in name]


def test_the_operator_is_sound(engine: Engine) -> None:
    x, weight, bias, residual = operands(residual=True)
    torch.library.opcheck(
        torch.ops.gemmsmith.fused_linear.default,
        (x, weight, bias, None, "gelu", None),
        test_utils=("test_schema", "test_faketensor"),
    )
    torch.library.opcheck(
        torch.ops.gemmsmith.fused_product.default,
        (x.detach(), weight.detach(), bias.detach(), residual.detach(), "bias_residual"),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_a_scaled_product_takes_its_bias(engine: Engine, chooser: Chooser, runs: Runs) -> None:
    chooser.saving_us = None
    a = torch.randn(16, 32).to(torch.float8_e4m3fn)
    b = torch.randn(16, 32).to(torch.float8_e4m3fn).t()
    scale, bias = torch.tensor([0.5]), torch.randn(16).to(BF16)
    out = gemmsmith.scaled_mm(a, b, scale, scale, bias, use_fast_accum=True)
    assert runs() == 1
    assert chooser.asked == [Problem(m=16, n=16, k=32, dtype="fp8_e4m3.then_bias")]
    close(out, a.double() @ b.double() * 0.25 + bias.double())


@pytest.mark.parametrize("trained", [False, True])
def test_what_could_be_fused_is_captured(trained: bool, tmp_path: Path) -> None:
    x, weight, bias, residual = operands(residual=True)
    for one in (x, weight, bias, residual):
        one.requires_grad_(trained)
    with gemmsmith.capture() as found:
        gemmsmith.linear(x, weight, bias, activation="gelu")
        gemmsmith.linear(x, weight, bias, residual=residual)
        gemmsmith.linear(x, weight, residual=residual)
        gemmsmith.linear(x, weight, bias)
        with torch.autocast("cpu", dtype=BF16):
            gemmsmith.linear(x.float(), weight.float(), bias.float(), activation="silu")
    aux = "_aux" if trained else ""
    counted = {problem.dtype: count for problem, count in found.problems.items()}
    assert counted == {
        "bf16": 1,  # what runs where nothing fused wins
        "bf16.then_bias": 4,
        f"bf16.then_bias_gelu{aux}": 1,
        "bf16.then_bias_residual": 1,
        "bf16.then_residual": 1,
        f"bf16.then_bias_silu{aux}": 1,
    }
    assert not found.skipped
    found.save(tmp_path / "captured.toml")
    again = load(tmp_path / "captured.toml")
    assert {str(problem) for _, problem in again.problems("bf16")} == set(map(str, found.problems))
