"""One line in a training script: what it replaces, and that it leaves everything as it was."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import gemmsmith
from gemmsmith.ops.below.dispatch import Dispatch
from gemmsmith.ops.engine.engine import Engine
from tests.support.patched import is_patched
from tests.support.stand_in import Chooser, Host

BF16 = torch.bfloat16
Runs = Callable[[], int]


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 24, bias=False), nn.ReLU(), nn.Linear(24, 8)).to(BF16)


def step(net: nn.Module) -> list[torch.Tensor]:
    net.zero_grad()
    out = net(torch.linspace(-1, 1, 64, dtype=BF16).view(4, 16))
    out.backward(torch.ones_like(out))
    return [out.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]


@pytest.mark.parametrize("which", ["model", "everywhere"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_training_step(engine: Engine, runs: Runs, which: str, compiled: bool) -> None:
    net = model()
    keys = list(net.state_dict())
    expected = step(net)
    assert runs() == 0
    with gemmsmith.patch(net if which == "model" else None):
        # The input needs no gradient: five products.
        found = step(torch.compile(net, backend="aot_eager", fullgraph=True) if compiled else net)
        assert runs() == 5
        assert list(net.state_dict()) == keys
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    assert type(net[0]) is nn.Linear
    step(net)
    assert runs() == 0


def test_a_model_where_there_is_no_binding(
    engine: Engine, host: Host, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(Dispatch, "of", asked.append)
    host.kind = "cpu"
    net = model()
    with gemmsmith.patch(net):
        assert [is_patched(layer) for layer in net] == [True, False, True]
        step(net)
    assert runs() == 5
    assert set(asked) == {"cpu"}


def test_every_way_to_multiply(engine: Engine, runs: Runs) -> None:
    a, b, c = torch.randn(4, 16).to(BF16), torch.randn(16, 8).to(BF16), torch.randn(8).to(BF16)
    x, y = torch.randn(3, 4, 16).to(BF16), torch.randn(3, 16, 8).to(BF16)
    ways: list[Callable[[], torch.Tensor]] = [
        lambda: a @ b,
        lambda: torch.matmul(a, b),
        lambda: torch.matmul(input=a, other=b),
        lambda: a.matmul(b),
        lambda: torch.mm(a, mat2=b),
        lambda: a.mm(b),
        lambda: torch.bmm(x, y),
        lambda: x.bmm(y),
        lambda: torch.addmm(c, a, b),
        lambda: nn.functional.linear(a, b.t().contiguous(), bias=c),
    ]
    for way in ways:
        expected = way()
        with gemmsmith.patch():
            torch.testing.assert_close(way(), expected, rtol=2e-2, atol=5e-2)
        assert runs() == 1
    others: list[Callable[[], torch.Tensor]] = [
        lambda: torch.mm(a, b, out=torch.empty(4, 8, dtype=BF16)),
        lambda: torch.addmm(c, a, b, beta=0.5),
        lambda: torch.addmm(torch.ones(4, 8, dtype=BF16), a, b),
    ]
    for way in others:
        expected = way()
        with gemmsmith.patch():
            torch.testing.assert_close(way(), expected)
        assert runs() == 0


def test_torchs_own_refusals_stay(engine: Engine) -> None:
    with gemmsmith.patch(), pytest.raises(RuntimeError, match=r"must be a matrix|2D|3D"):
        torch.mm(torch.ones(2, 4, 16), torch.ones(16, 8))
    with gemmsmith.patch(), pytest.raises(RuntimeError):
        torch.bmm(torch.ones(2, 4, 16), torch.ones(1, 16, 8))


def test_the_model_is_restored_after_an_error(engine: Engine) -> None:
    net = model()
    with pytest.raises(KeyError), gemmsmith.patch(net):
        raise KeyError
    assert type(net[0]) is nn.Linear


def test_the_report(engine: Engine, chooser: Chooser) -> None:
    chooser.answers = lambda problem: problem.n != 8
    file = io.StringIO()
    net = model()
    with gemmsmith.patch(net, report=True, file=file):
        step(net)
        step(net)
    text = file.getvalue().splitlines()
    assert text[0] == "gemmsmith: 8 of 10 products ran tuned kernels"
    assert "       2 × 4×24×16 bf16 tn (linear): tn, 1000.00 µs less each" in text
    assert "       2 × 4×8×24 bf16 tn (linear_bias): torch" in text
    assert text[-1] == "  expected gain: 8.000 ms in all"
    assert engine.watcher is None


@pytest.mark.parametrize("which", ["model", "everywhere"])
def test_the_report_counts_what_torch_computes(
    engine: Engine, chooser: Chooser, which: str
) -> None:
    chooser.answers = lambda problem: False
    file = io.StringIO()
    net = model()
    with gemmsmith.patch(net if which == "model" else None, report=True, file=file):
        step(net)
        x = torch.randn(4, 16).to(BF16).requires_grad_()
        if which == "everywhere":
            (x @ torch.randn(16, 8).to(BF16)).backward(torch.ones(4, 8, dtype=BF16))
    text = file.getvalue()
    # The input of the first layer needs no gradient, nor does the second operand.
    total = 5 if which == "model" else 7
    assert text.startswith(f"gemmsmith: 0 of {total} products ran tuned kernels")
    assert "expected gain" not in text


def test_the_report_without_use() -> None:
    file = io.StringIO()
    with gemmsmith.patch(report=True, file=file):
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert "call gemmsmith.use(...) first" in file.getvalue()


def test_other_types_by_the_function_mode(engine: Engine, chooser: Chooser, runs: Runs) -> None:
    a, b = torch.randn(4, 16).to(BF16), torch.randn(16, 8).to(BF16)
    wide = a.float() @ b.float()
    total = torch.ones(4, 8)
    ints = torch.randint(-128, 128, (4, 16), dtype=torch.int8)
    with gemmsmith.patch():
        close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
        close(torch.mm(a, b, out_dtype=torch.float32), wide)
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
        close(total, wide + 1)
        close(
            torch.baddbmm(total[None], a[None], b[None], out_dtype=torch.float32)[0], total + wide
        )
        assert torch.equal(torch._int_mm(ints, ints.t()), (ints.double() @ ints.t().double()).int())
    assert runs() == 4
    assert {problem.dtype for problem in chooser.asked} == {
        "bf16.out_f32",
        "bf16.out_f32.accumulate",
        "int8",
    }
    with gemmsmith.patch(), pytest.raises(NotImplementedError):  # torch's CPU has no such product
        torch.addmm(total, a, b, out_dtype=torch.float32, beta=2)
