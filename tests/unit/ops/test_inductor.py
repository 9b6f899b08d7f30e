"""Fused products in compiled graphs: where winners say so, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as models name it
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import fresh_inductor_cache
from transformers.activations import NewGELUActivation

import gemmsmith
from gemmsmith.core.activations import ACTIVATIONS
from gemmsmith.core.epilogue import Activation
from gemmsmith.core.operation import Epilogue
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.in_use import install
from tests.support.stand_in import Chooser, Host, Packs, deterministic, installed
from tests.unit.ops.test_layers import close

BF16 = torch.bfloat16
Runs = Callable[[], int]
WIDTH, INNER = 16, 24


@pytest.fixture(autouse=True)
def _compiled_anew(chooser: Chooser) -> Iterator[None]:
    torch._dynamo.reset()
    chooser.answers = lambda problem: (
        problem.operation.epilogue
        not in (
            Epilogue.NONE,
            Epilogue.BIAS,
        )
    )
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    """Layers to make functions of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up = nn.Linear(WIDTH, INNER)
        self.gate, self.raised = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.gamma = nn.Parameter(torch.randn(WIDTH))
        self.to(BF16)


Function = Callable[[Net, torch.Tensor], Any]
FUSED: dict[str, tuple[Function, list[str]]] = {
    "gelu_tanh": (lambda net, x: F.gelu(net.up(x), approximate="tanh"), ["bias_gelu_tanh"]),
    "gelu": (lambda net, x: F.gelu(net.up(x)), ["bias_gelu"]),
    "gelu in steps": (lambda net, x: NewGELUActivation()(net.up(x)), ["bias_gelu_tanh"]),
    "silu": (lambda net, x: F.silu(net.up(x)), ["bias_silu"]),
    "relu2": (lambda net, x: F.relu(net.up(x)).square(), ["bias_relu2"]),
    "swiglu": (lambda net, x: F.silu(net.gate(x)) * net.raised(x), ["silu_gate"]),
    "geglu": (
        lambda net, x: net.raised(x) * F.gelu(net.gate(x), approximate="tanh"),
        ["gelu_tanh_gate"],
    ),
    "residual": (lambda net, x: x + net.out(x), ["bias_residual"]),
    "residual after dropout that is off": (
        lambda net, x: x + F.dropout(net.out(x), 0.1, training=False),
        ["bias_residual"],
    ),
    "layer scale": (lambda net, x: net.out(x) * net.gamma + x, ["bias_scale_residual"]),
    "layer scale of a gated mlp": (
        lambda net, x: x + net.gamma * net.down(F.silu(net.gate(x)) * net.raised(x)),
        ["silu_gate", "scale_residual"],
    ),
    "relu of a residual": (lambda net, x: F.relu(net.out(x) + x), ["bias_residual_relu"]),
    "silu of a residual": (lambda net, x: F.silu(x + net.out(x)), ["bias_residual_silu"]),
    "mlp": (lambda net, x: x + net.down(F.gelu(net.up(x))), ["bias_gelu", "residual"]),
    "gated mlp": (
        lambda net, x: net.down(F.silu(net.gate(x)) * net.raised(x)) + x,
        ["silu_gate", "residual"],
    ),
}
ALONE: dict[str, Function] = {
    "nothing follows": lambda net, x: net.up(x),
    "no kernel's activation": lambda net, x: torch.tanh(net.up(x)),
    "nearly one": lambda net, x: net.up(x) * torch.sigmoid(1.7 * net.up(x)),
    "no bias": lambda net, x: F.gelu(net.gate(x)),
    "a row is added": lambda net, x: net.gate(x) + torch.ones(INNER, dtype=BF16),
    "a gate and a bias": lambda net, x: F.silu(net.gate(x)) * net.up(x),
    "two inputs": lambda net, x: F.silu(net.gate(x)) * net.raised(x + 1),
    "the product is wanted, too": lambda net, x: (lambda out: (out, out + x))(net.out(x)),
    "a number is added": lambda net, x: net.out(x) + 1,
    "what a residual is added to is wanted, too": lambda net, x: (
        lambda out: (out, F.silu(out + x))
    )(net.out(x)),
    "a row is multiplied, and nothing added": lambda net, x: net.out(x) * net.gamma,
    "what is scaled is wanted, too": lambda net, x: (lambda out: (out, out + x))(
        net.out(x) * net.gamma
    ),
    "what is scaled is the residual as well": lambda net, x: (lambda out: out * net.gamma + out)(
        net.out(x)
    ),
}


class Seen:
    """Compiles by Inductor's rules without its code, and keeps the graphs."""

    def __init__(self) -> None:
        self.before: list[str] = []
        self.after: list[str] = []
        self.epilogues: list[str] = []

    def __call__(self, graph: fx.Graph) -> None:
        self.before.append(str(graph))
        gemmsmith.inductor_pass()(graph)
        self.after.append(str(graph))
        self.epilogues += [
            next(str(one) for one in node.args if isinstance(one, str))
            for node in graph.nodes
            if "gemmsmith" in str(node.target)
        ]

    def compiled(self, function: Callable[..., Any], *, dynamic: bool = False) -> Any:
        return torch.compile(function, backend=self.backend, fullgraph=True, dynamic=dynamic)

    def backend(self, gm: fx.GraphModule, example: list[torch.Tensor]) -> Any:
        def parted(joint: fx.GraphModule, *more: Any, **named: Any) -> Any:
            self(joint.graph)
            joint.recompile()
            return min_cut_rematerialization_partition(joint, *more, **named)

        def whole(inference: fx.GraphModule, example: list[torch.Tensor]) -> Any:
            self(inference.graph)
            inference.recompile()
            return make_boxed_func(inference.forward)

        return aot_autograd(
            fw_compiler=lambda made, _: make_boxed_func(made.forward),
            inference_compiler=whole,
            partition_fn=parted,
            decompositions=select_decomp_table(),
        )(gm, example)


def tokens(*leading: int) -> torch.Tensor:
    torch.manual_seed(4)
    return torch.randn(*(leading or (2, 3)), WIDTH).to(BF16).requires_grad_()


def step(net: Net, function: Function, x: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of the tokens and the weights that have one."""
    out = function(net, x)
    loss = (out.float().square() * torch.linspace(-1, 1, out.shape[-1])).sum()
    grads = torch.autograd.grad(loss, [x, *net.parameters()], allow_unused=True)
    return [out.detach(), *(one for one in grads if one is not None)]


@pytest.mark.parametrize("leading", [(6,), (2, 3)])
@pytest.mark.parametrize("name", FUSED)
def test_inference(engine: Engine, runs: Runs, name: str, leading: tuple[int, ...]) -> None:
    function, epilogues = FUSED[name]
    net, x, seen = Net(), tokens(*leading), Seen()
    with torch.no_grad():
        expected = function(net, x)
        out = seen.compiled(function)(net, x)
    close([out], [expected])
    assert sorted(seen.epilogues) == sorted(epilogues)
    assert runs() == len(epilogues)


@pytest.mark.parametrize("leading", [(6,), (2, 3)])
@pytest.mark.parametrize("name", FUSED)
def test_training(engine: Engine, runs: Runs, name: str, leading: tuple[int, ...]) -> None:
    """The graph is of both passes: what a gradient needs is stored by the same kernel."""
    function, epilogues = FUSED[name]
    net, x, seen = Net(), tokens(*leading), Seen()
    expected = step(net, function, x)
    compiled = seen.compiled(function)
    close(step(net, compiled, x), expected)
    kept = ("residual", "bias_residual")  # whose gradients need nothing of what was computed
    stored = [one if one in kept else f"{one}_aux" for one in epilogues]
    forwards = [one for one in seen.epilogues if one in stored]
    assert set(forwards) == set(stored)
    # What else there is, are sums of the input's gradients, of gate and up and of the residual,
    # and the gradient of the activation between two products.
    others = {one for one in seen.epilogues if one not in stored}
    assert others <= ({"residual", "dgelu_bgrad"} if name == "mlp" else {"residual"})
    assert runs() == len(seen.epilogues)


@pytest.mark.parametrize("name", [*FUSED, *ALONE])
def test_a_graph_is_left_alone(engine: Engine, chooser: Chooser, runs: Runs, name: str) -> None:
    """Without winners each; with winners those that no kernel is for."""
    if name in FUSED:
        chooser.answers = lambda problem: False
    function = FUSED[name][0] if name in FUSED else ALONE[name]
    net, x, seen = Net(), tokens(), Seen()
    with torch.no_grad():
        seen.compiled(function)(net, x)
    assert seen.before == seen.after
    assert seen.before
    assert runs() == 0


@pytest.mark.parametrize("why", ["nothing in use", "float32", "sizes are symbols"])
def test_what_is_never_fused(engine: Engine, runs: Runs, why: str) -> None:
    function = FUSED["mlp"][0]
    net, x, seen = Net(), tokens(), Seen()
    if why == "nothing in use":
        install(None)
    if why == "float32":
        net, x = net.float(), x.detach().float()
    dynamic = why == "sizes are symbols"
    with torch.no_grad():
        seen.compiled(function, dynamic=dynamic)(net, x)
    assert seen.before == seen.after
    assert runs() == 0


def test_a_product_that_is_wanted_itself(engine: Engine, runs: Runs) -> None:
    """It is what the kernel stores beside the activation."""

    def both(net: Net, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = net.up(x)
        return hidden, F.gelu(hidden)

    net, x, seen = Net(), tokens(), Seen()
    with torch.no_grad():
        expected = both(net, x)
        found = seen.compiled(both)(net, x)
    close(list(found), list(expected))
    assert seen.epilogues == ["bias_gelu_aux"]
    assert runs() == 1


def test_a_graph_whose_winners_are_gone(engine: Engine, runs: Runs) -> None:
    """What was put in is torch's own steps then."""
    function = FUSED["gated mlp"][0]
    net, x = Net(), tokens()
    expected = step(net, function, x)
    compiled = Seen().compiled(function)
    close(step(net, compiled, x), expected)
    assert runs() > 0
    install(None)
    close(step(net, compiled, x), expected)
    assert runs() == 0


def test_what_caches_tell_apart(pack: Any, host: Host) -> None:
    def uuid(chooser: Any) -> Any:
        engine = None if chooser is None else Engine(chooser, Packs(pack), platform=host)
        with installed(engine):
            return gemmsmith.inductor_pass().uuid()

    def lookup(revision: str) -> Any:
        return SimpleNamespace(snapshot=SimpleNamespace(revision=revision), lookup=None)

    assert uuid(None) == uuid(None)
    assert uuid(lookup("one")) == uuid(lookup("one"))
    assert len({uuid(None), uuid(lookup("one")), uuid(lookup("two"))}) == 3
    with deterministic():
        strict = uuid(lookup("one"))
    assert strict != uuid(lookup("one"))
    assert uuid(Chooser()) is None  # nobody can tell: nothing is cached


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # Inductor's own
def test_inductor_itself(pack: Any, host: Host, chooser: Chooser, runs: Runs) -> None:
    """Its code for a training step, and its cache: of the same winners, and of others."""
    function = FUSED["gated mlp"][0]
    net, x = Net(), tokens()
    expected = step(net, function, x)
    hits = []
    with fresh_inductor_cache():
        for revision in ("one", "one", "two"):
            torch._dynamo.reset()
            counters.clear()
            chooser.snapshot = SimpleNamespace(revision=revision)  # type: ignore[attr-defined]
            with installed(Engine(chooser, Packs(pack), platform=host)):
                options = {"joint_custom_pre_pass": gemmsmith.inductor_pass()}
                compiled = torch.compile(function, options=options, dynamic=False)
                close(step(net, compiled, x), expected)
            assert runs() == 4  # the gate, the residual, and two sums of the input's gradients
            hits.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert hits == [0, 1, 0]


WRITTEN: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    **{name: (name, ACTIVATIONS[Activation(name)]) for name in ("gelu_tanh", "gelu", "silu")},
    "gelu in steps": ("gelu_tanh", NewGELUActivation()),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("written", WRITTEN)
def test_gradients_of_activations(engine: Engine, runs: Runs, written: str, bias: bool) -> None:
    """The product before one takes it along, and the bias's gradient, the sum of its rows."""
    name, activation = WRITTEN[written]
    layer = "up" if bias else "gate"

    def mlp(net: Net, x: torch.Tensor) -> torch.Tensor:
        return net.down(activation(getattr(net, layer)(x)))

    net, x, seen = Net(), tokens(), Seen()
    expected = step(net, mlp, x)
    compiled = seen.compiled(mlp)
    close(step(net, compiled, x), expected)
    backwards = f"d{name}_bgrad" if bias else f"d{name}"
    assert seen.epilogues == ([f"bias_{name}_aux"] if bias else []) + [backwards]
    assert runs() == len(seen.epilogues)
