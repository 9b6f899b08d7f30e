"""`gemmsmith.int8_mm`: every size, with and without kernels, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import gemmsmith
from gemmsmith.ops.engine import fallback
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.in_use import install
from tests.support.stand_in import Chooser

Runs = Callable[[], int]
BF16 = torch.bfloat16


@pytest.fixture(params=["kernels", "torch"])
def computing(request: pytest.FixtureRequest, engine: Engine) -> str:
    if request.param == "torch":
        install(None)
    return str(request.param)


def integers(*size: int) -> torch.Tensor:
    return torch.randint(-128, 128, size, dtype=torch.int8)


def factors(m: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(m, 1) + 0.5, torch.rand(1, n) + 0.5


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("scaled", ["none", "a", "both"])
def test_factors(computing: str, chooser: Chooser, runs: Runs, scaled: str, compiled: bool) -> None:
    a, w = integers(24, 32), integers(16, 32)
    scale_a, scale_b = factors(24, 16)

    def call(a, w):
        given = {"none": {}, "a": {"scale_a": scale_a}}.get(
            scaled, {"scale_a": scale_a, "scale_b": scale_b}
        )
        return gemmsmith.int8_mm(a, w.t(), **given)

    run = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    out = run(a, w)
    assert out.dtype is BF16
    wide = a.double() @ w.double().t()
    if scaled != "none":
        wide = wide * scale_a
    if scaled == "both":
        wide = wide * scale_b
    torch.testing.assert_close(out.double(), wide, rtol=2**-8, atol=0)
    assert runs() == (1 if computing == "kernels" else 0)
    if (
        computing == "kernels" and scaled == "both"
    ):  # the first kernel asked for is the one that ran
        assert [problem.dtype for problem in chooser.asked] == ["int8.out_bf16.scale_row"]


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (16, 8, 8), (17, 7, 30), (5, 24, 16)])
def test_every_size_is_exact(computing: str, m: int, n: int, k: int) -> None:
    a, b = integers(m, k), integers(n, k).t()
    for right in (b, b.contiguous()):
        out = gemmsmith.int8_mm(a, right, out_dtype=torch.int32)
        assert torch.equal(out, (a.double() @ b.double()).to(torch.int32))


@pytest.mark.parametrize(("m", "n", "k"), [(0, 8, 8), (4, 0, 8), (4, 8, 0)])
def test_empty_operands(computing: str, m: int, n: int, k: int) -> None:
    a, b = torch.zeros(m, k, dtype=torch.int8), torch.zeros(k, n, dtype=torch.int8)
    assert torch.equal(gemmsmith.int8_mm(a, b), torch.zeros(m, n, dtype=BF16))


def test_sizes_that_cuda_refuses_are_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    product = torch._int_mm

    def picky(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        assert a.shape[0] > 16
        assert a.shape[1] % 8 == b.shape[1] % 8 == 0
        seen.append((*a.shape, b.shape[1]))
        return product(a, b)

    monkeypatch.setattr(torch, "_int_mm", picky)
    for m, n, k in ((5, 7, 30), (17, 8, 8), (64, 16, 9)):
        a, b = integers(m, k), integers(n, k).t()
        found = fallback.padded_int8(a, b)
        assert found.is_contiguous()
        assert torch.equal(found, (a.double() @ b.double()).to(torch.int32))
    assert seen == [(17, 32, 8), (17, 8, 8), (64, 16, 16)]


def test_a_factor_alone_follows_the_kernels_integers(
    engine: Engine, chooser: Chooser, runs: Runs
) -> None:
    a, w = integers(4, 16), integers(8, 16)
    gemmsmith.int8_mm(a, w.t(), scale_b=factors(4, 8)[1])
    assert runs() == 1
    assert [problem.dtype for problem in chooser.asked] == ["int8"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": torch.ones(4, 16)}, "must be int8, got torch.float32"),
        ({"b": torch.ones(8, 16, dtype=torch.int8)}, "one K"),
        ({"out_dtype": torch.float16}, "must be bfloat16 or int32"),
        ({"scale_a": torch.ones(4)}, r"scale_a must be float32 \(4, 1\)"),
        ({"scale_b": torch.ones(8, 1)}, r"scale_b must be float32 \(1, 8\)"),
        ({"scale_a": torch.ones(4, 1), "out_dtype": torch.int32}, "sums in int32 are not scaled"),
    ],
)
def test_what_does_not_go_together(change: dict[str, object], message: str) -> None:
    given = {"a": integers(4, 16), "b": integers(16, 8)} | change
    with pytest.raises(ValueError, match=message):
        gemmsmith.int8_mm(**given)  # type: ignore[arg-type]


def test_a_factor_has_no_gradient(engine: Engine) -> None:
    with pytest.raises(NotImplementedError, match="int8_mm has no gradient"):
        gemmsmith.int8_mm(
            integers(4, 16), integers(16, 8), scale_a=torch.ones(4, 1, requires_grad=True)
        )
