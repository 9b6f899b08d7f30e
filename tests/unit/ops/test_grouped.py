"""Grouped products of unchanged code, and `gemmsmith.grouped_mm`: who computes them, and what."""

from __future__ import annotations

import io
import itertools
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.nn import functional

import gemmsmith
from gemmsmith.answers.snapshot import Row, Snapshot
from gemmsmith.core.config import Use
from gemmsmith.core.problem import Problem
from gemmsmith.ops.below.dispatch import Dispatch
from gemmsmith.ops.engine import engine as engines
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.forms import Form
from gemmsmith.ops.engine.in_use import install
from gemmsmith.winners.lookup import Lookup
from tests.support.below import leave, only_python
from tests.support.replacing import replace
from tests.support.stand_in import Chooser, Host, Packs, config

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
Runs = Callable[[], int]
ENDS = (5, 5, 17, 20)
"""The second expert has no tokens, and the last two of 22 tokens have no expert."""
E, T, K, N = len(ENDS), 22, 16, 24


@pytest.fixture(autouse=True)
def _on_the_host(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below autograd, and without the binding, unless a test is `bound`."""
    host.kind = "cpu"
    only_python(monkeypatch)


@pytest.fixture(params=["python", "binding"])
def bound(
    request: pytest.FixtureRequest, binding: Dispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the binding, and with it."""
    if request.param == "binding":
        monkeypatch.setattr(Dispatch, "of", lambda kind: binding)
        leave(left=False)


def ends(*values: int) -> torch.Tensor:
    return torch.tensor(values or ENDS, dtype=torch.int32)


def tokens(count: int = T, width: int = K) -> torch.Tensor:
    return torch.randn(count, width).to(BF16).requires_grad_()


def experts(layout: str = "tn") -> torch.Tensor:
    """[E, K, N], which lies in memory as the layout says."""
    stored = torch.randn(E, N, K).to(BF16).mT if layout == "tn" else torch.randn(E, K, N).to(BF16)
    return stored.requires_grad_()


def groups(offs: torch.Tensor) -> list[slice]:
    return [slice(*pair) for pair in itertools.pairwise([0, *offs.tolist()])]


def by_rows(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """The product in FP64, without what is no group's."""
    return torch.cat([a[rows].double() @ b[g].double() for g, rows in enumerate(groups(offs))])


def by_depth(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return torch.stack([a[:, run].double() @ b[run].double() for run in groups(offs)])


def close(ours: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    assert ours is not None
    assert expected is not None
    torch.testing.assert_close(ours.double(), expected.double(), rtol=2e-2, atol=2e-2)


def problem(m: int, n: int, k: int, dtype: str, layout: str) -> Problem:
    return Problem(m=m, n=n, k=k, batch=E, dtype=dtype, layout=layout)  # type: ignore[arg-type]


FORWARD = problem(T, N, K, "bf16.group_rows", "tn")
INPUT_GRADIENT = problem(T, K, N, "bf16.group_rows", "tt")
WEIGHT_GRADIENT = problem(N, K, T, "bf16.group_depth", "nt")
THREE = {
    "tn": [FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT],
    "tt": [
        problem(T, N, K, "bf16.group_rows", "tt"),
        problem(T, K, N, "bf16.group_rows", "tn"),
        problem(K, N, T, "bf16.group_depth", "nt"),
    ],
}
"""torch's gradient of weights lies in memory as they do, so its operands change places."""


def step(
    multiply: Callable[..., torch.Tensor], x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor
) -> torch.Tensor:
    """Output of a layer; its gradients are in x and w, and right."""
    x.grad = w.grad = None
    out = multiply(x, w, offs=offs)
    last = int(offs[-1])
    dy = torch.randn_like(out)
    out.backward(dy)
    wide_x, wide_w = (one.detach().double().requires_grad_() for one in (x, w))
    expected = by_rows(wide_x, wide_w, offs)
    expected.backward(dy[:last].double())
    close(out[:last], expected)
    assert x.grad is not None
    assert wide_x.grad is not None
    close(x.grad[:last], wide_x.grad[:last])
    close(w.grad, wide_w.grad)
    return out


OPERATORS: dict[str, Callable[..., torch.Tensor]] = {
    "aten": torch._grouped_mm,
    "functional": functional.grouped_mm,
}


@pytest.mark.parametrize("layout", ["tn", "tt"])
@pytest.mark.parametrize("operator", ["aten", "functional"])
@pytest.mark.usefixtures("bound")
def test_unchanged_code_forwards_and_backwards(
    engine: Engine, chooser: Chooser, runs: Runs, operator: str, layout: str
) -> None:
    multiply, x, w = OPERATORS[operator], tokens(), experts(layout)
    by_torch = multiply(x, w, offs=ends())
    with gemmsmith.patch():
        out = step(multiply, x, w, ends())
    assert runs() == 3
    assert sorted(chooser.asked) == sorted(THREE[layout])
    assert (out.dtype, out.stride()) == (by_torch.dtype, by_torch.stride())
    assert w.grad is not None
    assert w.grad.stride() == w.stride()
    step(multiply, x, w, ends())
    assert runs() == 0  # what was switched on is off again


@pytest.mark.usefixtures("bound")
def test_other_threads(engine: Engine, runs: Runs) -> None:
    x, w = tokens(), experts()
    with gemmsmith.patch():
        thread = threading.Thread(target=step, args=(torch._grouped_mm, x, w, ends()))
        thread.start()
        thread.join()
    assert runs() == 3


def test_a_product_is_decided_by_its_tokens_not_by_whose_they_are(
    engine: Engine, chooser: Chooser, runs: Runs
) -> None:
    w = experts()
    with gemmsmith.patch():
        for count, decided in ((T, 3), (T, 3), (40, 6), (41, 9), (40, 9), (T, 9)):
            for offs in (ends(), ends(0, 0, 0, count), ends(1, 2, 3, 4), ends(0, 0, 0, 0)):
                step(torch._grouped_mm, tokens(count), w, offs)
                assert len(chooser.asked) == decided
    assert runs() == 6 * 4 * 3


def test_numbers_of_tokens_between_two_that_won_run_their_kernel(
    pack: Path, host: Host, runs: Runs
) -> None:
    """For these experts and no others; their weights' gradient is torch's, unless it was tuned."""
    rows = [
        Row(
            problem=replace(one, m=one.m + more),
            use=Use.CUTLASS,
            config=config(name, one.dtype, one.layout),
            deterministic=True,
        )
        for one, name in zip(THREE["tn"], ("rows_tn", "rows_tt", "depth_nt"), strict=True)
        for more in ((0, 16) if name != "depth_nt" else (0,))
    ]
    lookup = Lookup(Snapshot.of("host-4sm", rows), pin=True)
    before = install(Engine(lookup, Packs(pack), platform=host))
    try:
        with gemmsmith.patch():
            for count, expected in ((T, 3), (T + 8, 2), (T + 9, 2), (T + 17, 0), (T - 1, 0)):
                step(torch._grouped_mm, tokens(count), experts(), ends())
                assert runs() == expected
            step(
                torch._grouped_mm, tokens(), experts()[1:].detach().requires_grad_(), ends(5, 9, 20)
            )
            train(Experts(K, 2 * N))
        assert runs() == 0
    finally:
        install(before)


def test_decisions_do_not_fill_the_memory(
    engine: Engine, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "CAPACITY", 8)
    w = experts()
    with gemmsmith.patch():
        for count in range(T, T + 20):
            step(torch._grouped_mm, tokens(count), w, ends())
            assert len(engine._plans) <= 8
    assert runs() == 60


def test_what_no_kernel_takes_is_torchs(engine: Engine, runs: Runs) -> None:
    x, w, offs = tokens().detach(), experts().detach(), ends()
    wide = torch.randn(E, N + 4, K).to(BF16).mT
    shifted = torch.randn(T * K + 1).to(BF16)[1:].view(T, K)  # 2 bytes behind an aligned address
    calls: list[tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor | None]] = [
        ((torch.randn(E, 8, K).to(BF16), w), None),
        ((w.mT, x.t()), offs),
        ((x.float(), w.float()), offs),
        ((x.half(), w.half()), offs),
        ((x, wide), offs),  # torch begins its rows of 28 on 16 bytes
        ((shifted, w), offs),
        ((x, w), torch.stack((offs, offs), 1)[:, 0]),
    ]
    for (a, b), cut in calls:
        expected = torch._grouped_mm(a, b, offs=cut)
        with gemmsmith.patch():
            out = torch._grouped_mm(a, b, offs=cut)
        assert out.stride() == expected.stride()
        if a.dim() == 3:  # what no token is in, torch leaves as it is
            close(out[..., : ENDS[-1]], expected[..., : ENDS[-1]])
        else:
            close(out[: ENDS[-1]], expected[: ENDS[-1]])
    assert runs() == 0


def test_the_binding_leaves_the_rest_to_torch(
    engine: Engine,
    chooser: Chooser,
    binding: Dispatch,
    monkeypatch: pytest.MonkeyPatch,
    runs: Runs,
) -> None:
    monkeypatch.setattr(Dispatch, "of", lambda kind: binding)
    leave(left=False)
    chooser.answers = lambda problem: problem.operation.is_grouped  # torch's loop calls mm here
    x, w, offs = tokens().detach(), experts().detach(), ends()
    shifted = torch.randn(T * K + 1).to(BF16)[1:].view(T, K)
    rest = (
        (x.half(), w, offs),
        (x.view(1, T, K), w, offs),
        (x, w.half(), offs),
        (x, w[:3], offs),
        (shifted, w, offs),
        (x[:0], w, offs),
        (x, w, offs.long()),
        (x, w, offs[:0]),
        (x, w, offs[0]),
        (x, w, torch.stack((offs, offs), 1)[:, 0]),
    )

    def outcome(a: torch.Tensor, b: torch.Tensor, cut: torch.Tensor) -> object:
        try:
            return torch._grouped_mm(a, b, offs=cut).shape
        except (RuntimeError, ValueError, IndexError) as error:
            return str(error)

    expected = [outcome(*operands) for operands in rest]
    with gemmsmith.patch():
        torch._grouped_mm(x, w, offs=offs)
        assert runs() == 1
        assert [outcome(*operands) for operands in rest] == expected
    assert runs() == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias": torch.zeros(N, dtype=BF16)}, "Bias not supported"),
        ({"out_dtype": torch.float32}, "output dtype must match"),
        ({"offs": None}, "offsets"),
        ({"offs": torch.tensor(ENDS)}, "(?i)int32"),
        ({"offs": torch.tensor([4], dtype=torch.int32)}, "batch sizes have to match"),
    ],
)
def test_errors_are_torchs(engine: Engine, change: dict[str, Any], message: str) -> None:
    given = {"offs": ends()} | change
    with gemmsmith.patch(), pytest.raises((RuntimeError, ValueError), match=message):
        torch._grouped_mm(tokens(), experts(), **given)


@pytest.mark.usefixtures("bound")
def test_a_kernel_that_does_not_run_is_torchs_from_then_on(
    engine: Engine, chooser: Chooser, runs: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    chooser.name = "refuses"
    with gemmsmith.patch(), caplog.at_level(logging.WARNING, "gemmsmith"):
        for _ in range(2):
            step(torch._grouped_mm, tokens(), experts(), ends())
    assert runs() == 0
    assert len([one for one in caplog.records if one.name == "gemmsmith"]) == 1


@pytest.mark.usefixtures("bound")
def test_during_a_capture_nothing_is_decided(engine: Engine, host: Host, runs: Runs) -> None:
    x, w, offs = tokens().detach(), experts().detach(), ends()
    with gemmsmith.patch():
        for capturing, expected in ((True, 0), (False, 1), (True, 1)):
            host.is_capturing = capturing
            torch._grouped_mm(x, w, offs=offs)
            assert runs() == expected


# FP8, with a factor for each row and column.


def eight_bits(*size: int) -> torch.Tensor:
    return torch.randn(size).to(E4M3)


def scaled(
    version: int,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    fast: bool = True,
    recipe: int = 1,
) -> torch.Tensor:
    how: Any = {"offs": ends(), "out_dtype": BF16, "use_fast_accum": fast}
    if version == 1:
        return torch._scaled_grouped_mm(a, b, scale_a, scale_b, **how)
    factors = ([scale_a], [recipe], [], [scale_b], [recipe], [])
    return torch._scaled_grouped_mm_v2(a, b, *factors, **how)


VERSIONS = [
    1,
    pytest.param(
        2,
        marks=pytest.mark.skipif(
            not hasattr(torch, "_scaled_grouped_mm_v2"), reason="this torch has no _v2"
        ),
    ),
]


@pytest.mark.parametrize("version", VERSIONS)
def test_scaled_by_rows(engine: Engine, chooser: Chooser, runs: Runs, version: int) -> None:
    a, b = eight_bits(T, K), eight_bits(E, N, K).mT
    scale_a, scale_b = torch.rand(T), torch.rand(E, N)
    with gemmsmith.patch():
        out = scaled(version, a, b, scale_a, scale_b)
        assert runs() == 1
        with pytest.raises(NotImplementedError, match="torch has no _scaled_grouped_mm"):
            scaled(version, a, b, scale_a, scale_b, fast=False)
        for factors in ((scale_a[:, None], scale_b), (scale_a, torch.rand(N, E).t())):
            with pytest.raises(NotImplementedError):
                scaled(version, a, b, *factors)
    assert runs() == 0
    expected = by_rows(a.double() * scale_a[:, None], b.double() * scale_b[:, None, :], ends())
    assert out.dtype is BF16
    close(out[: ENDS[-1]], expected)
    assert chooser.asked[0] == problem(T, N, K, "fp8_e4m3.scale_row.group_rows", "tn")


@pytest.mark.parametrize("version", VERSIONS)
def test_scaled_by_depth(engine: Engine, chooser: Chooser, runs: Runs, version: int) -> None:
    count = 32  # rows of A and columns of B begin on 16 bytes
    a, b = eight_bits(K, count), eight_bits(N, count).t()
    scale_a, scale_b = torch.rand(E, K), torch.rand(E, N)
    with gemmsmith.patch():
        out = scaled(version, a, b, scale_a.flatten(), scale_b.flatten())
    assert runs() == 1
    close(out, by_depth(a, b, ends()) * scale_a[:, :, None] * scale_b[:, None, :])
    assert chooser.asked == [problem(K, N, count, "fp8_e4m3.scale_row.group_depth", "tn")]


def test_what_is_not_scaled_by_rows_is_torchs(engine: Engine, chooser: Chooser) -> None:
    if not hasattr(torch, "_scaled_grouped_mm_v2"):
        pytest.skip("this torch has no _v2")
    a, b = eight_bits(T, K), eight_bits(E, N, K).mT
    factors = torch.rand(T), torch.rand(E, N)
    with gemmsmith.patch():
        with pytest.raises(NotImplementedError):
            scaled(2, a, b, *factors, recipe=3)
        with pytest.raises(NotImplementedError):
            torch._scaled_grouped_mm_v2(a, b, [], [1], [], [], [1], [], offs=ends())
        with pytest.raises(NotImplementedError):
            torch._scaled_grouped_mm(a, b, *factors, offs=ends()[0])
    assert not chooser.asked


# Of one model, and with a report.


class Experts(nn.Module):
    def __init__(self, width: int = K, inner: int = N) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(E, inner, width, dtype=BF16))
        self.down = nn.Parameter(torch.randn(E, width, inner, dtype=BF16))

    def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        hidden = torch._grouped_mm(x, self.up.mT, offs=offs).tanh()
        return torch._grouped_mm(hidden, self.down.mT, offs=offs)


def train(model: nn.Module, width: int = K) -> None:
    out = model(tokens(T, width), ends())
    out.backward(torch.ones_like(out))


@pytest.mark.usefixtures("bound")
def test_only_a_models_products(engine: Engine, runs: Runs) -> None:
    one, other = Experts(), Experts(K, 2 * N)

    def count() -> tuple[int, int]:
        train(one)
        of_one = runs()
        train(other)
        return of_one, runs()

    with gemmsmith.patch(one):
        assert count() == (6, 0)
        with gemmsmith.patch(other):
            assert count() == (6, 6)
        assert count() == (6, 0)
        with gemmsmith.patch():
            assert count() == (6, 6)
    with gemmsmith.patch(), gemmsmith.patch(one):
        assert count() == (6, 6)
    assert count() == (0, 0)


@pytest.mark.parametrize("tuned", [True, False])
def test_a_report_names_them(engine: Engine, chooser: Chooser, tuned: bool) -> None:
    chooser.answers = lambda problem: tuned
    file = io.StringIO()
    with gemmsmith.patch(report=True, file=file):
        train(Experts())
        gemmsmith.grouped_mm(tokens(), experts(), ends())
    lines = file.getvalue().splitlines()
    assert lines[0].startswith(f"gemmsmith: {7 if tuned else 0} of 7 products")
    rows, depth = ("rows_tn", "depth_nt") if tuned else ("torch", "torch")
    assert any(f"2 × {FORWARD} (grouped): {rows}" in line for line in lines)
    assert any(f"1 × {WEIGHT_GRADIENT} (grouped): {depth}" in line for line in lines)


# The function.


@pytest.fixture(params=["kernels", "torch"])
def computing(request: pytest.FixtureRequest, engine: Engine) -> str:
    if request.param == "torch":
        install(None)
    return str(request.param)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("layout", ["tn", "tt"])
def test_grouped_mm(computing: str, runs: Runs, layout: str, compiled: bool) -> None:
    call: Callable[..., torch.Tensor] = gemmsmith.grouped_mm
    if compiled:
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    step(call, tokens(), experts(layout), ends())
    assert runs() == (3 if computing == "kernels" else 0)


def test_by_depth(computing: str, runs: Runs) -> None:
    a, b = tokens(T, K).detach().t(), tokens(T, N).detach()
    close(gemmsmith.grouped_mm(a, b, ends()), by_depth(a, b, ends()))
    assert runs() == (1 if computing == "kernels" else 0)


@pytest.mark.usefixtures("bound")
def test_within_a_patch_block(engine: Engine, runs: Runs) -> None:
    with gemmsmith.patch():
        step(gemmsmith.grouped_mm, tokens(), experts(), ends())
    assert runs() == 3


def test_an_expanded_gradient(engine: Engine, runs: Runs) -> None:
    x, w = tokens(), experts()
    gemmsmith.grouped_mm(x, w, ends())[: ENDS[-1]].sum().backward()
    assert runs() == 3
    wide = w.detach().double().requires_grad_()
    by_rows(x.detach(), wide, ends()).sum().backward()
    close(w.grad, wide.grad)


def test_autocast(computing: str, runs: Runs) -> None:
    x, w = (one.detach().float().requires_grad_() for one in (tokens(), experts()))
    with torch.autocast("cpu", torch.bfloat16):
        out = gemmsmith.grouped_mm(x, w, ends(), out_dtype=BF16)
    assert out.dtype is BF16
    out.backward(torch.ones_like(out))
    assert x.grad is not None
    assert x.grad.dtype is torch.float32
    assert runs() == (3 if computing == "kernels" else 0)


def test_a_traced_product_without_a_kernel_is_torchs_own(engine: Engine, chooser: Chooser) -> None:
    chooser.answers = lambda problem: False
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        graphs.append(" ".join(str(node.target) for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    call = torch.compile(
        gemmsmith.grouped_mm, fullgraph=True, backend=aot_autograd(fw_compiler=backend)
    )
    step(call, tokens(), experts(), ends())
    assert len(graphs) == 2
    assert all("aten._grouped_mm" in graph for graph in graphs)
    assert not any("gemmsmith" in graph for graph in graphs)


def test_a_factor_of_the_gradient(engine: Engine) -> None:
    """A gradient of a gradient is torch's, and there is one."""
    x, w = tokens(), experts()
    out = gemmsmith.grouped_mm(x, w, ends())
    dy = torch.randn_like(out).requires_grad_()
    (dx,) = torch.autograd.grad(out, x, dy, create_graph=True)
    (found,) = torch.autograd.grad(dx[: ENDS[-1]].float().sum(), dy)
    ones = torch.ones(ENDS[-1], K)
    close(found[: ENDS[-1]], by_rows(ones, w.detach(), ends()))


def test_a_plan_is_one_that_kernels_take(engine: Engine, pack: Path) -> None:
    """Their arguments, by the conventions of the C interface."""
    x, w = tokens().detach(), experts().detach()
    plan = engine.plan(Form.GROUPED, x, w, groups=E)
    assert plan is not None
    shape = plan.shape
    assert shape.problem == FORWARD
    assert (shape.lda, shape.ldb, shape.stride_a, shape.stride_b, shape.stride_d) == (
        K, K, 0, N * K, 0,
    )  # fmt: skip
    plan = engine.plan(Form.GROUPED, x.t(), tokens(T, N).detach(), groups=E)
    assert plan is not None
    shape = plan.shape
    assert shape.output == (E, K, N)
    assert (shape.lda, shape.ldb, shape.stride_a, shape.stride_b, shape.stride_d) == (
        K, N, 0, 0, K * N,
    )  # fmt: skip
