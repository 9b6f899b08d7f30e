"""`numerics="invariant"`: products run a kernel of the order, or raise; torch never takes over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gemmsmith
from gemmsmith.core.config import Config
from gemmsmith.core.kernel import (
    AnyKernel,
    CublasLtKernel,
    Cutlass3xKernel,
    MainloopSchedule,
    TileScheduler,
)
from gemmsmith.core.launch import Decomposition, Launch
from gemmsmith.core.problem import Layout, Problem
from gemmsmith.errors import NotInvariant
from gemmsmith.ops.below.dispatch import Dispatch
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.in_use import in_use
from gemmsmith.winners.lookup import Lookup
from tests.support.below import BF16, close, layers, made, operands, trains
from tests.support.replacing import replace
from tests.support.snapshots import row, snapshot
from tests.support.stand_in import Chooser, Host, Packs, config, installed

pytestmark = pytest.mark.usefixtures("no_other_patch")

Runs = Callable[[], int]
ORDER = "sum_sequential"


def without_epilogues(problem: Problem) -> bool:
    return not problem.operation.is_fused


@pytest.fixture
def chooser() -> Chooser:
    return Chooser(answers=without_epilogues)


@pytest.fixture
def engine(chooser: Chooser, pack: Path, binding: Dispatch) -> Iterator[Engine]:
    with made(chooser, pack, "invariant") as engine:
        yield engine


@pytest.fixture
def patched(engine: Engine) -> Iterator[Engine]:
    with gemmsmith.patch():
        yield engine


def torch_products() -> dict[str, Callable[[], torch.Tensor]]:
    """Calls of torch's that multiply, and how often kernels run for each."""
    x, w = operands((4, 16), (8, 16))
    batch, other = operands((3, 4, 16), (3, 16, 8))
    row, full = operands((8,), (4, 8))
    (many,) = operands((3, 4, 8))
    return {
        "linear": lambda: functional.linear(x, w),
        "linear of 3 dimensions": lambda: functional.linear(batch, w),
        "linear with bias": lambda: functional.linear(x, w, row),
        "matmul": lambda: x @ w.t(),
        "mm": lambda: torch.mm(x, w.t()),
        "mm out": lambda: torch.mm(x, w.t(), out=torch.empty(4, 8, dtype=BF16)),
        "bmm": lambda: torch.bmm(batch, other),
        "addmm of a row": lambda: torch.addmm(row, x, w.t()),
        "addmm": lambda: torch.addmm(full, x, w.t(), beta=0.5, alpha=2.0),
        "addmm without": lambda: torch.addmm(full * torch.nan, x, w.t(), beta=0.0),
        "addmm out": lambda: torch.addmm(full, x, w.t(), out=torch.empty(4, 8, dtype=BF16)),
        "baddbmm": lambda: torch.baddbmm(many, batch, other, beta=2.0),
        "addmm in place": lambda: full.clone().addmm_(x, w.t(), beta=0.5),
        "baddbmm in place": lambda: many.clone().baddbmm_(batch, other),
        "baddbmm out": lambda: torch.baddbmm(many, batch, other, out=torch.empty_like(many)),
        "bmm out": lambda: torch.bmm(batch, other, out=torch.empty_like(many)),
        "matmul of 3 dimensions and 2": lambda: batch @ w.t(),
        "matmul of 2 dimensions and 3": lambda: x @ other,
        "matmul of 4 dimensions": lambda: batch.unsqueeze(0) @ other.unsqueeze(0),
        "matmul with a vector": lambda: x @ w[0],
        "matmul of a vector": lambda: x[0] @ w.t(),
        "matmul of 3 dimensions with a vector": lambda: batch @ w[0],
        "matmul of a vector with 3 dimensions": lambda: x[0] @ other,
        "mv": lambda: torch.mv(x, w[0]),
        "mv out": lambda: torch.mv(x, w[0], out=torch.empty(4, dtype=BF16)),
        "addmv": lambda: torch.addmv(x[:, 0], x, w[0], alpha=0.5),
        "addmv in place": lambda: x[:, 0].clone().addmv_(x, w[0]),
        "dot": lambda: torch.dot(x[0], w[0]),
        "inner": lambda: torch.inner(x, w),
        "vdot": lambda: torch.vdot(x[0], w[0]),
        "einsum": lambda: torch.einsum("mk,nk->mn", x, w),
        "einsum of batches": lambda: torch.einsum("bmk,bkn->bmn", batch, other),
        "tensordot": lambda: torch.tensordot(x, w, dims=([1], [1])),
        "chain": lambda: torch.linalg.multi_dot([x, w.t()]),
        "linear of a row with a bias": lambda: nn.functional.linear(x[0], w, row),
        "ours": lambda: gemmsmith.linear(x, w),
        "ours with bias": lambda: gemmsmith.linear(x, w, row),
        "our product": lambda: gemmsmith.matmul(x, w.t()),
    }


CONTEXTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "eager": nullcontext,
    "without gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", BF16),
    "compiled": nullcontext,
}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", torch_products())
def test_products_run_in_order(
    patched: Engine, chooser: Chooser, runs: Runs, name: str, context: str
) -> None:
    product = torch_products()[name]
    act = product
    if context == "compiled":
        if "out" in name.split():
            pytest.skip("torch does not trace an output that was made outside")
        act = torch.compile(product, backend="aot_eager")
    with CONTEXTS[context]():
        ours = act()
    assert runs() == 1
    asked = [problem for problem in chooser.asked if not problem.operation.is_fused]
    assert asked
    assert all(problem.operation.summation == "sequential" for problem in chooser.asked)
    with installed(None):
        close(ours, product())


@pytest.mark.parametrize("name", torch_products())
def test_without_a_kernel_they_raise(
    patched: Engine, chooser: Chooser, runs: Runs, name: str
) -> None:
    chooser.answers = lambda _: False
    with pytest.raises(RuntimeError, match=r"gemmsmith tune [1-9]+ [18] 16 --dtype "
                       rf"bf16\.{ORDER} --layout t[nt]") as raised:  # fmt: skip
        torch_products()[name]()
    assert "numerics='invariant'" in str(raised.value)
    assert runs() == 0


def test_training_runs_in_order(patched: Engine, chooser: Chooser, runs: Runs) -> None:
    trains(layers(16, 24, 8), 16)
    assert runs() == 6
    trains(layers(16, 24, 8, bias=True), 16)
    assert runs() == 6
    assert {problem.operation.summation for problem in chooser.asked} == {"sequential"}


def test_a_gradient_without_a_kernel_raises(patched: Engine, chooser: Chooser) -> None:
    x, w = operands((4, 16), (8, 16), grad=True)
    out = functional.linear(x, w)
    chooser.answers = lambda _: False
    with pytest.raises(RuntimeError, match=rf"bf16\.{ORDER} --layout"):
        out.backward(torch.ones_like(out))


OTHER_CLASSES = {
    "stream-K": {"scheduler": TileScheduler.STREAM_K},
    "CUTLASS 2.x": {"mainloop": MainloopSchedule.MULTISTAGE},
    "splits of K": {"scheduler": TileScheduler.SPLIT_K},
    "cuBLASLt": None,
}
LAUNCHES = {
    "stream-K": Launch(decomposition=Decomposition.STREAM_K),
    "splits of K": Launch(decomposition=Decomposition.SPLIT_K, splits=2),
}


@pytest.mark.parametrize("name", OTHER_CLASSES)
def test_a_kernel_of_another_class_never_runs(
    pack: Path, binding: Dispatch, runs: Runs, name: str
) -> None:
    """Whatever a source of winners says, also of the very size."""
    traits, launch = OTHER_CLASSES[name], LAUNCHES.get(name, Launch())
    of_order = config("tn", "bf16", Layout.TN).kernel
    assert isinstance(of_order, Cutlass3xKernel)
    kernel: AnyKernel = (
        CublasLtKernel(name="lt", arch="sm90", dtype="bf16", layout=Layout.TN, alignment_a=1,
                       alignment_b=1, alignment_d=1)
        if traits is None
        else msgspec.structs.replace(of_order, **traits)
    )  # fmt: skip
    tuned = Problem(4, 8, 16, dtype=f"bf16.{ORDER}")
    wrong = row(tuned, config=Config(kernel=kernel, launch=launch, pack="a" * 64))
    right = row(replace(tuned, m=64), config=config("tn", "bf16", Layout.TN))
    x, w = operands((4, 16), (8, 16))
    with made(Lookup(snapshot(wrong), pin=True), pack, "invariant"), gemmsmith.patch():
        for tokens in (x, x[:3]):
            with pytest.raises(RuntimeError, match="gemmsmith tune"):
                functional.linear(tokens, w)
    assert runs() == 0
    with made(Lookup(snapshot(wrong, right), pin=True), pack, "invariant"), gemmsmith.patch():
        functional.linear(x[:3], w)
    assert runs() == 1


def gradients(x: torch.Tensor, w: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """Products of x[3, 4, 16] and w[3, 16, 8] that have gradients of both."""
    first, matrix = x[0], w[0]
    return {
        "linear": lambda: functional.linear(x, matrix.t()),
        "linear with bias": lambda: functional.linear(x, matrix.t(), w[1, 0]),
        "mm": lambda: torch.mm(first, matrix),
        "addmm": lambda: torch.addmm(w[1, 0], first, matrix),
        "bmm": lambda: torch.bmm(x, w),
        "baddbmm": lambda: torch.baddbmm(w[:, :1], x, w, beta=0.5),
        "matmul of 3 dimensions and 2": lambda: x @ matrix,
        "matmul with a vector": lambda: first @ w[1, :, 0],
        "matmul of a vector": lambda: x[1, 0] @ matrix,
        "einsum": lambda: torch.einsum("bmk,bkn->bmn", x, w),
        "ours": lambda: gemmsmith.linear(x, matrix.t()),
        "our product": lambda: gemmsmith.matmul(x, matrix),
    }


@pytest.mark.parametrize("way", ["a number", "every other", "checkpoint", "twice"])
@pytest.mark.parametrize("name", gradients(torch.empty(3, 4, 16), torch.empty(3, 16, 8)))
def test_gradients_run_in_order(
    patched: Engine, chooser: Chooser, runs: Runs, name: str, way: str
) -> None:
    """Also where the gradient is one number, expanded, or does not lie densely."""
    results = []
    torch.manual_seed(3)
    values = torch.randn(3, 4, 16), torch.randn(3, 16, 8)
    for dtype in (BF16, torch.float64):
        x, w = (value.to(BF16).to(dtype).requires_grad_() for value in values)
        product = gradients(x, w)[name]
        if name.startswith("our") and dtype is not BF16:
            product = gradients(x, w)[
                "linear" if name == "ours" else "matmul of 3 dimensions and 2"
            ]
        out = checkpoint(product, use_reentrant=False) if way == "checkpoint" else product()
        gradient = torch.ones_like(out)
        if way == "every other":
            gradient = torch.ones((*out.shape, 2), dtype=dtype)[..., 0]
        if way == "twice":
            (again,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            again.sum().backward()
            x.grad = again.detach()
        elif way == "a number":
            out.sum().backward()
        else:
            out.backward(gradient)
        results.append((x.grad, w.grad))
    assert runs() >= 1
    assert {problem.operation.summation for problem in chooser.asked} == {"sequential"}
    for ours, theirs in zip(*results, strict=True):
        assert ours is not None
        assert theirs is not None
        torch.testing.assert_close(ours.double(), theirs, rtol=3e-2, atol=1e-1)


def test_every_thread_raises(patched: Engine, chooser: Chooser) -> None:
    chooser.answers = lambda _: False
    raised = []

    def multiply() -> None:
        x, w = operands((4, 16), (8, 16))
        try:
            torch.mm(x, w.t())
        except RuntimeError as error:
            raised.append(str(error))

    threads = [threading.Thread(target=multiply) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(raised) == 4
    assert all("gemmsmith tune 4 8 16" in text for text in raised)


def test_what_is_not_demanded_is_torchs(patched: Engine, chooser: Chooser, runs: Runs) -> None:
    """FP32, and products of nothing; integers are exact, and run as without it."""
    chooser.answers = lambda problem: problem.dtype == "int8"
    a = torch.randn(4, 16)
    torch.testing.assert_close(a @ a.t(), (a.double() @ a.double().t()).float())
    (empty,) = operands((0, 16))
    assert (empty @ operands((16, 8))[0]).shape == (0, 8)
    assert runs() == 0
    ints = torch.randint(-9, 9, (24, 16), dtype=torch.int8)
    assert torch.equal(torch._int_mm(ints, ints.t()), (ints.int() @ ints.int().t()))


def test_a_kernel_that_fails_raises(pack: Path, binding: Dispatch) -> None:
    with made(Chooser(name="fails", answers=without_epilogues), pack, "invariant"):
        x, w = operands((4, 16), (8, 16))
        with gemmsmith.patch(), pytest.raises(RuntimeError, match="invariant"):
            torch.mm(x, w.t())
        with pytest.raises(NotInvariant):
            gemmsmith.matmul(x, w.t())


def test_what_is_new_within_a_capture_raises(patched: Engine, chooser: Chooser) -> None:
    host = patched.platform
    assert isinstance(host, Host)
    x, w = operands((4, 16), (8, 16))
    known = torch.mm(x, w.t())
    host.is_capturing = True
    assert torch.equal(torch.mm(x, w.t()), known)  # what ran before may be captured
    with pytest.raises(RuntimeError, match="run the model once before"):
        torch.mm(x[:3], w.t())
    wide = torch.randn(4, 16)
    assert (wide @ wide.t()).shape == (4, 4)


def test_other_layers_than_a_patched_models_are_torchs(engine: Engine, runs: Runs) -> None:
    model = layers(16, 24)
    (x, other) = operands((4, 16), (40, 16))
    with gemmsmith.patch(model):
        model(x)
        assert runs() == 1
        functional.linear(x, other)
        assert runs() == 0


def test_an_open_patch_becomes_strict(pack: Path, binding: Dispatch, runs: Runs) -> None:
    x, w = operands((4, 16), (8, 16))
    none = Chooser(answers=lambda _: False)
    with made(none, pack), gemmsmith.patch():
        torch.mm(x, w.t())
        with made(none, pack, "invariant"), pytest.raises(RuntimeError, match="invariant"):
            torch.mm(x, w.t())
        torch.mm(x, w.t())
    with (
        gemmsmith.patch(report=True),
        made(none, pack, "invariant"),
        pytest.raises(RuntimeError, match="invariant"),
    ):
        torch.mm(x, w.t())
    assert runs() == 0


def test_compiled_models_run_in_order(patched: Engine, chooser: Chooser, runs: Runs) -> None:
    model = nn.Sequential(nn.Linear(16, 8, bias=False), nn.ReLU()).to(BF16)
    (x,) = operands((4, 16))
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        close(compiled(x), model(x))
    assert runs() == 2
    chooser.answers = lambda _: False
    with torch.no_grad(), pytest.raises(RuntimeError, match="invariant"):
        compiled(operands((5, 16))[0])


def test_a_patch_needs_the_binding(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dispatch, "of", lambda kind: None)
    with pytest.raises(NotInvariant, match="compiled binding"):
        gemmsmith.patch()


def test_use_takes_numerics(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmsmith.ops.engine.source.local_model", lambda: None)
    source = (Chooser(), Packs(pack))
    with installed(None):
        with pytest.raises(ValueError, match="numerics must be one of invariant, got"):
            gemmsmith.use(source, numerics="exact")
        with pytest.raises(NotInvariant, match="needs winners"):
            gemmsmith.use((snapshot(), Packs(pack)), numerics="invariant", device="another")
        gemmsmith.use(source, numerics="invariant")
        engine = in_use()
        assert engine is not None
        assert engine.is_invariant


def test_one_tuned_size_runs_at_every_number_of_tokens_and_weight(
    pack: Path, binding: Dispatch, runs: Runs
) -> None:
    tuned = Problem(64, 8, 16, dtype=f"bf16.{ORDER}")
    winners = snapshot(row(tuned, config=config("tn", "bf16", Layout.TN)))
    weights = operands((8, 16), (16, 16), (400, 16), (8, 160))
    with made(Lookup(winners, pin=True), pack, "invariant"), gemmsmith.patch():
        for m in (1, 3, 64, 65, 1000):
            for w in weights:
                (x,) = operands((m, w.shape[1]))
                close(functional.linear(x, w), x.float() @ w.float().t())
                assert runs() == 1
        batch, many = operands((3, 4, 16), (3, 8, 16))
        close(torch.bmm(batch, many.mT), torch.bmm(batch.float(), many.mT.float()))
        assert runs() == 1
        with pytest.raises(RuntimeError, match=r"gemmsmith tune 3 8 16 --dtype fp16\.sum_seq"):
            torch.randn(3, 16).half() @ torch.randn(8, 16).half().t()


def test_a_kernel_that_is_not_compiled_never_answers_for_an_order(pack: Path) -> None:
    tuned = Problem(64, 8, 16, dtype=f"bf16.{ORDER}")
    compiled = row(tuned, config=config("tn", "bf16", Layout.TN))
    near, exact = (
        row(replace(tuned, m=m), config=config("tn", "bf16", Layout.TN, pack=None))
        for m in (65, 66)
    )
    winners = snapshot(compiled, near, exact)
    for m in (65, 66, 67):
        choice = winners.find(replace(tuned, m=m))
        assert choice is not None
        assert choice.measured == tuned
    assert winners.row_for(replace(tuned, m=66)) == exact


def test_fp8_has_the_order_of_its_accumulation(
    engine: Engine, chooser: Chooser, runs: Runs
) -> None:
    a, b = (torch.randn(size, 16).to(torch.float8_e4m3fn) for size in (16, 32))
    rows, columns = torch.ones(16, 1), torch.ones(1, 32)
    for fast, order in ((True, "sequential"), (False, "promoted")):
        chooser.asked.clear()
        if fast:
            gemmsmith.scaled_mm(a, b.t(), rows, columns, use_fast_accum=True)
            assert runs() == 1
        else:  # the stand-in keeps its sums short
            with pytest.raises(NotInvariant):
                gemmsmith.scaled_mm(a, b.t(), rows, columns, use_fast_accum=False)
        assert {problem.dtype for problem in chooser.asked} == {f"fp8_e4m3.scale_row.sum_{order}"}
    one = torch.ones(1)
    with pytest.raises(NotInvariant, match="has no order of sums yet"):
        gemmsmith.scaled_mm(a, b.t(), one, one)
    with gemmsmith.patch():
        for scales in ((one, one), (rows, columns)):
            with pytest.raises(RuntimeError, match="invariant"):  # of another type than bf16
                torch._scaled_mm(a, b.t(), *scales, out_dtype=torch.float32)
        torch._scaled_mm(a, b.t(), rows, columns, out_dtype=BF16, use_fast_accum=True)
    assert runs() == 1


def test_a_fused_bias_is_never_added_otherwise(
    patched: Engine, chooser: Chooser, runs: Runs
) -> None:
    chooser.answers = lambda _: True
    x, w = operands((4, 16), (8, 16))
    (row,) = operands((8,))
    close(functional.linear(x, w, row), functional.linear(x.float(), w.float(), row.float()))
    assert runs() == 1
    assert chooser.asked[-1].dtype == f"bf16.then_bias.{ORDER}"
    shifted = torch.randn(4 * 16 + 1).to(BF16)[1:].view(4, 16)
    fused = functional.linear(shifted, w, row)
    assert torch.equal(fused, functional.linear(shifted.clone(), w, row))
    assert runs() == 2
    host = patched.platform
    assert isinstance(host, Host)
    host.is_capturing = True
    with pytest.raises(RuntimeError, match="run the model once before"):
        functional.linear(x[:3], w, row)
    assert runs() == 0


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="an older torch")
@pytest.mark.parametrize("name", ["torch", "ours"])
def test_grouped_products_run_in_order_or_raise(
    patched: Engine, chooser: Chooser, runs: Runs, name: str
) -> None:
    x, w = operands((16, 16), (2, 16, 8))
    offs = torch.tensor([3, 16], dtype=torch.int32)
    multiply = {"torch": lambda x: torch._grouped_mm(x, w, offs=offs),
                "ours": lambda x: gemmsmith.grouped_mm(x, w, offs)}[name]  # fmt: skip
    ours = multiply(x)
    assert runs() == 1
    assert {problem.dtype for problem in chooser.asked} == {f"bf16.group_rows.{ORDER}"}
    close(ours, torch.cat([x[:3].float() @ w[0].float(), x[3:].float() @ w[1].float()]))
    chooser.answers = lambda _: False
    with pytest.raises(RuntimeError, match=r"gemmsmith tune 20 8 16 --dtype bf16\.group_rows\."):
        multiply(torch.cat([x, x[:4]]))
    assert runs() == 0


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="an older torch")
def test_grouped_products_of_any_operands(patched: Engine, runs: Runs) -> None:
    """Copies where no kernel reads them, a batch without groups, and both gradients."""
    x, w = operands((16, 32), (2, 16, 8))
    offs = torch.tensor([3, 0, 16, 0], dtype=torch.int32)[::2]
    packed = torch._grouped_mm(x[:, ::2].contiguous(), w, offs=offs.contiguous())
    wide_w = torch.randn(2, 16, 20).to(BF16)[..., :8].copy_(w)
    assert runs() == 1
    for left, right in ((x[:, ::2], w), (x[:, ::2].t().contiguous().t(), w), (x[:, ::2], wide_w)):
        assert torch.equal(torch._grouped_mm(left, right, offs=offs), packed)
        assert runs() == 1
    batch = torch._grouped_mm(x[:, :16].expand(2, 16, 16), w)
    assert torch.equal(batch, torch.bmm(x[:, :16].expand(2, 16, 16), w))
    assert runs() == 2
    with pytest.raises(RuntimeError, match="no kernel of one order computes _grouped_mm"):
        torch._grouped_mm(w.mT, x[:, :16].t().contiguous(), offs=offs.contiguous())
    assert runs() == 0


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="an older torch")
@pytest.mark.parametrize("layout", ["tn", "tt"])
def test_one_layout_of_grouped_products_is_enough(
    patched: Engine, chooser: Chooser, runs: Runs, layout: str
) -> None:
    chooser.answers = lambda problem: problem.layout in (layout, "nt")
    x, w = operands((16, 16), (2, 8, 16), grad=True)
    offs = torch.tensor([3, 16], dtype=torch.int32)
    for weight in (w.mT, w.mT.contiguous()):
        gemmsmith.grouped_mm(x, weight, offs).backward(operands((16, 8))[0])
        assert runs() == 3
    by_depth = torch._grouped_mm(x.detach().t().contiguous(), x.detach(), offs=offs)
    close(by_depth[0], x[:3].float().t() @ x[:3].float())
    assert runs() == 1


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="an older torch")
def test_gradients_of_grouped_products_run_in_order(
    patched: Engine, chooser: Chooser, runs: Runs
) -> None:
    x, w = operands((16, 16), (2, 16, 8), grad=True)
    offs = torch.tensor([3, 16], dtype=torch.int32)
    out = gemmsmith.grouped_mm(x, w, offs)
    out.sum().backward()
    assert runs() == 3
    assert {problem.operation.summation for problem in chooser.asked} == {"sequential"}
    assert {problem.operation.grouping for problem in chooser.asked} == {"rows", "depth"}
    assert w.grad is not None
    close(w.grad[0], x[:3].float().sum(0)[:, None].expand(16, 8))


def test_a_layer_of_experts_is_fused_whatever_it_takes(
    patched: Engine, chooser: Chooser, runs: Runs
) -> None:
    """Times of kernels differ with the number of tokens, and bits must not."""
    chooser.answers = lambda _: True
    gate_up, down = operands((2, 32, 16), (2, 16, 16))
    for time_us in (None, 1.0, 1e6):
        chooser.time_us = lambda problem, time=time_us: time if problem.operation.is_fused else 2.0
        for tokens in (4, 7):
            (x,) = operands((tokens, 16))
            index = torch.arange(tokens)[:, None] % 2
            gemmsmith.experts(x, index, torch.ones(tokens, 1), gate_up, down)
            assert runs() == 2  # one with its gate
    assert any(problem.operation.is_fused for problem in chooser.asked)
