"""Differentiating, observing and feeding a patched model gives what it gives without the patch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd import functional as eager
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import gemmsmith
from gemmsmith.ops.engine.engine import Engine
from tests.support.programs import data, parameters, same, total
from tests.support.stand_in import Chooser
from tests.unit.ops.test_layers import BF16, LAYERS, WIDTH, given, loss, made

torch._dynamo.config.recompile_limit = 64


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


def _ones(net: nn.Module) -> tuple[torch.Tensor, ...]:
    return tuple(map(torch.ones_like, data(net)))


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


def _linearized(net: nn.Module) -> Any:
    out, push = linearize(net, *data(net))
    return out, push(*_ones(net))


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
    "jvp": lambda net: jvp(net, tuple(data(net)), _ones(net)),
    "vjp": _vjp,
    "grad": _grad,
    "vmap": lambda net: vmap(net)(*data(net)),
    "per sample": _per_sample,
    "ensemble": _ensemble,
    "jacrev": lambda net: jacrev(partial(total, net))(*data(net)),
    "jacfwd": lambda net: jacfwd(partial(total, net))(*data(net)),
    "hessian": _hessian,
    "linearize": _linearized,
    "batched gradients": _batched_gradients,
    "penalty": _penalty,
    "jacobian": lambda net: eager.jacobian(partial(total, net), tuple(data(net)), vectorize=True),
    "hvp": lambda net: eager.hvp(partial(total, net), tuple(data(net)), _ones(net)),
    "autograd's jvp": lambda net: eager.jvp(net, tuple(data(net)), _ones(net)),
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


def gradients_of(view: Any, net: nn.Module) -> Any:
    """The gradients for a gradient that lies in memory in another way."""
    operands = given(net)
    out = net(*operands)
    return torch.autograd.grad(out, [*operands, *net.parameters()], view(torch.ones_like(out)))


@pytest.mark.parametrize("view", [_negated, _expanded, _strided, _zero])
@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_of_any_kind(engine: Engine, kind: str, view: Any) -> None:
    same(made(kind), partial(gradients_of, view))


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
