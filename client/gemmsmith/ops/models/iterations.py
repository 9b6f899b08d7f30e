"""Newton–Schulz iterations that a program's own Muon computes, one matrix after another.

Many optimizers have a copy of the function `zeropower_via_newtonschulz5` in their module. It is
recognized by its source: it must be equal to one of the forms below except for the names of
variables, coefficients, assertions of two dimensions and ways to write a size. While a patch is
open, a function in its place runs `gemmsmith.newton_schulz`: half of the work where symmetric
kernels have won, and three kernels a step instead of eight. The loop over matrices stays the
program's, so matrices of equal shape are not computed at once.

A module is searched when an optimizer of a class that it defines takes its first step. At a call
the program's function runs in compiled graphs, for small matrices (`LEAST_FLOPS`), and for all that
`optimizers.suits` excludes.
"""

from __future__ import annotations

import ast
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gemmsmith.ops.models.canonical import OfFunction, parsed_plain
from gemmsmith.ops.models.forwards import still
from gemmsmith.ops.models.optimizers import suits
from gemmsmith.ops.models.originals import Original, originals
from gemmsmith.ops.products.newton_schulz import COEFFICIENTS, STEPS, newton_schulz

LEAST_FLOPS = 2**35
"""Operations of a matrix's X·Xᵀ: 3000 × 3000 × 2000. With smaller matrices the GPU waits for the
host, which takes as long for three kernels of winners as for eight of torch. A step took 57 to 65
ms with the program's function and 63 with ours (GPT-350M, up to 1024 × 4096), 117 to 122 and 131
(Qwen3 0.6B; H200, 2026-11-27)."""

_BEGINS = """
def iterate(g, steps):
    a, b, c = (1.0, 2.0, 3.0)
    x = g.bfloat16()
"""
_TURNS = "    if g.size(0) > g.size(1):\n        x = x.mT\n"
_DIVIDES = "    x = x / (x.norm() + 1e-7)\n"
_LOOPS = "    for _ in range(steps):\n        gram = x @ x.mT\n"
_POLYNOMIALS = (
    "        both = b * gram + c * gram @ gram\n        x = a * x + both @ x\n",
    "        both = gram @ x\n        x = a * x + b * both + c * gram @ both\n",
)
_RETURNS = {"    return x\n": False, "    return x.to(g.dtype)\n": True}
"""Whether the result has the matrix's type."""


class Iteration(NamedTuple):
    """A recognized function.

    Attributes:
        parameters: names of the matrix and of the number of steps.
        coefficients: a, b and c.
        eps: what is added to the norm, or the name of the parameter that says it.
        in_place: whether a matrix in bf16 is divided in place.
        casts: whether the result has the matrix's type.
        relies_on: as of `forwards.Recipe`.
    """

    parameters: tuple[str, str]
    coefficients: tuple[float, float, float]
    eps: float | str
    in_place: bool
    casts: bool
    relies_on: tuple[Original, ...]


class _CanonicalIteration(OfFunction):
    """Also reads the numbers, and writes sizes, norms and transposed matrices in one way."""

    def __init__(self, tree: ast.FunctionDef) -> None:
        super().__init__(tree)
        self.coefficients, self.in_place = COEFFICIENTS, False
        tree, names = self._tree, self.parameters
        tree.body = [step for step in tree.body if not _demands_matrix(step, names)]
        self.eps = _taken_eps(tree, names)
        self.keep({*names} - {str(self.eps)})

    def visit_Assign(self, node: ast.Assign) -> ast.AST:  # noqa: N802 - a name of `ast`
        if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
            try:
                a, b, c = map(float, ast.literal_eval(node.value))
            except (TypeError, ValueError):
                return self.generic_visit(node)
            self.coefficients, node.value = (a, b, c), _call("coefficients")
        return self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:  # noqa: N802 - a name of `ast`
        if not isinstance(node.target, ast.Name):
            return self.generic_visit(node)
        self.in_place = True
        value = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
        return self.visit_Assign(ast.Assign([node.target], value))

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:  # noqa: N802 - a name of `ast`
        node.attr = "mT" if node.attr == "T" else node.attr
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:  # noqa: N802 - a name of `ast`
        if isinstance(node.func, ast.Attribute):
            written = ast.unparse(node).removeprefix(ast.unparse(node.func.value))
            if written in _SIZES | _NORMS:
                name = "norm" if written in _NORMS else _SIZES[written]
                return _call(name, self.visit(node.func.value))
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:  # noqa: N802 - a name of `ast`
        if isinstance(node.value, ast.Attribute):
            written = ast.unparse(node).removeprefix(ast.unparse(node.value.value))
            if written in _SIZES:
                return _call(_SIZES[written], self.visit(node.value.value))
        return self.generic_visit(node)


_SIZES = {
    f"{begin}{at}{end}": name
    for begin, end in ((".size(", ")"), (".shape[", "]"))
    for name, places in (("rows", (0, -2)), ("columns", (1, -1)))
    for at in places
}
_NORMS = dict.fromkeys((".norm()", ".norm(dim=(-2, -1), keepdim=True)"), "norm")


def _demands_matrix(step: ast.stmt, names: Sequence[str]) -> bool:
    """Whether a statement only asserts that the first parameter is a matrix, or a batch of them."""
    if not isinstance(step, ast.Assert) or not names:
        return False
    dims = (form.format(names[0]) for form in ("{}.ndim", "{}.dim()", "len({}.shape)"))
    return ast.unparse(step.test) in {f"{dim} {sign} 2" for dim in dims for sign in ("==", ">=")}


def _taken_eps(tree: ast.FunctionDef, names: Sequence[str]) -> float | str:
    """What is added to the norm, a number or a parameter; the tree no longer says which."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.BinOp) or not _is_norm_plus(node):
            continue
        added = node.right
        if isinstance(added, ast.Constant) and isinstance(added.value, int | float):
            node.right = _call("eps")
            return float(added.value)
        if isinstance(added, ast.Name) and added.id in names:
            node.right = _call("eps")
            return added.id
    return 0.0


def _call(name: str, *arguments: Any) -> ast.Call:
    return ast.Call(ast.Name(f"<{name}>", ast.Load()), list(arguments), [])


def _is_norm_plus(node: ast.BinOp) -> bool:
    if not isinstance(node.op, ast.Add):
        return False
    left = node.left.func if isinstance(node.left, ast.Call) else None
    return isinstance(left, ast.Attribute) and left.attr == "norm"


@functools.cache
def _known() -> dict[str, bool]:
    """The forms' texts, and whether they cast."""
    texts = {}
    orders = (_TURNS + _DIVIDES, _DIVIDES + _TURNS)
    for order, polynomial, end in itertools.product(orders, _POLYNOMIALS, _RETURNS):
        (tree,) = ast.parse(_BEGINS + order + _LOOPS + polynomial + _TURNS + end).body
        assert isinstance(tree, ast.FunctionDef)  # noqa: S101 - the source is a form above
        texts[_CanonicalIteration(tree).text()] = _RETURNS[end]
    return texts


def _relies_on() -> tuple[Original, ...] | None:
    """The functions of torch that the forms call. Returns None if any of them is not torch's."""
    norm = torch.Tensor.norm  # which is written in Python, in another module than its class
    if getattr(norm, "__module__", None) != torch._tensor.__name__:
        return None
    others = originals(*((torch.Tensor, name) for name in ("bfloat16", "size", "to")))
    return others and (Original(torch.Tensor, "norm", norm), *others)


@functools.cache
def iteration(function: FunctionType) -> Iteration | None:
    """What a function computes. Returns None if it is not recognized."""
    if not {"bfloat16", "norm"} <= {*function.__code__.co_names}:
        return None
    tree, relies_on = parsed_plain(function), _relies_on()
    if tree is None or relies_on is None:
        return None
    canonical = _CanonicalIteration(tree)
    casts = _known().get(canonical.text())
    if casts is None:
        return None
    matrix, steps = canonical.parameters
    return Iteration(
        parameters=(matrix, steps),
        coefficients=canonical.coefficients,
        eps=canonical.eps,
        in_place=canonical.in_place,
        casts=casts,
        relies_on=relies_on,
    )


class _Patched:
    """Whether a patch is open, and what is replaced: modules, names, both functions."""

    is_open = False
    replaced: list[tuple[ModuleType, str, Any, Any]] = []  # noqa: RUF012 - of the process
    searched: set[str] = set()  # noqa: RUF012 - names of modules


@contextmanager
def iterations_in_use() -> Iterator[None]:
    """Replace the iterations that optimizers call, until the end of the block.

    Blocks are nested. All optimizers of the process take part, existing and new ones.
    """
    if _Patched.is_open:
        yield
        return
    hook = register_optimizer_step_pre_hook(_search)
    _Patched.is_open = True
    try:
        yield
    finally:
        _Patched.is_open = False
        hook.remove()
        _Patched.searched.clear()
        while _Patched.replaced:
            module, name, own, stand_in = _Patched.replaced.pop()
            if getattr(module, name, None) is stand_in:  # else replaced by the program since
                setattr(module, name, own)


def _search(optimizer: object, *_: object) -> None:
    """Replace the iterations in the modules of an optimizer's classes."""
    if torch.compiler.is_compiling():
        return
    for base in type(optimizer).__mro__:
        name = base.__module__
        if name in _Patched.searched or name.partition(".")[0] in ("builtins", "torch"):
            continue
        _Patched.searched.add(name)
        if (module := sys.modules.get(name)) is None:
            continue
        for attribute, value in list(vars(module).items()):
            if type(value) is FunctionType and (known := iteration(value)) is not None:
                stand_in = _stand_in(value, known)
                setattr(module, attribute, stand_in)
                _Patched.replaced.append((module, attribute, value, stand_in))


@functools.cache  # because compiled graphs have guards on the function
def _stand_in(own: FunctionType, known: Iteration) -> Callable[..., Any]:
    names = own.__code__.co_varnames[: own.__code__.co_argcount]
    defaults = dict(zip(names[::-1], (own.__defaults__ or ())[::-1], strict=False))

    @functools.wraps(own)
    def iterate(*arguments: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling() or not _Patched.is_open or len(arguments) > len(names):
            return own(*arguments, **named)
        values = {**defaults, **dict(zip(names, arguments, strict=False)), **named}
        if len(values) != len(names) or not still(known.relies_on):
            return own(*arguments, **named)
        matrix, steps = map(values.__getitem__, known.parameters)
        eps = values[known.eps] if isinstance(known.eps, str) else known.eps
        if not _suits(matrix, steps, eps, known):
            return own(*arguments, **named)
        (result,) = newton_schulz([matrix], steps, known.coefficients, eps)
        return result.to(matrix.dtype) if known.casts else result

    return iterate


def _suits(matrix: Any, steps: Any, eps: Any, known: Iteration) -> bool:
    if type(steps) is not int or not 0 <= steps < STEPS or type(eps) not in (int, float):
        return False
    if not isinstance(matrix, torch.Tensor) or not suits(matrix):
        return False
    if known.in_place and matrix.dtype is torch.bfloat16:
        return False
    return 2 * min(matrix.shape) * matrix.numel() >= LEAST_FLOPS
