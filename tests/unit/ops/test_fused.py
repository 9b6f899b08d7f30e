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
from gemmsmith.core.problem import Problem
from gemmsmith.ops.engine.engine import Engine
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
AFTER_RESIDUAL = {"relu": functional.relu, "silu": functional.silu}
"""Activations that kernels apply after adding a residual."""
CASES = [
    *((activation, True, False) for activation in ACTIVATIONS),
    *((activation, True, True) for activation in AFTER_RESIDUAL),
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
    return gemmsmith.linear(
        x, weight, bias, activation=activation, residual=residual, residual_first=True
    )


def wanted(given: list[Any], activation: str | None) -> torch.Tensor:
    """In FP64, differentiable."""
    x, weight, bias, residual = (None if one is None else one.double() for one in given)
    out = functional.linear(x, weight, bias)
    out = out if residual is None else out + residual
    return out if activation is None else (ACTIVATIONS | AFTER_RESIDUAL)[activation](out)


LAYERS: dict[str, tuple[str, ...]] = {
    "scale_residual": ("residual", "column_scale"),
    "bias_scale_residual": ("bias", "residual", "column_scale"),
    "row_scale": ("row_scale",),
    "row_scale_bias": ("bias", "row_scale"),
}
"""What layers with factors are given beside x and weight, by epilogue."""


def layer(epilogue: str, *leading: int) -> dict[str, torch.Tensor]:
    """Operands of one of `LAYERS`; factors of rows take no part in autograd."""
    rows = leading or (M,)
    made = {
        "bias": random(N),
        "residual": random(*rows, N),
        "column_scale": random(N),
        "row_scale": torch.rand(*rows) + 0.5,
    }
    return {"x": random(*rows, K), "weight": random(N, K), **{p: made[p] for p in LAYERS[epilogue]}}


def exactly(given: dict[str, torch.Tensor]) -> torch.Tensor:
    """The same in FP64, differentiable."""
    of = {name: one.double() for name, one in given.items()}
    out = functional.linear(of["x"], of["weight"])
    out = out * of["row_scale"].unsqueeze(-1) if "row_scale" in of else out
    out = out + of["bias"] if "bias" in of else out
    out = out * of["column_scale"] if "column_scale" in of else out
    return out + of["residual"] if "residual" in of else out


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
    words = ["bias"] * bias + ["residual"] * residual + [activation or ""] * bool(activation)
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


@pytest.mark.parametrize("epilogue", LAYERS)
@pytest.mark.parametrize("leading", [(M,), (2, 3), (1,), ()])
def test_factors_are_the_kernels(
    engine: Engine, chooser: Chooser, runs: Runs, epilogue: str, leading: tuple[int, ...]
) -> None:
    given = layer(epilogue, *leading)
    with torch.no_grad():
        found = gemmsmith.linear(**given)
    assert found.dtype is BF16
    close(found, exactly(given))
    assert runs() == 1
    assert [asked.dtype for asked in chooser.asked] == [f"bf16.then_{epilogue}"]


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("epilogue", LAYERS)
def test_gradients_of_layers_with_factors_are_those_of_fp64(
    engine: Engine, chooser: Chooser, runs: Runs, epilogue: str, compiles: bool
) -> None:
    given = layer(epilogue, 2, 3)
    leaves = {name: one for name, one in given.items() if one.requires_grad}
    call = torch.compile(gemmsmith.linear, backend="aot_eager", fullgraph=True)
    out = (call if compiles else gemmsmith.linear)(**given)
    close(out, exactly(given))
    dy = torch.randn_like(out)
    found = torch.autograd.grad(out, list(leaves.values()), dy)
    assert runs() == 3  # the layer, and both products of the backward pass
    expected = torch.autograd.grad(exactly(given), list(leaves.values()), dy.double())
    for name, mine, theirs in zip(leaves, found, expected, strict=True):
        assert mine.dtype is BF16, name
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=5e-2, atol=0.15)
    aux = "_aux" if "column_scale" in leaves else ""
    fused = {asked.dtype for asked in chooser.asked if "scale" in asked.dtype}
    assert fused == {f"bf16.then_{epilogue}{aux}"}


def test_nothing_is_stored_for_factors_that_are_not_trained(
    engine: Engine, chooser: Chooser
) -> None:
    given = layer("bias_scale_residual")
    given["column_scale"].requires_grad_(False)
    gemmsmith.linear(**given).sum().backward()
    assert chooser.asked[0].dtype == "bf16.then_bias_scale_residual"
    expected = torch.autograd.grad(exactly(given).sum(), given["bias"])
    assert given["bias"].grad is not None
    torch.testing.assert_close(given["bias"].grad, expected[0], rtol=5e-2, atol=0.15)


def test_a_gradient_of_factors_of_rows_is_torchs(
    engine: Engine, chooser: Chooser, runs: Runs
) -> None:
    given = layer("row_scale_bias")
    given["row_scale"].requires_grad_()
    with torch.no_grad():
        given["row_scale"][2] = 0.0  # nothing may be divided by it
    out = gemmsmith.linear(**given)
    assert out.dtype is BF16
    assert runs() == 1
    assert not [asked for asked in chooser.asked if asked.operation.epilogue.has_row_scale]
    out.float().square().sum().backward()
    expected = torch.autograd.grad(exactly(given).square().sum(), given["row_scale"])
    assert given["row_scale"].grad is not None
    torch.testing.assert_close(given["row_scale"].grad, expected[0], rtol=5e-2, atol=0.3)


@pytest.mark.parametrize("epilogue", ["bias_scale_residual", "row_scale_bias"])
def test_a_gradient_of_the_gradient_goes_through_factors(engine: Engine, epilogue: str) -> None:
    given = layer(epilogue)

    def twice(out: torch.Tensor) -> torch.Tensor:
        (dx,) = torch.autograd.grad(out.double().square().sum(), given["x"], create_graph=True)
        (found,) = torch.autograd.grad(dx.double().square().sum(), given["weight"])
        return found

    found, plain = twice(gemmsmith.linear(**given)), twice(exactly(given))
    torch.testing.assert_close(
        found.double(), plain.double(), rtol=0.1, atol=0.05 * plain.abs().max().item()
    )


@pytest.mark.parametrize("epilogue", LAYERS)
def test_a_weights_gradient_is_added_to_its_sum_with_factors(engine: Engine, epilogue: str) -> None:
    given = layer(epilogue)
    main_grad = torch.ones(N, K)
    out = gemmsmith.linear(**given, main_grad=main_grad)
    dy = torch.randn_like(out)
    out.backward(dy)
    assert given["weight"].grad is None
    (expected,) = torch.autograd.grad(exactly(given), given["weight"], dy.double())
    torch.testing.assert_close(main_grad.double() - 1, expected.double(), rtol=5e-2, atol=0.15)


@pytest.mark.parametrize("epilogue", LAYERS)
def test_torch_multiplies_where_no_kernel_with_factors_wins(
    engine: Engine, chooser: Chooser, runs: Runs, epilogue: str
) -> None:
    chooser.answers = lambda problem: not problem.operation.is_fused
    given = layer(epilogue)
    out = gemmsmith.linear(**given)
    assert out.dtype is BF16
    close(out, exactly(given))
    assert runs() == 1  # the product's own winner
    gemmsmith.use(None)
    assert gemmsmith.linear(**given).dtype is BF16


@pytest.mark.parametrize("trained", [False, True])
def test_other_combinations_are_torchs_steps_after_a_kernel(
    engine: Engine, chooser: Chooser, runs: Runs, trained: bool
) -> None:
    rows, columns = layer("row_scale_bias"), layer("bias_scale_residual")
    x, weight, bias = (columns[name] for name in ("x", "weight", "bias"))
    scale, residual, r = columns["column_scale"], columns["residual"], rows["row_scale"]
    linear = functional.linear(x.double(), weight.double())
    silu = functional.silu(linear + bias.double())
    with torch.set_grad_enabled(trained):
        cases: list[tuple[dict[str, Any], torch.Tensor]] = [
            ({"bias": bias, "column_scale": scale}, (linear + bias) * scale),
            ({"bias": bias, "activation": "silu", "column_scale": scale}, silu * scale),
            (
                {"bias": bias, "activation": "silu", "column_scale": scale, "residual": residual},
                silu * scale + residual,
            ),
            (
                {"row_scale": r, "activation": "silu", "residual": residual},
                functional.silu(linear * r.unsqueeze(-1)) + residual,
            ),
        ]
        for given, expected in cases:
            found = gemmsmith.linear(x, weight, **given)
            assert found.dtype is BF16
            close(found, expected)
            assert runs() == 1


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"column_scale": torch.randn(N)}, id="fp32"),
        pytest.param({"column_scale": torch.randn(2 * N).to(BF16)[::2]}, id="gaps"),
        pytest.param({"column_scale": torch.randn(1).to(BF16)}, id="one"),
        pytest.param({"row_scale": torch.rand(M).to(BF16)}, id="bf16"),
        pytest.param({"row_scale": torch.rand(2 * M)[::2]}, id="rows with gaps"),
    ],
)
def test_factors_that_no_kernel_reads_are_torchs(
    engine: Engine, chooser: Chooser, change: dict[str, torch.Tensor]
) -> None:
    given = layer("row_scale" if "row_scale" in change else "bias_scale_residual") | change
    found = gemmsmith.linear(**given)
    close(found, exactly(given))
    wide = "column_scale" in change and change["column_scale"].dtype is torch.float32
    assert found.dtype is (torch.float32 if wide else BF16)
    compiled = torch.compile(gemmsmith.linear, backend="aot_eager", fullgraph=True)
    assert compiled(**given).dtype is found.dtype


@pytest.mark.parametrize("compiles", [False, True])
def test_autocast_leaves_factors_as_they_are(engine: Engine, runs: Runs, compiles: bool) -> None:
    call = torch.compile(gemmsmith.linear, backend="aot_eager", fullgraph=True)
    for epilogue in LAYERS:
        given = layer(epilogue)
        wide = {name: one.detach().float().requires_grad_() for name, one in given.items()}
        narrow = {"residual", "column_scale"} & given.keys()
        mixed = wide | {name: given[name] for name in narrow}
        mixed |= {name: given[name] for name in {"row_scale"} & given.keys()}
        with torch.autocast("cpu", dtype=BF16):
            out = (call if compiles else gemmsmith.linear)(**mixed)
            assert runs() == 1
            assert out.dtype is BF16
            if narrow:  # FP32 ones make an FP32 result, as torch's own steps do
                out = (call if compiles else gemmsmith.linear)(**wide)
                assert runs() == 1
                assert out.dtype is torch.float32
        close(out, exactly(given))
        out.sum().backward()
        found = (wide if narrow else mixed)["weight"].grad
        assert found is not None
        assert found.dtype is torch.float32
        runs()


def test_factors_of_rows_are_as_many_as_rows(engine: Engine) -> None:
    given = layer("row_scale")
    with pytest.raises(ValueError, match=r"leading dimensions \(6,\), got \(6, 1\)"):
        gemmsmith.linear(**given | {"row_scale": torch.ones(M, 1)})


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
    for epilogue in LAYERS:
        given = layer(epilogue)
        torch.library.opcheck(
            torch.ops.gemmsmith.fused_linear.default,
            (given.pop("x"), given.pop("weight")),
            given,
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
        gemmsmith.linear(x, weight, residual=residual, column_scale=bias)
        gemmsmith.linear(x, weight, bias, row_scale=torch.ones(M))
        gemmsmith.linear(x, weight, bias)
        with torch.autocast("cpu", dtype=BF16):
            gemmsmith.linear(x.float(), weight.float(), bias.float(), activation="silu")
    aux = "_aux" if trained else ""
    counted = {problem.dtype: count for problem, count in found.problems.items()}
    assert counted == {
        "bf16": 3,  # what runs where nothing fused wins
        "bf16.then_bias": 4,
        f"bf16.then_bias_gelu{aux}": 1,
        "bf16.then_bias_residual": 1,
        "bf16.then_residual": 1,
        f"bf16.then_scale_residual{aux}": 1,
        "bf16.then_row_scale_bias": 1,
        f"bf16.then_bias_silu{aux}": 1,
    }
    assert not found.skipped
    found.save(tmp_path / "captured.toml")
    again = load(tmp_path / "captured.toml")
    assert {str(problem) for _, problem in again.problems("bf16")} == set(map(str, found.problems))
