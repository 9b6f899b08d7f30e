"""The head and its loss on a GPU: Triton's passes, memory, graphs and training, against FP64."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import gemmsmith
from gemmsmith.ops.products import loss_passes, losses
from gemmsmith.ops.products.loss_passes import LossOptions
from gemmsmith.ops.products.losses import linear_cross_entropy
from tests.unit.ops.test_losses import OPTIONS, Tensors, close, equal, outcome, reference

BF16 = torch.bfloat16
TERMS = ((0.0, None, 0.0), (0.1, 5.0, 1e-3), (1.0, None, 0.0))
"""Label smoothing, softcap and z-loss; Triton compiles a kernel for each of these."""
TYPES = (BF16, torch.float16)
BOUND = 2.4e-2
"""Relative error in the Frobenius norm: logits in bf16 are wrong by 2⁻⁸ of the largest."""


def operands(
    *leading: int, width: int, vocabulary: int, dtype: torch.dtype = BF16
) -> tuple[torch.Tensor, ...]:
    """x, weight, labels (some are ignored) and bias."""
    x = torch.randn(*leading, width, device="cuda")
    weight = torch.randn(vocabulary, width, device="cuda") * 2 / width**0.5
    bias = torch.randn(vocabulary, device="cuda")
    labels = torch.randint(vocabulary, leading, device="cuda")
    labels[torch.rand(leading, device="cuda") < 0.2] = -100
    x, weight, bias = (leaf.to(dtype).requires_grad_() for leaf in (x, weight, bias))
    return x, weight, labels, bias


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Sets the rows of a chunk, if the weight is frozen or has few columns."""

    def of(rows: int, vocabulary: int) -> None:
        monkeypatch.setattr(losses, "MULTIPLE", 16)
        monkeypatch.setattr(losses, "MOST_BYTES", rows * vocabulary * 2)

    return of


def on_device(options: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.cuda() if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }


def no_farther(leaves: tuple[Any, ...], dtype: torch.dtype, **options: Any) -> None:
    """From FP64 than torch, but for a little. FP16 loses small gradients without a loss scale."""
    ours = outcome(linear_cross_entropy, leaves, **options)
    exact = outcome(reference, leaves, torch.float64, **options)
    if dtype is BF16:
        close(ours, exact, BOUND)

    x, weight, labels, *rest = leaves
    bias = rest[0] if rest else None
    asked = {"ignore_index": -100, "label_smoothing": 0.0, "softcap": None, "z_loss": 0.0}
    asked |= {"reduction": "mean", **options}
    count = asked.pop("num_items_in_batch", None)
    count = None if count is None else torch.tensor(float(count), device="cuda")
    named = LossOptions(**asked)
    torchs = outcome(
        lambda x, weight, labels, bias: losses._by_torch(
            x, weight, bias, labels, count, None, *named
        ),
        (x, weight, labels, bias),
    )
    for mine, theirs, exactly in zip(ours, torchs, exact, strict=True):
        error = (mine.double() - exactly).norm()
        assert error <= 1.2 * (theirs.double() - exactly).norm() + 1e-3 * exactly.norm()
    assert equal(ours, outcome(linear_cross_entropy, leaves, **options))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("biased", [False, True])
def test_against_fp64(name: str, dtype: torch.dtype, biased: bool) -> None:
    torch.manual_seed(1)
    leaves = operands(3, 170, width=256, vocabulary=9001, dtype=dtype)
    options = on_device(OPTIONS[name])
    if "num_items_in_batch" in options:
        options["num_items_in_batch"] = options["num_items_in_batch"] * 50
    no_farther(leaves[: 3 + biased], dtype, **options)


def test_200_random_sizes(chunks: Callable[[int, int], None]) -> None:
    draw = random.Random(5)
    for number in range(200):
        torch.manual_seed(number)
        leading = draw.choice(
            [(1,), (draw.randint(1, 700),), (3, draw.randint(1, 90)), (2, 1, 200)]
        )
        vocabulary = draw.choice([33, 1000, 8193, 50257])
        dtype = draw.choice(TYPES)
        width = draw.choice([8, 64, 72, 256, 1000])
        x, weight, labels, bias = operands(
            *leading, width=width, vocabulary=vocabulary, dtype=dtype
        )
        leaves = [x, weight, labels, draw.choice([None, bias])]
        for leaf in leaves:
            if leaf is not None and leaf.is_floating_point():
                leaf.requires_grad_(draw.random() < 0.7)
        x.requires_grad_()
        labels.view(-1)[:1] = 0  # not all are ignored
        chunks(draw.choice([16, 48, 300, 10_000]), vocabulary)
        smoothing, cap, z_loss = draw.choice(TERMS[:2])
        options = {
            "label_smoothing": smoothing,
            "softcap": cap,
            "z_loss": z_loss,
            "reduction": draw.choice(["sum", "none", "mean"][: 2 + (dtype is BF16)]),
        }
        ours = outcome(linear_cross_entropy, tuple(leaves), **options)
        exact = outcome(reference, tuple(leaves), torch.float64, **options)
        close(ours, exact, BOUND)
        assert equal(ours, outcome(linear_cross_entropy, tuple(leaves), **options))


PASSES = (
    *((*size, BF16, False) for size in ((1, 0), (1, 63), (8192, 0), (50257, 0), (128256, 0))),
    *((50257, 47, dtype, by_row) for dtype in TYPES for by_row in (False, True, None)),
)
"""Triton compiles kernels for each of these, for a second each."""


@pytest.mark.parametrize(("width", "columns", "dtype", "by_row"), PASSES)
def test_the_pass(width: int, columns: int, dtype: torch.dtype, by_row: bool | None) -> None:
    """Triton's form against torch's, which is checked on the host."""
    pytest.importorskip("triton")
    torch.manual_seed(3)
    plain: Any = loss_passes.cross_entropy.__wrapped__  # type: ignore[attr-defined]
    logits = (4 * torch.randn(37, width + columns, device="cuda")).to(dtype)
    logits[:, width:] = torch.nan
    labels = torch.randint(width, (37,), device="cuda")
    labels[5] = -1
    scale = None if by_row is None else torch.rand(37 if by_row else 1, device="cuda")
    eps, floor = torch.finfo(dtype).eps, 2e-6 if width == 1 else 1e-7
    for smoothing, cap, z_loss in TERMS:
        options = LossOptions(-1, smoothing, cap, z_loss, "sum")
        rows, ours = loss_passes.cross_entropy(logits.clone(), labels, scale, options, width)
        exact, gradient = plain(logits.clone(), labels, scale, options, width)
        torch.testing.assert_close(rows, exact, rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(
            ours, gradient, rtol=2 * eps, atol=floor, equal_nan=scale is None
        )
        assert scale is None or not ours[5].any()
        own = logits.clone()
        again = loss_passes.cross_entropy(own, labels, scale, options, width, True)
        assert torch.equal(again[0], rows)
        assert torch.equal(again[1][:, :width], ours[:, :width])
        assert torch.equal(own[:, :width], logits[:, :width])


def test_the_passes_run() -> None:
    triton = pytest.importorskip("triton")
    leaves = operands(64, width=64, vocabulary=1000)
    outcome(linear_cross_entropy, leaves)  # compiles
    seen: list[object] = []
    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(seen.append)
    try:
        outcome(linear_cross_entropy, leaves)
    finally:
        hook.remove(seen.append)
    assert (
        len(seen) == 1 + 3
    )  # the loss, and gradients of x, weight and bias times that of the loss


def test_a_label_out_of_range_is_not_a_number() -> None:
    pytest.importorskip("triton")  # torch's own operator would end the process
    x, weight, labels, _ = operands(64, width=64, vocabulary=1000)
    labels[:] = 1
    labels[3], labels[7] = 1000, -5
    rows = linear_cross_entropy(x, weight, labels, reduction="none")
    assert torch.isnan(rows).nonzero().flatten().tolist() == [3, 7]
    (of_x,) = torch.autograd.grad(rows, x, torch.ones_like(rows))
    assert torch.isnan(of_x).any(-1).nonzero().flatten().tolist() == [3, 7]


def test_more_logits_than_32_bits_count() -> None:
    rows, vocabulary, width = 2**15 + 8, 2**16 + 8, 16
    x, weight, labels, _ = operands(rows, width=width, vocabulary=vocabulary)
    logits = x.detach() @ weight.detach().t()
    scale = torch.ones(1, device="cuda")
    parts = (slice(0, 8), slice(rows // 2, rows // 2 + 8), slice(rows - 8, rows))
    kept = [logits[part].clone() for part in parts]
    ours, gradient = loss_passes.cross_entropy(logits, labels, scale, LossOptions(), vocabulary)
    for part, some in zip(parts, kept, strict=True):
        exact, expected = loss_passes.cross_entropy(
            some, labels[part], scale, LossOptions(), vocabulary
        )
        assert torch.equal(ours[part], exact)
        assert torch.equal(gradient[part], expected)


def peak(step: Callable[[], Any]) -> int:
    """Bytes above those allocated before."""
    step()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize(
    "size", [(4096, 4096, 128256), (8192, 2048, 151936), (16384, 1024, 50304)], ids=str
)
def test_memory(size: tuple[int, int, int]) -> None:
    rows, width, vocabulary = size
    x, weight, labels, _ = operands(rows, width=width, vocabulary=vocabulary)

    def step(function: Callable[..., torch.Tensor], *leaves: torch.Tensor) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(function(x, weight, labels), leaves)

    def by_torch(*given: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(nn.functional.linear(*given[:2]).float(), given[2])

    ours, torchs = (
        peak(step(function, x, weight)) for function in (linear_cross_entropy, by_torch)
    )
    print(f"{size}: {ours / 1e9:.2f} GB, torch {torchs / 1e9:.2f} GB")
    assert ours <= 0.7 * torchs
    chunk, size_of_sums = losses.chunk_rows(rows, vocabulary, width, 2), 4 * width
    most = 2 * (rows + width) if chunk == rows else max(2 * chunk, 2 * width) + size_of_sums
    assert ours <= most * vocabulary + 2**28
    weight.requires_grad_(False)
    frozen = peak(step(linear_cross_entropy, x))
    print(f"{size}, frozen head: {frozen / 1e9:.2f} GB")
    assert frozen <= losses.MOST_BYTES + 2**28
    with torch.no_grad():
        assert peak(lambda: linear_cross_entropy(x, weight, labels)) <= losses.MOST_BYTES + 2**27


@pytest.mark.parametrize("name", ["plain", "none", "all"])
def test_in_a_graph(name: str, chunks: Callable[[int, int], None]) -> None:
    """No synchronization, and what a graph replays is what runs without."""
    options = on_device(OPTIONS[name])
    x, weight, labels, bias = operands(300, width=64, vocabulary=1000)
    chunks(128, 1000)
    leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_(), bias.detach()]

    def step() -> Tensors:
        # Leaves of each step's own: what autograd keeps of a leaf belongs to one stream.
        given = [leaf.detach().requires_grad_() for leaf in leaves]
        loss = linear_cross_entropy(given[0], given[1], labels, given[2], **options)
        return [loss.detach(), *torch.autograd.grad(loss, given, torch.ones_like(loss))]

    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        leaves[0].copy_(torch.randn_like(x))
        labels.copy_(labels.flip(0))
    graph.replay()
    close(captured, [part.double() for part in step()], 4e-3)


@pytest.mark.parametrize("name", ["plain", "none", "all"])
def test_compiled(name: str) -> None:
    torch._dynamo.reset()
    options = on_device(OPTIONS[name])
    leaves = operands(300, width=64, vocabulary=1000)
    run = torch.compile(
        lambda *given: linear_cross_entropy(*given, **options), fullgraph=True, dynamic=False
    )
    exact = outcome(reference, leaves, torch.float64, **options)
    close(outcome(run, leaves), exact, BOUND)


@pytest.mark.usefixtures("in_use")
def test_the_pass_over_graphs_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    leaves = operands(300, width=64, vocabulary=losses.LEAST_VOCABULARY)
    ours, calls, own = gemmsmith.inductor_pass(), [], losses.cross_entropy
    options: Any = {"joint_custom_pre_pass": ours, "pre_grad_custom_pass": ours}

    def noted(*given: Any) -> Any:
        calls.append(given)
        return own(*given)

    def loss(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: Any) -> Any:
        return functional.cross_entropy(functional.linear(x, weight, bias).float(), labels)

    monkeypatch.setattr(losses, "cross_entropy", noted)
    compiled = outcome(torch.compile(loss, options=options, dynamic=False), leaves)
    close(compiled, outcome(reference, leaves, torch.float64), BOUND)
    assert len(calls) == 1


class Tied(nn.Module):
    """Embeds and predicts with one weight."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=0.2)
        self.inner = nn.Linear(width, width)

    def forward(self, tokens: torch.Tensor, loss: Callable[..., torch.Tensor]) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + torch.tanh(self.inner(x))
        return loss(x[:, :-1], self.embedding.weight, tokens[:, 1:])


@pytest.fixture
def tokens() -> torch.Tensor:
    torch.manual_seed(2)
    return torch.randint(3000, (4, 257), device="cuda")


@pytest.mark.parametrize("autocast", [False, True])
def test_20_steps_like_torch(
    autocast: bool, tokens: torch.Tensor, chunks: Callable[[int, int], None]
) -> None:
    chunks(256, 3000)
    model = Tied(3000, 128).cuda()

    def train(dtype: torch.dtype, loss: Callable[..., torch.Tensor], *, cast: bool) -> torch.Tensor:
        net = copy.deepcopy(model).to(dtype)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        history = []
        for _ in range(20):
            optimizer.zero_grad()
            with torch.autocast("cuda", BF16, enabled=cast):
                out = net(tokens, loss)
            out.backward()
            optimizer.step()
            history.append(out.detach().double())
        return torch.stack(history)

    dtype = torch.float32 if autocast else BF16
    exact = train(torch.float64, reference, cast=False)
    ours = train(dtype, linear_cross_entropy, cast=autocast)
    torchs = train(dtype, reference, cast=autocast)
    assert exact[-1] < exact[0]
    assert (ours - exact).norm() <= 1.2 * (torchs - exact).norm() + 1e-3 * exact.norm()
