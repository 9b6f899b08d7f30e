"""Heads of patched models, whose logits are not computed where only a loss reads them."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch._dynamo import compiled_autograd
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import gemmsmith
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.models import deferred
from gemmsmith.ops.models.automatic import every_model
from gemmsmith.ops.models.deferred_logits import DeferredLogits
from gemmsmith.ops.products import backward, losses
from gemmsmith.program.built import remember
from gemmsmith.program.variables import DEFER_LOGITS_VARIABLE
from tests.support.patched import is_patched
from tests.support.stand_in import Host, installed
from tests.support.tiny_models import MODELS, Tiny

BF16 = torch.bfloat16
WIDTH, VOCABULARY = 16, 64
LANGUAGE = [
    tiny for tiny in MODELS if tiny.made_by in ("AutoModelForCausalLM", "AutoModelForMaskedLM")
]
Tensors = list[torch.Tensor]
Sizes = list[tuple[int, ...]]


@pytest.fixture(autouse=True)
def _narrow(engine: Engine, without_binding: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "LEAST_VOCABULARY", VOCABULARY)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Sizes:
    """The weights of layers whose deferred values were computed."""
    seen: Sizes = []
    own = deferred._linear

    def noted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        seen.append(tuple(weight.shape))
        return own(x, weight, bias)

    monkeypatch.setattr(deferred, "_linear", noted)
    return seen


class Model(nn.Module):
    """As nanoGPT: a body, a head and its loss in one forward."""

    def __init__(self, bias: bool = True, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.head(self.body(self.embedding(tokens)))
        flat = logits.view(-1, logits.shape[-1])
        return logits, functional.cross_entropy(flat, labels.view(-1), ignore_index=3)


def made(dtype: torch.dtype = BF16, **options: Any) -> Model:
    return Model(**options).to(dtype)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(6)
    return torch.randint(VOCABULARY, (4, 9)), torch.randint(VOCABULARY, (4, 9))


def gradients(model: nn.Module) -> Tensors:
    parts = [part.grad.clone() for part in model.parameters() if part.grad is not None]
    model.zero_grad()
    return parts


def step(model: Any, run: Callable[[Any], Any] = lambda model: model(*batch())[1]) -> Tensors:
    """The loss and the gradients."""
    loss = run(model)
    loss.backward()
    return [loss.detach(), *gradients(model)]


def distance(ours: Tensors, exact: Tensors) -> float:
    """Relative, of all tensors together."""
    pairs = [(mine.double(), right.double()) for mine, right in zip(ours, exact, strict=True)]
    off = sum((mine - right).square().sum() for mine, right in pairs)
    return float((off / sum(right.square().sum() for _, right in pairs)).sqrt())


def no_farther(ours: Tensors, torchs: Tensors, exact: Tensors) -> None:
    assert abs(float(ours[0]) - float(exact[0])) <= 4e-3 * float(exact[0])
    assert distance(ours[1:], exact[1:]) <= 1.3 * distance(torchs[1:], exact[1:]) + 1e-3


def of_transformers(model: Any, **more: Any) -> Any:
    tokens = (torch.arange(12).view(2, 6) * 7) % 61 + 3
    labels = tokens.clone()
    labels[0, :3] = -100
    return model(input_ids=tokens, labels=labels, **more)


@pytest.mark.parametrize("items", [None, 7, torch.tensor(7)], ids=str)
@pytest.mark.parametrize("tiny", LANGUAGE, ids=lambda tiny: tiny.name)
def test_models_of_transformers(
    tiny: Tiny, items: int | torch.Tensor | None, computed: Sizes
) -> None:
    more = {} if items is None or "Causal" not in tiny.made_by else {"num_items_in_batch": items}

    def loss(model: Any) -> Any:
        return of_transformers(model, **more).loss

    model = tiny.model().train()
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    torchs = step(model, loss)
    exact = copy.deepcopy(model).double()
    with gemmsmith.patch(model):
        step(model, loss)  # other wide layers are known now
        computed.clear()
        ours = step(model, loss)
        assert computed == []
        out = of_transformers(model)
        assert type(out.logits) is DeferredLogits
        assert out.logits.deferred.head.has_loss
        out.logits.argmax()
        assert computed[-1][0] == VOCABULARY
    assert ours[0].dtype is torchs[0].dtype
    if hasattr(model.config, "num_experts_per_tok"):  # torch has no FP64 for experts
        assert distance(ours, torchs) < 0.05
    else:
        no_farther(ours, torchs, step(exact, loss))


def stays_within_torchs_own_distance(make: Callable[[], Any], data: dict[str, Any]) -> None:
    """200 steps: the losses of a patched model are as far from torch's as torch's are from its own
    with the sequences in another order, at most three times.
    """

    def losses_of(data: dict[str, Any], *, patched: bool) -> torch.Tensor:
        model, losses = make(), []
        optimizer = torch.optim.AdamW(model.parameters())
        with gemmsmith.patch(model) if patched else contextlib.nullcontext():
            for number in range(200):
                out = model(**data)
                loss = out.loss
                assert type(out.logits) is (DeferredLogits if patched else torch.Tensor)
                if number % 2:
                    del out  # else the program holds logits
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach().float())
        return torch.stack(losses)

    torchs = losses_of(data, patched=False)
    others = losses_of({name: part.flip(0) for name, part in data.items()}, patched=False)
    ours = losses_of(data, patched=True)
    assert (ours - torchs).abs().max() <= 3 * (torchs - others).abs().max() + 1e-3 * torchs.max()
    assert ours[-1] < 0.5 * ours[0]


def test_training_stays_within_torchs_own_distance() -> None:
    tiny = next(tiny for tiny in LANGUAGE if tiny.name == "Llama")
    tokens = torch.randint(3, 64, (8, 12))
    stays_within_torchs_own_distance(
        lambda: tiny.model().train(), {"input_ids": tokens, "labels": tokens}
    )


@pytest.mark.parametrize("frozen", ["", "head", "body"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_frozen_and_tied(bias: bool, tied: bool, frozen: str, computed: Sizes) -> None:
    model = made(bias=bias, tied=tied)
    for name in ("embedding", "body") if frozen == "body" else (frozen,) if frozen else ():
        getattr(model, name).requires_grad_(False)
    if not any(part.requires_grad for part in model.parameters()):
        return
    torchs, exact = step(model), step(copy.deepcopy(model).double())
    with gemmsmith.patch(model):
        ours = step(model)
    assert computed == []
    no_farther(ours, torchs, exact)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_autocast(dtype: torch.dtype, computed: Sizes) -> None:
    def within(model: Any) -> Any:
        with torch.autocast("cpu", dtype):
            return model(*batch())[1]

    def after(model: Any) -> Any:
        with torch.autocast("cpu", dtype):
            logits, _ = model(*batch())
        return functional.cross_entropy(logits.float().view(-1, VOCABULARY), batch()[1].view(-1))

    model = made(torch.float32)
    for run in (within, after):
        torchs, exact = step(model, run), step(copy.deepcopy(model).double(), run)
        with gemmsmith.patch(model):
            ours = step(model, run)
        assert [part.dtype for part in ours] == [part.dtype for part in torchs]
        no_farther(ours, torchs, exact)
    assert computed == []


def test_accumulated_gradients() -> None:
    def twice(model: Any) -> Any:
        model(*batch())[1].backward()
        return model(batch()[1], batch()[0])[1]

    model = made()
    torchs, exact = step(model, twice), step(copy.deepcopy(model).double(), twice)
    with gemmsmith.patch(model):
        no_farther(step(model, twice), torchs, exact)


@pytest.mark.parametrize("bf16", [False, True])
def test_trainer(bf16: bool, computed: Sizes, tmp_path: Path) -> None:
    tokens = [torch.arange(6) + first for first in range(3, 19)]
    losses = []
    for patched in (False, True):
        model = LANGUAGE[0].model(torch.float32 if bf16 else BF16)
        trainer = transformers.Trainer(
            model=model,
            args=transformers.TrainingArguments(
                output_dir=str(tmp_path),
                use_cpu=True,
                bf16=bf16,
                max_steps=3,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=2,
                report_to=[],
                save_strategy="no",
                logging_steps=1,
                disable_tqdm=True,
                learning_rate=1e-2,
            ),
            train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        )
        with gemmsmith.patch(model) if patched else contextlib.nullcontext():
            trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)
    assert losses[0][0] != losses[1][0]  # without the roundings of logits
    assert computed == []


def is_deferred(model: Any, run: Callable[[Any], Any] = lambda model: model(*batch())[0]) -> bool:
    return type(run(model)) is DeferredLogits


def test_every_model_of_a_process() -> None:
    remember()
    model = nn.ModuleList([made()])
    with every_model():
        assert is_deferred(model[0])
    assert not is_deferred(model[0])


def test_only_with_winners_and_where_the_variable_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(bias=False)
    with gemmsmith.patch(model):
        assert is_deferred(model)
        with installed(None):
            assert not is_deferred(model)
        monkeypatch.setenv(DEFER_LOGITS_VARIABLE, "0")
        with gemmsmith.patch(model):
            pass
    with gemmsmith.patch(model):
        assert not is_deferred(model)
    monkeypatch.delenv(DEFER_LOGITS_VARIABLE)
    monkeypatch.setattr(losses, "LEAST_VOCABULARY", VOCABULARY + 1)
    with gemmsmith.patch(model):
        assert not is_deferred(model)


def _hooked(model: Any) -> Any:
    handle = model.head.register_forward_hook(lambda *_: None)
    try:
        return model(*batch())[0]
    finally:
        handle.remove()


def _globally_hooked(model: Any) -> Any:
    handle = register_module_forward_hook(lambda *_: None)
    try:
        return model(*batch())[0]
    finally:
        handle.remove()


def _under(*contexts: Callable[[], Any]) -> Callable[[Any], Any]:
    def run(model: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            return model(*batch())[0]

    return run


def _evaluated(model: Any) -> Any:
    try:
        return model.eval()(*batch())[0]
    finally:
        model.train()


def _called(model: Any) -> Any:
    parameters = dict(model.named_parameters())
    weight = parameters["head.weight"].clone()
    return torch.func.functional_call(model, parameters | {"head.weight": weight}, batch())[0]


NOT_DEFERRED: dict[str, Callable[[Any], Any]] = {
    "eval": _evaluated,
    "no gradients": _under(torch.no_grad),
    "inference": _under(torch.inference_mode),
    "a hook": _hooked,
    "a global hook": _globally_hooked,
    "a mode": _under(lambda: FlopCounterMode(display=False)),
    "saved elsewhere": _under(lambda: torch.autograd.graph.save_on_cpu()),
    "checkpointed": lambda model: checkpoint(model, *batch(), use_reentrant=False)[0],
    "compiled": lambda model: torch.compile(model, backend="eager")(*batch())[0],
    "FP64": lambda model: copy.deepcopy(model).double()(*batch())[0],
    "another weight": _called,
}


@pytest.mark.parametrize("name", NOT_DEFERRED)
def test_what_is_computed_at_once(name: str) -> None:
    model = made()
    with gemmsmith.patch(model):
        ours = NOT_DEFERRED[name](model)
        assert type(ours) is torch.Tensor
        assert is_deferred(model)
    torch.testing.assert_close(ours, NOT_DEFERRED[name](model), rtol=1e-2, atol=1e-2)


def test_captured_graphs_compute_at_once(host: Host) -> None:
    model = made()
    with gemmsmith.patch(model):
        host.is_capturing = True
        assert not is_deferred(model)


def test_sharded_weights_compute_at_once(mesh: dist.DeviceMesh) -> None:
    model = made()
    fully_shard(model, mesh=mesh)
    with gemmsmith.patch(model):
        assert not is_deferred(model)
    del model
    gc.collect()  # torch lists sharded modules as long as they exist


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_replicated_models(options: dict[str, Any], mesh: dist.DeviceMesh) -> None:
    model = made()
    torchs = step(model)
    exact = step(copy.deepcopy(model).double())
    parallel = DistributedDataParallel(model, **options)
    with gemmsmith.patch(model):
        for _ in range(2):
            no_farther(step(parallel), torchs, exact)


def test_a_layer_whose_outputs_are_read_is_left_to_torch(computed: Sizes) -> None:
    """As an MLP with a wide hidden layer, or distillation."""
    model = made()
    with gemmsmith.patch(model):
        logits = model(*batch())[0]
        assert type(logits) is DeferredLogits
        logits.softmax(-1)
        assert len(computed) == 1
        assert not is_deferred(model)
        assert not is_deferred(model)
    other = made()
    with gemmsmith.patch(other):
        assert is_deferred(other)


CHANGES: list[Callable[[nn.Module], Any]] = [
    lambda model: torch.optim.SGD(model.parameters(), lr=0.1).step(),
    lambda model: [part.data.sub_(part.grad) for part in model.parameters()],
    lambda model: model.load_state_dict(
        {name: part * 2 for name, part in model.state_dict().items()}
    ),
]
"""A program changes weights, also past torch's version counters."""


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("rows", [1, WIDTH, WIDTH + 1])
def test_logits_that_a_program_holds_are_those_before_the_step(
    rows: int, change: Callable[[nn.Module], Any], computed: Sizes
) -> None:
    """They are computed, or the weight is copied, whichever takes less memory."""
    tokens, labels = (part.flatten()[:rows] for part in batch())
    for steps in (1, 3):  # after the first step, logits are computed before their loss
        model, torchs = made(), made()
        with gemmsmith.patch(model):
            for _ in range(steps):
                torchs.load_state_dict(model.state_dict())
                expected = torchs(tokens, labels)[0].detach()
                exact = step(copy.deepcopy(torchs).double(), lambda run: run(tokens, labels)[1])
                rounded = step(torchs, lambda run: run(tokens, labels)[1])
                computed.clear()
                logits, loss = model(tokens, labels)
                loss.backward()
                assert len(computed) == (rows <= WIDTH)
                change(model)
                off = distance(gradients(model), exact[1:])
                assert off <= 1.3 * distance(rounded[1:], exact[1:]) + 1e-3
            assert torch.equal(logits, expected)
            assert len(computed) == 1
            assert not torch.equal(model(tokens, labels)[0], expected)


def test_logits_that_a_program_holds_are_computed_once(
    computed: Sizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first step twice: only its backward pass shows that they are held."""
    own, products = backward.linear, []

    def counted(*operands: torch.Tensor) -> torch.Tensor:
        products[-1] += 1
        return own(*operands)

    monkeypatch.setattr(backward, "linear", counted)
    model, few = made(), [part[:1] for part in batch()]
    with gemmsmith.patch(model):
        for _ in range(3):
            products.append(0)
            held, loss = model(*few)
            loss.backward()
        assert products == [2, 1, 1]
        assert len(computed) == 3
        assert type(held) is DeferredLogits
        assert is_deferred(model)  # the program has not read them


def test_the_weight_of_a_padded_head_is_copied(
    computed: Sizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its logits would be computed by kernels that load single elements."""
    monkeypatch.setattr(deferred, "padding", lambda *_sizes: 8)
    model, few = made(), [part[:1] for part in batch()]
    expected = model(*few)[0].detach()
    with gemmsmith.patch(model):
        logits, loss = model(*few)
        loss.backward()
        assert computed == []
        with torch.no_grad():
            model.head.weight.zero_()
        assert torch.equal(logits, expected)


@pytest.mark.parametrize("rows", [WIDTH, WIDTH + 1])
def test_logits_that_autocast_made_need_no_copy(rows: int, computed: Sizes) -> None:
    """Where they take more memory than the weight that autocast has made, that is held."""
    tokens, labels = (part.flatten()[:rows] for part in batch())
    for steps in (1, 2):
        model = made(torch.float32)
        with torch.autocast("cpu", BF16):
            expected = model(tokens, labels)[0].detach()
        with gemmsmith.patch(model):
            for _ in range(steps):
                computed.clear()
                with torch.autocast("cpu", BF16):
                    logits, loss = model(tokens, labels)
                loss.backward()
            with torch.no_grad():
                model.head.weight.zero_()
            assert len(computed) == (rows <= WIDTH)
            assert torch.equal(logits, expected)


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("patched", [False, True])
def test_logits_that_a_program_holds_do_not_hold_their_operands(
    patched: bool, dtype: torch.dtype
) -> None:
    """As torch's, but for the weight that logits of many rows are computed from."""
    tokens, labels = (part.flatten()[:WIDTH] for part in batch())
    model, made_here = made(dtype), []
    model.body.register_forward_hook(
        lambda _module, _arguments, x: made_here.append(StorageWeakRef(x.untyped_storage()))
    )
    with gemmsmith.patch(model) if patched else contextlib.nullcontext():
        for keeps in (False, True, False):
            with torch.autocast("cpu", BF16, enabled=dtype is not BF16):
                held, loss = model(tokens, labels)
            assert type(held) is (DeferredLogits if patched else torch.Tensor)
            if keeps:
                loss.backward(retain_graph=True)
                assert not made_here[-1].expired()
            loss.backward()
            assert made_here[-1].expired()


@pytest.mark.parametrize("reads", [False, True])
def test_gradients_of_logits_beside_those_of_their_loss(reads: bool) -> None:
    """In one backward pass, whose hooks free what the loss alone does not need."""
    both = []
    for patched in (False, True):
        model = made()
        with gemmsmith.patch(model) if patched else contextlib.nullcontext():
            logits, loss = model(*batch())
            assert type(logits) is (DeferredLogits if patched else torch.Tensor)
            if reads:
                (loss + logits.float().square().mean()).backward()
            else:
                torch.manual_seed(7)
                torch.autograd.backward([loss, logits], [None, torch.randn(logits.shape).to(BF16)])
        both.append(gradients(model))
    torchs, ours = both
    assert distance(ours, torchs) < 2e-2


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch reads it
def test_compiled_autograd() -> None:
    """It traces the hook of the loss, also where the program holds logits."""
    model = made()
    expected = step(model)
    with gemmsmith.patch(model):
        for _ in range(2):
            held, loss = model(*batch())
            assert type(held) is DeferredLogits
            with compiled_autograd._enable(torch.compile(backend="eager")):
                loss.backward()
            assert distance([loss.detach(), *gradients(model)], expected) < 2e-2


def test_logits_of_a_changed_weight_are_an_error() -> None:
    model = made()
    with gemmsmith.patch(model):
        logits, _ = model(*batch())
        with torch.no_grad():
            model.head.weight.mul_(2)
        with pytest.raises(gemmsmith.GemmsmithError, match="GEMMSMITH_DEFER_LOGITS=0"):
            logits.sum()


def test_a_report_names_the_head() -> None:
    text = io.StringIO()
    model = made()
    with gemmsmith.patch(model, report=True, file=text):
        step(model)
    assert "recognized: 1 × Linear (head, with the loss that follows)" in text.getvalue()


def test_copies_and_the_end_of_a_patch() -> None:
    model = made()
    with gemmsmith.patch(model):
        copied = copy.deepcopy(model)
        assert not is_patched(copied.head)
        assert is_deferred(model)
    assert not is_patched(model.head)
    assert not is_deferred(model)


@pytest.mark.parametrize(
    "x", [torch.ones(()), torch.ones(3, WIDTH + 1), torch.ones(3, WIDTH, device="meta")]
)
def test_operands_that_do_not_fit_get_torchs_error(x: torch.Tensor) -> None:
    model = made()
    errors = []
    for context in (contextlib.nullcontext(), gemmsmith.patch(model)):
        with context, pytest.raises((RuntimeError, TypeError)) as caught:
            model.head(x.to(BF16))
        errors.append(str(caught.value).partition("\n")[0])
    assert errors[0] == errors[1]
