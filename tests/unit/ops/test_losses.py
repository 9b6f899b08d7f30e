"""The head and its loss, against FP64 and torch's own, whole and in chunks."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import gemmsmith
from gemmsmith.ops.products import loss_passes, losses
from gemmsmith.ops.products.losses import linear_cross_entropy

BF16 = torch.bfloat16
BOUNDS = {BF16: 8e-3, torch.float16: 2e-3, torch.float32: 1e-5}
"""Relative error in the Frobenius norm: logits, their gradients and the results are rounded."""
Tensors = list[torch.Tensor]

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smooth": {"label_smoothing": 0.1},
    "all smooth": {"label_smoothing": 1.0},
    "capped": {"softcap": 3.0},
    "z": {"z_loss": 0.02},
    "items": {"num_items_in_batch": 7},
    "items on the device": {"num_items_in_batch": torch.tensor(7)},
    "all": {"label_smoothing": 0.2, "softcap": 5.0, "z_loss": 0.01, "num_items_in_batch": 5},
    "all rows": {"label_smoothing": 0.2, "softcap": 5.0, "z_loss": 0.01, "reduction": "none"},
}


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """By whole logits and `torch.nn.functional.cross_entropy`."""
    softcap, z_loss = options.pop("softcap", None), options.pop("z_loss", 0.0)
    items, reduction = options.pop("num_items_in_batch", None), options.pop("reduction", "mean")
    logits = functional.linear(x, weight, bias).reshape(-1, weight.shape[0])
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    flat = labels.reshape(-1)
    kept = flat != options.get("ignore_index", -100)
    how = "sum" if items is not None else reduction
    loss = functional.cross_entropy(logits, flat, reduction=how, **options)
    more = z_loss * torch.where(kept, torch.logsumexp(logits, -1) ** 2, 0)
    if how == "none":
        return (loss + more).reshape(labels.shape)
    loss = loss + (more.sum() / kept.sum() if how == "mean" else more.sum())
    return loss if items is None else loss / items


def operands(
    *leading: int, width: int = 16, vocabulary: int = 40, dtype: torch.dtype = BF16
) -> tuple[torch.Tensor, ...]:
    """x, weight, labels (some are ignored) and bias."""
    x = torch.randn(*leading, width)
    weight, bias = torch.randn(vocabulary, width) / 2, torch.randn(vocabulary)
    labels = torch.randint(vocabulary, leading)
    labels[torch.rand(leading) < 0.2] = -100
    leaves = (tensor.to(dtype).requires_grad_() for tensor in (x, weight, bias))
    x, weight, bias = leaves
    return x, weight, labels, bias


def outcome(
    function: Callable[..., torch.Tensor],
    leaves: tuple[torch.Tensor | None, ...],
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Tensors:
    """The loss and its gradients, all in turn; the operands in another type."""
    given = [
        leaf if leaf is None or not leaf.is_floating_point() or dtype is None
        else leaf.detach().to(dtype).requires_grad_(leaf.requires_grad)
        for leaf in leaves
    ]  # fmt: skip
    loss = function(*given, **options)
    torch.manual_seed(7)
    gradient = (torch.rand(loss.shape) + 0.5).to(loss)
    needed = [leaf for leaf in given if leaf is not None and leaf.requires_grad]
    return [loss.detach(), *torch.autograd.grad(loss, needed, gradient)]


def close(ours: Tensors, exact: Tensors, bound: float) -> None:
    for mine, exactly in zip(ours, exact, strict=True):
        assert mine.shape == exactly.shape
        assert (mine.double() - exactly).norm() <= bound * exactly.norm() + 1e-12


def equal(ours: Tensors, others: Tensors) -> bool:
    return all(torch.equal(mine, other) for mine, other in zip(ours, others, strict=True))


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the rows of a chunk, if the weight is frozen or has few columns."""

    def of(rows: int, vocabulary: int = 40) -> None:
        monkeypatch.setattr(losses, "MULTIPLE", 1)
        monkeypatch.setattr(losses, "MOST_BYTES", rows * vocabulary * 2)

    return of


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Rows of each pass over logits, and whether it turns them into gradients."""
    seen: list[tuple[int, bool]] = []
    own = loss_passes.cross_entropy

    def noted(logits: torch.Tensor, labels: torch.Tensor, scale: Any, *others: Any) -> Any:
        seen.append((logits.shape[0], scale is not None))
        return own(logits, labels, scale, *others)

    monkeypatch.setattr(losses, "cross_entropy", noted)
    return seen


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("biased", [False, True])
def test_against_fp64(computing: str, name: str, dtype: torch.dtype, biased: bool) -> None:
    leaves = operands(3, 50, dtype=dtype)[: 3 + biased]
    ours = outcome(linear_cross_entropy, leaves, **OPTIONS[name])
    assert ours[0].dtype is torch.float32
    assert all(part.dtype is dtype for part in ours[1:])
    exact = outcome(reference, leaves, torch.float64, **OPTIONS[name])
    close(ours, exact, BOUNDS[dtype])
    assert equal(ours, outcome(linear_cross_entropy, leaves, **OPTIONS[name]))


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("frozen", [False, True])
def test_logits_that_a_program_has_are_only_read(
    name: str, dtype: torch.dtype, frozen: bool, chunks: Callable[[int], None]
) -> None:
    """Also in chunks, and padded."""
    chunks(100)
    x, weight, labels, bias = operands(3, 100, vocabulary=37, dtype=dtype)
    weight.requires_grad_(not frozen)
    logits = functional.linear(x, weight, bias)
    before = logits.detach().clone()
    for given in (logits, logits.detach().double()):  # those of another type are computed
        ours = outcome(
            partial(linear_cross_entropy, logits=given), (x, weight, labels, bias), **OPTIONS[name]
        )
        plain = outcome(linear_cross_entropy, (x, weight, labels, bias), **OPTIONS[name])
        close(ours, [part.double() for part in plain], BOUNDS[dtype])
        assert torch.equal(logits, before)


def test_logits_that_a_program_has_are_used(passes: list[tuple[int, bool]]) -> None:
    _, weight, labels, _ = operands(30)
    other = torch.randn(30, 40).to(BF16)
    zeros = torch.zeros(30, 16, dtype=BF16)
    expected = reference(other, torch.eye(40, dtype=BF16), labels)
    loss = linear_cross_entropy(zeros, weight, labels, logits=other)
    torch.testing.assert_close(loss, expected.float(), rtol=1e-2, atol=0.0)
    with torch.autocast("cpu", BF16):
        wide = linear_cross_entropy(zeros.float(), weight.float(), labels, logits=other)
    assert torch.equal(wide, loss)
    assert passes == [(30, True)] * 2
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(zeros, weight, labels, logits=other), loss)


def test_fp64_is_torchs() -> None:
    leaves = operands(6, dtype=torch.float64)
    for options in OPTIONS.values():
        ours = outcome(linear_cross_entropy, leaves, **options)
        close(ours, outcome(reference, leaves, **options), 1e-14)


def test_100_random_calls(
    computing: str, chunks: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(5)
    for _ in range(100):
        leading = draw.choice(
            [(), (1,), (draw.randint(1, 70),), (3, draw.randint(1, 9)), (2, 1, 5)]
        )
        vocabulary = draw.choice([1, 2, 33, 64, 100])
        x, weight, labels, bias = operands(
            *leading, width=draw.choice([8, 16, 40]), vocabulary=vocabulary
        )
        leaves = [x, weight, labels, draw.choice([None, bias])]
        for leaf in leaves:
            if leaf is not None and leaf.is_floating_point():
                leaf.requires_grad_(draw.random() < 0.7)
        x.requires_grad_()
        labels.view(-1)[:1] = 0  # not all are ignored
        chunks(draw.choice([1, 7, 32, 1000]), vocabulary)
        monkeypatch.setattr(losses, "LEAST_PADDED", draw.choice([1, 1000]))
        options = {
            "label_smoothing": draw.choice([0.0, 0.3]),
            "softcap": draw.choice([None, 4.0]),
            "z_loss": draw.choice([0.0, 1e-2]),
            "reduction": draw.choice(["mean", "sum", "none"]),
            "ignore_index": draw.choice([-100, -1, vocabulary - 1 or -5]),
        }
        labels[labels == -100] = options["ignore_index"]
        ours = outcome(linear_cross_entropy, tuple(leaves), **options)
        exact = outcome(reference, tuple(leaves), torch.float64, **options)
        for mine, exactly in zip(ours, exact, strict=True):
            # Of a vocabulary of 1 or 2, gradients nearly cancel.
            assert mine.shape == exactly.shape
            floor = 4e-2 * weight.detach().double().norm() / len(labels.view(-1)) ** 0.5
            assert (mine.double() - exactly).norm() <= 1e-2 * exactly.norm() + floor * (
                vocabulary <= 2
            ), options


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["plain", "none", "all"])
@pytest.mark.parametrize("rows", [losses.LEAST_PADDED, 40])
def test_logits_are_padded(
    rows: int,
    name: str,
    dtype: torch.dtype,
    chunks: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes, own = set(), losses.cross_entropy

    def noted(logits: torch.Tensor, *others: Any) -> Any:
        sizes.add(logits.shape[1])
        return own(logits, *others)

    monkeypatch.setattr(losses, "cross_entropy", noted)
    for vocabulary in (37, 50):  # torch's own kernels load 1 and 2 elements at a time
        chunks(200, vocabulary)
        leaves = operands(rows, vocabulary=vocabulary, dtype=dtype)
        ours = outcome(linear_cross_entropy, leaves, **OPTIONS[name])
        close(ours, outcome(reference, leaves, torch.float64, **OPTIONS[name]), BOUNDS[dtype])
        assert all(part.is_contiguous() for part in ours)
        assert sizes == {losses.LINE if rows >= losses.LEAST_PADDED else vocabulary}
        sizes.clear()


def test_an_infinite_row_that_is_ignored_does_not_reach_others() -> None:
    x, weight, labels, bias = operands(losses.LEAST_PADDED, vocabulary=37)
    labels[3] = -100
    with torch.no_grad():
        x[3] = torch.inf
    _, of_x, _, of_bias = outcome(linear_cross_entropy, (x, weight, labels, bias))
    assert not of_x[3].any()
    assert of_x.isfinite().all()
    assert of_bias.isfinite().all()


@pytest.mark.parametrize(
    ("rows", "vocabulary", "depth", "columns"),
    [
        (4096, 50257, 1600, 47),
        (8192, 30522, 1024, 6),
        (4096, 49155, 2048, 61),
        (4096, 50264, 1600, 0),  # aligned
        (4096, 50257, 1601, 0),  # the depth is not
        (16, 50257, 1600, 0),  # the copy of the weight would take longer
        (1024, 128257, 4096, 0),  # or more memory than torch's logits
    ],
)
def test_padding(rows: int, vocabulary: int, depth: int, columns: int) -> None:
    assert losses.padding(rows, vocabulary, depth) == columns


@pytest.mark.parametrize("rows", [1, 7, 64, 199])
@pytest.mark.parametrize("name", ["plain", "all", "all rows"])
def test_chunks_differ_by_rounding_alone(
    rows: int, name: str, chunks: Callable[[int], None], passes: list[tuple[int, bool]]
) -> None:
    leaves = operands(200, width=4)
    whole = outcome(linear_cross_entropy, leaves, **OPTIONS[name])
    assert {count for count, _ in passes} == {200}
    passes.clear()
    chunks(rows)
    some = outcome(linear_cross_entropy, leaves, **OPTIONS[name])
    assert max(count for count, _ in passes) <= max(rows, 4)
    for mine, other in zip(some, whole, strict=True):
        # A product of other sizes may add up in another order; then a rounding to bf16 differs.
        assert (mine.float() - other.float()).norm() <= 2e-3 * other.float().norm()
    assert equal(some, outcome(linear_cross_entropy, leaves, **OPTIONS[name]))


@pytest.mark.parametrize(
    ("rows", "vocabulary", "depth", "expected"),
    [
        (4096, 128256, 0, 2048),  # a frozen head
        (4096, 128256, 4096, 4096),  # sums of its gradient would take more than whole logits
        (8192, 151936, 2048, 8192),
        (16384, 50304, 1024, 4096),
        (16384, 50304, 0, 4096),
        (5000, 50304, 0, 5000),
        (5400, 50304, 0, 2816),
        (300, 2**28, 0, 256),  # at least 256 rows
        (1, 2**28, 0, 1),
        (0, 100, 16, 0),
    ],
)
def test_rows_of_a_chunk(rows: int, vocabulary: int, depth: int, expected: int) -> None:
    assert losses.chunk_rows(rows, vocabulary, depth, 2) == expected


def test_chunks_are_balanced_and_bounded() -> None:
    draw = random.Random(3)
    for _ in range(500):
        rows, vocabulary = draw.randint(1, 200_000), draw.randint(2, 300_000)
        depth = draw.choice([0, draw.randint(1, 16384)])
        step = losses.chunk_rows(rows, vocabulary, depth, 2)
        assert 1 <= step <= rows + losses.MULTIPLE
        limit = max(
            losses.MOST_BYTES // (2 * vocabulary), losses.ONE_CHUNK * depth, losses.MULTIPLE
        )
        assert step <= limit
        if step < rows:
            assert step % losses.MULTIPLE == 0
            count = -(-rows // step)
            assert step * count - rows <= losses.MULTIPLE * count


@pytest.mark.parametrize("needs", [(True, False), (False, True), (True, True)], ids=str)
def test_products_are_by_winners(
    needs: tuple[bool, bool],
    engine: Any,
    runs: Callable[[], int],
    chunks: Callable[[int], None],
) -> None:
    x, weight, labels, _ = operands(64, width=16)
    x.requires_grad_(needs[0])
    weight.requires_grad_(needs[1])
    linear_cross_entropy(x, weight, labels).backward()
    assert runs() == 1 + sum(needs)
    for leaf, need in zip((x, weight), needs, strict=True):
        assert (leaf.grad is not None) == need
    chunks(32)
    weight.requires_grad_(False)
    with torch.no_grad():
        linear_cross_entropy(x, weight, labels)
    assert runs() == 2


def test_what_is_not_needed_is_not_computed(passes: list[tuple[int, bool]]) -> None:
    x, weight, labels, bias = operands(20)
    with torch.no_grad():
        linear_cross_entropy(x, weight, labels, bias)
    linear_cross_entropy(x.detach(), weight.detach(), labels)
    linear_cross_entropy(x, weight, labels, reduction="none")
    half = operands(20, dtype=torch.float16)
    linear_cross_entropy(half[0], half[1], labels)
    assert passes == [(20, False)] * 4
    linear_cross_entropy(x.detach(), weight.detach(), labels, bias).backward()
    assert passes[4:] == [(20, True)]
    assert x.grad is None
    assert bias.grad is not None


@pytest.mark.parametrize("name", ["plain", "none"])
def test_a_graph_that_is_kept(name: str) -> None:
    leaves = operands(30)
    x, weight, labels, bias = leaves
    loss = linear_cross_entropy(*leaves, **OPTIONS[name])
    for factor in (1.0, 3.0, 0.7):
        gradient = torch.full(loss.shape, factor)
        again = torch.autograd.grad(loss, [x, weight, bias], gradient, retain_graph=True)
        wide = [leaf.detach().double().requires_grad_() for leaf in (x, weight, bias)]
        exact = reference(*wide[:2], labels, wide[2], **OPTIONS[name])
        expected = torch.autograd.grad(exact, wide, gradient.double())
        close(list(again), list(expected), BOUNDS[BF16])


def test_gradients_of_a_kept_graph_are_added_up() -> None:
    x, weight, labels, _ = operands(30)
    loss = linear_cross_entropy(x, weight, labels)
    loss.backward(retain_graph=True)
    first = [leaf.grad.clone() for leaf in (x, weight) if leaf.grad is not None]
    loss.backward()
    for leaf, before in zip((x, weight), first, strict=True):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, 2 * before)


def test_fp16_keeps_what_a_loss_scale_saves() -> None:
    """Without the scale, 1e-8 of a probability would be 0 in FP16."""
    x, weight, labels, _ = operands(64, vocabulary=100, dtype=torch.float16)
    scaled = {"num_items_in_batch": 2**16}
    for function, dtype in ((linear_cross_entropy, torch.float16), (reference, torch.float64)):
        leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in (x, weight)]
        (function(*leaves, labels, **scaled) * 2**16).backward()
        grads = [leaf.grad.double() for leaf in leaves if leaf.grad is not None]
        if dtype is torch.float16:
            ours = grads
    close(ours, grads, BOUNDS[torch.float16])


def test_all_rows_are_ignored() -> None:
    x, weight, _, _ = operands(6)
    labels = torch.full((6,), -100)
    loss = linear_cross_entropy(x, weight, labels)
    assert torch.isnan(loss)  # as torch's mean of nothing
    assert torch.isnan(reference(x, weight, labels))
    for part in torch.autograd.grad(loss, [x, weight]):
        assert not part.any()
    assert linear_cross_entropy(x, weight, labels, reduction="sum") == 0
    assert not linear_cross_entropy(x, weight, labels, reduction="none").any()


def test_ignored_rows_do_nothing_even_if_they_are_not_finite() -> None:
    x, weight, labels, _ = operands(6)
    labels[:] = 1
    labels[2] = -100
    with torch.no_grad():
        x[2] = float("nan")
    of_x, _ = torch.autograd.grad(linear_cross_entropy(x, weight, labels), [x, weight])
    assert not of_x[2].any()
    assert torch.isfinite(of_x).all()


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("label", [40, -1, -101])
def test_labels_out_of_range(label: int, dtype: torch.dtype) -> None:
    x, weight, labels, _ = operands(6, dtype=dtype)
    labels[3] = label
    with pytest.raises(IndexError, match="out of bounds"):
        reference(x, weight, labels)
    with pytest.raises(IndexError, match="out of bounds"):
        linear_cross_entropy(x, weight, labels)


def test_no_rows() -> None:
    x, weight, labels, _ = operands(0)
    assert torch.isnan(linear_cross_entropy(x, weight, labels))
    linear_cross_entropy(x, weight, labels, reduction="sum").backward()
    assert weight.grad is not None
    assert not weight.grad.any()


ERRORS: dict[str, tuple[Callable[..., Any], str]] = {
    "width": (lambda x, w, y: linear_cross_entropy(x[:, :8], w, y), "x must be"),
    "weight": (lambda x, w, y: linear_cross_entropy(x, w[0], y), "x must be"),
    "scalar": (lambda x, w, y: linear_cross_entropy(x[0, 0], w, y), "x must be"),
    "rows": (lambda x, w, y: linear_cross_entropy(x, w, y[:3]), "labels must be int64"),
    "int32": (lambda x, w, y: linear_cross_entropy(x, w, y.int()), "labels must be int64"),
    "shares": (
        lambda x, w, y: linear_cross_entropy(x, w, torch.rand(6, 40)),
        "labels must be int64",
    ),
    "bias": (lambda x, w, y: linear_cross_entropy(x, w, y, w[:, 0][:5]), "bias must be"),
    "logits": (lambda x, w, y: linear_cross_entropy(x, w, y, logits=x), "logits must be"),
    "smoothing": (
        lambda x, w, y: linear_cross_entropy(x, w, y, label_smoothing=1.1),
        "label_smoothing",
    ),
    "cap": (lambda x, w, y: linear_cross_entropy(x, w, y, softcap=0.0), "softcap"),
    "reduction": (lambda x, w, y: linear_cross_entropy(x, w, y, reduction="max"), "reduction"),
    "count": (
        lambda x, w, y: linear_cross_entropy(x, w, y, reduction="sum", num_items_in_batch=3),
        "num_items_in_batch replaces",
    ),
    "counts": (
        lambda x, w, y: linear_cross_entropy(x, w, y, num_items_in_batch=torch.ones(2)),
        "one element",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    call, message = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        call(*operands(6)[:3])


@pytest.mark.parametrize(
    ("backend", "dynamic"), [("eager", False), ("aot_eager", False), ("aot_eager", True)]
)
@pytest.mark.parametrize("name", ["plain", "none", "all", "items on the device"])
def test_compiled(computing: str, name: str, backend: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    leaves, options = operands(4, 9), OPTIONS[name]

    def run(*given: Any) -> torch.Tensor:
        return linear_cross_entropy(*given, **options)

    compiled = torch.compile(run, backend=backend, dynamic=dynamic, fullgraph=True)
    assert equal(outcome(compiled, leaves), outcome(run, leaves))
    with torch.no_grad():
        assert torch.equal(compiled(*leaves), run(*leaves))


def test_compiled_fp32_and_frozen() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    for dtype in (torch.float32, BF16):
        for frozen in (0, 1):
            leaves = operands(9, dtype=dtype)[:3]
            leaves[frozen].requires_grad_(False)
            close(outcome(compiled, leaves), outcome(linear_cross_entropy, leaves), 1e-6)


@pytest.mark.parametrize("name", ["plain", "none", "all"])
def test_autocast(computing: str, name: str) -> None:
    leaves, options = operands(4, 9, dtype=torch.float32), OPTIONS[name]

    def run(*given: Any) -> torch.Tensor:
        with torch.autocast("cpu", BF16):
            return linear_cross_entropy(*given, **options)

    ours = outcome(run, leaves)
    assert all(part.dtype is torch.float32 for part in ours)
    close(ours, outcome(reference, leaves, torch.float64, **options), BOUNDS[BF16])
    torch._dynamo.reset()
    assert equal(outcome(torch.compile(run, backend="aot_eager", fullgraph=True), leaves), ours)


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_of_gradients(name: str) -> None:
    options = OPTIONS[name]
    first = operands(12)

    def twice(function: Callable[..., torch.Tensor], dtype: torch.dtype) -> Tensors:
        x, weight, labels, bias = (
            leaf.detach().to(dtype).requires_grad_() if leaf.is_floating_point() else leaf
            for leaf in first
        )
        loss = function(x, weight, labels, bias, **options).double().square().sum()
        parts = torch.autograd.grad(loss, [x, weight, bias], create_graph=True)
        total = torch.stack([part.double().square().sum() for part in parts]).sum()
        return [part.double() for part in torch.autograd.grad(total, [x, weight, bias])]

    # A product of small differences in bf16, which torch's own operators round as often.
    close(twice(linear_cross_entropy, BF16), twice(reference, torch.float64), 4e-2)


def test_batches_of_gradients() -> None:
    x, weight, labels, _ = operands(6)
    loss = linear_cross_entropy(x, weight, labels, reduction="none")
    rows = torch.autograd.grad(loss, x, torch.eye(6), is_grads_batched=True, retain_graph=True)[0]
    (total,) = torch.autograd.grad(loss, x, torch.ones(6))
    for at in range(6):
        kept = torch.arange(6) != at
        assert not rows[at][kept].any()
    close([rows.sum(0)], [total.double()], BOUNDS[BF16])


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_transforms_and_modes() -> None:
    x, weight, labels, _ = operands(6, dtype=torch.float32)
    x, weight = x.detach(), weight.detach()

    def loss(function: Callable[..., torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda given: function(given, weight, labels, softcap=4.0)

    acts: list[Callable[[Callable[..., torch.Tensor]], torch.Tensor]] = [
        lambda act: torch.func.grad(loss(act))(x),
        lambda act: torch.func.jvp(loss(act), (x,), (torch.ones_like(x),))[1],
        lambda act: torch.func.vmap(loss(act))(torch.stack([x, 2 * x])),
        lambda act: torch.func.hessian(loss(act))(x),
    ]
    for act in acts:
        close([act(linear_cross_entropy)], [act(reference).double()], 1e-5)
    with forward_ad.dual_level():
        out = loss(linear_cross_entropy)(forward_ad.make_dual(x, torch.ones_like(x)))
        assert forward_ad.unpack_dual(out).tangent is not None
    with FlopCounterMode(display=False) as counter:
        linear_cross_entropy(x.to(BF16), weight.to(BF16), labels)
    assert counter.get_total_flops() == 2 * 6 * 16 * 40


def test_operands_anywhere_in_memory() -> None:
    x, weight, labels, bias = operands(10, 30)
    others = {
        "turned": (x.detach().mT.contiguous().mT, weight, labels, bias),
        "a turned weight": (x, weight.detach().t().contiguous().t(), labels, bias),
        "labels with gaps": (x, weight, torch.stack([labels, labels], -1)[..., 0], bias),
        "negated": (torch._neg_view(-x.detach()), weight, labels, bias),
        "expanded": (x.detach()[:1].expand(10, 30, -1), weight, labels, bias),
    }
    for given in others.values():
        leaves = tuple(
            leaf.requires_grad_() if leaf.is_floating_point() else leaf for leaf in given
        )
        exact = outcome(reference, leaves, torch.float64)
        close(outcome(linear_cross_entropy, leaves), exact, BOUNDS[BF16])


class Tied(nn.Module):
    """Embeds and predicts with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.inner = nn.Linear(16, 16)

    def forward(self, tokens: torch.Tensor, loss: Callable[..., torch.Tensor]) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + torch.tanh(self.inner(x))
        return loss(x[:, :-1], self.embedding.weight, tokens[:, 1:])


def test_20_steps_of_tied_weights_like_torch(computing: str) -> None:
    torch.manual_seed(2)
    model = Tied()
    tokens = torch.randint(40, (4, 17))

    def train(dtype: torch.dtype, loss: Callable[..., torch.Tensor]) -> torch.Tensor:
        net = copy.deepcopy(model).to(dtype)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        history = []
        for _ in range(20):
            optimizer.zero_grad()
            out = net(tokens, loss)
            out.backward()
            optimizer.step()
            history.append(float(out.detach()))
        return torch.tensor(history, dtype=torch.float64)

    exact = train(torch.float64, reference)
    ours, torchs = train(BF16, linear_cross_entropy), train(BF16, reference)
    assert exact[-1] < exact[0] - 0.5
    assert (ours - exact).norm() <= 1.1 * (torchs - exact).norm() + 1e-2


def test_fsdp2(mesh: dist.DeviceMesh) -> None:
    torch.manual_seed(2)
    plain = Tied().to(BF16)
    sharded = copy.deepcopy(plain)
    fully_shard(sharded, mesh=mesh)
    tokens = torch.randint(40, (4, 17))
    for net in (plain, sharded):
        for _ in range(2):  # gradients are added up
            net(tokens, linear_cross_entropy).backward()
    for own, other in zip(plain.parameters(), sharded.parameters(), strict=True):
        assert isinstance(other.grad, DTensor)
        assert torch.equal(other.grad.full_tensor(), own.grad)  # type: ignore[arg-type]


def test_checkpoints() -> None:
    x, weight, labels, _ = operands(30)
    plain = torch.autograd.grad(linear_cross_entropy(x, weight, labels), [x, weight])
    for reentrant in (False, True):
        loss: Any = checkpoint(linear_cross_entropy, x, weight, labels, use_reentrant=reentrant)
        for leaf in (x, weight):
            leaf.grad = None
        loss.backward()
        assert equal([x.grad, weight.grad], list(plain))  # type: ignore[list-item]


def test_captured(engine: Any, chunks: Callable[[int], None]) -> None:
    """Products of chunks are products of the step."""
    chunks(8)
    x, weight, labels, _ = operands(24, width=4)
    with gemmsmith.capture() as shapes:
        linear_cross_entropy(x, weight, labels).backward()
    sizes = {(problem.m, problem.n, problem.k) for problem in shapes.problems}
    assert (8, 40, 4) in sizes
    assert (8, 4, 40) in sizes
