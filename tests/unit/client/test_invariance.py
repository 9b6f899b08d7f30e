"""`check_invariance` names the first module and operator whose rows depend on their batch.

Products here are sums of elementwise terms in an order of the test's own: their bits depend on
nothing else on any machine. One of them turns its order round beyond a number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import gemmsmith
from tests.support.tiny_models import MODELS

WIDTH, LENGTH, BATCH = 8, 3, 4


@torch.library.custom_op("test_invariance::mm", mutates_args=())
def ordered(x: torch.Tensor, weight: torch.Tensor, most: int) -> torch.Tensor:
    """x · weightᵀ, summed along K upwards for up to `most` rows, else downwards."""
    order = range(x.shape[1]) if len(x) <= most else reversed(range(x.shape[1]))
    total = torch.zeros(len(x), len(weight), dtype=x.dtype)
    for k in order:
        total = total + x[:, k, None] * weight[:, k]
    return total


class Product(nn.Module):
    """A linear layer whose order of summation turns round beyond `most` rows."""

    def __init__(self, most: int = 10**6, wide: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, wide))
        self.most = most

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = ordered(x.reshape(-1, x.shape[-1]), self.weight.to(x.dtype), self.most)
        return rows.reshape(*x.shape[:-1], len(self.weight))


class Attention(nn.Module):
    """Causal, with ReLU for softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = Product(), Product(), Product()

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[Any, Any]:
        query, key, value = self.query(x), self.key(x), self.value(x)
        scores = sum(query[:, :, None, h] * key[:, None, :, h] for h in range(WIDTH))
        weights = torch.relu(scores).tril() if mask is None else torch.relu(scores) * mask[:, None]
        return sum(weights[:, :, s, None] * value[:, s, None] for s in range(x.shape[1])), weights


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.up, self.act, self.down = Product(), nn.ReLU(inplace=True), Product()

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.attention(self.norm(x), mask)[0]
        return x + self.down(self.act(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x, attention_mask)
        return x


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(3)


def ids() -> torch.Tensor:
    return torch.randint(50, (BATCH, LENGTH))


def rows(*size: int) -> torch.Tensor:
    return torch.randn(BATCH, *(size or (WIDTH,)))


def first_of(model: Callable[..., Any], inputs: Any, **options: Any) -> Any:
    report = gemmsmith.check_invariance(model, inputs, **options)
    assert not report
    assert report.first is not None
    return report.first


def test_a_model_whose_rows_do_not_depend_on_the_batch() -> None:
    report = gemmsmith.check_invariance(Model(), ids())
    assert report
    assert report.first is None
    assert (report.modules, report.unread) == (20, 1), "a ModuleList does not run"
    assert report.batches == ("again", "alone", "halves", "reordered", "among", "repeated")
    assert str(report).splitlines()[0] == "gemmsmith: each row has the same bits in all batches"


@pytest.mark.parametrize(
    ("most", "batch", "differing", "of"),
    [
        (LENGTH * BATCH - 1, "alone", BATCH, BATCH),
        (LENGTH * BATCH, "among", BATCH * 3 // 2, BATCH * 3 // 2),
        (LENGTH * BATCH * 3 // 2, "repeated", BATCH * 2, BATCH * 2),
    ],
)
@pytest.mark.parametrize("name", ["blocks.0.attention.key", "blocks.1.up", "blocks.1.down"])
def test_the_module_and_its_operator_are_named(
    name: str, most: int, batch: str, differing: int, of: int
) -> None:
    model = Model()
    model.get_submodule(name).most = most
    report = gemmsmith.check_invariance(model, ids())
    first = report.first
    assert first is not None
    assert (first.module, first.kind, first.call) == (name, "Product", 0)
    assert (first.operator, first.batch) == ("test_invariance.mm", batch)
    assert 1 <= first.rows <= differing
    assert first.of == of
    assert (first.ulp > 0, first.dtype) == (True, torch.float32)
    assert "another order of summation" in first.remedy
    for text in (f"{name} (Product)", "test_invariance.mm", batch, f"of {of} rows", "float32"):
        assert text in str(report), text


def test_a_sum_that_python_splits() -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.product = Product()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) < BATCH:
                return self.product(x)
            half = x.clone()
            half[:, : WIDTH // 2] = 0
            return self.product(x - half) + self.product(half)

    first = first_of(nn.Sequential(Product(), Split(), Product()), rows())
    assert (first.module, first.operator, first.remedy) == ("1", "", "")
    assert "inside" in str(gemmsmith.check_invariance(Split(), rows()))


def test_a_module_that_runs_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.product = Product()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.product.most = 10**6
            x = self.product(x)
            self.product.most = 1
            return self.product(x)

    report = gemmsmith.check_invariance(Twice(), rows())
    assert report.first is not None
    assert (report.first.module, report.first.call) == ("product", 1)
    assert "call 2" in str(report)


PARTS: list[tuple[str, Callable[[], nn.Module], Callable[[], torch.Tensor]]] = [
    ("layer norm", lambda: nn.LayerNorm(WIDTH), rows),
    ("RMS norm", lambda: nn.RMSNorm(WIDTH), rows),
    ("batch norm", lambda: nn.BatchNorm1d(WIDTH).eval(), rows),
    ("group norm", lambda: nn.GroupNorm(2, WIDTH), lambda: rows(WIDTH, 5)),
    ("dropout", lambda: nn.Dropout(0.5).eval(), rows),
    ("in place", lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Hardtanh(inplace=True)), rows),
    ("one result for all rows", lambda: Made(lambda x: (x + 1, x.sum(), torch.ones(3))), rows),
    ("nothing to compare but the result", lambda: Made(lambda x: x * 2), rows),
    ("integers, flags, complex numbers", lambda: Made(lambda x: (x.long(), x > 0, x * 1j)), rows),
    ("half precision", lambda: Made(lambda x: (x.half(), x.bfloat16(), x.double())), rows),
    ("no number", lambda: Made(lambda x: (x.log(), x / 0)), rows),
    ("none and text", lambda: Made(lambda x: {"x": x, "none": None, "text": "text"}), rows),
    ("an empty result", lambda: Made(lambda x: (x, x[:, :0])), rows),
    ("rows by rows", lambda: Made(lambda x: (x, x[:, None, 0] * x[None, :, 0])), rows),
    ("a view", lambda: Made(lambda x: x.T.expand(2, WIDTH, -1)), rows),
]


class Made(nn.Module):
    def __init__(self, compute: Callable[..., Any]) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, *args: Any, **named: Any) -> Any:
        return self.compute(*args, **named)


@pytest.mark.parametrize(("make", "inputs"), [p[1:] for p in PARTS], ids=[p[0] for p in PARTS])
def test_parts_that_do_not_depend_on_the_batch(
    make: Callable[[], nn.Module], inputs: Callable[[], torch.Tensor]
) -> None:
    report = gemmsmith.check_invariance(nn.Sequential(make(), nn.Identity()), inputs())
    assert report, report


def test_statistics_of_the_batch() -> None:
    norm = Made(lambda x: nn.functional.batch_norm(x, None, None, training=True))
    first = first_of(nn.Sequential(Product(), norm), rows(WIDTH, WIDTH))
    assert (first.module, first.kind, first.batch) == ("1", "Made", "alone")
    assert "batch_norm" in first.operator
    assert "model.eval()" in first.remedy
    centred = nn.Sequential(Product(), Made(lambda x: x - x.mean(0)))
    assert first_of(centred, rows()).operator == "", "the mean has no rows"


@dataclass
class Output:
    states: tuple[torch.Tensor, ...]
    loss: torch.Tensor


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: (x.mean(), x),
        lambda x: {"loss": x.mean(), "states": [x, x]},
        lambda x: Output(states=(x,), loss=x.mean()),
    ],
    ids=["tuple", "dictionary", "dataclass"],
)
def test_results_within_others(wrap: Callable[[torch.Tensor], Any]) -> None:
    class Wrapped(Product):
        def forward(self, x: torch.Tensor) -> Any:
            return wrap(super().forward(x))

    model = Wrapped(most=1)
    assert first_of(model, rows()).module == ""
    model.most = 10**6
    assert gemmsmith.check_invariance(model, rows())


@pytest.mark.parametrize("order", ["batch outside", "batch inside"])
def test_rows_merged_with_the_sequence(order: str) -> None:
    class Merged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.product = Product()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x if order == "batch outside" else x.transpose(0, 1)
            return self.product(x.flatten(0, 1)).view(x.shape)

    model = Merged()
    assert gemmsmith.check_invariance(model, rows(LENGTH, WIDTH))
    model.product.most = LENGTH
    first = first_of(model, rows(LENGTH, WIDTH))
    assert (first.module, first.operator) == ("product", "test_invariance.mm")


def test_the_batch_in_another_dimension() -> None:
    model = nn.Sequential(Product(), Product())
    x = torch.randn(LENGTH, BATCH, WIDTH)
    assert gemmsmith.check_invariance(model, x, dim=1)
    assert gemmsmith.check_invariance(model, x, dim=-2)
    model[1].most = LENGTH
    assert first_of(model, x, dim=1).module == "1"


def test_experts_that_get_other_numbers_of_rows() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([Product(), Product(), Product()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            chosen = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
            out = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                out[chosen == number] = expert(x[chosen == number])
            return out

    for seed in range(5):
        torch.manual_seed(seed)
        model = nn.Sequential(Product(), Experts())
        assert gemmsmith.check_invariance(model, rows(), seed=seed)
        for expert in model[1].experts:
            expert.most = 1
        assert first_of(model, torch.randn(8, WIDTH), seed=seed).module.startswith("1")


def test_other_arguments_stay_as_they_are() -> None:
    def compute(x: torch.Tensor, scale: torch.Tensor, *, shift: torch.Tensor, flag: bool) -> Any:
        assert flag
        assert scale.ndim == 0
        assert shift.shape == (1, WIDTH)
        return x * scale + shift

    made = Made(compute)
    inputs = {"x": rows(), "scale": torch.tensor(2.0), "shift": torch.ones(1, WIDTH), "flag": True}
    assert gemmsmith.check_invariance(made, inputs)
    assert gemmsmith.check_invariance(lambda x, y: x + y, (rows(), rows()))
    assert gemmsmith.check_invariance(lambda x, more: x + more["y"], (rows(), {"y": rows()}))


def test_padding_on_the_right() -> None:
    class Mean(nn.Module):
        def __init__(self, *, masked: bool) -> None:
            super().__init__()
            self.masked = masked

        def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            weights = attention_mask if self.masked else torch.ones_like(attention_mask)
            x = (x * weights[:, :, None]).cumsum(1)
            return x[:, -1] / weights.sum(1)[:, None]

    masks = torch.ones(BATCH, LENGTH, dtype=torch.long)
    inputs = {"x": rows(LENGTH, 1), "attention_mask": masks}
    report = gemmsmith.check_invariance(Mean(masked=True), inputs, sequence=1)
    assert report, report
    assert report.batches[-1] == "padded"
    assert gemmsmith.check_invariance(Mean(masked=False), inputs), "it is not padded"
    assert first_of(Mean(masked=False), inputs, sequence=1).batch == "padded"


def test_results_of_padded_batches_are_cut() -> None:
    inputs = {"input_ids": ids(), "attention_mask": torch.ones(BATCH, LENGTH)}
    report = gemmsmith.check_invariance(Model(), inputs, sequence=1)
    assert report, report
    model = Model()
    model.blocks[0].up.most = 2 * BATCH * LENGTH  # as many as without padding
    assert gemmsmith.check_invariance(model, inputs, sequence=1)
    model.blocks[0].up.most = BATCH * LENGTH * 3 // 2
    assert first_of(model, inputs, sequence=1).module == "blocks.0.up"


def test_bits_are_compared() -> None:
    nan = rows()
    nan[1] = float("nan")
    assert gemmsmith.check_invariance(nn.Sequential(Product(), Product()), nan)
    zeros = Made(lambda x: x * 0 if len(x) > 1 else x * -0.0)
    first = first_of(zeros, rows().abs())
    assert (first.rows, first.ulp) == (BATCH, 0)


def test_units_in_the_last_place() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        step = 2 * torch.finfo(dtype).eps

        def compute(x: torch.Tensor, step: float = step) -> torch.Tensor:
            return x - x + 1 + (3 * step if len(x) > 1 else 0)

        first = first_of(Made(compute), rows().to(dtype))
        assert (first.ulp, first.dtype) == (6, dtype)
    counts = Made(lambda x: (x * 0).long() + len(x))
    assert first_of(counts, rows()).ulp == BATCH - 1


def test_a_model_that_does_not_repeat_itself() -> None:
    class Counting(nn.Module):
        count = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return x + self.count

    first = first_of(nn.Sequential(Product(), Counting()), rows())
    assert (first.module, first.batch, first.rows) == ("1", "again", BATCH)
    assert "use_deterministic_algorithms" in first.remedy


def test_random_numbers_are_the_same_in_each_run() -> None:
    model, inputs = nn.Sequential(Product(), Made(torch.rand_like)), rows()
    state = torch.get_rng_state()
    first = first_of(model, inputs)
    assert (first.module, first.operator, first.batch) == ("1", "aten.rand_like", "alone")
    assert "random numbers" in first.remedy
    assert torch.equal(torch.get_rng_state(), state)


class Fused(nn.Module):
    """Computes in another order if its child has no hooks, as fused layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Product()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inner._forward_hooks or self.inner._forward_pre_hooks:
            return self.inner(x)
        return ordered(x, self.inner.weight, 0 if len(x) < BATCH else -1) * 3


def test_hooks_change_nothing_that_runs() -> None:
    model = nn.Sequential(nn.Sequential(Product(), Fused()))
    assert gemmsmith.check_invariance(model, rows()).unread == 1
    model[0][1].inner.most = 1  # would differ, but does not run
    report = gemmsmith.check_invariance(model, rows())
    assert report, report
    model[0][0].most = 1
    assert first_of(model, rows()).module == "0.0"


def hooks_of(model: nn.Module) -> list[Any]:
    return [
        {name: list(hooks) for name, hooks in vars(module).items() if "hooks" in name}
        for module in model.modules()
    ]


def test_hooks_of_the_program_stay() -> None:
    model = Model()
    seen: list[str] = []
    model.blocks[0].register_forward_pre_hook(lambda _, args: (args[0] * 2, *args[1:]))
    model.blocks[0].up.register_forward_hook(lambda *_: seen.append("up"))
    model.blocks[1].up.register_forward_hook(
        lambda _m, args, out: out * 2 if len(args[0]) > 1 else out
    )
    before = hooks_of(model)
    assert first_of(model, ids()).module == "blocks.1.up"
    assert seen
    assert hooks_of(model) == before


@pytest.mark.parametrize("runs", range(0, 35, 3))
def test_nothing_stays_after_an_error(runs: int) -> None:
    class Failing(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.calls == runs:
                raise ArithmeticError
            self.calls += 1
            torch.rand(1)
            return x + (len(x) == 1)

    model = nn.Sequential(Product(), nn.Sequential(Failing()), Product())
    inputs, before, state = rows(), hooks_of(model), torch.get_rng_state()
    with pytest.raises(ArithmeticError):
        gemmsmith.check_invariance(model, inputs)
    assert hooks_of(model) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()
    assert not _get_current_dispatch_mode_stack()


def test_a_module_that_raises_and_is_caught() -> None:
    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.picky, self.product = Made(lambda x: x.view(7)), Product(most=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return self.picky(x)
            except RuntimeError:
                return self.product(x)

    assert first_of(Careful(), rows()).module == "product"


def test_the_model_and_its_inputs_are_unchanged() -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.BatchNorm1d(WIDTH).eval(), Product()).double()
    x = rows().double()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    copy, modes = x.clone(), [module.training for module in model.modules()]
    assert gemmsmith.check_invariance(model, x)
    assert torch.equal(x, copy)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert all(weight.grad is None for weight in model.parameters())


def test_a_compiled_model() -> None:
    hooked: list[Any] = []

    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hooked.extend(self._forward_hooks.values())
            return x + x.mean()

    model = nn.Sequential(Made(torch.relu), nn.Sequential(Inner()), Made(torch.neg))
    assert first_of(torch.compile(model, backend="eager"), rows()).kind == "OptimizedModule"
    assert not hooked
    model[1] = torch.compile(model[1], backend="eager")
    assert first_of(model, rows()).module == "1"
    assert not hooked
    model[1] = nn.Sequential(Inner())
    model[1].compile(backend="eager")
    assert first_of(model, rows()).module == "", "hooks of the module would be compiled"
    assert not hooked
    assert first_of(nn.Sequential(Inner()), rows()).module == "0"
    assert hooked


def test_llama() -> None:
    llama = next(tiny for tiny in MODELS if tiny.name == "Llama").model(torch.float32)
    projection = Product(most=LENGTH, wide=llama.config.hidden_size)
    projection.weight = llama.model.layers[0].self_attn.q_proj.weight
    llama.model.layers[0].self_attn.q_proj = projection
    given = {"input_ids": ids(), "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.long)}
    report = gemmsmith.check_invariance(llama, given | {"use_cache": False}, sequence=1)
    assert report.first is not None
    assert report.first.module == "model.layers.0.self_attn.q_proj"
    assert report.first.operator == "test_invariance.mm"
    assert report.modules > 25


REFUSED: list[tuple[str, nn.Module | Callable[..., Any], Any, dict[str, Any], str]] = [
    ("no tensor", nn.Identity(), {"x": 3}, {}, "no tensor: pass the tensors"),
    ("nothing", nn.Identity(), (), {}, "no tensor: pass the tensors"),
    ("a number", nn.Identity(), torch.tensor(1.0), {}, "no input has a dimension 0"),
    ("no such dimension", nn.Identity(), torch.ones(4, 2), {"dim": 2}, "has a dimension 2"),
    ("one row", nn.Identity(), torch.ones(1, 2), {}, "1 rows in dimension 0: pass two or more"),
    ("no row", nn.Identity(), torch.ones(0, 2), {}, "0 rows in dimension 0"),
    ("two sizes", torch.add, (torch.ones(4), torch.ones(2)), {}, "2 or 4 rows in dimension 0"),
    ("no data", nn.Identity(), torch.ones(2, device="meta"), {}, "must have data"),
    ("two devices", torch.add, (torch.ones(2), torch.ones(2, device="meta")), {}, "on one device"),
    (
        "another device",
        nn.Linear(2, 2, device="meta"),
        torch.ones(2, 2),
        {},
        "the model is on meta",
    ),
    ("dropout", nn.Sequential(nn.Dropout(0.1)), torch.ones(2), {}, "call model.eval"),
    ("dropout of attention", nn.MultiheadAttention(2, 1, 0.1), torch.ones(2), {}, "model.eval"),
    ("statistics", nn.BatchNorm1d(2), torch.ones(2, 2), {}, "statistics of the batch"),
    ("no rows", Made(lambda x: x.sum()), torch.ones(2, 2), {}, "no result grows with dimension 0"),
    ("no mask", nn.Identity(), torch.ones(2, 2), {"sequence": 1}, "needs an attention_mask"),
    (
        "no such sequence",
        nn.Identity(),
        {"attention_mask": torch.ones(2, 2)},
        {"sequence": 2},
        "attention_mask with a dimension 2",
    ),
]


@pytest.mark.parametrize(
    ("model", "inputs", "options", "message"), [c[1:] for c in REFUSED], ids=[c[0] for c in REFUSED]
)
def test_refused(model: Any, inputs: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gemmsmith.check_invariance(model, inputs, **options)
