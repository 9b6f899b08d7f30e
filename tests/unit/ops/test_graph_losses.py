"""Heads and their losses in compiled programs, by the pass before autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._inductor.utils import fresh_inductor_cache
from torch.nn import functional

import gemmsmith
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.in_use import install
from gemmsmith.ops.products import losses
from tests.support.tiny_models import MODELS, Tiny

BF16 = torch.bfloat16
WIDTH, VOCABULARY = 16, 64
HEADS = ("Llama", "Gemma 2", "Phi", "Cohere", "Granite", "Mixtral", "gpt-oss", "GPT-2", "OPT")
"""Models whose heads or losses differ: softcaps, biases, scales, routers, graphs that break."""
CAUSAL = [
    pytest.param(tiny, id=tiny.name, marks=() if tiny.name in HEADS else pytest.mark.long)
    for tiny in MODELS
    if tiny.made_by == "AutoModelForCausalLM"
]
Loss = Callable[["Net", torch.Tensor, torch.Tensor], Any]


@pytest.fixture(autouse=True)
def _narrow(engine: Engine, without_binding: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "LEAST_VOCABULARY", VOCABULARY)
    torch._dynamo.reset()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=BF16)
        self.bound = nn.Linear(WIDTH, VOCABULARY, dtype=BF16)
        self.smoothed = nn.CrossEntropyLoss(label_smoothing=0.1)


def flat(logits: torch.Tensor) -> torch.Tensor:
    return logits.view(-1, VOCABULARY)


def entropy(logits: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
    return functional.cross_entropy(flat(logits), labels.reshape(-1), **options)


REPLACED: dict[str, Loss] = {
    "flat": lambda net, x, y: entropy(net.head(x), y),
    "in FP32": lambda net, x, y: entropy(net.head(x).float(), y),
    "cast": lambda net, x, y: entropy(net.head(x).to(torch.float32), y),
    "with a bias": lambda net, x, y: entropy(net.bound(x), y),
    "by a module": lambda net, x, y: net.smoothed(net.bound(x).flatten(0, 1), y.flatten()),
    "of a weight": lambda net, x, y: entropy(functional.linear(x, net.head.weight), y),
    "of all but the last token": lambda net, x, y: entropy(
        net.head(x)[..., :-1, :].contiguous(), y[..., 1:]
    ),
    "of the first tokens": lambda net, x, y: entropy(net.head(x)[:, :2].contiguous(), y[:, :2]),
    "summed": lambda net, x, y: entropy(net.head(x), y, reduction="sum") / 7,
    "with ignored labels": lambda net, x, y: entropy(net.head(x), y, ignore_index=3),
    "with a softcap": lambda net, x, y: entropy(torch.tanh(net.head(x) / 2.0) * 2.0, y),
    "with a softcap's method": lambda net, x, y: entropy(3.0 * (net.bound(x) / 3).tanh(), y),
    "scaled": lambda net, x, y: entropy(net.bound(x) * 0.25, y),
    "twice": lambda net, x, y: entropy(net.head(x), y) + entropy(net.bound(x), y),
}
LEFT: dict[str, Loss] = {
    "logits are returned": lambda net, x, y: (lambda logits: (entropy(logits, y), logits.detach()))(
        net.head(x)
    ),
    "logits are read": lambda net, x, y: (
        lambda logits: entropy(logits, y) + logits.float().logsumexp(-1).square().mean()
    )(net.head(x)),
    "weights of classes": lambda net, x, y: entropy(
        net.head(x), y, weight=torch.ones(VOCABULARY, dtype=BF16)
    ),
    "probabilities": lambda net, x, y: functional.cross_entropy(
        flat(net.head(x)).float(), functional.one_hot(y.reshape(-1), VOCABULARY).float()
    ),
    "each row's loss": lambda net, x, y: entropy(net.head(x), y, reduction="none").mean(),
    "squared": lambda net, x, y: (lambda logits: entropy(logits * logits, y))(net.head(x)),
    "scaled by three": lambda net, x, y: entropy(net.head(x) * 3, y),
    "divided": lambda net, x, y: entropy(1.0 / (2 + net.head(x).tanh()), y),
    "a number is added": lambda net, x, y: entropy(net.head(x) + 1, y),
    "classes come second": lambda net, x, y: functional.cross_entropy(
        net.head(x).transpose(1, 2), y
    ),
    "other classes": lambda net, x, y: functional.cross_entropy(
        net.head(x).view(-1, VOCABULARY // 2), y.repeat(1, 2).flatten() % (VOCABULARY // 2)
    ),
    "chosen rows": lambda net, x, y: entropy(net.head(x)[torch.arange(2)], y),
    "in FP16": lambda net, x, y: entropy(functional.linear(x.half(), net.head.weight.half()), y),
    "autocast": lambda net, x, y: _with_autocast(net, x, y),
    "x is written to": lambda net, x, y: _written(net, x, y, lambda x: x.mul_(3)),
    "a row of x is set": lambda net, x, y: _written(net, x, y, lambda x: x.__setitem__(0, 0)),
    "x is an output": lambda net, x, y: _written(net, x, y, lambda x: torch.neg(x, out=x)),
    "without gradients": lambda net, x, y: _without_gradients(net, x, y),
    "no head": lambda net, x, y: entropy(x.repeat(1, 1, VOCABULARY // WIDTH), y),
}


def _with_autocast(net: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=BF16):
        return entropy(net.head(x), y)


def _written(
    net: Net, x: torch.Tensor, y: torch.Tensor, write: Callable[[torch.Tensor], object]
) -> torch.Tensor:
    operand = x.detach().clone()
    logits = functional.linear(operand, net.head.weight.detach())
    write(operand)
    return entropy(logits, y) + x.float().mean()


def _without_gradients(net: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits = net.head(x)
    return entropy(logits, y) + x.float().mean()


class Seen:
    """Compiles a program by the pass and AOTAutograd; counts the losses that were found."""

    count = 0
    changed = False

    def __call__(self, gm: fx.GraphModule, example: list[torch.Tensor]) -> Any:
        before = str(gm.graph)
        gemmsmith.inductor_pass()(gm.graph)
        gm.graph.lint()
        gm.recompile()
        self.changed |= str(gm.graph) != before
        self.count += str(gm.graph).count("gemmsmith.linear_cross_entropy")
        return torch._dynamo.lookup_backend("aot_eager")(gm, example)

    def compiled(self, function: Callable[..., Any], **options: Any) -> Any:
        return torch.compile(function, backend=self, **options)


def step(function: Any, net: Net) -> list[torch.Tensor]:
    """The loss, and the gradients of x and of the parameters that have one."""
    torch.manual_seed(6)
    x = torch.randn(2, 5, WIDTH).to(BF16).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (2, 5))
    labels[0, :2] = 3
    out = function(net, x, labels)
    loss = out[0] if isinstance(out, tuple) else out
    gradients = torch.autograd.grad(loss, [x, *net.parameters()], allow_unused=True)
    return [loss.detach(), *(part for part in gradients if part is not None)]


def close(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert (one - other).abs().max() <= 0.02 * other.abs().max()


@pytest.mark.parametrize("name", REPLACED)
def test_a_loss_needs_no_logits(name: str) -> None:
    net, seen = Net(), Seen()
    expected = step(REPLACED[name], net)
    close(step(seen.compiled(REPLACED[name], fullgraph=True), net), expected)
    assert seen.count == (2 if name == "twice" else 1)


@pytest.mark.parametrize("name", LEFT)
def test_a_loss_is_left_alone(name: str) -> None:
    net, seen = Net(), Seen()
    expected = step(LEFT[name], net)
    close(step(seen.compiled(LEFT[name]), net), expected)
    assert not seen.changed


@pytest.mark.parametrize("name", REPLACED)
def test_sizes_that_are_symbols(name: str) -> None:
    net, seen = Net(), Seen()
    expected = step(REPLACED[name], net)
    run = seen.compiled(REPLACED[name], fullgraph=True, dynamic=True)
    close(step(run, net), expected)
    assert seen.count == (2 if name == "twice" else 1)


def test_a_batch_of_another_size_runs_the_same_graph() -> None:
    net, seen = Net(), Seen()
    run = seen.compiled(REPLACED["in FP32"], fullgraph=True, dynamic=True)
    for rows in (2, 3, 7):
        x = torch.randn(rows, 5, WIDTH).to(BF16).requires_grad_()
        labels = torch.randint(0, VOCABULARY, (rows, 5))
        ours, theirs = (
            [loss.detach(), *torch.autograd.grad(loss, [x, net.head.weight])]
            for loss in (function(net, x, labels) for function in (run, REPLACED["in FP32"]))
        )
        close(ours, theirs)
    assert seen.count == 1


def test_a_weight_of_any_size_is_left() -> None:
    seen = Seen()
    run = seen.compiled(
        lambda x, w, y: functional.cross_entropy(functional.linear(x, w), y), dynamic=True
    )
    run(torch.randn(9, WIDTH).to(BF16), torch.randn(VOCABULARY, WIDTH).to(BF16), torch.arange(9))
    assert not seen.changed


@pytest.mark.parametrize("why", ["nothing in use", "one order of sums"])
def test_what_is_never_replaced(why: str, engine: Engine) -> None:
    net, seen = Net(), Seen()
    if why == "nothing in use":
        install(None)
    if why == "one order of sums":
        engine.is_invariant = True
    close(step(seen.compiled(REPLACED["flat"]), net), step(REPLACED["flat"], net))
    assert not seen.changed


def test_without_gradients() -> None:
    net, seen = Net(), Seen()
    x, labels = torch.randn(2, 5, WIDTH).to(BF16), torch.arange(10).view(2, 5)
    with torch.no_grad():
        expected = REPLACED["flat"](net, x, labels)
        close([seen.compiled(REPLACED["flat"])(net, x, labels)], [expected])
    assert seen.count == 1


@pytest.mark.filterwarnings("ignore")  # Dynamo's, of code that it does not know
@pytest.mark.parametrize("tiny", CAUSAL)
def test_models_of_transformers(tiny: Tiny) -> None:
    """A function that returns a model's loss alone."""
    model, seen = tiny.model(), Seen()
    model.train()
    tokens = torch.randint(3, VOCABULARY, (2, 8))

    def loss(tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return out

    def gradients(function: Any) -> list[torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(7)
        out = function(tokens)
        out.backward()
        head = model.get_output_embeddings().weight
        return [out.detach(), head.grad.clone()]

    expected = gradients(loss)
    close(gradients(seen.compiled(loss)), expected)
    # In GPT-2 and OPT a graph ends between the head and its loss, or returns the logits.
    assert seen.count == (tiny.name not in ("GPT-2", "OPT"))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # Inductor's own
def test_inductor_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same pass in both places, as the documentation says."""
    net, ours = Net(), gemmsmith.inductor_pass()
    options: Any = {"joint_custom_pre_pass": ours, "pre_grad_custom_pass": ours}
    expected = step(REPLACED["in FP32"], net)
    calls: list[int] = []
    own = losses.cross_entropy

    def noted(*given: Any) -> Any:
        calls.append(1)
        return own(*given)

    monkeypatch.setattr(losses, "cross_entropy", noted)
    with fresh_inductor_cache():
        for turn in range(2):  # the second time from a cache
            torch._dynamo.reset()
            compiled = torch.compile(REPLACED["in FP32"], options=options, dynamic=False)
            close(step(compiled, net), expected)
            assert len(calls) == turn + 1
