"""FP8 layers with what follows them, and with FP8 results: who computes them, what, and amax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import gemmsmith
from gemmsmith.ops.engine.engine import Engine
from tests.support.stand_in import Chooser

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
Runs = Callable[[], int]
M, N, K = 6, 32, 16
ACTIVATIONS: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    None: lambda x: x,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "relu2": lambda x: functional.relu(x).square(),
}
WITH_KERNELS = (None, "gelu_tanh", "silu")


def fp8(*size: int) -> torch.Tensor:
    return (torch.randn(*size) * 16).to(FP8)


def operands(*leading: int) -> tuple[torch.Tensor, ...]:
    """x, weight, their factors, and a bias."""
    return (
        fp8(*(leading or (M,)), K),
        fp8(N, K),
        torch.tensor([1 / 16]),
        torch.tensor([1 / 64]),
        torch.randn(N).to(BF16),
    )


def linear_of(given: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """In FP64, without a bias where there is none."""
    x, weight, scale_x, scale_weight, *bias = given
    product = functional.linear(x.double(), weight.double()) * (scale_x * scale_weight).double()
    return product + bias[0].double() if bias else product


def check_fp8(found: torch.Tensor, value: torch.Tensor, scale: float = 1.0) -> None:
    """One step of rounding to E4M3, saturated, of a value that torch may have in bf16."""
    assert found.dtype is FP8
    expected = (value * scale).clamp(-448, 448)
    torch.testing.assert_close(found.double(), expected, rtol=2**-4 + 2**-7, atol=2**-9)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("leading", [(M,), (2, 3), (1,)])
def test_an_fp8_result_and_its_amax(
    computing: str, runs: Runs, activation: str | None, leading: tuple[int, ...]
) -> None:
    given = operands(*leading)
    value = ACTIVATIONS[activation](linear_of(given))
    amax = torch.zeros(1)
    found = gemmsmith.scaled_linear(
        *given,
        activation=activation,
        out_dtype=FP8,
        out_scale=torch.tensor([4.0]),
        amax=amax,
    )
    assert found.shape == (*leading, N)
    check_fp8(found, value, 4.0)
    torch.testing.assert_close(amax.double(), value.abs().max().view(1), rtol=2**-7, atol=0)
    wins = computing == "kernels" and activation in WITH_KERNELS
    assert runs() == (1 if wins else computing == "kernels")  # the product's own winner


def test_the_operation_says_that_d_is_fp8(engine: Engine, chooser: Chooser) -> None:
    gemmsmith.scaled_linear(*operands(), activation="silu", out_dtype=FP8)
    assert chooser.asked[0].dtype == "fp8_e4m3.out_e4m3.then_bias_silu"


def test_amax_runs_and_may_be_left_out(computing: str) -> None:
    given = operands()
    largest = float(linear_of(given).abs().max())
    amax = torch.tensor([1e6])
    gemmsmith.scaled_linear(*given, out_dtype=FP8, amax=amax)
    assert float(amax) == 1e6
    amax.fill_(largest / 2)
    gemmsmith.scaled_linear(*given, out_dtype=FP8, amax=amax)
    assert float(amax) == pytest.approx(largest, rel=2**-7)
    found = gemmsmith.scaled_linear(*given, out_dtype=FP8)
    check_fp8(found, linear_of(given))


def test_what_is_too_large_saturates(computing: str) -> None:
    given = operands()
    found = gemmsmith.scaled_linear(*given, out_dtype=FP8, out_scale=torch.tensor([1e6]))
    assert set(found.float().abs().unique().tolist()) <= {0.0, 448.0}
    check_fp8(found, linear_of(given), 1e6)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_bf16_result(computing: str, activation: str | None, bias: bool) -> None:
    given = operands() if bias else operands()[:4]
    value = ACTIVATIONS[activation](linear_of(given))
    amax = torch.zeros(1)
    found = gemmsmith.scaled_linear(*given, activation=activation, amax=amax)
    assert found.dtype is BF16
    torch.testing.assert_close(found.double(), value, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(amax.double(), value.abs().max().view(1), rtol=2e-2, atol=0)


def test_without_a_bias_torch_casts(engine: Engine, chooser: Chooser, runs: Runs) -> None:
    given = operands()[:4]
    check_fp8(gemmsmith.scaled_linear(*given, out_dtype=FP8), linear_of(given))
    assert runs() == 1
    assert [problem.dtype for problem in chooser.asked] == ["fp8_e4m3"]


def test_precise_sums_are_left_to_kernels_that_promote_them(engine: Engine, runs: Runs) -> None:
    given = operands()
    found = gemmsmith.scaled_linear(*given, out_dtype=FP8, use_fast_accum=False)
    check_fp8(found, linear_of(given))
    assert runs() == 0  # all stand-ins keep short ones


@pytest.mark.parametrize("out_dtype", [FP8, BF16])
@pytest.mark.parametrize("layout", ["halves", "interleaved", "two"])
def test_gates(computing: str, runs: Runs, layout: str, out_dtype: torch.dtype) -> None:
    x, _, scale_x, scale_weight, _ = operands(2, 3)
    gate, up = fp8(N, K), fp8(N, K)
    first, second = (linear_of((x, one, scale_x, scale_weight)) for one in (gate, up))
    value = functional.silu(first) * second
    weight, given = gate, {"up": up}
    if layout == "halves":
        weight, given = torch.cat([gate.view(torch.int8), up.view(torch.int8)]).view(FP8), {}
    elif layout == "interleaved":
        both = torch.stack([gate.view(torch.int8), up.view(torch.int8)], 1)
        weight, given = both.view(-1, K).view(FP8), {"interleaved": True}  # type: ignore[dict-item]
    amax = torch.zeros(1)
    of_fp8: dict[str, Any] = {"out_scale": torch.tensor([2.0])} if out_dtype is FP8 else {}
    found = gemmsmith.scaled_gated_linear(
        x, weight, scale_x, scale_weight, out_dtype=out_dtype, amax=amax, **of_fp8, **given
    )
    assert found.shape == (2, 3, N)
    if out_dtype is FP8:
        # torch multiplies two values that were rounded to bf16.
        expected = (value * 2).clamp(-448, 448)
        torch.testing.assert_close(found.double(), expected, rtol=2**-4 + 2**-6, atol=2**-9)
        assert runs() == (1 if computing == "kernels" else 0)
    else:
        torch.testing.assert_close(found.double(), value, rtol=3e-2, atol=2e-2)
    torch.testing.assert_close(amax.double(), value.abs().max().view(1), rtol=2e-2, atol=0)


def test_nothing_to_multiply(computing: str) -> None:
    x, *others = operands()
    amax = torch.tensor([3.0])
    found = gemmsmith.scaled_linear(x[:0], *others, out_dtype=FP8, amax=amax)
    assert (found.shape, found.dtype, float(amax)) == ((0, N), FP8, 3.0)


@pytest.mark.parametrize("gated", [False, True])
def test_compiled_whole(computing: str, runs: Runs, gated: bool) -> None:
    """With amax, which the graph writes to."""
    x, weight, scale_x, scale_weight, bias = operands()

    def layer(x: torch.Tensor, amax: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        wide: dict[str, Any] = {"out_dtype": FP8, "out_scale": scale, "amax": amax}
        if gated:
            return gemmsmith.scaled_gated_linear(x, weight, scale_x, scale_weight, **wide)
        return gemmsmith.scaled_linear(
            x, weight, scale_x, scale_weight, bias, activation="gelu_tanh", **wide
        )

    scale = torch.tensor([2.0])
    eager, compiled = torch.zeros(1), torch.zeros(1)
    expected = layer(x, eager, scale)
    before = runs()
    found = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, compiled, scale)
    assert runs() == before
    assert torch.equal(found.view(torch.int8), expected.view(torch.int8))
    assert torch.equal(eager, compiled)
    assert float(compiled) > 0


def test_wrong_arguments_are_refused() -> None:
    given = operands()
    one = torch.ones(1)
    for arguments, message in (
        ({"activation": "tanh"}, "gelu_tanh, gelu, silu, relu2"),
        ({"out_dtype": torch.float16}, "out_dtype must be"),
        ({"out_scale": one}, "out_scale is of"),
        ({"out_dtype": FP8, "out_scale": one.double()}, "out_scale must be one float32"),
        ({"amax": torch.ones(2)}, "amax must be one float32"),
    ):
        with pytest.raises(ValueError, match=message):
            gemmsmith.scaled_linear(*given, **arguments)  # type: ignore[arg-type]
    x, weight, scale_x, _, _ = given
    with pytest.raises(ValueError, match="scale_weight must be one float32"):
        gemmsmith.scaled_linear(x, weight, scale_x, torch.ones(N))
    with pytest.raises(ValueError, match="must be one of silu"):
        gemmsmith.scaled_gated_linear(x, weight, scale_x, one, activation="relu2")
    with pytest.raises(ValueError, match=r"must be \[2 \* I, K\]"):
        gemmsmith.scaled_gated_linear(x, weight[1:], scale_x, one)


def test_it_has_no_gradient(computing: str) -> None:
    *given, bias = operands()
    with pytest.raises(NotImplementedError, match="has no gradient"):
        gemmsmith.scaled_linear(*given, bias.float().requires_grad_())
    with pytest.raises(NotImplementedError, match="has no gradient"):
        torch.ops.gemmsmith.scaled_linear(
            *given, bias.requires_grad_(), None, BF16, None, None, True
        )
