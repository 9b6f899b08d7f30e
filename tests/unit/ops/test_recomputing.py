"""Checkpointed regions: recomputed as they were computed, whatever happened in between."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as models name it
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import gemmsmith
from gemmsmith.ops.below.dispatch import Dispatch
from gemmsmith.ops.engine import engine as engines
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.in_use import _Pinned, in_use, install
from tests.support.below import Swapping
from tests.support.stand_in import Host, Packs, installed
from tests.unit.ops.test_layers import FeedForward

BF16 = torch.bfloat16
WIDTH, INNER, TOKENS = 32, 48, 6
Runs = Callable[[], int]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        hidden_states = self.dense(hidden_states)
        return hidden_states + input_tensor


class Twice(nn.Module):
    """Its part's result and input, added by a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Added()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.part(x.tanh(), x)
        return added


class Calls(nn.Module):
    """The library's own functions."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(INNER, WIDTH) / 8)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Parameter(torch.randn(WIDTH, INNER) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = gemmsmith.linear(x, self.up.weight, self.up.bias, activation="gelu")
        hidden = hidden + gemmsmith.gated_linear(x, self.gate, self.up.weight)
        x = gemmsmith.linear(hidden, self.down, residual=x)
        x = gemmsmith.mlp(x, self.up.weight, self.down, bias=self.up.bias, activation="gelu_tanh")
        return gemmsmith.matmul(gemmsmith.linear(x.tanh(), self.gate), self.down.mT)


PARTS: dict[str, Callable[[], nn.Module]] = {
    "mlp": Mlp,
    "gated": partial(FeedForward, WIDTH, INNER),
    "residual": Twice,
    "norm": partial(LlamaRMSNorm, WIDTH),
    "bias": lambda: nn.Linear(WIDTH, WIDTH),
    "product": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "calls": Calls,
}


class World:
    """A model with winners, whose forward pass has run."""

    def __init__(self, pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pack, self.monkeypatch = pack, monkeypatch
        self.chooser = Swapping()
        self.opened = ExitStack()

    def engine(self) -> Engine:
        host = Host()
        host.kind = "cpu"
        return Engine(self.chooser, Packs(self.pack), platform=host)

    def newer(self, has_won: Callable[[Any], bool]) -> None:
        self.chooser.answers = has_won
        self.chooser.snapshot = object()
        self.chooser.on_swap()

    @property
    def in_use(self) -> Engine:
        engine = in_use()
        assert engine is not None
        return engine


Change = tuple[Callable[[World], object], Callable[[World], object]]
"""What is so in the forward pass, and what happens before the backward pass."""


def nothing(world: World) -> None:
    pass


def every(problem: Any) -> bool:
    return True


def none(problem: Any) -> bool:
    return False


def plain(problem: Any) -> bool:
    return not problem.operation.is_fused


def forwards(problem: Any) -> bool:
    """But no fused backward product, whose winners decide for the pair of layers."""
    return problem.operation.epilogue.backward is None


def winners(has_won: Callable[[Any], bool]) -> Callable[[World], None]:
    return lambda world: world.newer(has_won)


def break_kernels(world: World) -> None:
    for plan in world.in_use._plans.values():
        if plan is not None:
            plan._run = lambda *_: 1009


def failing(world: World) -> None:
    world.chooser.name = "fails"


def any_order(world: World) -> None:
    world.chooser.deterministic = False


def only_deterministic(is_on: bool) -> Callable[[World], None]:
    def change(world: World) -> None:
        any_order(world)
        world.opened.callback(torch.use_deterministic_algorithms, False)
        torch.use_deterministic_algorithms(is_on)

    return change


def other_engine(has_won: Callable[[Any], bool]) -> Callable[[World], None]:
    def change(world: World) -> None:
        world.chooser = Swapping(answers=has_won)
        install(world.engine())

    return change


def evict(world: World) -> None:
    world.monkeypatch.setattr(engines, "CAPACITY", 1)
    world.in_use._planner._broken["a" * 64] = "refused"  # what is decided anew is decided otherwise
    for k in (8, 16):
        gemmsmith.linear(torch.ones(2, k, dtype=BF16), torch.ones(8, k, dtype=BF16))


def fail_and_evict(world: World) -> None:
    evict(world)
    world.chooser.name = None


def stop(world: World) -> None:
    gemmsmith.use(None)


def begin(world: World) -> None:
    install(world.engine())


CHANGES: dict[str, Change] = {
    "nothing": (nothing, nothing),
    "first winners": (winners(none), winners(every)),
    "no winners any more": (winners(every), winners(none)),
    "fused winners": (winners(plain), winners(every)),
    "fused winners went": (winners(every), winners(plain)),
    "backward winners": (winners(forwards), winners(every)),
    "backward winners went": (winners(every), winners(forwards)),
    "kernels failed": (failing, nothing),
    "forward kernels failed": (lambda w: [failing(w), w.newer(forwards)], nothing),
    "kernels fail": (winners(every), break_kernels),
    "forward kernels fail": (winners(forwards), break_kernels),
    "deterministic": (any_order, only_deterministic(True)),
    "not deterministic": (only_deterministic(True), only_deterministic(False)),
    "evicted": (winners(every), evict),
    "failed and evicted": (lambda w: [failing(w), w.newer(forwards)], fail_and_evict),
    "none in use": (nothing, stop),
    "in use": (stop, begin),
    "others in use": (nothing, other_engine(none)),
    "others with winners in use": (winners(none), other_engine(every)),
}

PATCHES: dict[str, tuple[bool, bool]] = {
    "patched": (True, True),
    "closed": (True, False),
    "opened": (False, True),
    "reported": (True, True),
}
"""Whether the model is patched forwards, and backwards."""


def policy(context: Any, operator: Any, *operands: Any, **named: Any) -> CheckpointPolicy:
    name = str(operator)
    saves = "mm" in name or "linear" in name or "product" in name
    return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE


def nested(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    def inner(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(model, model(x), use_reentrant=False)
        return model(out)

    out: torch.Tensor = checkpoint(inner, x, use_reentrant=False)
    return out


def once(model: nn.Module, x: torch.Tensor, **how: Any) -> torch.Tensor:
    out: torch.Tensor = checkpoint(model, x, use_reentrant=False, **how)
    return out


def to_the_end(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with set_checkpoint_early_stop(False):
        return once(model, x)


def with_reentry(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = checkpoint(model, x, use_reentrant=True)
    return out


def compiled(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return once(cast("nn.Module", torch.compile(model, backend="aot_eager")), x)


WAYS: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "once": once,
    "nested": nested,
    "selective": partial(once, context_fn=partial(create_selective_checkpoint_contexts, policy)),
    "to the end": to_the_end,
    "reentrant": with_reentry,
    "compiled": compiled,
}


@pytest.fixture
def world(pack: Path, binding: Dispatch, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(pack, monkeypatch)
    with installed(world.engine()), world.opened:
        yield world
    torch._dynamo.reset()


def patched(model: nn.Module, how: str) -> AbstractContextManager[None]:
    report = how == "reported"
    return gemmsmith.patch(model, report=report, file=io.StringIO())


def gradients(model: nn.Module, x: torch.Tensor, out: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    x.grad = None
    out.float().pow(2).sum().backward()
    return [leaf.grad for leaf in (x, *model.parameters()) if leaf.grad is not None]


def alike(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs)
    for gradient, expected in zip(ours, theirs, strict=True):
        bound = 0.03 * float(expected.abs().max())
        torch.testing.assert_close(gradient.float(), expected.float(), rtol=3e-2, atol=bound)


def model_of(part: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(5)
    model = nn.Sequential(PARTS[part](), nn.Identity()).to(BF16)
    return model, torch.randn(TOKENS, WIDTH).to(BF16).requires_grad_()


@pytest.mark.filterwarnings("ignore:gemmsmith.patch")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("part", PARTS)
def test_a_region_is_recomputed_as_it_was_computed(world: World, part: str, change: str) -> None:
    check(world, part, change)


@pytest.mark.filterwarnings("ignore:gemmsmith.patch")
@pytest.mark.parametrize("how", [how for how in PATCHES if how != "patched"])
@pytest.mark.parametrize(
    "change", ["nothing", "first winners", "no winners any more", "none in use", "in use"]
)
@pytest.mark.parametrize("part", ["mlp", "gated", "norm", "bias"])
def test_patches_that_end_or_begin_in_between(
    world: World, part: str, change: str, how: str
) -> None:
    check(world, part, change, how)


@pytest.mark.parametrize("way", ["nested", "selective", "to the end", "reentrant"])
@pytest.mark.parametrize("how", ["patched", "closed"])
@pytest.mark.parametrize("change", ["first winners", "forward kernels fail", "others in use"])
@pytest.mark.parametrize("part", ["mlp", "gated"])
def test_regions_of_all_kinds(world: World, part: str, change: str, how: str, way: str) -> None:
    check(world, part, change, how, way)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize("change", ["first winners", "not deterministic", "none in use"])
def test_compiled_parts(world: World, change: str) -> None:
    check(world, "mlp", change, way="compiled")


def test_what_is_only_moved_is_fused(world: World, runs: Runs) -> None:
    model, x = model_of("gated")
    with gemmsmith.patch(model), torch.autograd.graph.save_on_cpu():
        gradients(model, x, model(x))
    assert any(problem.operation.is_fused for problem in world.chooser.asked)
    assert runs() == 8


def test_nothing_is_kept_with_a_region(world: World) -> None:
    model, x = model_of("mlp")
    with gemmsmith.patch(model):
        out = once(model, x)
        (kept,) = [held for held in gc.get_objects() if type(held) is _Pinned]
        reference = weakref.ref(kept)
        del kept
        gradients(model, x, out)
        del out
    gc.collect()
    assert reference() is None


def check(world: World, part: str, change: str, how: str = "patched", way: str = "once") -> None:
    model, x = model_of(part)
    wide = copy.deepcopy(model)
    wide_x = x.detach().clone().requires_grad_()
    install(None)
    expected = gradients(wide, wide_x, WAYS[way](wide, wide_x))
    begin(world)
    first, then = CHANGES[change]
    forwards, backwards = PATCHES[how]
    first(world)
    with patched(model, how) if forwards else contextlib.nullcontext():
        out = WAYS[way](model, x)
        if backwards == forwards:
            then(world)
            ours = gradients(model, x, out)
    if backwards != forwards:
        then(world)
        with patched(model, how) if backwards else contextlib.nullcontext():
            ours = gradients(model, x, out)
    alike(ours, expected)
    assert not any("forward" in vars(module) for module in model.modules())
