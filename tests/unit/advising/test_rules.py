"""The rules of `gemmsmith advise`: what they see in a step, and both forms of each part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - as programs write it

from gemmsmith.answers.answer import Ratio
from gemmsmith.program.observed import (
    ObservedFunction,
    ObservedOptimizer,
    ObservedStep,
)
from gemmsmith.startup.observing import _Watch
from tuner.advising import checking
from tuner.advising.activations import activations
from tuner.advising.checking import check
from tuner.advising.part import Forms, Run, StepPart
from tuner.advising.rules import RULES

CPU = torch.device("cpu")
Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """`check` takes the program's number of threads."""
    torch._dynamo.utils.counters.clear()  # compiled programs are not observed
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def observed(run: Callable[[], object]) -> list[ObservedFunction]:
    watch = _Watch()
    watch.begin()
    run()
    watch.end()
    return watch.functions


def step(
    *functions: ObservedFunction,
    optimizers: tuple[ObservedOptimizer, ...] = (),
    device: str = "cpu",
) -> ObservedStep:
    return ObservedStep(
        rank=0,
        device=device,
        threads=1,
        milliseconds=[1.0],
        is_compiled=False,
        functions=list(functions),
        optimizers=list(optimizers),
    )


def parts(of: ObservedStep) -> list[StepPart]:
    return [part for rule in RULES for part in rule(of)]


def gelu_tanh(x: Tensor) -> Tensor:
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


def fast_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def after_a_bias(x: Tensor) -> Tensor:
    y = x + torch.ones(8)
    return y * 0.5 * (1.0 + torch.erf(y / math.sqrt(2.0)))


def before_a_gate(x: Tensor) -> Tensor:
    gate, up = x * 3, x + torch.ones(4, 8)
    return gate * torch.sigmoid(gate) * up


def scaled_later(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x)) * 4


def after_a_layer(x: Tensor) -> Tensor:
    y = F.linear(x, torch.ones(8, 8))
    return gelu_tanh(y)


TANH = 'F.gelu(x, approximate="tanh")'
WRITTEN: dict[Callable[[Tensor], Tensor], tuple[str, int] | None] = {
    gelu_tanh: (TANH, 8),
    fast_gelu: (TANH, 9),
    after_a_bias: ("F.gelu(x)", 5),
    before_a_gate: ("F.silu(x)", 2),
    scaled_later: ("F.silu(x)", 4),
    after_a_layer: (TANH, 8),
}


@pytest.mark.parametrize("function", WRITTEN, ids=lambda function: function.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_activation_is_known_by_what_it_computes(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    x = torch.randn(4, 8, dtype=dtype, requires_grad=True)
    if function is after_a_layer:
        x = x.detach().float()
    functions = observed(lambda: function(x))
    seen = [a for f in functions for a in activations(f.calls)]
    assert [(a.code, len(a.calls)) for a in seen] == [WRITTEN[function]]
    (part,) = [part for part in parts(step(*functions)) if part.rule == "activation"]
    assert part.change == seen[0].code
    forms = part.forms(CPU)
    before, *gradients = forms.before()
    after, *others = forms.after()
    for gradient, other in zip(gradients, others, strict=True):
        assert (gradient.float() - other.float()).abs().max() < 0.05
    assert before.dtype is after.dtype
    assert (before.float() - after.float()).abs().max() < 0.05


NEITHER: dict[str, Callable[[Tensor], Tensor]] = {
    "the quick GELU": lambda x: x * torch.sigmoid(1.702 * x),
    "a hyperbolic tangent": lambda x: x * torch.tanh(x) * 0.5,
    "one of torch's": lambda x: F.gelu(x) + F.silu(x) + torch.sigmoid(x),
    "a GELU with another constant": lambda x: (
        0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.05 * x**3)))
    ),
    "of two tensors": lambda x: x * torch.sigmoid(x.clone()),
    "written to on the way": lambda x: x * torch.sigmoid(x).mul_(2),
    "of a row": lambda x: x * torch.sigmoid(x[:1]),
}


@pytest.mark.parametrize("function", NEITHER.values(), ids=NEITHER)
def test_what_is_no_activation_of_torch_is_not_advised(
    function: Callable[[Tensor], Tensor],
) -> None:
    functions = observed(lambda: function(torch.randn(4, 8)))
    assert functions
    assert parts(step(*functions)) == []


def attention(mask: Tensor | None, dtype: torch.dtype) -> Callable[[], object]:
    q, k, v = (torch.randn(2, 3, 16, 8).to(dtype).requires_grad_() for _ in range(3))

    def run() -> Tensor:
        scores = torch.matmul(q, k.transpose(2, 3)) * 8**-0.5
        scores = scores if mask is None else scores + mask
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(dtype)
        return torch.matmul(F.dropout(weights, 0.1), v)

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masks", [False, True])
def test_attention_with_its_scores_in_memory(masks: bool, dtype: torch.dtype) -> None:
    mask = torch.zeros(1, 1, 16, 16).masked_fill(torch.ones(16, 16).triu(1) > 0, float("-inf"))
    functions = observed(attention(mask.to(dtype) if masks else None, dtype))
    (part,) = parts(step(*functions))
    assert part.what == "attention of 6 heads, 16 × 16 scores in memory"
    assert ("v, mask)" in part.change) == masks
    assert part.place.startswith("tests/unit/advising/test_rules.py:")
    forms = part.forms(CPU)
    before, *gradients = forms.before()
    after, *others = forms.after()
    for gradient, other in zip(gradients, others, strict=True):
        assert (gradient.float() - other.float()).abs().max() < 0.05
    assert before.shape == after.shape == (1, 6, 16, 8)
    assert (before.float() - after.float()).abs().max() < 0.05


def test_torchs_own_attention_and_other_softmaxes_are_left_alone() -> None:
    q = torch.randn(2, 3, 16, 8)
    functions = observed(
        lambda: (F.scaled_dot_product_attention(q, q, q), (q @ q.mT).softmax(-1), q[0] @ q[0].mT)
    )
    assert parts(step(*functions)) == []


@pytest.mark.parametrize(
    ("n", "k", "dtype", "change"),
    [
        (50257, 64, torch.bfloat16, "nn.Linear(64, 50304): pad 50257 → 50304"),
        (64, 100, torch.bfloat16, "nn.Linear(128, 64): pad 100 → 128"),
        (33, 33, torch.float32, "nn.Linear(64, 64): pad 33 → 64 and 33 → 64"),
        (36, 36, torch.bfloat16, "nn.Linear(64, 64): pad 36 → 64 and 36 → 64"),
        (36, 36, torch.float32, None),
        (50304, 64, torch.bfloat16, None),
        (2, 64, torch.bfloat16, None),  # a head for two classes
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_sizes_that_are_not_aligned(
    n: int, k: int, dtype: torch.dtype, change: str | None, bias: bool
) -> None:
    layer = torch.nn.Linear(k, n, bias=bias, dtype=dtype)
    functions = observed(lambda: layer(torch.ones(2, 8, k, dtype=dtype)))
    changes = [
        part.change.removesuffix(", and ignore what is added") for part in parts(step(*functions))
    ]
    assert changes == ([] if change is None else [change])
    for part in parts(step(*functions)):
        forms = part.forms(CPU)
        assert (*forms.before(), *forms.after()) == ()


@pytest.mark.parametrize(
    ("dtype", "columns", "in_fp32", "seen"),
    [
        (torch.bfloat16, 1024, True, True),
        (torch.float16, 1024, True, True),
        (torch.bfloat16, 1024, False, False),
        (torch.bfloat16, 512, True, False),  # a few classes
        (torch.float32, 1024, True, False),  # the program computes in FP32
    ],
)
def test_fp32_logits(dtype: torch.dtype, columns: int, in_fp32: bool, seen: bool) -> None:
    head = torch.nn.Linear(16, columns, bias=False, dtype=dtype)
    x = torch.randn(2, 9, 16, dtype=dtype, requires_grad=True)

    def run() -> Tensor:
        logits = head(x)[:, :-1].reshape(-1, columns)
        return F.cross_entropy(logits.float() if in_fp32 else logits, torch.ones(16).long())

    functions = observed(run)
    logits = [part for part in parts(step(*functions)) if part.rule == "logits"]
    assert [part.what for part in logits] == (
        [f"head and loss with FP32 logits [16, {columns}]"] if seen else []
    )
    for part in logits:
        forms = part.forms(CPU)
        loss, *gradients = forms.before()
        other, *others = forms.after()
        torch.testing.assert_close(loss, other, rtol=0.01, atol=0.0)
        assert len(gradients) == 2
        for before, after in zip(gradients, others, strict=True):
            assert (before - after).abs().max() <= 0.02 * before.abs().max()


def optimizer(kind: str, **options: bool | float | tuple[float, ...] | None) -> ObservedOptimizer:
    return ObservedOptimizer(
        kind=kind, options=options, groups=[[("float32", (8, 8))] * 3, [("bfloat16", (8,))]]
    )


@pytest.mark.parametrize(
    ("of", "device", "what"),
    [
        (optimizer("AdamW"), "cuda", "AdamW, with foreach"),
        (optimizer("AdamW"), "cpu", "AdamW, in a loop over parameters"),
        (optimizer("Adam", foreach=False), "cuda", "Adam, in a loop over parameters"),
        (optimizer("SGD", momentum=0.9, foreach=True), "cpu", "SGD, with foreach"),
        (optimizer("Adagrad", eps=1e-8), "cpu", "Adagrad, in a loop over parameters"),
        (optimizer("AdamW", fused=True), "cuda", None),
        (optimizer("Adam", differentiable=True), "cuda", None),
        (optimizer("RMSprop"), "cuda", None),
        (optimizer(""), "cuda", None),  # of another package
    ],
)  # fmt: skip
def test_optimizers_that_are_not_fused(
    of: ObservedOptimizer, device: str, what: str | None
) -> None:
    seen = parts(step(optimizers=(of,), device=device))
    whats = [part.what.replace(" steps 4 parameters", ",") for part in seen]
    assert whats == ([] if what is None else [what])
    for part in seen:
        forms = part.forms(CPU)
        assert forms.scale == 1.0
        assert (*forms.before(), *forms.after()) == ()


def test_a_large_optimizer_is_measured_on_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    # 6 times 784 bytes; half of it is room for every second tensor.
    monkeypatch.setattr("tuner.advising.rules.HOST_ROOM", 2400)
    (part,) = parts(step(optimizers=(optimizer("AdamW"),)))
    assert part.forms(CPU).scale == pytest.approx(784 / 512)


def test_products_without_tf32_are_a_gpus() -> None:
    a = torch.randn(8, 16, requires_grad=True)
    functions = observed(lambda: a @ a.t())
    assert parts(step(*functions)) == []
    (part,) = parts(step(*functions, device="cuda"))
    assert part.what == "FP32 product [8, 16] by [16, 8] without TF32"
    forms = part.forms(CPU)
    for before, after in zip(forms.before(), forms.after(), strict=True):
        torch.testing.assert_close(before, after)
    assert torch.get_float32_matmul_precision() == "highest"


def busy(ms: float) -> list[Tensor]:
    torch.ones(1)
    end = checking.time.perf_counter() + ms / 1e3
    while checking.time.perf_counter() < end:
        pass
    return [torch.ones(4), torch.ones(4)]


def checked(
    monkeypatch: pytest.MonkeyPatch,
    before: Run,
    after: Run,
    *,
    calls: int = 1,
    least_ms: float = 0.1,
) -> list[checking.Checked]:
    part = StepPart(
        rule="x", what="x", change="y", place="", calls=calls, forms=lambda _: Forms(before, after)
    )
    monkeypatch.setattr(checking, "RULES", (lambda _: iter([part, part]),))
    return check(step(), CPU, least_ms)


def test_what_is_measured_to_be_faster_is_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    (result,) = checked(monkeypatch, lambda: busy(2), lambda: busy(0.5), calls=3)
    assert result.why_not == ""
    assert result.gain is not None
    assert result.gain.median > 1.02
    assert result.after_ms is not None
    assert result.ms > result.after_ms
    assert result.ms >= 12  # both parts, three calls each


def fails() -> list[Tensor]:
    raise RuntimeError("out of memory\nmore")


@pytest.mark.parametrize(
    ("after", "why"),
    [
        (lambda: busy(4), "it is only 0."),
        (lambda: [busy(1)[0], torch.full((4,), 1.2)], "its result or a gradient differs by 20.0%"),
        (lambda: [busy(1)[0] * math.nan, torch.ones(4)], "its result or a gradient differs by nan"),
        (fails, "it cannot be run here: out of memory"),
    ],
)
def test_what_is_not_faster_or_not_the_same_is_not_advised(
    monkeypatch: pytest.MonkeyPatch, after: Run, why: str
) -> None:
    (result,) = checked(monkeypatch, lambda: busy(2), after)
    assert result.why_not.startswith(why)


@pytest.mark.parametrize(
    ("gain", "is_advised"),
    [((1.03, 1.01, 1.05), True), ((1.019, 1.01, 1.03), False), ((1.5, 0.99, 1.6), False)],
)
def test_a_gain_must_be_certain_and_worth_a_change(
    gain: tuple[float, float, float], is_advised: bool
) -> None:
    median, low, high = gain
    forms = Forms(tuple, tuple)
    why_not = checking._why_not(forms, Ratio(median=median, ci_low=low, ci_high=high))
    assert (why_not == "") == is_advised


def test_what_takes_too_little_has_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checked(monkeypatch, lambda: busy(1), lambda: busy(0.1), least_ms=50.0) == []
