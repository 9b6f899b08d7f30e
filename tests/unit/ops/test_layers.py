"""Layers of a patched model: one kernel where one wins, their own forward everywhere else."""

from __future__ import annotations

import copy
import io
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as models name it
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import gemmsmith
from gemmsmith.core.epilogue import Epilogue
from gemmsmith.core.problem import Problem
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.forms import Form
from gemmsmith.ops.models.layers import recognized
from tests.support.patched import is_patched
from tests.support.stand_in import Chooser, deterministic

BF16 = torch.bfloat16
Runs = Callable[[], int]
WIDTH, INNER = 16, 24


class FeedForward(nn.Module):
    """As torchtitan's."""

    def __init__(self, width: int = WIDTH, inner: int = INNER, *, bias: bool = False) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, inner, bias=bias)
        self.w2 = nn.Linear(inner, width, bias=False)
        self.w3 = nn.Linear(width, inner, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Halves(nn.Module):
    """As Phi-3's."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(WIDTH, 2 * INNER, bias=bias)
        self.down_proj = nn.Linear(INNER, WIDTH, bias=False)
        self.activation_fn = nn.GELU(approximate="tanh")

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        up_states = self.gate_up_proj(hidden_states)

        gate, up_states = up_states.chunk(2, dim=-1)
        up_states = up_states * self.activation_fn(gate)

        return self.down_proj(up_states)


class Mlp(nn.Module):
    """As nanoGPT's."""

    def __init__(self, *, bias: bool = True, drop: float = 0.0) -> None:
        super().__init__()
        self.c_fc = nn.Linear(WIDTH, INNER, bias=bias)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(INNER, WIDTH, bias=bias)
        self.dropout = nn.Dropout(drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.c_fc(x)
        x = self.gelu(x)
        x = self.c_proj(x)
        x = self.dropout(x)
        return x  # noqa: RET504 - as theirs


class Output(nn.Module):
    """As BERT's."""

    def __init__(self, *, drop: float = 0.0) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(drop)

    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        hidden_states = self.dense(hidden_states)
        hidden_states = self.dropout(hidden_states)
        hidden_states = self.LayerNorm(hidden_states + input_tensor)
        return hidden_states  # noqa: RET504 - as theirs


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)).square())


class Dropping(nn.Module):
    """With a dropout between its layers."""

    def __init__(self, *, drop: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.dropout = nn.Dropout(drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.dropout(F.silu(self.up(x))))


def tower() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, INNER),
        nn.GELU("tanh"),
        nn.Dropout(0.0),
        nn.Linear(INNER, WIDTH),
        nn.Tanh(),
    )


def sequence() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, INNER), nn.SiLU(), nn.Dropout(0.0), nn.Linear(INNER, WIDTH), nn.GELU()
    )


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...], tuple[str, ...]]] = {
    "torchtitan": (FeedForward, ("silu_gate",), ("dsilu_gate",)),
    "halves": (Halves, ("gelu_tanh_gate",), ("dgelu_tanh_gate",)),
    "nanogpt": (Mlp, ("bias_gelu",), ("dgelu_bgrad",)),
    "bert": (Output, ("bias_residual",), ()),
    "squares": (Squares, ("bias_relu2",), ("drelu2_bgrad",)),
    "dropping": (Dropping, ("bias_silu",), ("dsilu_bgrad",)),
    "tower": (tower, ("bias_gelu_tanh",), ("dgelu_tanh_bgrad",)),
    "sequence": (sequence, ("bias_silu", "bias_gelu"), ()),
}
"""Each with the epilogues of its fused products, forwards and backwards."""


def forwards(kind: str) -> int:
    return len(LAYERS[kind][1])


def both(kind: str) -> int:
    """Fused products of a step."""
    return forwards(kind) + len(LAYERS[kind][2])


def made(kind: str) -> nn.Module:
    torch.manual_seed(3)
    return LAYERS[kind][0]().to(BF16)


def given(net: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(4)
    count = 2 if isinstance(net, Output) else 1
    return [torch.randn(2, 3, WIDTH).to(BF16).requires_grad_() for _ in range(count)]


def loss(out: torch.Tensor) -> torch.Tensor:
    """Of which no norm makes a constant."""
    return (out.float().square() * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum()


def step(net: Any, *, compute: Callable[..., torch.Tensor] | None = None) -> list[torch.Tensor]:
    """The output, and the gradients of the operands and the weights."""
    operands = given(getattr(net, "_orig_mod", net))
    out = net(*operands) if compute is None else compute(net, *operands)
    wanted = [*operands, *net.parameters()]
    return [out.detach(), *torch.autograd.grad(loss(out), wanted)]


def equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        bound = 0.05 * max(float(theirs.abs().max()), 0.1)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=bound)


def fused(chooser: Chooser) -> set[str]:
    asked = (problem.operation.epilogue.value for problem in chooser.asked)
    return {name.removesuffix("_aux") for name in asked if name not in ("none", "bias")}


def only_fused(chooser: Chooser) -> None:
    """Winners of nothing but what follows a product with more than its bias."""
    chooser.answers = lambda problem: problem.operation.epilogue.value not in ("none", "bias")


@pytest.mark.parametrize("kind", LAYERS)
def test_one_kernel_where_one_wins(engine: Engine, chooser: Chooser, runs: Runs, kind: str) -> None:
    net = made(kind)
    keys, expected = list(net.state_dict()), step(net)
    only_fused(chooser)
    gemmsmith.patch(net)
    try:
        close(step(net), expected)
        assert runs() == both(kind)
        assert fused(chooser) == {*LAYERS[kind][1], *LAYERS[kind][2]}
        with torch.no_grad():
            close([net(*given(net))], expected[:1])
        assert runs() == forwards(kind)
        assert list(net.state_dict()) == keys
    finally:
        gemmsmith.unpatch(net)
    assert not any(map(is_patched, net.modules()))
    assert equal(step(net), expected)
    assert runs() == 0


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_asks_once_for_each_plan_with_an_epilogue(
    engine: Engine,
    chooser: Chooser,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    gradients: bool,
) -> None:
    """A forward pass decides, and hands its decision down to the launch."""
    only_fused(chooser)
    plan, asked = Engine.plan, Counter[object]()

    def counting(engine: Engine, form: Form, a: Any, b: Any, *rest: Any, **named: Any) -> Any:
        epilogue = named.get("epilogue", Epilogue.NONE)
        if epilogue is not Epilogue.NONE:
            asked[form, epilogue, b.data_ptr()] += 1
        return plan(engine, form, a, b, *rest, **named)

    net = made(kind)
    operands = given(net)
    with torch.set_grad_enabled(gradients), gemmsmith.patch(net):
        net(*operands)
        monkeypatch.setattr(Engine, "plan", counting)
        net(*operands)
    assert asked
    assert set(asked.values()) == {1}


@pytest.mark.parametrize("kind", LAYERS)
def test_to_the_bit_what_it_was_where_none_wins(
    engine: Engine, chooser: Chooser, runs: Runs, kind: str
) -> None:
    net = made(kind)
    expected = step(net)
    chooser.answers = lambda problem: False
    with gemmsmith.patch(net):
        assert equal(step(net), expected)
    assert runs() == 0
    assert fused(chooser) >= {*LAYERS[kind][1], *LAYERS[kind][2]}  # each was asked for


@pytest.mark.parametrize("winners", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_compiled_as_one_graph(
    engine: Engine, chooser: Chooser, runs: Runs, kind: str, winners: bool
) -> None:
    net = made(kind)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    expected = step(compiled)
    chooser.answers = lambda problem: (
        winners and problem.operation.epilogue.value not in ("none", "bias")
    )
    with gemmsmith.patch(net):  # which compiles it anew, as its classes are others
        found = step(compiled)
        assert runs() == winners * both(kind)
    close(found, expected)
    assert equal(step(compiled), expected)
    assert runs() == 0


@pytest.mark.parametrize("kind", LAYERS)
def test_under_autocast(engine: Engine, chooser: Chooser, runs: Runs, kind: str) -> None:
    net = made(kind).float()

    def compute(net: nn.Module, *operands: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", BF16):
            out: torch.Tensor = net(*(one.float() for one in operands))
            return out

    expected = step(net, compute=compute)
    only_fused(chooser)
    with gemmsmith.patch(net):
        found = step(net, compute=compute)
    # A residual stays in FP32, which no kernel adds.
    assert runs() == (0 if kind == "bert" else both(kind))
    close(found, expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_under_activation_checkpointing(
    engine: Engine, chooser: Chooser, runs: Runs, kind: str, reentrant: bool
) -> None:
    net = made(kind)
    expected = step(net)
    only_fused(chooser)

    def compute(net: nn.Module, *operands: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(net, *operands, use_reentrant=reentrant)
        return out

    if reentrant:  # which knows `backward` alone

        def run() -> list[torch.Tensor]:
            net.zero_grad()
            operands = given(net)
            out = compute(net, *operands)
            loss(out).backward()
            leaves = [*operands, *net.parameters()]
            return [out.detach(), *(one.grad for one in leaves if one.grad is not None)]
    else:

        def run() -> list[torch.Tensor]:
            return step(net, compute=compute)

    with gemmsmith.patch(net):
        close(run(), expected)
    assert runs() == forwards(kind) + both(kind)  # forwards again for the backward pass


def test_hooks_are_called(engine: Engine, chooser: Chooser, runs: Runs) -> None:
    """Those of the layer always; those of a child that would be passed by keep it from being so."""
    net = made("nanogpt")
    only_fused(chooser)
    called: list[str] = []
    net.register_forward_hook(lambda *_: called.append("layer"))
    net.c_proj.register_forward_hook(lambda *_: called.append("c_proj"))
    with gemmsmith.patch(net):
        step(net)
        assert (called, runs()) == (["c_proj", "layer"], 1)
        for child in (net.c_fc, net.gelu):
            assert isinstance(child, nn.Module)
            handle = child.register_forward_pre_hook(lambda *_: called.append("child"))
            called.clear()
            step(net)
            assert (called, runs()) == (["child", "c_proj", "layer"], 0)
            handle.remove()
        handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
        step(net)
        handle.remove()
        assert runs() == 0
        called.clear()
        net.c_proj._forward_hooks.clear()
        step(net)
        assert (called, runs()) == (["layer"], 2)


def test_children_that_became_others(engine: Engine, chooser: Chooser, runs: Runs) -> None:
    class Adapted(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
            return super().forward(input) * 2

    net = made("nanogpt")
    only_fused(chooser)
    with gemmsmith.patch(net):
        for child, other, count in (
            ("c_fc", Adapted(WIDTH, INNER, dtype=BF16), 0),
            ("gelu", nn.Tanh(), 0),
            ("c_proj", Adapted(INNER, WIDTH, dtype=BF16), 1),  # the first half is as it was
        ):
            own = getattr(net, child)
            setattr(net, child, other)
            step(net)
            setattr(net, child, own)
            assert runs() == count
        step(net)
        assert runs() == 2


def test_dropout(engine: Engine, chooser: Chooser, runs: Runs) -> None:
    """After the product it runs as ever; between a product and a sum it must do nothing."""
    only_fused(chooser)
    output, mlp = Output(drop=0.5).to(BF16), Mlp(drop=0.5).to(BF16)
    with gemmsmith.patch(output), gemmsmith.patch(mlp):
        step(output)
        assert runs() == 0
        output.eval()
        step(output)
        assert runs() == 1
        between = Dropping(drop=0.5).to(BF16)
        with gemmsmith.patch(between):
            step(between)
            assert runs() == 1  # the first layer alone
            between.eval()
            step(between)
            assert runs() == 2
        torch.manual_seed(5)
        x = given(mlp)[0]
        torch.manual_seed(6)
        found = mlp(x)
        assert runs() == 1
    torch.manual_seed(6)
    dropped = mlp(x)
    assert torch.equal(found == 0, dropped == 0)


def test_biases(engine: Engine, chooser: Chooser, runs: Runs) -> None:
    """No kernel has a gate and a bias, nor an activation and none; the backward ones do not care,
    but for two biases, which are two tensors.
    """
    only_fused(chooser)
    for net, count in ((FeedForward(bias=True), 0), (Halves(bias=True), 1), (Mlp(bias=False), 1)):
        net.to(BF16)
        expected = step(net)
        with gemmsmith.patch(net):
            found = step(net)
            assert runs() == count
            close(found, expected)
            assert count or equal(found, expected)
            with torch.no_grad():
                assert equal([net(*given(net))], expected[:1])
        assert runs() == 0


@pytest.mark.parametrize("has_gradient", [True, False])
def test_a_factor_that_torch_broadcasts_stays_torchs(
    engine: Engine, chooser: Chooser, runs: Runs, has_gradient: bool
) -> None:
    net = FeedForward()
    net.w3 = nn.Linear(WIDTH, 1, bias=False)
    net.to(BF16)
    only_fused(chooser)
    x = given(net)[0]
    with torch.set_grad_enabled(has_gradient):
        expected = net(x)
        with gemmsmith.patch(net):
            assert torch.equal(net(x), expected)
    assert runs() == 0


def test_named_arguments_are_the_classs_own_affair(
    engine: Engine, chooser: Chooser, runs: Runs
) -> None:
    net = made("halves")
    only_fused(chooser)
    with gemmsmith.patch(net):
        net(hidden_states=given(net)[0])
        assert runs() == 0
        with pytest.raises(TypeError):
            net()


@pytest.mark.parametrize("kind", LAYERS)
def test_copies_and_pickles_are_not_patched(
    engine: Engine, chooser: Chooser, runs: Runs, kind: str
) -> None:
    net = made(kind)
    keys, expected = set(vars(net)), step(net)
    only_fused(chooser)
    with gemmsmith.patch(net):
        whole = io.BytesIO()
        torch.save(net.state_dict(), whole)
        others = [copy.deepcopy(net), copy.copy(net)]
        if "<locals>" not in type(net).__qualname__:
            others += [pickle.loads(pickle.dumps(net, protocol)) for protocol in (2, 5)]
        for other in others[1:]:
            assert vars(other).keys() == keys
            assert not is_patched(other)
        assert not any(map(is_patched, others[0].modules()))
        assert is_patched(net)
        runs()
        assert equal(step(others[0]), expected)
        assert runs() == 0
    whole.seek(0)
    net.load_state_dict(torch.load(whole, weights_only=True))


def test_slices_of_a_sequence(engine: Engine) -> None:
    net = made("sequence")
    assert isinstance(net, nn.Sequential)
    with gemmsmith.patch(net):
        assert type(net[:2]) is nn.Sequential
        assert isinstance(net, nn.Sequential)


def test_a_layer_that_was_wrapped_while_patched(
    engine: Engine, chooser: Chooser, runs: Runs
) -> None:
    """As FSDP2's `fully_shard` derives from whatever class it finds."""
    net = made("nanogpt")
    expected = step(net)
    only_fused(chooser)
    gemmsmith.patch(net)
    net.__class__ = type("Sharded", (net.__class__,), {})
    step(net)
    assert runs() == 2
    gemmsmith.unpatch(net)
    assert equal(step(net), expected)
    assert runs() == 0
    with gemmsmith.patch(net):
        step(net)
        assert runs() == 2
    assert equal(step(net), expected)


@pytest.mark.filterwarnings("ignore")  # torch's own
@pytest.mark.parametrize("first", ["patch", "shard"])
def test_under_fsdp2(engine: Engine, chooser: Chooser, runs: Runs, mesh: Any, first: str) -> None:
    net = made("torchtitan")
    only_fused(chooser)
    if first == "patch":
        gemmsmith.patch(net)
    fully_shard(net, mesh=mesh)
    if first == "shard":
        gemmsmith.patch(net)
    loss(net(*given(net))).backward()
    assert runs() == 2
    assert all(one.grad is not None for one in net.parameters())
    gemmsmith.unpatch(net)
    assert isinstance(net, FSDPModule)
    net(*given(net))
    assert runs() == 0


@pytest.mark.filterwarnings("ignore")  # torch's own
@pytest.mark.parametrize("first", ["patch", "parallelize"])
def test_under_tensor_parallelism(
    engine: Engine, chooser: Chooser, runs: Runs, mesh: Any, first: str
) -> None:
    """Which has hooks and weights of its own: its products stay its own."""
    net = made("torchtitan")
    expected = step(net)
    only_fused(chooser)
    plan = {"w1": ColwiseParallel(), "w2": RowwiseParallel(), "w3": ColwiseParallel()}
    if first == "patch":
        gemmsmith.patch(net)
    parallelize_module(net, mesh, plan)
    if first == "parallelize":
        gemmsmith.patch(net)
    operands = given(net)
    out = net(*operands)
    found = torch.autograd.grad(loss(out), [*operands, *net.parameters()])
    assert runs() == 0
    found = [one.full_tensor() if isinstance(one, DTensor) else one for one in found]
    assert equal([out, *found], expected)
    gemmsmith.unpatch(net)


def kept_bytes(call: Callable[[], torch.Tensor], *but: torch.Tensor | None) -> int:
    """Bytes of what the backward pass keeps beside these."""
    kept: dict[int, int] = {}
    known = {one.untyped_storage().data_ptr() for one in but if one is not None}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = call()
    assert out.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("kind", LAYERS)
def test_no_more_is_kept_for_the_backward_pass(
    engine: Engine, chooser: Chooser, runs: Runs, kind: str
) -> None:
    net = made(kind)

    def kept() -> int:
        operands = given(net)
        return kept_bytes(lambda: net(*operands), *operands, *net.parameters())

    own = kept()
    only_fused(chooser)
    with gemmsmith.patch(net):
        assert 0 < kept() <= own
    assert runs() == forwards(kind)


def test_subclasses(engine: Engine) -> None:
    """One that is wrapped already is known by the forward that it has; another forward is read."""

    class Wrapped(FeedForward):
        pass

    class Scaled(FeedForward):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 0.5

    assert [str(one.recipe) for one in recognized(Wrapped())] == ["gated silu"]
    assert list(recognized(Scaled())) == []


def test_a_capture_of_a_patched_model(engine: Engine) -> None:
    """What could be fused is told beside the products, which torch computes then."""
    net = made("torchtitan")
    with gemmsmith.capture() as shapes, gemmsmith.patch(net), torch.no_grad():
        net(*given(net))
    assert shapes.problems == {
        Problem(m=6, n=INNER, k=WIDTH, dtype="bf16"): 2,
        Problem(m=6, n=WIDTH, k=INNER, dtype="bf16"): 1,
        Problem(m=6, n=2 * INNER, k=WIDTH, dtype="bf16.then_silu_gate"): 1,
    }


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_capture_of_a_step_holds_what_the_backward_pass_could_fuse(device: str) -> None:
    """Also of a model without data, and of `gemmsmith.mlp`."""
    net = made("nanogpt").to(device)
    with torch.device(device), gemmsmith.capture() as shapes, gemmsmith.patch(net):
        x = torch.randn(2, 3, WIDTH, dtype=BF16)
        net(x).sum().backward()
        weights = (net.c_fc.weight, net.c_proj.weight)
        gemmsmith.mlp(x, *weights, bias=net.c_fc.bias, activation="silu", recompute=True)
    found = {problem: n for problem, n in shapes.problems.items() if problem.operation.is_fused}
    assert found == {
        Problem(m=6, n=INNER, k=WIDTH, dtype="bf16.then_bias_gelu_aux"): 1,
        Problem(m=6, n=INNER, k=WIDTH, dtype="bf16.then_dgelu_bgrad", layout="tt"): 1,
        Problem(m=6, n=INNER, k=WIDTH, dtype="bf16.then_bias_silu_aux"): 1,
        Problem(m=6, n=INNER, k=WIDTH, dtype="bf16.then_dsilu_act", layout="tt"): 1,
        Problem(m=6, n=INNER, k=WIDTH, dtype="bf16.then_bias"): 2,
        Problem(m=6, n=WIDTH, k=INNER, dtype="bf16.then_bias"): 1,
    }


def test_deterministic_programs_run_what_is_deterministic(
    engine: Engine, chooser: Chooser, runs: Runs
) -> None:
    net = made("torchtitan")
    expected = step(net)
    chooser.deterministic = False
    with deterministic(), gemmsmith.patch(net):
        assert equal(step(net), expected)
    assert runs() == 0


def test_the_report_says_what_was_fused(engine: Engine, chooser: Chooser) -> None:
    net = nn.ModuleList([made("torchtitan"), made("nanogpt"), made("nanogpt")])
    only_fused(chooser)
    file = io.StringIO()
    with gemmsmith.patch(net, report=True, file=file):
        for one in net:
            step(one)
    lines = file.getvalue().splitlines()
    assert lines[0] == "gemmsmith: 6 of 20 products ran tuned kernels"
    assert lines[1:3] == [
        "  recognized: 1 × FeedForward (gated silu)",
        "  recognized: 2 × Mlp (linear + gelu)",
    ]
    assert sorted(lines[-5:-1]) == [
        "  fused: 1 × dsilu_gate, 1.000 ms less in all",
        "  fused: 1 × silu_gate_aux, 1.000 ms less in all",
        "  fused: 2 × bias_gelu_aux, 2.000 ms less in all",
        "  fused: 2 × dgelu_bgrad, 2.000 ms less in all",
    ]
    assert lines[-1] == "  expected gain: 6.000 ms in all"


def test_other_libraries_tensors_are_left_alone(
    engine: Engine, chooser: Chooser, runs: Runs
) -> None:
    class Their(torch.Tensor):
        pass

    net = made("nanogpt")
    only_fused(chooser)
    x = given(net)[0].detach()
    with gemmsmith.patch(net), torch.no_grad():
        found = net(x.as_subclass(Their))
    assert runs() == 0
    assert type(found) is Their
    with gemmsmith.patch(net):  # as torchao's quantized weights are
        net.c_proj.weight = nn.Parameter(net.c_proj.weight.detach().as_subclass(Their))
        net(x)
    assert runs() == 1


def test_the_check_of_invariance_lets_fused_layers_run(
    engine: Engine, chooser: Chooser, runs: Runs
) -> None:
    """Hooks on children of a fused layer would make it call them."""
    net = nn.Sequential(FeedForward(), nn.Tanh(), Halves()).to(BF16).eval()
    inputs = torch.randn(4, 3, WIDTH).to(BF16)
    only_fused(chooser)
    with gemmsmith.patch(net):
        net(inputs)
        assert (once := runs()) > 0
        report = gemmsmith.check_invariance(net, inputs)
        assert (report.modules, report.unread) == (4, 6), report
        assert runs() == once * 13 * 2
    others = torch.randn(4, 5, WIDTH).to(BF16)
    chooser.answers = lambda problem: (
        problem.operation.epilogue.value not in ("none", "bias") and problem.m <= 20
    )
    with gemmsmith.patch(net):
        report = gemmsmith.check_invariance(net, others)
    print(report)
    assert report.first is not None
    assert (report.first.module, report.first.batch) == ("0", "among")


WRONG = [
    (),
    (None,),
    (3,),
    ([1.0] * WIDTH,),
    ("x",),
    (np.ones((2, WIDTH), np.float32),),
    (torch.ones(2, WIDTH), torch.ones(2, WIDTH), torch.ones(2, WIDTH)),
    (torch.tensor(1.0, dtype=BF16),),
    (torch.ones(2, WIDTH + 1, dtype=BF16),),
    (torch.ones(2, WIDTH, dtype=torch.int64),),
    (torch.ones(2, WIDTH, dtype=torch.bool),),
    (torch.ones(2, WIDTH, dtype=torch.complex64),),
    (torch.ones(2, WIDTH, dtype=torch.float64),),
    (torch.ones(2, WIDTH, dtype=BF16).to_sparse(),),
    (torch.ones(2, WIDTH, dtype=BF16, device="meta"),),
]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", [*LAYERS, "linear", "norm"])
def test_wrong_calls_get_torchs_errors(
    engine: Engine, chooser: Chooser, kind: str, autocast: bool
) -> None:
    alone = {"linear": nn.Linear(WIDTH, INNER), "norm": nn.RMSNorm(WIDTH)}
    net = alone[kind].to(BF16) if kind in alone else made(kind)

    def outcome(arguments: tuple[Any, ...]) -> tuple[type, str]:
        with torch.autocast("cpu", enabled=autocast):
            try:
                return type(net(*arguments)), ""
            except Exception as error:  # noqa: BLE001 - any of torch's
                return type(error), str(error)

    expected = [outcome(arguments) for arguments in WRONG]
    chooser.answers = lambda _: True
    for report in (False, True):  # which patches all linear layers
        with gemmsmith.patch(net, report=report, file=io.StringIO()):
            assert [outcome(arguments) for arguments in WRONG] == expected
