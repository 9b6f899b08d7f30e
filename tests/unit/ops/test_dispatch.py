"""Tuned kernels below torch's own products: unchanged code, any thread, forwards and backwards."""

from __future__ import annotations

import logging
import threading
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import gemmsmith
from gemmsmith.ops.dispatch import Dispatch, _binding
from gemmsmith.ops.engine import Engine, install
from tests.support.stand_in import Chooser, Host, Packs

BF16 = torch.bfloat16
Runs = Callable[[], int]


@pytest.fixture(scope="module")
def binding(tmp_path_factory: pytest.TempPathFactory) -> Dispatch:
    """Compiled from its source, into a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GEMMSMITH_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setattr("gemmsmith.ops.dispatch._INSTALLED", Path("none"))
        found = Dispatch.of("cpu", stream=lambda index: 77)
    assert found is not None
    return found


@pytest.fixture
def engine(chooser: Chooser, pack: Path, binding: Dispatch) -> Iterator[Engine]:
    host = Host()
    host.kind = "cpu"
    made = Engine(chooser, Packs(pack), platform=host)
    before = install(made)
    yield made
    install(before)
    torch._dynamo.reset()


@pytest.fixture
def patched(engine: Engine) -> Iterator[Engine]:
    with gemmsmith.patch():
        yield engine


def operands(*sizes: tuple[int, ...], grad: bool = False) -> list[torch.Tensor]:
    return [torch.randn(size).to(BF16).requires_grad_(grad) for size in sizes]


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=2e-2, atol=2e-2)


def test_forwards_and_backwards(engine: Engine, runs: Runs) -> None:
    x, w = operands((2, 4, 16), (8, 16), grad=True)
    wide = [t.detach().float().requires_grad_() for t in (x, w)]
    with gemmsmith.patch():
        out = functional.linear(x, w)
        out.backward(torch.ones_like(out))
    assert runs() == 3
    expected = functional.linear(*wide)
    expected.backward(torch.ones_like(expected))
    close(out, expected)
    for ours, theirs in zip((x, w), wide, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        close(ours.grad, theirs.grad)
    functional.linear(x, w)
    assert runs() == 0  # what was switched on is off again


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((8, 16), (16, 8)),
        ((3, 8, 16), (3, 16, 8)),
        ((2, 3, 8, 16), (2, 3, 16, 8)),
        ((1, 8), (8, 1)),
    ],
)
def test_products(patched: Engine, runs: Runs, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    left, right = operands(a, b)
    for x, y in ((left, right), (left.mT.contiguous().mT, right), (left, right.mT.contiguous().mT)):
        close(x @ y, x.float() @ y.float())
        assert runs() == 1


def test_into_an_output(patched: Engine, runs: Runs) -> None:
    a, b = operands((4, 16), (16, 8))
    out = torch.full((4, 8), torch.nan, dtype=BF16)
    assert torch.mm(a, b, out=out) is out
    assert runs() == 1
    close(out, a.float() @ b.float())
    turned = torch.empty((8, 4), dtype=BF16).t()  # no kernel writes columns
    torch.mm(a, b, out=turned)
    assert runs() == 0
    close(turned, a.float() @ b.float())
    batch, other = operands((3, 4, 16), (3, 16, 8))
    into = torch.empty((3, 4, 8), dtype=BF16)
    close(torch.bmm(batch, other, out=into), batch.float() @ other.float())
    assert runs() == 1


def test_what_is_not_ours_is_torchs(patched: Engine, runs: Runs) -> None:
    for dtype in (torch.float32, torch.float64, torch.int64, torch.complex64):
        a, b = torch.ones(4, 16, dtype=dtype), torch.ones(16, 8, dtype=dtype)
        assert torch.equal(a @ b, torch.full((4, 8), 16, dtype=dtype))
    a, b = operands((0, 16), (16, 8))
    assert (a @ b).shape == (0, 8)
    a, b = operands((4, 0), (0, 8))
    assert torch.equal(a @ b, torch.zeros(4, 8, dtype=BF16))
    (odd,) = operands((65,))
    shifted = odd[1:].view(4, 16)  # 2 bytes behind an aligned address
    (b,) = operands((16, 8))
    close(shifted @ b, shifted.float() @ b.float())
    assert runs() == 0


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (torch.ones(4, 16), torch.ones(8, 16), r"cannot be multiplied \(4x16 and 8x16\)"),
        (torch.ones(4, 16), torch.ones(16, 8, dtype=BF16), "same dtype"),
        (torch.ones(4, 16), torch.ones(2, 16, 8), "mat2 must be a matrix, got 3-D tensor"),
    ],
)
def test_errors_are_torchs(patched: Engine, a: torch.Tensor, b: torch.Tensor, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        torch.mm(a, b)


def test_a_kernel_that_fails_is_given_up(
    engine: Engine, chooser: Chooser, caplog: pytest.LogCaptureFixture
) -> None:
    chooser.name = "fails"
    a, b = operands((4, 16), (16, 8))
    with gemmsmith.patch(), caplog.at_level(logging.WARNING, "gemmsmith"):
        for _ in range(3):
            close(a @ b, a.float() @ b.float())
    (record,) = caplog.records
    assert "torch's own operators stand in for kernel pack" in record.getMessage()


def test_a_kernel_with_workspace(patched: Engine, chooser: Chooser, runs: Runs) -> None:
    chooser.name = "split"
    a, b = operands((4, 16), (16, 8))
    a @ b  # the stand-in checks that it gets its workspace
    assert runs() == 1


def test_a_product_is_decided_once(patched: Engine, chooser: Chooser, runs: Runs) -> None:
    a, b = operands((4, 16), (16, 8))
    for _ in range(5):
        a @ b
    assert runs() == 5
    assert len(chooser.asked) == 1


def test_during_a_capture_nothing_is_decided(engine: Engine, chooser: Chooser, runs: Runs) -> None:
    host = engine.platform
    assert isinstance(host, Host)
    a, b = operands((4, 16), (16, 8))
    with gemmsmith.patch():
        host.is_capturing = True
        a @ b
        assert runs() == 0
        host.is_capturing = False
        a @ b
        assert runs() == 1


def test_newer_winners_are_taken_over(pack: Path, binding: Dispatch, runs: Runs) -> None:
    class Swapping(Chooser):
        snapshot: object = 1
        on_swap: Callable[[], None] = staticmethod(lambda: None)

    chooser = Swapping(answers=lambda problem: False)
    host = Host()
    host.kind = "cpu"
    engine = Engine(chooser, Packs(pack), platform=host)
    before = install(engine)
    a, b = operands((4, 16), (16, 8))
    try:
        with gemmsmith.patch():
            a @ b
            assert runs() == 0
            chooser.answers, chooser.snapshot = (lambda problem: True), 2
            chooser.on_swap()
            a @ b
            assert runs() == 1
    finally:
        install(before)


def test_threads_share_the_decisions(patched: Engine, runs: Runs) -> None:
    sizes = [(m, 16 * k) for m in (1, 2, 3, 4, 5) for k in (1, 2, 3)]
    wrong: list[str] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for m, k in sizes * 4:
            a = torch.randn(m, k, generator=generator).to(BF16)
            b = torch.randn(k, 8, generator=generator).to(BF16)
            if not torch.allclose((a @ b).float(), a.float() @ b.float(), rtol=3e-2, atol=6e-2):
                wrong.append(f"{m}x{k}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert runs() == 8 * 4 * len(sizes)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # inductor's own
def test_under_torch_compile(engine: Engine, runs: Runs) -> None:
    x, w = operands((4, 16), (8, 16), grad=True)
    compiled = torch.compile(lambda x, w: functional.linear(x, w).tanh(), fullgraph=True)
    with gemmsmith.patch():
        out = compiled(x, w)
        out.sum().backward()
    close(out, functional.linear(x.float(), w.float()).tanh())
    assert x.grad is not None


def test_the_binding_says_why_it_cannot_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMMSMITH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("gemmsmith.ops.dispatch._INSTALLED", Path("none"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(OSError, match="no C\\+\\+ compiler"):
        _binding()


def test_a_call_costs_little_more_than_torchs(engine: Engine, chooser: Chooser) -> None:
    """Where torch computes it: what everything that is not ours pays. Measured: 0.4 µs of 3."""
    chooser.answers = lambda problem: False
    x, w = operands((4, 16), (8, 16))

    def cost() -> float:
        return min(timeit.repeat(lambda: functional.linear(x, w), number=2000, repeat=15))

    alone = cost()
    with gemmsmith.patch():
        assert cost() < 1.5 * alone
