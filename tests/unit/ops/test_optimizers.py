"""`torch.optim.Muon` under a patch: the same training, with updates of equal shape at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import Muon, _muon
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import gemmsmith
from gemmsmith.core.operation import Layout
from gemmsmith.core.problem import Problem
from gemmsmith.ops import autouse
from gemmsmith.ops.below.dispatch import Dispatch
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.in_use import install
from gemmsmith.ops.models import optimizers
from gemmsmith.ops.products import newton_schulz
from tests.gpu.support.choosing import Ground
from tests.gpu.support.counting import launches
from tests.support.stand_in import Host
from tests.unit.ops.test_unchanged import baked

BF16 = torch.bfloat16
SIZES = ((32, 48), (48, 32), (32, 48), (16, 16), (32, 48), (16, 16), (8, 40))
"""Of the parameters: three batches, and a matrix without an equal."""
OWN = _muon._single_tensor_muon
ITERATION = _muon._zeropower_via_newtonschulz

Parameters = list[nn.Parameter]


@pytest.fixture
def batches(
    engine: Engine, without_binding: None, no_other_patch: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[int]]:
    """Sizes of the batches that are computed in place of torch's loop."""
    seen: list[int] = []
    own = optimizers.newton_schulz

    def noted(matrices: Any, *options: Any) -> list[torch.Tensor]:
        seen.append(len(matrices))
        return own(matrices, *options)

    monkeypatch.setattr(optimizers, "newton_schulz", noted)
    yield seen
    assert _muon._single_tensor_muon is OWN


def parameters(dtype: torch.dtype = torch.float32) -> Parameters:
    torch.manual_seed(4)
    return [nn.Parameter(torch.randn(size).to(dtype)) for size in SIZES]


def with_gradients(params: Parameters, step: int) -> None:
    torch.manual_seed(100 + step)
    for at, param in enumerate(params):
        gradient = torch.randn(param.shape, dtype=param.dtype)
        param.grad = None if (at + step) % 5 == 4 else gradient


def trained(
    make: Callable[[Parameters], Muon],
    dtype: torch.dtype = torch.float32,
    steps: int = 4,
    step: Callable[[Muon], Any] = Muon.step,
) -> tuple[Parameters, dict[str, Any]]:
    """The parameters after some steps, and the optimizer's state."""
    params = parameters(dtype)
    optimizer = make(params)
    for number in range(steps):
        with_gradients(params, number)
        step(optimizer)
    return params, optimizer.state_dict()


def same(state: Any, other: Any) -> bool:
    """To the bit."""
    if isinstance(state, torch.Tensor):
        return torch.equal(state, other)
    if isinstance(state, dict):
        return list(state) == list(other) and all(same(state[key], other[key]) for key in state)
    return bool(state == other)


def close(params: Parameters, others: Parameters) -> None:
    """Up to rounding of the updates. Of parameters in bf16 few may round to the next value."""
    start = parameters(params[0].dtype)
    for param, other, before in zip(params, others, start, strict=True):
        moved = (other.double() - before.double()).norm()
        assert moved > 0
        off = param.double() - other.double()
        is_next = bool((off.abs() <= 2**-7 * other.double().abs()).all())
        is_rare = param.dtype is BF16 and (off != 0).double().mean() < 0.01
        assert off.norm() <= 0.02 * moved or (is_next and is_rare)


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "plain momentum": {"nesterov": False},
    "no momentum": {"momentum": 0.0},
    "no decay": {"weight_decay": 0.0},
    "much decay": {"weight_decay": 0.7, "lr": 0.1},
    "original": {"adjust_lr_fn": "original"},
    "adamw": {"adjust_lr_fn": "match_rms_adamw"},
    "other steps": {"ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3},
}
"""Of the optimizer."""


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_steps_are_those_of_torch(batches: list[int], name: str, dtype: torch.dtype) -> None:
    def make(params: Parameters) -> Muon:
        return Muon(params, **OPTIONS[name])

    theirs, their_state = trained(make, dtype)
    assert not batches
    with gemmsmith.patch():
        ours, our_state = trained(make, dtype)
    close(ours, theirs)
    assert same(our_state, their_state)
    # Without Nesterov's momentum, torch writes into a moment in bf16.
    assert set(batches) == (set() if dtype is BF16 and name == "plain momentum" else {1, 2, 3, 4})


def test_groups_have_their_own_options(batches: list[int]) -> None:
    def make(params: Parameters) -> Muon:
        groups = [{"params": params[:4], "lr": 0.1}, {"params": params[4:], "nesterov": False}]
        return Muon(groups)  # type: ignore[arg-type]

    theirs, their_state = trained(make)
    with gemmsmith.patch():
        ours, our_state = trained(make)
    close(ours, theirs)
    assert same(our_state, their_state)
    assert batches


def test_closures_schedules_and_hooks(batches: list[int]) -> None:
    def run() -> tuple[Parameters, list[str], list[float]]:
        params = parameters()
        optimizer, seen, values = Muon(params, lr=0.1), list[str](), list[float]()
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = sum((param.square().sum() for param in params), start=torch.zeros(()))
            loss.backward()
            return loss

        for _ in range(3):
            values.append(float(optimizer.step(closure).detach()))
            schedule.step()
        return params, seen, values

    theirs, _, their_losses = run()
    with gemmsmith.patch():
        ours, events, our_losses = run()
    close(ours, theirs)
    assert events == ["before", "after"] * 3
    assert our_losses == pytest.approx(their_losses, rel=1e-3)
    assert batches


def test_state_is_saved_and_loaded_across_patches(batches: list[int]) -> None:
    theirs, _ = trained(Muon, steps=6)
    params = parameters()
    first = Muon(params)
    with gemmsmith.patch():
        for number in range(3):
            with_gradients(params, number)
            first.step()
    second = Muon(params)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for number in range(3, 6):
        with_gradients(params, number)
        second.step()
    close(params, theirs)
    assert batches


def test_parameters_of_other_types_than_their_gradients(batches: list[int]) -> None:
    def run() -> list[torch.Tensor]:
        params = [param.detach() for param in parameters()]
        moments = [torch.zeros(param.shape, dtype=BF16) for param in params]
        torch.manual_seed(5)
        grads = [torch.randn(param.shape).bfloat16() for param in params]
        options = Muon([nn.Parameter(torch.ones(2, 2))]).defaults
        with torch.no_grad():
            _muon.muon(params, grads, moments, has_complex=False, **options)
        return params + moments

    theirs = run()
    with gemmsmith.patch():
        ours = run()
    count = len(SIZES)
    close(ours[:count], theirs[:count])  # type: ignore[arg-type]
    assert same(dict(enumerate(ours[count:])), dict(enumerate(theirs[count:])))
    assert batches


def test_updates_of_a_bounded_number_are_in_memory(
    batches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(newton_schulz, "MOST_BYTES", 2 * 2 * 32 * 48)
    theirs, their_state = trained(Muon)
    with gemmsmith.patch(), torch.device("cpu"):
        ours, our_state = trained(Muon)
    close(ours, theirs)
    assert same(our_state, their_state)
    assert max(batches) == 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(4))
        self.head = nn.Linear(32, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        out: torch.Tensor = self.head(x)
        return out


def losses(change: float = 0.0) -> torch.Tensor:
    """Of 100 steps of a small model, whose weights are changed by this part at the start."""
    torch.manual_seed(8)
    net, target = Net(), Net().requires_grad_(False)
    with torch.no_grad():
        for param in net.parameters():
            param.mul_(1 + change * torch.randn(param.shape))
    optimizer = Muon(net.parameters(), lr=0.02)
    values = []
    for step in range(100):
        torch.manual_seed(step)
        x = torch.randn(64, 32)
        loss = nn.functional.mse_loss(net(x), target(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.detach())
    return torch.stack(values)


def test_100_steps_within_the_spread_of_rounding(batches: list[int]) -> None:
    theirs = losses()
    # A change of the weights by a unit of bf16 makes other roundings.
    spread = max((losses(change) - theirs).abs().max() for change in (2**-8, -(2**-8)))
    with gemmsmith.patch():
        ours = losses()
    assert (ours - theirs).abs().max() <= spread
    assert ours[-10:].mean() < 0.2 * ours[0]
    assert batches == [4, 1] * 100


class Renamed(Muon):
    """Inherits torch's step."""


class Own(Muon):
    """Has a step of its own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(ITERATION(param.grad, (2.0, -1.5, 0.5), 5, 1e-7), alpha=-0.1)


@pytest.mark.parametrize(("kind", "takes_part"), [(Renamed, True), (Own, False)])
def test_subclasses(batches: list[int], kind: type[Muon], takes_part: bool) -> None:
    theirs, _ = trained(kind, step=kind.step)
    with gemmsmith.patch():
        ours, _ = trained(kind, step=kind.step)
    close(ours, theirs)
    assert bool(batches) is takes_part


def under(manager: Callable[[], Any]) -> Callable[[Muon], None]:
    def step(optimizer: Muon) -> None:
        with manager():
            optimizer.step()

    return step


def without_winners(optimizer: Muon) -> None:
    before = install(None)
    optimizer.step()
    install(before)


def compiled(optimizer: Muon) -> None:
    torch.compile(optimizer.step, backend="eager")()


class Seeing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


LEFT: dict[str, tuple[Callable[[Parameters], Muon], Callable[[Muon], Any]]] = {
    "a single parameter": (lambda params: Muon(params[:1]), Muon.step),
    "a learning rate on the device": (lambda params: Muon(params, torch.tensor(0.1)), Muon.step),
    "autocast": (Muon, under(lambda: torch.autocast("cpu", BF16))),
    "a function mode": (Muon, under(Seeing)),
    "a dispatch mode": (Muon, under(lambda: FlopCounterMode(display=False))),
    "no winners": (Muon, without_winners),
    "compiled": (Muon, compiled),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize("name", LEFT)
def test_torchs_own_loop_runs(batches: list[int], name: str) -> None:
    make, step = LEFT[name]
    theirs, their_state = trained(make)
    with gemmsmith.patch():
        ours, our_state = trained(make, step=step)
    assert not batches
    assert same(our_state, their_state)
    for param, other in zip(ours, theirs, strict=True):
        assert name == "compiled" or torch.equal(param, other)


def test_one_order_of_sums_is_torchs(
    engine: Engine, binding: Dispatch, monkeypatch: pytest.MonkeyPatch, host: Host
) -> None:
    """Batches would be other products than those of the program."""
    host.kind = "cpu"
    monkeypatch.setattr(optimizers, "newton_schulz", None)
    with gemmsmith.patch(numerics="invariant"):
        assert _muon._single_tensor_muon is not OWN
        trained(Muon)


def test_parameters_that_share_memory_keep_their_order(batches: list[int]) -> None:
    def run() -> nn.Parameter:
        first, second, third = parameters()[0:6:2]
        second.data = first.data
        optimizer = Muon([first, second, third], lr=0.3, weight_decay=0.9)
        for number in range(2):
            with_gradients([first, second, third], number)
            optimizer.step()
        return first

    theirs = run()
    with gemmsmith.patch():
        assert torch.equal(run(), theirs)
    assert not batches


def test_sharded_parameters_are_torchs(batches: list[int], mesh: dist.DeviceMesh) -> None:
    def run() -> list[torch.Tensor]:
        torch.manual_seed(8)
        net = Net()
        fully_shard(net, mesh=mesh)
        optimizer = Muon(net.parameters())
        net(torch.randn(4, 32)).sum().backward()
        optimizer.step()
        return [param.full_tensor() for param in net.parameters()]  # type: ignore[attr-defined]

    theirs = run()
    with gemmsmith.patch():
        ours = run()
    assert all(map(torch.equal, ours, theirs))
    assert not batches


@pytest.mark.parametrize("name", [optimizers._LOOP, optimizers._ITERATION, "_adjust_lr"])
@pytest.mark.parametrize("first", [False, True])
def test_a_replaced_function_is_called(
    batches: list[int], monkeypatch: pytest.MonkeyPatch, name: str, first: bool
) -> None:
    calls, own = [0], getattr(_muon, name)

    def replacing(*arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        return own(*arguments, **named)

    with monkeypatch.context() as replaced:
        if first:
            replaced.setattr(_muon, name, replacing)
        with gemmsmith.patch():
            if not first:
                ours = _muon._single_tensor_muon
                replaced.setattr(_muon, name, replacing)
            trained(Muon)
        assert getattr(_muon, name) is replacing
    if not first and _muon._single_tensor_muon is ours:  # put back by the end of the replacement
        trained(Muon)
        setattr(_muon, optimizers._LOOP, OWN)
    assert calls[0]
    assert not batches


def test_another_source_is_not_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    assert optimizers._recognized() is not None
    for name in (optimizers._LOOP, optimizers._ITERATION):
        with monkeypatch.context() as changed:
            changed.setitem(optimizers._SOURCES, name, "of another torch")
            assert optimizers._recognized() is None


def test_a_program_that_does_not_use_gemmsmith(
    ground: Ground,
    host: Host,
    binding: Dispatch,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    no_other_patch: None,
) -> None:
    """By `GEMMSMITH=`."""
    host.kind = "cpu"
    monkeypatch.setattr(autouse, "Engine", partial(Engine, platform=host))
    theirs, their_state = trained(Muon)
    gram = Problem(m=32, n=32, k=48, batch=4, layout=Layout.TN)
    autouse.start(str(baked(ground, tmp_path / "winners.gspack", [gram])))
    try:
        with launches() as ran:
            ours, our_state = trained(Muon)
    finally:
        gemmsmith.use(None)
    close(ours, theirs)
    assert same(our_state, their_state)
    assert gram in [launch.shape.problem for launch in ran]
    assert _muon._single_tensor_muon is OWN


def test_a_patch_of_a_model_leaves_optimizers_alone(batches: list[int]) -> None:
    with gemmsmith.patch(Net()):
        assert _muon._single_tensor_muon is OWN


def test_patches_are_nested_and_undone(batches: list[int]) -> None:
    with gemmsmith.patch():
        loop = _muon._single_tensor_muon
        with gemmsmith.patch():
            assert _muon._single_tensor_muon is loop is not OWN
        assert _muon._single_tensor_muon is loop
        gemmsmith.patch()
        gemmsmith.unpatch()
        assert _muon._single_tensor_muon is loop
    assert _muon._single_tensor_muon is OWN
    with gemmsmith.patch():
        assert _muon._single_tensor_muon is loop


def test_a_program_that_keeps_our_function_runs_torchs(
    batches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with gemmsmith.patch():
        loop = _muon._single_tensor_muon
    with monkeypatch.context() as kept:
        kept.setattr(_muon, "_single_tensor_muon", loop)
        trained(Muon)
    assert not batches


def test_winners_that_come_later(batches: list[int], engine: Engine, host: Host) -> None:
    before = install(None)
    with gemmsmith.patch(report=True):
        trained(Muon)
        assert not batches
        install(before)
        trained(Muon)
        assert batches
