"""Mixtures of experts of transformers in a patched model, computed by `gemmsmith.experts`.

They are recognized by the function with which transformers replaces their forward, and which calls
an implementation by its name. If the model uses a default implementation of transformers, experts
that are SwiGLU without biases run as with the implementation `gemmsmith` (`experts_forward`),
provided that one of their grouped products has a winner. The model's configuration is unchanged.
The experts' own forward runs if hooks would be skipped, or if a program has replaced functions that
it calls.

Experts may also be transposed, have biases, and a clamped gate, which is recognized by its source,
if their implementation is `grouped_mm`. They save passes, and run while any winners are in use, but
not in graphs, or where one order of sums is demanded.
"""

from __future__ import annotations

import ast
import functools
import itertools
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from gemmsmith.ops.below.prospects import may_run
from gemmsmith.ops.engine.forms import Form, Spec
from gemmsmith.ops.engine.in_use import current
from gemmsmith.ops.models.canonical import OfModule
from gemmsmith.ops.models.forwards import LEFT, DependsOn, has_no_global_hooks, is_plain
from gemmsmith.ops.models.norms import kind_in_use
from gemmsmith.ops.models.originals import Original, originals
from gemmsmith.ops.models.reading import parsed
from gemmsmith.ops.products import recording
from gemmsmith.ops.products.grouped import grouped_mm, is_aligned
from gemmsmith.ops.products.mixture import computed, experts
from gemmsmith.ops.products.mixture_operands import ExpertsOperands, refusal
from gemmsmith.ops.products.passes import Gate
from gemmsmith.ops.products.registry import CallWay, way_of

_FORWARD = (
    "transformers.integrations.moe",
    "use_experts_implementation.<locals>.wrapper.<locals>.forward",
)

_WEIGHTS = DependsOn(weights=((None, "gate_up_proj"), (None, "down_proj")))


@dataclass(frozen=True, kw_only=True)
class ExpertsRecipe:
    """Experts with weights [E, 2 * I, K] and [E, K, I], or these transposed.

    Attributes:
        interface: transformers' registry of implementations, by name.
        grouped: the implementation `grouped_mm`. `eager` is the layer's own forward, and not in the
            registry.
        is_swiglu: whether they are SwiGLU without biases, of weights as above.
        relies_on: functions that must be the originals.
        depends_on: as of `forwards.Recipe`.
    """

    interface: Any
    grouped: Any
    is_swiglu: bool
    relies_on: tuple[Original, ...]
    depends_on: DependsOn = _WEIGHTS

    def __str__(self) -> str:
        return "experts"


def experts_recipe(module: nn.Module) -> ExpertsRecipe | None:
    """The recipe of a module of experts; None if the module is not recognized."""
    forward: Any = type(module).forward
    code = getattr(forward, "__code__", None)
    # The wrapper has the name of the wrapped function, but its own code and globals.
    if code is None or code.co_qualname != _FORWARD[1]:
        return None
    if forward.__globals__.get("__name__") != _FORWARD[0]:
        return None
    has_swiglu = is_swiglu(module)
    if not has_swiglu and gate_of(module) is None:
        return None
    closed_over = dict(zip(code.co_freevars, forward.__closure__, strict=True))
    kind: Any = type(module)
    calls = learn().calls
    if hasattr(module, "act_fn"):
        calls = *calls, (type(module.act_fn), "forward")
    relies_on = originals(*calls, *(() if has_swiglu else _WRITTEN_WITH))
    if relies_on is None or "experts_interface" not in closed_over:
        return None
    return ExpertsRecipe(
        interface=closed_over["experts_interface"].cell_contents,
        grouped=learn().grouped,
        is_swiglu=has_swiglu,
        relies_on=(*relies_on, Original(kind, "_apply_gate", kind._apply_gate)),
    )


def run_experts(recipe: ExpertsRecipe, module: Any, arguments: tuple[Any, ...]) -> Any:
    is_compiling = torch.compiler.is_compiling()
    if len(arguments) != 3 or (is_compiling and not recipe.is_swiglu):
        return NotImplemented
    operands = _operands(module, *arguments) if _is_own(recipe, module) else None
    if operands is None or recording.is_recording():
        return NotImplemented
    if is_compiling:
        return computed(operands) if _may_group() else NotImplemented
    engine = current()
    if engine is None:
        return NotImplemented
    if not recipe.is_swiglu:
        wins = kind_in_use() == operands.tokens.device.type and not engine.is_invariant
        return computed(operands) if wins else NotImplemented
    weights, rows = (operands.gate_up, operands.down), operands.numbers.numel()
    products = [_product(operands.tokens, rows, weight) for weight in weights]
    if any(engine.plan(form, a, b, groups=groups) for form, a, b, groups in products):
        return computed(operands)
    return LEFT if all(engine.lacks(*product) for product in products) else NotImplemented


def _is_own(recipe: ExpertsRecipe, module: Any) -> bool:
    """Whether the layer runs a default implementation of transformers.

    `eager` of experts with other gates may be of another precision: it stays.
    """
    config: Any = module.config
    name = config._experts_implementation
    if name == "grouped_mm":
        return recipe.interface.get(name) is recipe.grouped
    return name == "eager" and recipe.is_swiglu and recipe.interface.get(name) is None


def _operands(module: Any, tokens: Any, numbers: Any, shares: Any) -> ExpertsOperands | None:
    """The operands of `computed`. Returns None if it does not compute what the module does."""
    has_swiglu = is_swiglu(module)
    gate = Gate() if has_swiglu else gate_of(module)
    if gate is None or not _is_replaceable(module):
        return None
    biases = (None, None)
    weights = gate_up, down = module.gate_up_proj, module.down_proj
    if module.has_bias:
        biases = module.gate_up_proj_bias, module.down_proj_bias
    tensors = [tokens, numbers, shares, *weights, *(bias for bias in biases if bias is not None)]
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        return None
    if torch.is_autocast_enabled(tokens.device.type):
        return None
    way = way_of(*tensors)
    if way is CallWay.TORCH or not (has_swiglu or way is CallWay.EAGER):
        return None
    if module.is_transposed:  # what observes operators would see this one
        gate_up, down = gate_up.mT, down.mT
    operands = ExpertsOperands(tokens, numbers, shares, gate_up, down, biases[0], gate, biases[1])
    is_taken = refusal(*operands[:5]) is None
    if not has_swiglu:
        is_taken = is_taken and all(map(_fits, biases, (gate_up, down)))
    return operands if is_taken else None


def _fits(bias: torch.Tensor | None, weight: torch.Tensor) -> bool:
    """Whether torch's grouped product reads the weight as it lies, and the bias is one of it."""
    if not is_aligned(weight):
        return False
    if bias is None:
        return True
    alike = bias.dtype is weight.dtype and bias.device == weight.device
    return alike and bias.shape == weight.shape[:2]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _may_group() -> bool:
    """Whether there are winners of grouped products, of any size: a tracer has no sizes."""
    engine = current()
    return engine is not None and may_run(engine, lambda problem: problem.operation.is_grouped)


def _product(
    tokens: torch.Tensor, rows: int, weight: torch.Tensor
) -> tuple[Form, Spec, torch.Tensor, int]:
    """A grouped product of the layer's forward pass, as `Engine.lacks` takes it."""
    a = Spec(tokens.dtype, tokens.device, (rows, weight.shape[-1]), (weight.shape[-1], 1))
    return Form.GROUPED, a, weight.detach().mT, weight.shape[0]


def experts_forward(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The weighted sum of the experts' outputs for each token.

    The same as transformers' `grouped_mm_experts_forward`.

    Args:
        module: the experts, a class with transformers' decorator `use_experts_implementation` of
            release 5.17.
        hidden_states: the tokens, [T, width].
        top_k_index: [T, chosen], numbers of experts. Numbers from `module.num_experts` on are
            experts of other ranks, and contribute nothing.
        top_k_weights: [T, chosen], factors of the experts' outputs.

    Returns:
        [T, width], of the tokens' type.
    """
    arguments = hidden_states, top_k_index, top_k_weights
    if is_swiglu(module):
        if _is_replaceable(module) and not torch.is_autocast_enabled(hidden_states.device.type):
            return experts(*arguments, module.gate_up_proj, module.down_proj)
    elif not torch.compiler.is_compiling():
        engine, operands = current(), _operands(module, *arguments)
        if operands is not None and not (engine is not None and engine.is_invariant):
            return computed(operands)
    number, order = top_k_index.flatten().sort()
    last = torch.arange(module.num_experts, device=number.device)
    offsets = torch.searchsorted(number, last, right=True, out_int32=True)
    # A grouped product does not write the rows after the last offset, neither in the forward nor in
    # the backward pass. They may hold NaN, so the masks keep them out of the sums that follow.
    others = (number >= module.num_experts)[:, None]

    def product(rows: torch.Tensor, name: str) -> torch.Tensor:
        weight = getattr(module, name)
        d = grouped_mm(rows, weight if module.is_transposed else weight.mT, offsets)
        if module.has_bias:
            d = d + getattr(module, f"{name}_bias")[number.clamp(max=len(last) - 1)]
        return d.masked_fill(others, 0)

    rows = hidden_states[order // top_k_index.shape[-1]].masked_fill(others, 0)
    if module.has_gate:
        hidden = module._apply_gate(product(rows, "gate_up_proj"))
    else:
        hidden = module.act_fn(product(rows, "up_proj"))
    weighted = product(hidden, "down_proj") * top_k_weights.flatten()[order, None]
    by_token = weighted[order.argsort()].view(*top_k_index.shape, -1)
    return by_token.sum(dim=1).to(hidden_states.dtype)


class _Known(NamedTuple):
    """The functions and classes of transformers' SwiGLU experts. They differ between releases.

    Attributes:
        gate: the method that multiplies the activated gate with up.
        activations: classes that compute SiLU.
        calls: the functions that the experts call.
        grouped: the implementation `grouped_mm`.
    """

    gate: Any
    activations: tuple[type, ...]
    calls: tuple[tuple[Any, str], ...]
    grouped: Any


_known: _Known | None = None


def learn() -> _Known:
    """Look up transformers' functions once. Must run before tracing, which cannot import them."""
    global _known
    if _known is None:
        from transformers.activations import SiLUActivation
        from transformers.integrations import moe

        name = "grouped_mm_experts_forward"
        _known = _Known(
            gate=getattr(moe, "_default_apply_gate", None),  # private: it may be removed
            activations=(nn.SiLU, SiLUActivation),
            calls=((moe, "_default_apply_gate"), (moe, name), (functional, "silu")),
            grouped=getattr(moe, name, None),
        )
    return _known


def is_swiglu(module: Any) -> bool:
    """Whether `gemmsmith.experts` computes the same as these experts."""
    known = learn() if _known is None else _known
    return (
        module.has_gate
        and not module.has_bias
        and not module.is_transposed
        and type(module)._apply_gate is known.gate
        and "_apply_gate" not in module.__dict__
        and type(module.act_fn) in known.activations
        and module.gate_up_proj.dtype.itemsize == 2
    )


def _is_replaceable(module: Any) -> bool:
    """Whether the experts' activation, without hooks, can be skipped."""
    has_hooks = hasattr(module, "act_fn") and not is_plain(module.act_fn)
    return not has_hooks and has_no_global_hooks()


class _GateForm(NamedTuple):
    """What a method `_apply_gate` computes, and names of attributes that it reads.

    Attributes:
        interleaved: as of `Gate`.
        limit: of the clamps.
        alpha: of the sigmoid, for a gate whose offset is 1. None: SiLU.
        calls_child: whether the child `act_fn` computes SiLU.
    """

    interleaved: bool
    limit: str
    alpha: str | None
    calls_child: bool


_GATE = """
def _apply_gate(self, gate_up):
    gate, up = {}
    gate = gate.clamp({})
    up = up.clamp(min=-self.limit, max=self.limit)
    {}
"""
_SPLITS = {"gate_up[..., ::2], gate_up[..., 1::2]": True, "gate_up.chunk(2, dim=-1)": False}
_BOUNDS = ("max=self.limit", "min=None, max=self.limit")
_ENDS = (
    "glu = gate * torch.sigmoid(gate * self.alpha); gated = (up + 1) * glu; return gated",
    "glu = gate * torch.sigmoid(gate * self.alpha); return (up + 1.0) * glu",
    "return F.silu(gate) * up",
    "return self.act_fn(gate) * up",
)
_WRITTEN_WITH = ((torch, "sigmoid"), (torch.Tensor, "clamp"), (torch.Tensor, "chunk"))
"""The functions that the forms call, beside SiLU."""


def _text(tree: ast.FunctionDef) -> tuple[str, list[str]]:
    canonical = OfModule(tree, ("act_fn",))
    return canonical.text(), canonical.attributes


@functools.cache
def _forms() -> dict[str, bool]:
    """The canonical texts of gates, and whether they are interleaved."""
    known = {}
    for (split, interleaved), bound, end in itertools.product(_SPLITS.items(), _BOUNDS, _ENDS):
        (tree,) = ast.parse(_GATE.format(split, bound, end)).body
        assert isinstance(tree, ast.FunctionDef)  # noqa: S101 - a form above
        known[_text(tree)[0]] = interleaved
    return known


@functools.cache
def _form(apply: Any) -> _GateForm | None:
    """The form of a method; None if its source or the meaning of its names is not known."""
    tree = parsed(apply)
    if tree is None or tree.decorator_list or apply.__closure__:
        return None
    names = {"torch": torch, "F": functional}
    if any(apply.__globals__.get(name, value) is not value for name, value in names.items()):
        return None
    text, attributes = _text(tree)
    if text not in _forms():
        return None
    limit, *alpha = attributes
    return _GateForm(_forms()[text], limit, alpha[0] if alpha else None, "act_fn" in text)


def gate_of(module: Any) -> Gate | None:
    """The gate of experts that are not `is_swiglu`; None if `computed` does not compute them."""
    known = learn() if _known is None else _known
    if not module.has_gate or "_apply_gate" in module.__dict__:
        return None
    if module.gate_up_proj.dtype.itemsize != 2:
        return None
    apply = type(module)._apply_gate
    form = _GateForm(False, "", None, True) if apply is known.gate else _form(apply)
    if form is None or (form.calls_child and type(module.act_fn) not in known.activations):
        return None
    limit = getattr(module, form.limit) if form.limit else inf
    alpha = getattr(module, form.alpha) if form.alpha else 1.0
    if any(type(number) not in (int, float) or not number > 0 for number in (limit, alpha)):
        return None
    return Gate(float(alpha), float(limit), 1.0 if form.alpha else 0.0, form.interleaved)
