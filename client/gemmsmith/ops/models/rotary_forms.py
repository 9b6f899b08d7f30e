"""The functions of models that rotate Q and K, recognized by their source.

A function must be equal to a form below except for the names of variables, as must the function
that it calls, such as `rotate_half`. Decorators that return the function itself do not matter.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from gemmsmith.ops.models.canonical import OfFunction, parsed_plain
from gemmsmith.ops.models.forwards import has_no_global_hooks, has_own_forward, is_plain
from gemmsmith.ops.models.originals import Original, originals


class Pairing(NamedTuple):
    """Which elements make a pair, and the sign of the sines; see `Rotation`."""

    reads_pairs: bool
    writes_pairs: bool
    sign: int = 1


_HALVES, _PAIRS = Pairing(False, False), Pairing(True, True)


@dataclass(frozen=True, kw_only=True, eq=False)
class RotaryForm:
    """What a function computes, by its source.

    Attributes:
        source: a line with the parameters, then the body. A line after `+` stands for itself and
            for the same line with `k` instead of `q`, or `sin` instead of `cos`.
        pairing: None if it is that of the function that this one calls.
        casts: whether results have Q's type, and not the type to which Q and the cosines promote.
        is_partial: whether a head may be longer than what is rotated.
        is_joined: whether torch's `cat` makes the results.
        shares: whether the first half of the cosines is for both elements of the pairs.
        is_halved: whether there are no other cosines.
        axis: the dimension that is inserted into the cosines, if no parameter says it.
    """

    source: str
    pairing: Pairing | None = None
    casts: bool = False
    is_partial: bool = False
    is_joined: bool = False
    shares: bool = False
    is_halved: bool = False
    axis: int | None = None


_INSERTS = "+ cos = cos.unsqueeze(dim)\n"
_ROTATES = "+ q_new = q * cos + rotate(q) * sin\n"
_RETURNS = "return q_new, k_new\n"
_TYPED = "dtype = q.dtype\n"
_CASTS = "return q_new.to(dtype), k_new.to(dtype)"
_SLICES = """
width = cos.shape[-1]
+ q, q_rest = q[..., :width], q[..., width:]
"""
_SLICES_TO_NEW = _SLICES.replace("q, q_rest =", "q_turned, q_rest =")
_ROTATES_NEW = "+ q_new = q_turned * cos + rotate(q_turned) * sin\n"
_REPEATS = "+ cos = cos[..., : cos.shape[-1] // 2].repeat_interleave(2, dim=-1)\n"
_JOINS = "+ q_new = torch.cat([q_new, q_rest], dim=-1)\n"
_BOTH = "(q, k, cos, sin, dim)\n"
_FLOATS = "+ q_new = q.float() * cos + rotate(q).float() * sin\n"
_FORMS = (
    RotaryForm(source=_BOTH + _INSERTS + _ROTATES + _RETURNS),
    RotaryForm(  # Gemma 4
        source="(x, cos, sin, dim)\n" + _INSERTS + "return x * cos + rotate(x) * sin"
    ),
    RotaryForm(  # Cohere
        source=f"{_BOTH}{_TYPED}+ q = q.float()\n{_INSERTS}{_ROTATES}"
        "return q_new.to(dtype=dtype), k_new.to(dtype=dtype)",
        casts=True,
    ),
    RotaryForm(  # OLMo
        source=f"{_BOTH}q_type, k_type = q.dtype, k.dtype\n{_INSERTS}{_ROTATES}"
        "return q_new.to(q_type), k_new.to(k_type)",
        casts=True,
    ),
    RotaryForm(  # ModernBERT
        source=f"{_BOTH}{_TYPED}{_INSERTS}"
        f"+ q_new = q.float() * cos + rotate(q.float()) * sin\n{_CASTS}",
        casts=True,
    ),
    # ERNIE 4.5 VL, and without images
    RotaryForm(source=_BOTH + _TYPED + _INSERTS + _FLOATS + _CASTS, casts=True),
    RotaryForm(
        source=_BOTH + _TYPED + _INSERTS + _REPEATS + _FLOATS + _CASTS, casts=True, shares=True
    ),
    RotaryForm(  # vision towers
        source="(q, k, cos, sin)\n+ q_type = q.dtype\nq, k = q.float(), k.float()\n"
        "cos, sin = cos.unsqueeze(-2).float(), sin.unsqueeze(-2).float()\n"
        f"{_ROTATES}+ q_new = q_new.to(q_type)\n{_RETURNS}",
        casts=True,
        axis=-2,
    ),
    RotaryForm(  # Hunyuan-VL
        source=f"{_BOTH}{_TYPED}q, k = q.float(), k.float()\n"
        f"+ cos = cos.unsqueeze(dim).float()\n{_ROTATES}{_CASTS}",
        casts=True,
    ),
    RotaryForm(source=_BOTH + _INSERTS + _REPEATS + _ROTATES + _RETURNS, shares=True),  # Helium
    RotaryForm(  # GPT-NeoX, Qwen3-Next
        source=_BOTH + _INSERTS + _SLICES_TO_NEW + _ROTATES_NEW + _JOINS + _RETURNS,
        is_partial=True,
        is_joined=True,
    ),
    RotaryForm(  # GLM
        source=_BOTH + _INSERTS + _REPEATS + _SLICES_TO_NEW + _ROTATES_NEW + _JOINS + _RETURNS,
        shares=True,
        is_partial=True,
        is_joined=True,
    ),
    RotaryForm(  # Phi-3
        source=f"{_BOTH}{_INSERTS}{_SLICES_TO_NEW}+ q_new = torch.cat("
        f"[q_turned * cos + rotate(q_turned) * sin, q_rest], dim=-1)\n{_RETURNS}",
        is_partial=True,
        is_joined=True,
    ),
    RotaryForm(  # Nemotron
        source=f"{_BOTH}{_INSERTS}{_SLICES}{_ROTATES}"
        "return torch.cat((q_new, q_rest), dim=-1), torch.cat((k_new, k_rest), dim=-1)",
        is_partial=True,
        is_joined=True,
    ),
    RotaryForm(  # DeepSeek-V3
        source=f"{_BOTH}+ cos = cos[..., : cos.shape[-1] // 2].unsqueeze(dim)\n"
        "+ q1, q2 = q[..., 0::2], q[..., 1::2]\n"
        f"+ q_new = torch.cat([q1 * cos - q2 * sin, q2 * cos + q1 * sin], dim=-1)\n{_RETURNS}",
        pairing=Pairing(True, False),
        is_joined=True,
        shares=True,
    ),
    RotaryForm(  # GPT-J
        source="(x, sin, cos)\n"
        "sin = torch.repeat_interleave(sin[:, :, None, :], 2, 3)\n"
        "cos = torch.repeat_interleave(cos[:, :, None, :], 2, 3)\n"
        "return x * cos + rotate(x) * sin",
        shares=True,
        is_halved=True,
        axis=2,
    ),
    RotaryForm(  # gpt-oss
        source=f"{_BOTH}{_INSERTS}+ q_new = rotate(q, cos, sin)\n{_RETURNS}",
        is_joined=True,
        shares=True,
        is_halved=True,
    ),
)
_OF_HALVES = """
x1 = x[..., : x.shape[-1] // 2]
x2 = x[..., x.shape[-1] // 2 :]
"""
_STACKED = "torch.stack((-x2, x1), dim=-1)"
_ROTATED = {
    f"(x){_OF_HALVES}return torch.cat((-x2, x1), dim=-1)": _HALVES,
    f"(x){_OF_HALVES}return torch.cat((x2, -x1), dim=-1)": Pairing(False, False, -1),  # nanochat
    f"(x)\nx1 = x[..., ::2]\nx2 = x[..., 1::2]\nreturn {_STACKED}.flatten(-2)": _PAIRS,
    f"(x)\nx1 = x[..., ::2]\nx2 = x[..., 1::2]\ny = {_STACKED}.flatten(-2)\nreturn y": _PAIRS,
    f"(x)\nx1 = x[:, :, :, ::2]\nx2 = x[:, :, :, 1::2]\nx = {_STACKED}\nreturn x.flatten(-2)": (
        _PAIRS
    ),
}
"""Functions that turn a vector by 90°."""
_TURNS = "first = a * cos - b * sin\nsecond = b * cos + a * sin\n"
_ROTATED_BY = {
    "(x, cos, sin)\na, b = torch.chunk(x, 2, dim=-1)\n"
    f"{_TURNS}return torch.cat((first, second), dim=-1)": _HALVES,
    "(x, cos, sin)\na, b = x[..., ::2], x[..., 1::2]\n"
    f"{_TURNS}return torch.stack((first, second), dim=-1).flatten(-2)": _PAIRS,
}
"""Functions that rotate a vector by the angles."""

_WRITTEN_WITH = (
    *((torch, name) for name in ("cat", "stack", "chunk", "repeat_interleave")),
    *((torch.Tensor, name) for name in ("unsqueeze", "repeat_interleave", "flatten", "float")),
)
"""The functions of torch that the forms call."""


class _CanonicalFunction(OfFunction):
    """Also leaves out unused parameters, and calls the function that is called `rotate`."""

    def __init__(self, tree: ast.FunctionDef) -> None:
        super().__init__(tree)
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        self.keep(used)
        self.called: set[str] = set()

    def visit_Name(self, node: ast.Name) -> ast.Name:  # noqa: N802 - a name of `ast`
        if node.id in self._local or node.id == "torch":
            return super().visit_Name(node)
        self.called.add(node.id)
        return ast.Name(id="rotate", ctx=node.ctx)

    def visit_List(self, node: ast.List) -> ast.AST:  # noqa: N802 - a name of `ast`
        return self.generic_visit(ast.Tuple(elts=node.elts, ctx=node.ctx))

    def visit_Slice(self, node: ast.Slice) -> ast.AST:  # noqa: N802 - a name of `ast`
        if isinstance(node.lower, ast.Constant) and node.lower.value == 0:
            node.lower = None
        return self.generic_visit(node)


def _tree(source: str) -> ast.FunctionDef:
    header, *lines = source.strip().splitlines()
    body = ""
    for line in filter(None, lines):
        text = line.removeprefix("+ ")
        body += f"  {text}\n"
        if text != line:
            renamed = re.sub(r"\bcos\b", "sin", text) if "cos =" in text else text
            body += "  " + re.sub(r"\bq", "k", renamed) + "\n"
    (tree,) = ast.parse(f"def _{header}:\n{body}").body
    assert isinstance(tree, ast.FunctionDef)  # noqa: S101 - the source is a form above
    return tree


def _written(source: str) -> tuple[str, tuple[str, ...]]:
    """The canonical text of a form, and the names of its parameters."""
    canonical = _CanonicalFunction(_tree(source))
    return canonical.text(), tuple(canonical.parameters)


@functools.cache
def _known() -> dict[str, tuple[RotaryForm, tuple[str, ...]]]:
    """The forms by their text, with the names of their parameters."""
    return {text: (form, roles) for form in _FORMS for text, roles in [_written(form.source)]}


@functools.cache
def _known_rotated(*, by_angles: bool) -> dict[str, Pairing]:
    sources = _ROTATED_BY if by_angles else _ROTATED
    return {_written(source)[0]: pairing for source, pairing in sources.items()}


@functools.cache
def _attributes() -> set[str]:
    """Names of attributes in the forms. Few functions are parsed, because others use more names."""
    return {"torch"} | {
        node.attr
        for form in _FORMS
        for node in ast.walk(_tree(form.source))
        if isinstance(node, ast.Attribute)
    }


@dataclass(frozen=True, kw_only=True, eq=False)
class RotaryRecipe:
    """What a recognized function computes.

    Attributes:
        form: by the function's source.
        pairing: the form's, or that of the function that it calls.
        at: the position of each of the form's parameters among the function's.
        names: the function's parameters.
        defaults: of all parameters; those without a default have `MISSING`.
        relies_on: as of `forwards.Recipe`.
    """

    form: RotaryForm
    pairing: Pairing
    at: dict[str, int]
    names: dict[str, int]
    defaults: tuple[Any, ...]
    relies_on: tuple[Original, ...]


MISSING = object()


def _read(function: object) -> tuple[_CanonicalFunction, str] | None:
    """The canonical text of a function; None if its source or its names' meaning is not known."""
    if not isinstance(function, FunctionType) or (tree := parsed_plain(function)) is None:
        return None
    if function.__globals__.get("torch", torch) is not torch:
        return None
    canonical = _CanonicalFunction(tree)
    return canonical, canonical.text()


@functools.cache
def rotary_recipe(function: FunctionType) -> RotaryRecipe | None:
    """The recipe of a function; None if it is not recognized."""
    names = set(function.__code__.co_names)
    if len(names - _attributes()) > 1 or not names & {"unsqueeze", "repeat_interleave"}:
        return None
    read = _read(function)
    relies_on = originals(*_WRITTEN_WITH)
    if read is None or relies_on is None or read[1] not in _known():
        return None
    canonical, text = read
    form, roles = _known()[text]
    pairing, module = form.pairing, sys.modules.get(function.__module__)
    if pairing is None:
        if (
            len(canonical.called) != 1
            or getattr(module, "__dict__", None) is not function.__globals__
        ):
            return None  # a change of its globals could not be detected
        (name,) = canonical.called
        called = function.__globals__.get(name)
        inner = _read(called)
        by_angles = form.is_halved and form.axis is None
        if inner is None or len(inner[0].parameters) != called.__code__.co_argcount:
            return None
        pairing = _known_rotated(by_angles=by_angles).get(inner[1])
        if pairing is None or (form.shares and not by_angles and pairing != _PAIRS):
            return None
        relies_on = (*relies_on, Original(module, name, called))
    code, given = function.__code__, function.__defaults__ or ()
    count = code.co_argcount
    positions = {name: at for at, name in enumerate(code.co_varnames[:count])}
    return RotaryRecipe(
        form=form,
        pairing=pairing,
        at={role: positions[name] for role, name in zip(roles, canonical.parameters, strict=True)},
        names=positions,
        defaults=(MISSING,) * (count - len(given)) + given,
        relies_on=relies_on,
    )


def function_of(value: Any) -> FunctionType | None:
    """The function that an attribute of a Python module runs. Returns None if it may run more.

    With the package `kernels`, such a function is called by an `nn.Module`, whose forward another
    kernel may replace.
    """
    if type(value) is FunctionType:
        return value
    forward = type(value).forward if issubclass(type(value), nn.Module) else None
    if not isinstance(forward, FunctionType) or forward.__closure__ is None:
        return None
    if forward.__code__.co_code != _CALLS.__code__.co_code or len(forward.__closure__) != 1:
        return None
    function = forward.__closure__[0].cell_contents
    if type(function) is not FunctionType or has_own_forward(value) or not is_plain(value):
        return None
    return function if has_no_global_hooks() else None


def _calling(func: Callable[..., Any]) -> Any:
    def forward(self: Any, *arguments: Any, **named: Any) -> Any:  # noqa: ARG001 - as theirs
        return func(*arguments, **named)

    return forward


_CALLS = _calling(len)
"""A function with the code of that module's forward."""
