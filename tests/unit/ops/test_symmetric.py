"""Products of a matrix and its transposed view: known by storage and strides, computed by half."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import gemmsmith
from gemmsmith.core.problem import Layout, Problem
from gemmsmith.ops.below.dispatch import Dispatch
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.symmetric import symmetric
from gemmsmith.program.calls import is_mirrored
from tests.support.below import BF16, close, made
from tests.support.stand_in import Chooser

Runs = Callable[[], int]
Views = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture
def engine(chooser: Chooser, pack: Path, binding: Dispatch) -> Iterator[Engine]:
    with made(chooser, pack) as engine:
        yield engine


@pytest.fixture
def patched(engine: Engine) -> Iterator[Engine]:
    with gemmsmith.patch():
        yield engine


def rows(*size: int) -> torch.Tensor:
    return torch.randn(size, dtype=BF16)


def of(a: torch.Tensor) -> Views:
    return a, a.mT


MIRRORED: dict[str, Callable[[], Views]] = {
    "rows": lambda: of(rows(8, 16)),
    "columns": lambda: of(rows(16, 8).mT),
    "a batch": lambda: of(rows(3, 8, 16)),
    "with gaps": lambda: of(rows(8, 32)[:, 8:24]),
    "another view": lambda: (x := rows(8, 16), x.view(8, 16).t()),
}
OTHERS: dict[str, Callable[[], Views]] = {
    "itself": lambda: (x := rows(8, 8), x),
    "a copy": lambda: (x := rows(8, 16), x.clone().t()),
    "other rows": lambda: ((x := rows(16, 16))[:8], x[8:].t()),
    "other columns": lambda: ((x := rows(8, 32))[:, :16], x[:, 16:].t()),
    "another shape": lambda: ((x := rows(8, 16)), x.view(16, 8)),
    "fewer rows": lambda: ((x := rows(8, 16)), x[:4].t()),
    "other strides": lambda: ((x := rows(128))[:64].view(8, 8), x.as_strided((8, 8), (1, 16))),
    "another matrix of a batch": lambda: ((x := rows(2, 8, 16)), x.flip(0).mT),
}


@pytest.mark.parametrize("name", MIRRORED)
def test_by_half(patched: Engine, chooser: Chooser, runs: Runs, name: str) -> None:
    a, b = MIRRORED[name]()
    assert is_mirrored(a, b)
    for multiply in (torch.matmul, torch.mm if a.dim() == 2 else torch.bmm):
        close(multiply(a, b), a.float() @ b.float())
    assert runs() == 2
    (asked,) = chooser.asked
    layout = Layout.NT if name == "columns" else Layout.TN
    batch = 3 if name == "a batch" else 1
    assert asked == Problem(8, 8, 16, batch=batch, dtype="bf16.symmetric", layout=layout)


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_products_like_any(
    patched: Engine, chooser: Chooser, runs: Runs, name: str
) -> None:
    a, b = OTHERS[name]()
    assert not is_mirrored(a, b)
    close(a @ b, a.float() @ b.float())
    assert runs() == 1
    assert not any(problem.operation.symmetric for problem in chooser.asked)


def test_without_a_winner_all_of_it_is_computed(
    patched: Engine, chooser: Chooser, runs: Runs
) -> None:
    chooser.answers = lambda problem: not problem.operation.symmetric
    a = rows(8, 16)
    for product in (a @ a.t(), gemmsmith.matmul(a, a.t())):
        close(product, a.float() @ a.float().t())
    assert runs() == 2


def test_gradients_are_those_of_the_product(patched: Engine, runs: Runs) -> None:
    a = rows(8, 16).requires_grad_()
    wide = a.detach().float().requires_grad_()
    outward = rows(8, 8)
    (a @ a.t()).backward(outward)
    (wide @ wide.t()).backward(outward.float())
    assert runs() == 3
    assert a.grad is not None
    assert wide.grad is not None
    close(a.grad, wide.grad)


def test_an_output_that_is_read_is_torchs(patched: Engine, chooser: Chooser) -> None:
    a = rows(8, 8)
    expected = a.float() @ a.float().t()
    torch.mm(a, a.t(), out=a)
    assert not any(problem.operation.symmetric for problem in chooser.asked)
    assert a.shape == expected.shape


def test_in_a_new_output(patched: Engine, chooser: Chooser, runs: Runs) -> None:
    a, out = rows(8, 16), rows(8, 8)
    close(torch.mm(a, a.t(), out=out), a.float() @ a.float().t())
    assert runs() == 1
    assert chooser.asked[0].operation.symmetric


def test_where_rows_must_have_the_same_bits_it_is_a_product_like_any(
    engine: Engine, chooser: Chooser
) -> None:
    assert symmetric(engine.invariant, rows(8, 16)) is None
    assert not chooser.asked


@pytest.mark.parametrize("batch", [(), (3,)])
def test_factors_hold_for_one_call(engine: Engine, runs: Runs, batch: tuple[int, ...]) -> None:
    a, c = rows(*batch, 8, 16), rows(*batch, 8, 8)
    c += c.mT.clone()
    product = a.float() @ a.float().mT
    for alpha, beta in ((2.0, -0.5), (1.0, 0.0), (-1.0, 1.0)):
        d = symmetric(engine, a, c, alpha, beta)
        assert d is not None
        close(d, alpha * product + beta * c.float())
    d = symmetric(engine, a)
    assert d is not None
    close(d, product)
    assert runs() == 4


def test_a_capture_counts_it_as_what_it_is() -> None:
    a, whole = rows(8, 16), torch.randn(8, 16, dtype=torch.float64)
    with gemmsmith.capture() as shapes:
        _ = a @ a.t(), a @ a.t(), a @ a.clone().t(), torch.bmm(*of(rows(3, 8, 16)))
        _ = whole @ whole.t(), (odd := rows(3, 16)) @ odd.t()
    assert shapes.problems == {
        Problem(8, 8, 16, dtype="bf16.symmetric"): 2,
        Problem(8, 8, 16): 1,
        Problem(3, 3, 16): 1,
        Problem(8, 8, 16, batch=3, dtype="bf16.symmetric"): 1,
    }
