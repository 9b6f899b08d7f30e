"""The operators against FP32, forward and backward, with kernels and with torch in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import gemmsmith
from gemmsmith.core.problem import Layout
from gemmsmith.ops.engine.engine import Engine
from tests.support import stand_in
from tests.support.replacing import replace
from tests.support.stand_in import Chooser

BF16 = torch.bfloat16
Runs = Callable[[], int]


def random(*size: int, dtype: torch.dtype = BF16, grad: bool = True) -> torch.Tensor:
    return torch.randn(size, dtype=dtype).requires_grad_(grad)


def close(ours: torch.Tensor | None, reference: torch.Tensor | None) -> None:
    assert ours is not None
    assert reference is not None
    assert ours.shape == reference.shape
    error = torch.linalg.vector_norm(ours.float() - reference.float())
    assert error <= 1e-2 * torch.linalg.vector_norm(reference.float())


def check(function, reference, *operands: torch.Tensor | None) -> torch.Tensor:
    """Output and every gradient against the same in FP32."""
    out: torch.Tensor = function(*operands)
    wide = [None if o is None else o.detach().float().requires_grad_() for o in operands]
    expected = reference(*wide)
    close(out, expected)
    gradient = torch.randn(out.shape)
    out.backward(gradient.to(out.dtype))
    expected.backward(gradient.to(out.dtype).float())
    for ours, theirs in zip(operands, wide, strict=True):
        if ours is not None and theirs is not None:
            close(ours.grad, theirs.grad)
    return out


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("leading", [(5,), (2, 3), (1,)])
def test_linear(computing: str, runs: Runs, leading: tuple[int, ...], bias: bool) -> None:
    b = random(24) if bias else None
    check(gemmsmith.linear, functional.linear, random(*leading, 16), random(24, 16), b)
    assert runs() == (3 if computing == "kernels" else 0)


@pytest.mark.parametrize(
    ("a", "b", "kernels"),
    [((8, 16), (16, 24), 3), ((2, 4, 16), (16, 24), 3), ((3, 8, 16), (3, 16, 24), 3),
     ((2, 3, 8, 16), (2, 3, 16, 24), 3), ((16,), (16, 24), 0), ((3, 8, 16), (1, 16, 24), 0),
     ((2, 8, 16), (16,), 0)],
)  # fmt: skip
def test_matmul(computing: str, runs: Runs, a, b, kernels: int) -> None:
    check(gemmsmith.matmul, torch.matmul, random(*a), random(*b))
    assert runs() == (kernels if computing == "kernels" else 0)


def test_operands_that_lie_otherwise(computing: str, runs: Runs) -> None:
    x, w = random(16, 40, grad=False), random(16, 24, grad=False)
    for a, b in ((x.t(), w), (x.t()[::2], w), (x[:, ::2].t(), w), (x.t(), w.t().contiguous().t())):
        close(gemmsmith.matmul(a, b), a.float() @ b.float())
    close(gemmsmith.linear(x.t(), w.t()), x.t().float() @ w.float())
    offset = random(165, grad=False)[5:].view(10, 16)  # its start is not on 16 bytes
    close(gemmsmith.linear(offset, w.t()), offset.float() @ w.float())


@pytest.mark.parametrize("sizes", [(0, 16, 8), (4, 0, 8), (4, 16, 0)])
def test_nothing_to_multiply(computing: str, sizes: tuple[int, int, int]) -> None:
    m, k, n = sizes
    x, w = random(m, k), random(n, k)
    out = gemmsmith.linear(x, w)
    assert torch.equal(out, functional.linear(x, w))
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_other_types_are_torchs(computing: str, runs: Runs, dtype: torch.dtype) -> None:
    x, w = random(4, 16, dtype=dtype), random(8, 16, dtype=dtype)
    assert torch.equal(gemmsmith.linear(x, w), functional.linear(x, w))
    assert runs() == 0


def test_wrong_sizes_are_torchs_error(computing: str) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        gemmsmith.linear(random(4, 16), random(8, 17))


def test_the_gradient_of_a_gradient(computing: str) -> None:
    x, w = random(4, 16), random(8, 16)
    (dx,) = torch.autograd.grad(gemmsmith.linear(x, w).square().sum(), x, create_graph=True)
    dx.float().square().sum().backward()
    wide = [t.detach().float().requires_grad_() for t in (x, w)]
    y = functional.linear(*wide).square().sum()
    (expected,) = torch.autograd.grad(y, wide[0], create_graph=True)
    expected.square().sum().backward()
    close(w.grad, wide[1].grad)


def test_only_the_gradients_that_are_wanted(engine: Engine, runs: Runs) -> None:
    gemmsmith.linear(random(4, 16, grad=False), random(8, 16)).sum().backward()
    assert runs() == 1  # forward; the expanded gradient of a sum is no matrix in memory
    x, w = random(4, 16, grad=False), random(8, 16)
    gemmsmith.linear(x, w).backward(torch.ones(4, 8, dtype=BF16))
    assert runs() == 2
    assert x.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_main_grad_accumulates(computing: str, dtype: torch.dtype) -> None:
    x, w = random(32, 16), random(8, 16)
    total = torch.ones(8, 16, dtype=dtype)
    expected = torch.ones(8, 16)
    for _ in range(3):
        gradient = torch.randn(32, 8).to(BF16)
        gemmsmith.linear(x, w, main_grad=total).backward(gradient)
        expected += gradient.float().t() @ x.detach().float()
    assert w.grad is None
    if dtype is torch.float32:  # no product was rounded on the way
        torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-4)
    else:
        close(total, expected)


def test_main_grad_is_checked() -> None:
    x, w = random(4, 16), random(8, 16)
    with pytest.raises(ValueError, match=r"main_grad must be \(8, 16\)"):
        gemmsmith.linear(x, w, main_grad=torch.zeros(16, 8))
    with pytest.raises(ValueError, match="must not require a gradient"):
        gemmsmith.linear(x, w, main_grad=torch.zeros(8, 16, requires_grad=True))


def test_autocast(computing: str, runs: Runs) -> None:
    x, w, b = (random(*size, dtype=torch.float32) for size in ((4, 16), (8, 16), (8,)))
    with torch.autocast("cpu", dtype=BF16):
        out = gemmsmith.linear(x, w, b)
        other = gemmsmith.matmul(x, w.t())
        assert out.dtype is other.dtype is functional.linear(x, w, b).dtype is BF16
    out.backward(torch.ones(4, 8, dtype=BF16))
    assert w.grad is not None
    assert w.grad.dtype is torch.float32
    assert runs() == (4 if computing == "kernels" else 0)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_compiled(computing: str, runs: Runs, backend: str) -> None:
    # A kink, as ReLU's, would turn rounding near 0 into a whole gradient's difference.
    def step(x, w, b, y):
        return gemmsmith.linear(x, w, b).tanh() + gemmsmith.matmul(x, y)

    def plain(x, w, b, y):
        return functional.linear(x, w, b).tanh() + x @ y

    compiled = torch.compile(step, fullgraph=True, backend=backend, dynamic=False)
    check(compiled, plain, random(4, 16), random(8, 16), random(8), random(16, 8))
    assert runs() == (6 if computing == "kernels" else 0)


def test_compiled_for_any_size(engine: Engine, runs: Runs) -> None:
    compiled = torch.compile(gemmsmith.linear, fullgraph=True, backend="aot_eager", dynamic=True)
    for m in (8, 24):
        check(compiled, functional.linear, random(m, 16), random(8, 16))
    assert runs() == 6


def test_compiled_under_autocast_and_into_main_grad(engine: Engine, runs: Runs) -> None:
    total = torch.zeros(8, 16)

    def step(x, w):
        with torch.autocast("cpu", dtype=BF16):
            return gemmsmith.linear(x, w, main_grad=total)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    x, w = random(4, 16, dtype=torch.float32), random(8, 16, dtype=torch.float32)
    compiled(x, w).backward(torch.ones(4, 8, dtype=BF16))
    close(total, torch.ones(4, 8).t() @ x.detach())
    assert runs() == 3


def test_a_graph_holds_torchs_operator_where_there_is_no_kernel(
    engine: Engine, chooser: Chooser
) -> None:
    chooser.answers = lambda problem: problem.m == 8
    targets: list[str] = []

    def backend(graph, inputs):
        from torch._dynamo.backends.common import aot_autograd

        def look(module, inputs):
            targets.extend(str(node.target) for node in module.graph.nodes)
            return module.forward

        return aot_autograd(fw_compiler=look)(graph, inputs)

    compiled = torch.compile(gemmsmith.linear, fullgraph=True, backend=backend, dynamic=False)
    w = random(8, 16, grad=False)
    compiled(random(4, 16, grad=False), w)
    assert "aten.mm.default" in targets
    assert not any("gemmsmith" in target for target in targets)
    compiled(random(8, 16, grad=False), w)
    assert "gemmsmith.linear.default" in targets


@pytest.mark.parametrize("grad", [True, False])
def test_opcheck(computing: str, grad: bool) -> None:
    x, w, b = random(4, 16, grad=grad), random(8, 16, grad=grad), random(8, grad=grad)
    operators = torch.ops.gemmsmith
    torch.library.opcheck(operators.linear.default, (x, w))
    torch.library.opcheck(operators.linear.default, (x, w, b))
    torch.library.opcheck(operators.matmul.default, (x, random(16, 8, grad=grad)))
    torch.library.opcheck(
        operators.matmul.default, (random(3, 8, 16, grad=grad), random(3, 16, 8, grad=grad))
    )
    if not grad:
        torch.library.opcheck(operators.weight_gradient.default, (x, random(4, 8, grad=False)))
        torch.library.opcheck(
            operators.accumulate.default, (torch.zeros(16, 8), x, random(4, 8, grad=False))
        )


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("n", [16, 24])
def test_scaled_mm(
    computing: str, chooser: Chooser, runs: Runs, n: int, bias: bool, by_rows: bool
) -> None:
    a = torch.randn(32, 16).to(torch.float8_e4m3fn)
    b = torch.randn(n, 16).to(torch.float8_e4m3fn)
    added = torch.randn(n).to(BF16) if bias else None
    scales = torch.tensor(0.5), torch.tensor(3.0)
    if by_rows:
        scales = torch.rand(32, 1) + 0.5, torch.rand(1, n) + 0.5
    out = gemmsmith.scaled_mm(a, b.t(), *scales, bias=added, use_fast_accum=True)
    expected = (a.float() @ b.float().t()) * scales[0] * scales[1]
    close(out, expected if added is None else expected + added.float())
    assert out.dtype is BF16
    # A bias beside factors of rows is torch's.
    ours = computing == "kernels" and not (bias and by_rows)
    assert runs() == (1 if ours else 0)
    if ours and by_rows:
        assert [str(one) for one in chooser.asked] == [f"32×{n}×16 fp8_e4m3.scale_row tn"]
    compiled = torch.compile(gemmsmith.scaled_mm, fullgraph=True, backend="aot_eager")
    close(compiled(a, b.t(), *scales, bias=added, use_fast_accum=True), out)
    if by_rows:
        apart = torch.rand(32, 2)[:, :1].copy_(scales[0]), scales[1]
        close(gemmsmith.scaled_mm(a, b.t(), *apart, bias=added, use_fast_accum=True), out)
    elif not bias:
        torch.library.opcheck(
            torch.ops.gemmsmith.scaled_mm.default,
            (a, b.t(), *scales, None, BF16, True),
            test_utils=("test_autograd_registration", "test_faketensor"),  # the rest cannot do FP8
        )


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("fast_kernel", [False, True])
@pytest.mark.parametrize("asked", [False, True])
def test_fast_accumulation_is_for_those_who_ask_for_it(
    engine: Engine,
    runs: Runs,
    monkeypatch: pytest.MonkeyPatch,
    fast_kernel: bool,
    asked: bool,
    rows: bool,
) -> None:
    """Whether cuBLAS accumulates fast is the caller's choice, and so it is of our kernels."""
    given: list[bool] = []
    real = torch._scaled_mm

    def noted(*arguments: Any, use_fast_accum: bool = False, **more: Any) -> torch.Tensor:
        given.append(use_fast_accum)
        return real(*arguments, use_fast_accum=use_fast_accum, **more)

    monkeypatch.setattr(torch, "_scaled_mm", noted)
    names = ("row_fp8", "fp8_e4m3.scale_row") if rows else ("fp8", "fp8_e4m3")
    kernel = replace(stand_in.kernel(*names, Layout.TN), fast_accumulation=fast_kernel)
    monkeypatch.setattr(stand_in, "kernel", lambda *_: kernel)
    a, b = (torch.randn(32, 16).to(torch.float8_e4m3fn) for _ in range(2))
    ones = (torch.ones(32, 1), torch.ones(1, 32)) if rows else (torch.ones(()), torch.ones(()))
    out = gemmsmith.scaled_mm(a, b.t(), *ones, use_fast_accum=asked)
    close(out, a.float() @ b.float().t())
    ours = asked or not fast_kernel
    assert runs() == ours
    assert given == ([] if ours else [asked])
    # What no kernel does, a bias here, is torch's in the way that was asked for.
    gemmsmith.scaled_mm(a, b.t(), *ones, bias=torch.zeros(32, dtype=BF16), use_fast_accum=asked)
    assert given[-1] is asked


def test_scales_are_checked() -> None:
    a = torch.zeros(16, 16, dtype=torch.float8_e4m3fn)
    one = torch.ones(())
    with pytest.raises(ValueError, match=r"scale_b must be float32 on cpu, got torch\.float64"):
        gemmsmith.scaled_mm(a, a.t(), one, one.double())
    for scale_a, scale_b in (
        (one, torch.ones(2)),
        (torch.ones(16), torch.ones(16)),
        (torch.ones(16, 1), one),
        (torch.ones(16, 1), torch.ones(16, 1)),
        (torch.ones(8, 1), torch.ones(1, 16)),
    ):
        with pytest.raises(ValueError, match=r"or \[M, 1\] and \[1, N\] of a\[M, K\]"):
            gemmsmith.scaled_mm(a, a.t(), scale_a, scale_b)
    with pytest.raises(NotImplementedError, match="has no gradient"):
        torch.ops.gemmsmith.scaled_mm(a, a.t(), one.clone().requires_grad_(), one)


def test_tensors_of_other_libraries_are_torchs(engine: Engine, runs: Runs) -> None:
    class Theirs(torch.Tensor):
        pass

    x = random(4, 16, grad=False).as_subclass(Theirs)
    assert type(gemmsmith.linear(x, random(8, 16, grad=False))) is Theirs
    sparse = torch.eye(4, dtype=torch.float32).to_sparse()
    close(gemmsmith.matmul(sparse, torch.ones(4, 3)), torch.ones(4, 3))
    assert runs() == 0


def test_without_use_everything_is_torchs() -> None:
    with stand_in.installed(None):
        x, w = random(4, 16), random(8, 16)
        assert torch.equal(gemmsmith.linear(x, w), functional.linear(x, w))
        assert torch.equal(gemmsmith.matmul(x, w.t()), x @ w.t())
