"""Tools that read a module's type, copy it, keep its forward or write it down, and patches."""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as models name it
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import gemmsmith
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.models.automatic import every_model
from gemmsmith.program import built
from tests.support.patched import is_patched
from tests.support.processes import in_threads
from tests.support.programs import data, same
from tests.unit.ops.test_layers import BF16, INNER, LAYERS, WIDTH, Runs, close, made


class Registered(nn.Module):
    """Keeps a registry of its subclasses, as plug-in frameworks do."""

    classes: set[str] = set()  # noqa: RUF012 - the point

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.__name__ in Registered.classes:
            raise ValueError(f"{cls.__name__} is registered twice")
        Registered.classes.add(cls.__name__)


class Meta(type):
    def __new__(mcs, name: str, bases: tuple[type, ...], space: dict[str, Any]) -> Any:
        if name in ("InRegistry",) and bases != (Registered,):
            raise TypeError(f"{name} is not to be derived from")
        return super().__new__(mcs, name, bases, space)


class InRegistry(Registered, metaclass=Meta):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(F.gelu(self.up(x)))


def test_classes_with_a_registry(engine: Engine, runs: Runs) -> None:
    net = nn.Sequential()
    net.add_module("layer", InRegistry())
    net.to(BF16)
    same(net, lambda net: net(*data(net)))
    assert runs() == 2
    built.remember()
    with every_model():
        other = nn.Sequential()
        other.add_module("layer", InRegistry())
        other.to(BF16)(*data(other))
    assert runs() == 2


@pytest.mark.parametrize("kind", LAYERS)
def test_types_stay(engine: Engine, kind: str) -> None:
    net = made(kind)
    types = [type(module) for module in net.modules()]
    with gemmsmith.patch(net):
        assert [type(module) for module in net.modules()] == types


@pytest.mark.filterwarnings("ignore")  # torch's own
def test_tools_that_look_for_exact_types(engine: Engine) -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    with gemmsmith.patch(net):
        torch.ao.quantization.quantize_dynamic(net, {nn.Linear}, inplace=True)
    assert type(net[0]) is torch.ao.nn.quantized.dynamic.Linear
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    with gemmsmith.patch(net):
        parametrizations.weight_norm(net[0])
        net(torch.randn(2, WIDTH))
    parametrize.remove_parametrizations(net[0], "weight")
    assert type(net[0]) is nn.Linear
    assert not is_patched(net[0])


@pytest.mark.parametrize("kind", LAYERS)
def test_replicas(engine: Engine, runs: Runs, kind: str) -> None:
    """`nn.DataParallel` makes some for each call: they have their own parameters."""
    net = made(kind)
    gemmsmith.patch(net)
    replicas = [net._replicate_for_data_parallel() for _ in range(2)]
    gemmsmith.unpatch(net)
    with gemmsmith.patch(net), torch.no_grad():
        replica = net._replicate_for_data_parallel()
        assert type(replica) is type(net)
        for name, child in net._modules.items():
            replica._modules[name] = copy.deepcopy(child)
        for one in replica.parameters():
            one.mul_(2)
        result = replica(*data(net))
        assert runs() > 0
    doubled = copy.deepcopy(net)
    with torch.no_grad():
        for one in doubled.parameters():
            one.mul_(2)
        close([result], [doubled(*data(net))])
        runs()
        for old in replicas:
            old._modules = net._modules
            old(*data(net))
        assert runs() == 0  # whose patch has ended


@pytest.mark.parametrize("kind", LAYERS)
def test_a_forward_that_the_program_kept(engine: Engine, runs: Runs, kind: str) -> None:
    net = made(kind)
    before, operands = net.forward, data(net)
    with torch.no_grad():
        expected = net(*operands)
        with gemmsmith.patch(net):
            during = net.forward
            close([before(*operands)], [expected])  # whose linear layers are patched themselves
            runs()
            close([during(*operands)], [expected])
            assert runs() > 0
        for kept in (before, during):
            assert torch.equal(kept(*operands), expected)
        assert runs() == 0
        assert during.__name__ == "forward"
        assert during.__wrapped__ == before


def test_a_forward_that_the_program_put_in(engine: Engine, runs: Runs) -> None:
    net = made("nanogpt")
    (x,) = data(net)
    with torch.no_grad(), gemmsmith.patch(net):
        ours = net.forward
        net.forward = lambda x: ours(x) * 2  # type: ignore[method-assign]
        close([net(x)], [ours(x) * 2])
        assert runs() == 4
    with torch.no_grad():
        close([net(x)], [ours(x) * 2])
        assert runs() == 0
    assert "forward" in vars(net)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_prepared_by_accelerate(engine: Engine, precision: str) -> None:
    net = nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))
    x = torch.randn(6, WIDTH)
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    with torch.no_grad():
        with gemmsmith.patch(net):
            prepared = accelerator.prepare(net)
            first = prepared(x)
        close([prepared(x)], [first])
        close([accelerator.unwrap_model(prepared)(x)], [first])


def _exported(net: nn.Module, strict: bool) -> Any:
    program = torch.export.export(net, tuple(data(net)), strict=strict)
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    file = io.BytesIO()
    torch.export.save(program, file)
    return names, program.module()(*data(net))


def _exported_with_named_sizes(net: nn.Module) -> Any:
    names = list(inspect.signature(net.forward).parameters)
    sizes = {name: {0: torch.export.Dim("batch", min=2, max=64)} for name in names}
    program = torch.export.export(net, tuple(data(net)), dynamic_shapes=sizes)
    return names, program.module()(*data(net))


def _symbolically(net: nn.Module) -> Any:
    graph = torch.fx.symbolic_trace(net)
    return [node.name for node in graph.graph.nodes], graph(*data(net))


def _scripted(net: nn.Module) -> Any:
    children = dict(net.named_children())
    out = torch.jit.script(net)(*data(net))
    assert dict(net.named_children()) == children
    return out


WRITTEN: dict[str, Callable[[nn.Module], Any]] = {
    "export": lambda net: _exported(net, strict=False),
    "strict export": lambda net: _exported(net, strict=True),
    "export with named sizes": _exported_with_named_sizes,
    "symbolic trace": _symbolically,
    "jit.trace": lambda net: torch.jit.trace(net, tuple(data(net)))(*data(net)),
    "jit.script": _scripted,
    "make_fx": lambda net: [
        str(node.target)
        for node in torch.fx.experimental.proxy_tensor.make_fx(net)(*data(net)).graph.nodes
    ],
    "signature": lambda net: str(inspect.signature(net.forward)),
}


@pytest.mark.filterwarnings("ignore")  # torch's own
@pytest.mark.parametrize("act", WRITTEN)
@pytest.mark.parametrize("kind", LAYERS)
def test_programs_that_are_written_down(engine: Engine, kind: str, act: str) -> None:
    same(made(kind).eval(), WRITTEN[act])


def test_one_model_patched_by_several_threads(engine: Engine) -> None:
    net = made("torchtitan")
    with torch.no_grad():
        expected = net(*data(net))
    operands, errors = data(net), []

    def work() -> None:
        try:
            for _ in range(30):
                with gemmsmith.patch(net), torch.no_grad():
                    close([net(*operands)], [expected])
        except BaseException as error:  # noqa: BLE001 - a thread's
            errors.append(error)

    in_threads(*[work] * 4)
    assert not errors
    assert not any(map(is_patched, net.modules()))


def test_a_forgotten_model_is_freed_at_once(engine: Engine) -> None:
    """Without waiting for the garbage collector: its memory may be most of a GPU's."""
    import gc
    import weakref

    net = made("nanogpt")
    gemmsmith.patch(net)
    net(*data(net))
    gone = weakref.ref(net.c_fc.weight)
    gc.disable()
    try:
        del net
        assert gone() is None
    finally:
        gc.enable()
