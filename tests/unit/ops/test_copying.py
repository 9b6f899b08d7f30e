"""Operands that no kernel reads as they lie are copied where one order of sums is demanded.

The stand-in kernels add along K in FP32, so rows can be compared by their bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import gemmsmith
from gemmsmith.core.problem import Problem
from gemmsmith.ops.below.dispatch import Dispatch
from gemmsmith.ops.engine.engine import Engine
from tests.support.below import BF16, close, made, operands
from tests.support.stand_in import Chooser, Host

pytestmark = pytest.mark.usefixtures("no_other_patch")

Runs = Callable[[], int]


@pytest.fixture
def chooser() -> Chooser:
    return Chooser(answers=lambda problem: not problem.operation.is_fused)


@pytest.fixture
def engine(chooser: Chooser, pack: Path, binding: Dispatch) -> Iterator[Engine]:
    with made(chooser, pack) as engine, gemmsmith.patch(numerics="invariant"):
        yield engine


def wide(*size: int) -> torch.Tensor:
    (made,) = operands(size)
    return made


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same at an address that is one element off."""
    place = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
    return place.copy_(tensor)


LYING: dict[str, Callable[[], torch.Tensor]] = {
    "every other column": lambda: wide(12, 64)[:, ::2],
    "every other row": lambda: wide(24, 32)[::2],
    "turned": lambda: wide(32, 12).t(),
    "turned, every other row": lambda: wide(64, 12)[::2].t(),
    "rows off the alignment": lambda: wide(12, 37)[:, :32],
    "columns off the alignment": lambda: wide(32, 13)[:, :12].t(),
    "an address off the alignment": lambda: shifted(wide(12, 32)),
    "an address off the alignment, and gaps": lambda: wide(12, 48)[:, 1:33],
    "one row for all": lambda: wide(1, 32).expand(12, 32),
    "one column for all": lambda: wide(12, 1).expand(12, 32),
    "one number for all": lambda: wide(1, 1).expand(12, 32),
    "backwards": lambda: wide(12, 32).flip(0),
}
"""Matrices A[12, 32] in all kinds of places."""


@pytest.mark.parametrize("name", LYING)
@pytest.mark.parametrize("product", ["mm", "linear", "weight", "both", "bias", "ours"])
def test_products_have_the_bits_of_packed_operands(
    engine: Engine, runs: Runs, name: str, product: str
) -> None:
    x, w, row = LYING[name](), wide(16, 32), wide(16)
    w_for_columns = wide(12, 16)
    multiply: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "mm": lambda x: torch.mm(x, w.t()),
        "linear": lambda x: functional.linear(x, w),
        "weight": lambda x: functional.linear(w, x),
        "both": lambda x: x.t() @ w_for_columns,
        "bias": lambda x: torch.addmm(row, x, w.t()),
        "ours": lambda x: gemmsmith.linear(x, w, row),
    }
    packed = x.clone(memory_format=torch.contiguous_format)
    ours = multiply[product](x)
    assert runs() == 1
    assert ours.is_contiguous()
    assert torch.equal(ours, multiply[product](packed))
    assert runs() == 1


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", LYING)
def test_a_bias_is_fused_wherever_the_input_lies(
    engine: Engine, chooser: Chooser, runs: Runs, name: str, fused: bool
) -> None:
    """A fused sum is rounded once, and another twice."""
    chooser.answers = lambda problem: fused or not problem.operation.is_fused
    x, w = LYING[name](), wide(16, 32)
    packed, row = x.clone(memory_format=torch.contiguous_format), wide(32)[::2]
    expected = functional.linear(packed, w, row.clone())
    for act in (
        lambda: functional.linear(x, w, row),
        lambda: torch.addmm(row, x, w.t()),
        lambda: torch.addmm(row.expand(12, 16), x, w.t()),
        lambda: gemmsmith.linear(x, w, row),
    ):
        assert torch.equal(act(), expected)
    assert runs() == 5


@pytest.mark.parametrize("k", [1, 7, 8, 20, 31])
@pytest.mark.parametrize("n", [1, 5, 8, 12])
@pytest.mark.parametrize("m", [1, 3, 8])
def test_extents_off_the_alignment(engine: Engine, runs: Runs, m: int, n: int, k: int) -> None:
    x, w = wide(m, k), wide(n, k)
    padded = functional.pad(x, (0, 40 - k)), functional.pad(w, (0, 40 - k, 0, 16 - n))
    expected = functional.linear(*padded)[:, :n]
    runs()
    for act in (
        lambda: functional.linear(x, w),
        lambda: x @ w.t().contiguous(),
        lambda: x.t().contiguous().t() @ w.t(),
        lambda: gemmsmith.linear(x, w),
    ):
        assert torch.equal(act(), expected)
        assert runs() == 1
    batch = torch.bmm(x.expand(3, m, k), w.t().expand(3, k, n))
    assert torch.equal(batch, expected.expand(3, m, n))
    assert runs() == 1


@pytest.mark.parametrize("layout", ["tn", "tt", "nt", "nn"])
def test_one_layout_with_a_winner_is_enough(
    engine: Engine, chooser: Chooser, runs: Runs, layout: str
) -> None:
    """Forwards and both gradients, of two and three dimensions."""
    chooser.answers = lambda problem: problem.layout == layout and not problem.operation.is_fused
    w = wide(8, 16).requires_grad_()
    for size in ((4, 16), (2, 4, 16)):
        x = wide(*size).requires_grad_()
        out = functional.linear(x, w)
        out.sum().backward()  # its gradient is one number, expanded
        assert runs() == 3
        close(out, functional.linear(x.float(), w.float()))
        assert x.grad is not None
        close(x.grad, w.float().sum(0).expand(size))
    batch, other = wide(3, 4, 16), wide(3, 16, 8)
    close(batch @ other, batch.float() @ other.float())
    assert runs() == 1


def test_outputs_of_callers(engine: Engine, runs: Runs) -> None:
    x, w, added = wide(12, 32), wide(32, 16), wide(12, 16)
    expected, sums = x @ w, added + x @ w
    runs()
    places: dict[str, Callable[[], torch.Tensor]] = {
        "turned": lambda: torch.empty(16, 12, dtype=BF16).t(),
        "with gaps": lambda: torch.empty(12, 32, dtype=BF16)[:, ::2],
        "off the alignment": lambda: shifted(added),
        "empty": lambda: torch.empty(0, dtype=BF16),
    }
    for make in places.values():
        for act, result in (
            (lambda out: torch.mm(x, w, out=out), expected),
            (lambda out: torch.addmm(added, x, w, out=out), sums),
        ):
            out = make()
            assert act(out) is out
            assert torch.equal(out, result)
            assert runs() == 1
    with pytest.raises(RuntimeError, match="float32"):
        torch.mm(x, w, out=torch.empty(12, 16))


def test_sums_in_place(engine: Engine, runs: Runs) -> None:
    x, w, batch, other = wide(4, 16), wide(16, 8), wide(3, 4, 16), wide(3, 16, 8)
    added, many, column = wide(4, 8), wide(3, 4, 8), wide(4)
    for act, of in (
        (lambda t: t.addmm_(x, w, beta=0.5, alpha=2.0), added),
        (lambda t: t.baddbmm_(batch, other), many),
        (lambda t: t.addmv_(x, w[:, 0], beta=2.0), column),
    ):
        ours = of.clone()
        assert act(ours) is ours
        assert runs() == 1
    close(torch.addmm(added, x, w), added.float() + x.float() @ w.float())
    runs()
    products = torch.bmm(batch.float(), other.float()).sum(0)
    torch.testing.assert_close(
        torch.addbmm(added, batch, other).float(), added.float() + products, rtol=5e-2, atol=0.2
    )
    assert runs() == 3


def test_vectors_are_rows_and_columns(engine: Engine, runs: Runs) -> None:
    x, w = wide(12, 32), wide(32, 16)
    column, row = w[:, 3], x[5]
    whole = x @ w
    runs()
    assert torch.equal(x @ column, whole[:, 3])
    assert torch.equal(torch.mv(x, column), whole[:, 3])
    assert torch.equal(row @ w, whole[5])
    assert torch.equal(row @ column, whole[5, 3])
    assert torch.equal(torch.dot(row, column), whole[5, 3])
    assert torch.equal(torch.vdot(row, column), whole[5, 3])
    assert torch.equal(x.expand(2, 12, 32) @ column, whole[:, 3].expand(2, 12))
    assert torch.equal(functional.linear(row, w.t()), whole[5])
    added = wide(12)
    assert torch.equal(torch.addmv(added, x, column), added + whole[:, 3])
    assert torch.equal(torch.addmv(added, x, column, beta=0), whole[:, 3])
    assert runs() == 10


def test_added_gradients_of_any_operands(engine: Engine, chooser: Chooser, runs: Runs) -> None:
    """Sums in FP32, also where a kernel can only add to a copy."""
    dy, x = wide(20, 24)[:, ::2], wide(20, 16)
    into = torch.randn(12, 16)
    expected = into + dy.float().t() @ x.float()
    for place in (into.clone(), into.t().contiguous().t(), shifted(into)):
        gemmsmith.linear(x, wide(12, 16))
        runs()
        torch.addmm(place, dy.t(), x, out_dtype=torch.float32, out=place)
        assert runs() == 1
        torch.testing.assert_close(place, expected, rtol=1e-4, atol=1e-3)


def test_factors_of_rows_of_any_operands(engine: Engine, chooser: Chooser, runs: Runs) -> None:
    a, b = (torch.randn(size, 64).to(torch.float8_e4m3fn) for size in (16, 32))
    rows, columns = torch.rand(16, 2)[:, :1], torch.rand(2, 32)[:1]
    packed = a[:, ::2].contiguous(), b[:, ::2].contiguous()
    expected = gemmsmith.scaled_mm(
        packed[0], packed[1].t(), rows.contiguous(), columns.contiguous(), use_fast_accum=True
    )
    ours = torch._scaled_mm(
        a[:, ::2], b[:, ::2].t(), rows, columns, out_dtype=BF16, use_fast_accum=True
    )
    assert runs() == 2
    assert torch.equal(ours, expected)
    odd = gemmsmith.scaled_mm(
        packed[0][:, :20], packed[1][:19, :20].t(), rows, columns[:, :19].contiguous(),
        use_fast_accum=True,
    )  # fmt: skip
    assert runs() == 1
    exact = packed[0][:, :20].float() @ packed[1][:19, :20].float().t() * rows * columns[:, :19]
    close(odd, exact)


def test_a_fused_product_of_other_operands(engine: Engine, chooser: Chooser, runs: Runs) -> None:
    chooser.answers = lambda problem: True
    x, gate, up = wide(12, 32), wide(16, 32), wide(16, 32)
    expected = gemmsmith.gated_linear(x, gate, up)
    runs()
    for left in (wide(12, 64)[:, ::2], wide(12, 37)[:, :32], shifted(x)):
        left.copy_(x)
        assert torch.equal(gemmsmith.gated_linear(left, gate, up), expected)
        assert runs() == 1
    moved = shifted(gate), shifted(up)
    assert torch.equal(gemmsmith.gated_linear(x, *moved), expected)
    assert torch.equal(gemmsmith.gated_linear(x, gate, moved[1]), expected)
    assert runs() == 2


def test_copies_may_be_captured(engine: Engine, runs: Runs) -> None:
    host = engine.platform
    assert isinstance(host, Host)
    x, w = wide(4, 32)[:, ::2], wide(8, 16)
    known = functional.linear(x, w)
    host.is_capturing = True
    assert torch.equal(functional.linear(x, w), known)
    with pytest.raises(RuntimeError, match="run the model once before"):
        functional.linear(x[:3], w)
    with pytest.raises(RuntimeError, match="run the model once before"):
        functional.linear(shifted(x), w)


def test_what_has_a_fused_kernel_is_not_captured_without_it(
    engine: Engine, chooser: Chooser
) -> None:
    chooser.answers = lambda _: True
    host = engine.platform
    assert isinstance(host, Host)
    x, w, row = wide(4, 16), wide(8, 16), wide(8)
    functional.linear(x, w)
    host.is_capturing = True
    for act in (lambda: functional.linear(x, w, row), lambda: gemmsmith.linear(x, w, row)):
        with pytest.raises(RuntimeError, match="run the model once before"):
            act()


def test_without_a_demand_torch_computes_them(chooser: Chooser, pack: Path, runs: Runs) -> None:
    with made(chooser, pack), gemmsmith.patch():
        for make in LYING.values():
            x, w = make(), wide(16, 32)
            close(functional.linear(x, w), x.float() @ w.float().t())
    assert not any(problem.operation.summation for problem in chooser.asked)


def test_what_is_fused_by_a_library_raises(engine: Engine) -> None:
    row, x, w = wide(8), wide(4, 16), wide(16, 8)
    with pytest.raises(RuntimeError, match="call addmm"):
        torch._addmm_activation(row, x, w)


def test_the_order_is_the_only_one_that_is_demanded(engine: Engine, chooser: Chooser) -> None:
    for make in LYING.values():
        functional.linear(make(), wide(16, 32))
    asked: list[Problem] = chooser.asked
    assert {problem.operation.summation for problem in asked} == {"sequential"}
