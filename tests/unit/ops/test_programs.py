"""What a program may do with a patched model gives what it gives without the patch."""

from __future__ import annotations

import copy
import inspect
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as models name it
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.nn.utils import parametrizations, parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import gemmsmith
from gemmsmith import built
from gemmsmith.epilogue import Epilogue
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.models.automatic import every_model
from gemmsmith.ops.models.forwards import is_patched
from tests.support.stand_in import Chooser
from tests.unit.ops.test_layers import BF16, INNER, LAYERS, WIDTH, Runs, close, given, loss, made

torch._dynamo.config.recompile_limit = 64


def same(net: nn.Module, act: Callable[[nn.Module], Any]) -> None:
    """`act` gives the same with the patch, or ends with the same kind of error."""
    results: list[Any] = []
    for patched in (False, True):
        torch.manual_seed(7)
        try:
            if patched:
                with gemmsmith.patch(net):
                    results.append(act(net))
            else:
                results.append(act(net))
        except Exception as error:  # noqa: BLE001 - compared
            results.append(error)
    expected, ours = results
    if isinstance(expected, Exception):
        assert type(ours) is type(expected), ours
        return
    if isinstance(ours, Exception):
        raise ours
    flat = [torch.utils._pytree.tree_leaves(one) for one in (ours, expected)]
    assert len(flat[0]) == len(flat[1])
    for one, other in zip(*flat, strict=True):
        if isinstance(one, torch.Tensor):
            close([one.detach()], [other.detach()])
        else:
            assert one == other


def total(net: nn.Module, *operands: torch.Tensor) -> torch.Tensor:
    return loss(net(*operands))


def data(net: nn.Module) -> list[torch.Tensor]:
    return [one.detach() for one in given(net)]


def parameters(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.detach() for name, one in net.named_parameters()}


def _dual(net: nn.Module) -> Any:
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(one, torch.ones_like(one)) for one in data(net)]
        return forward_ad.unpack_dual(net(*duals)).tangent


def _dual_parameters(net: nn.Module) -> Any:
    with forward_ad.dual_level():
        duals = {
            name: forward_ad.make_dual(one, torch.ones_like(one))
            for name, one in parameters(net).items()
        }
        return forward_ad.unpack_dual(functional_call(net, duals, tuple(data(net)))).tangent


def _jvp(net: nn.Module) -> Any:
    operands = tuple(data(net))
    return jvp(net, operands, tuple(torch.ones_like(one) for one in operands))


def _vjp(net: nn.Module) -> Any:
    out, pull = vjp(net, *data(net))
    return out, pull(torch.ones_like(out))


def _grad(net: nn.Module) -> Any:
    def of(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return loss(functional_call(net, weights, tuple(data(net))))

    return grad(of)(parameters(net))


def _per_sample(net: nn.Module) -> Any:
    def of(weights: dict[str, torch.Tensor], *sample: torch.Tensor) -> torch.Tensor:
        return loss(functional_call(net, weights, sample))

    axes = (None, *(0 for _ in data(net)))
    return vmap(grad(of), in_dims=axes)(parameters(net), *data(net))


def _ensemble(net: nn.Module) -> Any:
    weights = {name: torch.stack([one, one * 2]) for name, one in parameters(net).items()}
    return vmap(lambda one: functional_call(net, one, tuple(data(net))))(weights)


def _batched_gradients(net: nn.Module) -> Any:
    operands = given(net)
    out = net(*operands)
    directions = torch.randn(3, *out.shape).to(out.dtype)
    return torch.autograd.grad(
        out, [*operands, *net.parameters()], directions, is_grads_batched=True
    )


def _penalty(net: nn.Module) -> Any:
    operands = given(net)
    first = torch.autograd.grad(total(net, *operands), operands, create_graph=True)
    norm = sum(one.float().square().sum() for one in first)
    return torch.autograd.grad(norm, [*operands, *net.parameters()], allow_unused=True)


def _jacobian(net: nn.Module) -> Any:
    return torch.autograd.functional.jacobian(
        lambda *operands: total(net, *operands), tuple(data(net)), vectorize=True
    )


def _hvp(net: nn.Module) -> Any:
    operands = tuple(data(net))
    return torch.autograd.functional.hvp(
        lambda *inputs: total(net, *inputs), operands, tuple(torch.ones_like(x) for x in operands)
    )


def _autograd_jvp(net: nn.Module) -> Any:
    operands = tuple(data(net))
    ones = tuple(torch.ones_like(x) for x in operands)
    return torch.autograd.functional.jvp(net, operands, ones)


def _linearized(net: nn.Module) -> Any:
    operands = tuple(data(net))
    out, push = linearize(net, *operands)
    return out, push(*(torch.ones_like(one) for one in operands))


def _hessian(net: nn.Module) -> Any:
    x, *rest = data(net)
    return hessian(lambda row: total(net, row.expand(x.shape), *rest))(x[0, 0])


def _compiled_grad(net: nn.Module) -> Any:
    torch._dynamo.reset()
    of = torch.compile(grad(lambda x, *rest: total(net, x, *rest)), backend="aot_eager")
    return of(*data(net))


def _selective(net: nn.Module) -> Any:
    seen: list[str] = []

    def policy(_: Any, function: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
        seen.append(str(function))
        products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return (
            CheckpointPolicy.MUST_SAVE if function in products else CheckpointPolicy.MUST_RECOMPUTE
        )

    operands = given(net)
    out: torch.Tensor = checkpoint(
        net,
        *operands,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )
    return out, torch.autograd.grad(loss(out), [*operands, *net.parameters()]), seen


def _operators(net: nn.Module) -> Any:
    """As tools list, count or replace them."""
    names: list[str] = []

    class Lists(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    operands = given(net)
    with Lists():
        torch.autograd.grad(total(net, *operands), [*operands, *net.parameters()])
    return names


def _functions(net: nn.Module) -> Any:
    names: list[str] = []

    class Lists(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            names.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    operands = data(net)
    with Lists(), torch.no_grad():
        net(*operands)
    return names


def _flops(net: nn.Module) -> Any:
    operands = given(net)
    with FlopCounterMode(display=False) as counter:
        total(net, *operands).backward()
    return counter.get_total_flops()


def _flops_of_backward(net: nn.Module) -> Any:
    out = total(net, *given(net))
    with FlopCounterMode(display=False) as counter:
        out.backward()
    return counter.get_total_flops()


AUTOGRAD: dict[str, Callable[[nn.Module], Any]] = {
    "forward mode": _dual,
    "forward mode, parameters": _dual_parameters,
    "jvp": _jvp,
    "vjp": _vjp,
    "grad": _grad,
    "vmap": lambda net: vmap(net)(*data(net)),
    "per sample": _per_sample,
    "ensemble": _ensemble,
    "jacrev": lambda net: jacrev(lambda *x: total(net, *x))(*data(net)),
    "jacfwd": lambda net: jacfwd(lambda x, *y: total(net, x, *y))(*data(net)),
    "hessian": _hessian,
    "linearize": _linearized,
    "batched gradients": _batched_gradients,
    "penalty": _penalty,
    "jacobian": _jacobian,
    "hvp": _hvp,
    "autograd's jvp": _autograd_jvp,
    "compiled grad": _compiled_grad,
    "selective checkpoint": _selective,
    "operators": _operators,
    "functions": _functions,
    "flops": _flops,
    "flops of the backward pass": _flops_of_backward,
}


@pytest.mark.filterwarnings("ignore")  # torch's own
@pytest.mark.parametrize("act", AUTOGRAD)
@pytest.mark.parametrize("kind", LAYERS)
def test_ways_to_differentiate_and_to_observe(
    engine: Engine, chooser: Chooser, kind: str, act: str
) -> None:
    same(made(kind), AUTOGRAD[act])


def test_the_patch_runs_kernels(engine: Engine, runs: Runs) -> None:
    """The patch does something: the tests above would pass without any kernel."""
    net = made("nanogpt")
    with gemmsmith.patch(net):
        net(*given(net))
    assert runs()


# Tensors that hold other values than their memory, or none


def _negated(x: torch.Tensor) -> torch.Tensor:
    return torch._neg_view(x)


def _expanded(x: torch.Tensor) -> torch.Tensor:
    return x.flatten()[:1].expand(x.shape)


def _strided(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, x * 0], -1).flatten(-2)[..., ::2]


def _shifted(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def _zero(x: torch.Tensor) -> torch.Tensor:
    return torch._efficientzerotensor(x.shape, dtype=x.dtype)


def _inference(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x.clone()


VIEWS = (_negated, _expanded, _strided, _shifted, _zero, _inference)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("kind", LAYERS)
def test_operands_of_any_kind(engine: Engine, kind: str, view: Any) -> None:
    def act(net: nn.Module) -> Any:
        with torch.no_grad():
            return net(*(view(one) for one in data(net)))

    same(made(kind), act)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("kind", LAYERS)
def test_parameters_of_any_kind(engine: Engine, kind: str, view: Any) -> None:
    net = made(kind)
    for name, one in parameters(net).items():

        def act(net: nn.Module, name: str = name, one: torch.Tensor = one) -> Any:
            operands = [] if view is _inference else given(net)
            with torch.set_grad_enabled(bool(operands)):
                changed = {**parameters(net), name: view(one)}
                out = functional_call(net, changed, tuple(operands or data(net)))
            return out, torch.autograd.grad(loss(out), operands) if operands else None

        same(net, act)


@pytest.mark.parametrize("view", [_negated, _expanded, _strided, _zero])
@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_of_any_kind(engine: Engine, kind: str, view: Any) -> None:
    def act(net: nn.Module) -> Any:
        operands = given(net)
        out = net(*operands)
        return torch.autograd.grad(out, [*operands, *net.parameters()], view(torch.ones_like(out)))

    same(made(kind), act)


@pytest.mark.parametrize("kind", LAYERS)
def test_without_data(engine: Engine, kind: str) -> None:
    with torch.device("meta"):
        net = LAYERS[kind][0]().to(BF16)
    operands = [one.to("meta") for one in data(net)]
    with gemmsmith.patch(net):
        assert net(*operands).shape == operands[0].shape[:-1] + net(*operands).shape[-1:]
        with torch.autocast("cpu", BF16):
            assert net(*operands).is_meta


@pytest.mark.filterwarnings("ignore")  # torch's own
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(engine: Engine, layout: torch.layout) -> None:
    def act(net: nn.Module) -> Any:
        rows = [torch.randn(n, WIDTH).to(BF16) for n in (2, 5)]
        nested = torch.nested.nested_tensor(rows, layout=layout)
        with torch.no_grad():
            return list(net(nested).unbind())

    same(made("nanogpt"), act)


# Functions and forwards that a program has replaced


class ModuleMlp(nn.Module):
    """Whose activation is a module."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, INNER), activation, nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(self.act(self.up(x)))


def _scaled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def replacement(*arguments: Any, **named: Any) -> torch.Tensor:
        return function(*arguments, **named) * 3

    replacement.__name__ = function.__name__  # in disguise
    return replacement


REPLACED: list[tuple[Any, str, Callable[[], nn.Module]]] = [
    (F, "gelu", lambda: LAYERS["nanogpt"][0]()),
    (F, "silu", lambda: LAYERS["torchtitan"][0]()),
    (F, "relu", lambda: LAYERS["squares"][0]()),
    (torch.Tensor, "square", lambda: LAYERS["squares"][0]()),
    (torch.Tensor, "chunk", lambda: LAYERS["halves"][0]()),
    (F, "gelu", lambda: ModuleMlp(nn.GELU())),
    (F, "silu", lambda: ModuleMlp(nn.SiLU())),
    (F, "linear", lambda: LAYERS["nanogpt"][0]()),
    (F, "dropout", lambda: LAYERS["dropping"][0]()),
    (nn.GELU, "forward", lambda: ModuleMlp(nn.GELU())),
    (nn.SiLU, "forward", lambda: ModuleMlp(nn.SiLU())),
    (nn.Linear, "forward", lambda: LAYERS["nanogpt"][0]()),
    (nn.Linear, "__call__", lambda: LAYERS["nanogpt"][0]()),
    (nn.Module, "__call__", lambda: LAYERS["nanogpt"][0]()),
    (nn.Dropout, "forward", lambda: LAYERS["dropping"][0]()),
    (nn.Sequential, "forward", lambda: LAYERS["sequence"][0]()),
    (LAYERS["nanogpt"][0], "forward", lambda: LAYERS["nanogpt"][0]()),
]


@pytest.mark.parametrize("when", ["before", "during"])
@pytest.mark.parametrize(("owner", "name", "make"), REPLACED)
def test_functions_that_a_program_replaced(
    engine: Engine, owner: Any, name: str, make: Callable[[], nn.Module], when: str
) -> None:
    torch.manual_seed(3)
    net = make().to(BF16).eval()
    operands = data(net)
    with pytest.MonkeyPatch.context() as program, torch.no_grad():
        own = net(*operands)

        def replace() -> None:
            function = getattr(owner, name)
            replacement = _scaled(function)
            if name == "chunk":  # gives a pair

                def replacement(*arguments: Any, **named: Any) -> Any:
                    return [one * 3 for one in function(*arguments, **named)]

            program.setattr(owner, name, replacement, raising=False)

        if when == "before":
            replace()
            expected = net(*operands)
            with gemmsmith.patch(net):
                result = net(*operands)
        else:
            with gemmsmith.patch(net):
                net(*operands)
                replace()
                result = net(*operands)
            expected = net(*operands)
    close([result], [expected])
    assert not torch.allclose(own, expected, atol=1e-2)
    with gemmsmith.patch(net), torch.no_grad():
        close([net(*operands)], [own])  # and back


def test_an_activation_that_changes(engine: Engine, chooser: Chooser) -> None:
    net = ModuleMlp(nn.GELU()).to(BF16)
    x = data(net)[0]
    with torch.no_grad(), gemmsmith.patch(net):
        net(x)
        asked = {problem.operation.epilogue for problem in chooser.asked}
        assert Epilogue.BIAS_GELU_TANH not in asked
        net.act.approximate = "tanh"  # type: ignore[union-attr]
        chooser.asked.clear()
        net(x)
        asked = {problem.operation.epilogue for problem in chooser.asked}
        assert Epilogue.BIAS_GELU not in asked


# Tools that look at a module's type, copy it, keep its forward or write it down


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

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
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
