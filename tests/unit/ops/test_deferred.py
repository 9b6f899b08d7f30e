"""Deferred logits: whatever reads them gets torch's values, gradients and errors."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gemmsmith
from gemmsmith.ops.models import deferred
from gemmsmith.ops.models.deferred_logits import defer

BF16 = torch.bfloat16
VOCABULARY = 40
Program = Callable[[Any], Any]


def operands(dtype: torch.dtype = BF16) -> tuple[torch.Tensor, nn.Parameter, nn.Parameter]:
    torch.manual_seed(8)
    x = torch.randn(2, 5, 8).to(dtype).requires_grad_()
    parts = torch.randn(VOCABULARY, 8), torch.randn(VOCABULARY)
    weight, bias = (nn.Parameter(part.to(dtype)) for part in parts)
    return x, weight, bias


def labels(rows: int = 10) -> torch.Tensor:
    return torch.arange(rows) * 7 % VOCABULARY


def deferring(*parts: Any) -> Any:
    x, weight, bias = parts
    return defer(x, weight, bias, weight)


def outcome(linear: Program, program: Program, dtype: torch.dtype = BF16) -> list[Any]:
    """What a program returns, with the gradients if it has any, or its error."""
    parts = operands(dtype)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = program(linear(*parts))
            if isinstance(result, torch.Tensor) and result.requires_grad:
                result.double().sum().backward()
    except Exception as error:  # noqa: BLE001 - any error of torch's
        return [type(error), str(error).partition("\n")[0].replace("DeferredLogits", "Tensor")]
    if isinstance(result, torch.Tensor):
        result = result.detach()
    return [result, *(part.grad for part in parts)]


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        if ours.layout is not torch.strided or theirs.layout is not torch.strided:
            return ours.layout is theirs.layout
        return ours.dtype is theirs.dtype and torch.allclose(
            ours.to(torch.complex128), theirs.to(torch.complex128), rtol=0, atol=0, equal_nan=True
        )
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    texts = (re.sub(r"grad_fn=<\w+>", "grad_fn", repr(value)) for value in (ours, theirs))
    return next(texts) == next(texts)


class Reversed(torch.autograd.Function):
    """The program's own gradient."""

    @staticmethod
    def forward(_ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        return tensors[0].view_as(tensors[0])

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return -2 * gradients[0]


class Same(Reversed):
    """A function that returns its operand."""

    @staticmethod
    def forward(_ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        return tensors[0]


class Labelled(torch.Tensor):
    """Another library's subclass."""


def loss(logits: Any) -> Any:
    return functional.cross_entropy(logits.float().view(-1, VOCABULARY), labels())


def _softmax(logits: Any) -> Any:
    return logits.softmax(-1)


def _hooked(logits: Any) -> Any:
    logits.register_hook(lambda gradient: gradient * 3)
    return loss(logits)


def _step_hooked(logits: Any) -> Any:
    wide = logits.float()
    wide.register_hook(lambda gradient: gradient * 3)
    return loss(wide)


def _retained(logits: Any) -> Any:
    logits.retain_grad()
    loss(logits).backward()
    return logits.grad


def _differentiated(logits: Any) -> Any:
    return torch.autograd.grad(logits.float().softmax(-1)[..., 0].sum(), logits)[0]


def _masked(logits: Any) -> Any:
    wide = logits.float()
    logits[..., 3] = -50.0
    return loss(logits) + loss(wide)


def _masked_view(logits: Any) -> Any:
    rows = logits.view(-1, VOCABULARY)
    first = logits.detach().select(-1, 0)
    wide = logits.float()
    first.fill_(-50.0)
    return loss(logits) + loss(rows) + loss(wide)


def _masked_by_data(logits: Any) -> Any:
    logits.data[..., 3] = -50.0
    return loss(logits)


def _masked_by_numpy(logits: Any) -> Any:
    wide = logits.float()
    wide.detach().numpy()[..., 3] = -50.0
    return loss(wide)


def _written_out(logits: Any) -> Any:
    torch.mul(logits.detach(), 2.0, out=logits.detach())
    return loss(logits)


def _without_gradients(logits: Any) -> Any:
    with torch.no_grad():
        wide = logits.float()
    return loss(wide) + loss(logits.detach()) + loss(logits.float().detach())


def _pickled(logits: Any) -> Any:
    return pickle.loads(pickle.dumps(logits.detach()))


def _saved(logits: Any) -> Any:
    file = io.BytesIO()
    torch.save({"logits": logits}, file)
    file.seek(0)
    return torch.load(file)["logits"]


READERS: dict[str, Program] = {
    "a sum of uses": lambda logits: loss(logits * 3.0) + logits.float().logsumexp(-1).mean(),
    "twice": lambda logits: loss(logits / 3.0) + logits.softmax(-1).square().sum(),
    "a function of the program": lambda logits: loss(Reversed.apply(logits)),
    "a function on a step": lambda logits: loss(Reversed.apply(logits.float())),
    "a function that returns it": lambda logits: loss(Same.apply(logits)),
    "hooked": _hooked,
    "a hook on a step": _step_hooked,
    "retained": _retained,
    "differentiated": _differentiated,
    "masked": _masked,
    "masked by a view": _masked_view,
    "masked by data": _masked_by_data,
    "masked by numpy": _masked_by_numpy,
    "written by out": _written_out,
    "without gradients": _without_gradients,
    "checkpointed": lambda logits: checkpoint(_softmax, logits, use_reentrant=False),
    "vmap": torch.vmap(lambda row: row.float().softmax(-1)),
    "grad": torch.func.grad(lambda logits: logits.float().square().sum()),
    "traced": lambda logits: torch.jit.trace(_softmax, (logits,))(logits),
    "pickled": _pickled,
    "saved": _saved,
    "copied": lambda logits: copy.deepcopy(logits.detach()),
    "not copied": copy.deepcopy,
    "numpy of a graph": lambda logits: logits.numpy(),
    "numbers": lambda logits: logits.tolist(),
    "text": lambda logits: f"{logits.detach()} {logits.detach():}",
    "rows": lambda logits: [row.sum().item() for row in logits],
    "contained": lambda logits: 2.0 in logits,
    "a parameter": lambda logits: nn.Parameter(logits.detach()) * 2,
    "by dlpack": lambda logits: torch.from_dlpack(logits.detach()),
    "on meta": lambda logits: logits.to("meta").shape,
    "joined": lambda logits: torch.cat([logits, logits.float()]),
    "another subclass": lambda logits: (
        logits + torch.ones(VOCABULARY).as_subclass(Labelled)
    ).as_subclass(torch.Tensor),
    "part of the vocabulary": lambda logits: functional.cross_entropy(
        logits[..., :30].reshape(-1, 30), labels() % 30
    ),
    "transposed": lambda logits: functional.cross_entropy(
        logits.transpose(1, 2), labels().view(2, 5)
    ),
    "weighted": lambda logits: functional.cross_entropy(
        logits.view(-1, VOCABULARY), labels(), weight=torch.ones(VOCABULARY, dtype=BF16)
    ),
    "probabilities": lambda logits: functional.cross_entropy(
        logits.view(-1, VOCABULARY), torch.ones(10, VOCABULARY, dtype=BF16) / VOCABULARY
    ),
    "int32 labels": lambda logits: functional.cross_entropy(logits.view(-1, 40), labels().int()),
    "too few labels": lambda logits: functional.cross_entropy(logits.view(-1, 40), labels(3)),
    "FP64": lambda logits: functional.cross_entropy(logits.double().view(-1, 40), labels()),
    "FP16": lambda logits: functional.cross_entropy(logits.half().view(-1, 40), labels()),
    "a scale that rounds": lambda logits: loss(logits * 0.3),
    "a softcap times another number": lambda logits: loss(torch.tanh(logits / 3.0) * 5.0),
    "scaled after the cap": lambda logits: loss(torch.tanh(logits / 2.0) * 2.0 * 3.0),
    "scaled by a tensor": lambda logits: loss(logits * torch.tensor(2.0)),
    "negative": lambda logits: loss(torch.tanh(logits / -2.0) * -2.0),
    "zero": lambda logits: loss(logits * 0.0),
    "divided by zero": lambda logits: loss(logits / 0.0),
    "clamped": lambda logits: loss(logits.clamp(-1, 1)),
}


@pytest.mark.parametrize("name", READERS)
def test_who_reads_logits_gets_torchs(name: str) -> None:
    theirs = outcome(functional.linear, READERS[name])
    ours = outcome(deferring, READERS[name])
    if len(theirs) > 2 and theirs[1] is not None and not same(ours[1:], theirs[1:]):
        # Where a loss needed no logits, gradients have fewer roundings.
        for mine, torchs in zip(ours[1:], theirs[1:], strict=True):
            torch.testing.assert_close(mine, torchs, rtol=2e-2, atol=2e-3)
        ours, theirs = ours[:1], theirs[:1]
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-2, atol=1e-5)
    else:
        assert same(ours, theirs), (ours, theirs)


_RANDOM = ("random_", "normal_", "uniform_", "exponential_", "geometric_", "cauchy_", "bernoulli_")
NAMES = sorted(
    set(dir(torch.Tensor))
    - {*_RANDOM, "log_normal_", "bernoulli", "multinomial", "backward", "__hash__", "__sizeof__"}
    - {name for name in dir(object) if name not in ("__repr__", "__format__", "__reduce_ex__")}
    - {name for name in dir(torch.Tensor) if name.endswith("data_ptr") or "torch_d" in name}
    - {"__torch_function__", "__dict__", "__iter__", "__module__", "__weakref__", "__getstate__"}
    - {"__annotations__", "__dlpack__", "_cdata", "_python_dispatch", "_grad_fn", "grad_fn"}
    - {"_base", "_is_view", "detach_", "set_", "_rev_view_func_unsafe", "apply_"}
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("detached", [False, True])
def test_every_attribute_and_method_without_arguments(detached: bool) -> None:
    others = []
    for name in NAMES:

        def program(logits: Any, name: str = name) -> Any:
            value = getattr(logits.detach() if detached else logits, name)
            return value() if callable(value) else value

        ours, theirs = outcome(deferring, program), outcome(functional.linear, program)
        if not same(ours[0], theirs[0]):
            others.append((name, ours, theirs))
    assert others == []


@pytest.mark.parametrize("name", [name for name in dir(torch.Tensor) if name.endswith("data_ptr")])
def test_addresses_are_those_of_the_values(name: str) -> None:
    logits = deferring(*operands())
    address = getattr(logits.detach(), name)()
    assert address
    assert address == getattr(logits, name)()
    assert logits.untyped_storage().data_ptr() == address


@pytest.mark.parametrize("name", ["set_", "squeeze_", "t_"])
def test_sizes_do_not_change_in_place(name: str) -> None:
    logits = deferring(*operands()).detach()
    logits = logits.view(-1, VOCABULARY) if name == "t_" else logits[:1]
    with pytest.raises(gemmsmith.GemmsmithError, match="GEMMSMITH_DEFER_LOGITS=0"):
        getattr(logits, name)()


LOSSES: dict[str, Program] = {
    "Llama": lambda logits: functional.cross_entropy(
        logits[..., :-1, :].contiguous().float().view(-1, VOCABULARY), labels(8)
    ),
    "slices": lambda logits: functional.cross_entropy(
        logits[1:, 1:4].reshape(-1, VOCABULARY), labels(3)
    ),
    "flat": lambda logits: functional.cross_entropy(
        logits.flatten(0, 1).to(torch.float32), labels(), reduction="sum"
    ),
    "none": lambda logits: functional.cross_entropy(
        logits.type(torch.float32).view(10, -1), labels(), reduction="none"
    ),
    "narrow": lambda logits: functional.cross_entropy(
        torch.narrow(logits, 1, 0, 2).reshape(-1, VOCABULARY), target=labels(4)
    ),
    "named": lambda logits: functional.cross_entropy(
        input=logits.view(-1, VOCABULARY),
        target=labels(),
        ignore_index=7,
        label_smoothing=0.1,
    ),
    "a module": lambda logits: nn.CrossEntropyLoss(ignore_index=14)(
        logits.view(-1, VOCABULARY), labels()
    ),
    "capped": lambda logits: loss(torch.tanh(logits / 3.0) * 3.0),
    "capped as a method": lambda logits: loss(3 * (logits.float() / 3).tanh()),
    "scaled": lambda logits: loss(logits * 0.25),
    "divided": lambda logits: loss(logits / 8.0),
    "scaled and capped": lambda logits: loss(torch.tanh(logits * 2.0 / 3.0) * 3.0),
    "all ignored": lambda logits: functional.cross_entropy(
        logits.view(-1, VOCABULARY), torch.full((10,), -100), reduction="sum"
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_without_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> torch.Tensor:
        raise AssertionError("the logits were computed")

    theirs = outcome(functional.linear, LOSSES[name])
    exact = outcome(functional.linear, LOSSES[name], torch.float64)
    monkeypatch.setattr(deferred, "_linear", refused)
    ours = outcome(deferring, LOSSES[name])
    for mine, torchs, right in zip(ours, theirs, exact, strict=True):
        assert (mine.dtype, mine.shape) == (torchs.dtype, torchs.shape)
        off = [float((part.double() - right).norm()) for part in (mine, torchs)]
        assert off[0] <= 1.3 * off[1] + 4e-3 * float(right.norm())


def test_logits_have_no_gradient_after_their_loss() -> None:
    parts = operands()
    logits = deferring(*parts)
    value = loss(logits)
    for ask in (
        logits.retain_grad,
        lambda: logits.register_hook(lambda gradient: gradient),
        lambda: torch.autograd.grad(value, logits),
        lambda: torch.autograd.grad(value, [parts[0], logits], allow_unused=True),
    ):
        with pytest.raises(gemmsmith.GemmsmithError, match="before the loss"):
            ask()


def test_backward_twice_and_gradients_of_gradients() -> None:
    sums = []
    for linear in (functional.linear, deferring):
        x, weight, bias = operands()
        value = loss(linear(x, weight, bias))
        value.backward(retain_graph=True)
        value.backward()
        assert x.grad is not None
        sums.append(x.grad)
        value = loss(linear(x, weight, bias))
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        (again,) = torch.autograd.grad(gradient.float().square().sum(), weight)
        sums.append(again)
    for mine, torchs in zip(sums[2:], sums[:2], strict=True):
        torch.testing.assert_close(mine, torchs, rtol=3e-2, atol=3e-3)


def test_nothing_outlives_the_logits() -> None:
    """Autograd holds what tanh gave; it must not hold the graph with it."""
    gc.collect()
    gc.disable()
    try:
        logits = deferring(*operands())
        head = weakref.ref(logits.deferred.head)
        value = loss(torch.tanh(logits / 3.0) * 3.0)
        del logits
        assert head() is None
        value.backward()
    finally:
        gc.enable()


def test_compiled_functions_take_logits() -> None:
    sums = []
    for linear in (functional.linear, deferring):
        for function in (loss, lambda logits: logits.float().square().mean()):
            x, weight, bias = operands()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                value = torch.compile(function, backend="aot_eager")(linear(x, weight, bias))
            value.backward()
            assert x.grad is not None
            sums += [value.detach(), x.grad]
    torch._dynamo.reset()
    for mine, torchs in zip(sums[4:], sums[:4], strict=True):
        torch.testing.assert_close(mine, torchs, rtol=2e-2, atol=2e-3)
