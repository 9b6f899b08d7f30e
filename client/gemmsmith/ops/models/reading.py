"""Reads from the source of a module's `forward` what it computes, to recognize models' layers.

The reader supports straight-line code with calls of the module's own children and of torch's
activations, with halving, sums and products. Anything else makes the whole forward unknown: a
branch, a default, another attribute, or a call whose result is not used. The code is not run. The
reader takes the function that the class has now, whatever its name, and its source must compile to
its code. Functions of torch must be torch's originals.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import sys
import textwrap
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, TypeAlias

import torch
from torch.nn import functional

from gemmsmith.core.epilogue import Activation
from gemmsmith.ops.models.originals import Original, original


@dataclass(frozen=True, kw_only=True, eq=False)
class Given:
    """A parameter of the forward."""

    position: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Called:
    """`self.child(argument)`."""

    child: str
    argument: Expression


@dataclass(frozen=True, kw_only=True, eq=False)
class Activated:
    """An activation function of torch."""

    activation: Activation | None  # None: ReLU, which has no epilogue unless it is squared
    argument: Expression


@dataclass(frozen=True, kw_only=True, eq=False)
class Halved:
    """A tensor whose last dimension is split into two halves."""

    argument: Expression


@dataclass(frozen=True, kw_only=True, eq=False)
class Half:
    """The first or the second half."""

    of: Halved
    second: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Combined:
    """A product of two factors or a sum of two terms."""

    is_product: bool
    left: Expression
    right: Expression


Expression: TypeAlias = Given | Called | Activated | Halved | Half | Combined


@dataclass(frozen=True, kw_only=True, eq=False)
class Formula:
    """The expression that a forward computes, provided that `relies_on` has not changed."""

    expression: Expression
    relies_on: tuple[Original, ...]


class _NotUnderstoodError(Exception):
    """The forward has something that the reader does not support."""


def read(forward: Callable[..., Any]) -> Formula | None:
    """The expression that a function computes; None if the reader does not support it.

    Args:
        forward: the forward of a class, with `self` and positional parameters.
    """
    if not isinstance(forward, FunctionType) or (tree := parsed(forward)) is None:
        return None
    try:
        return _Reader(forward, tree).result()
    except _NotUnderstoodError:
        return None


@functools.cache
def parsed(function: object) -> ast.FunctionDef | None:
    """The parsed source of a function; None if it is not the source of the function's code."""
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        return None
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    if not isinstance(tree, ast.FunctionDef) or not _is_code_of(function, tree):
        return None
    return tree


def _is_code_of(forward: FunctionType, tree: ast.FunctionDef) -> bool:
    """Whether the source compiles to the function's code: its file may have changed since."""
    plain = ast.Module(body=[tree], type_ignores=[])
    flags = forward.__code__.co_flags & _FUTURES
    whole = compile(plain, "<forward>", "exec", flags=flags, dont_inherit=True)
    codes = [one for one in whole.co_consts if isinstance(one, CodeType)]
    return any(_steps(one) == _steps(forward.__code__) for one in codes)


def _steps(code: CodeType) -> list[tuple[str, Any]]:
    """The instructions of a function, in a form in which the two compilations are comparable.

    The compiler uses other instructions to load an attribute if it knows from the rest of the file
    that its owner is a module. So jumps are counted in the instructions that remain.
    """
    same = {"LOAD_METHOD": "LOAD_ATTR"}
    kept = [
        one
        for one in dis.get_instructions(code)
        if one.opname not in ("PUSH_NULL", "PRECALL", "RESUME")
    ]
    offsets = [one.offset for one in kept]
    return [
        (
            same.get(one.opname, one.opname),
            bisect_left(offsets, one.argval) if one.opcode in _JUMPS else one.argval,
        )
        for one in kept
    ]


_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_FUTURES = 0x1000000  # `from __future__ import annotations`


class _Reader:
    """Reads one function, top to bottom."""

    def __init__(self, forward: FunctionType, tree: ast.FunctionDef) -> None:
        self._module = sys.modules.get(forward.__globals__.get("__name__", ""))
        if getattr(self._module, "__dict__", None) is not forward.__globals__:
            raise _NotUnderstoodError  # a change of its globals could not be detected
        self._tree = tree
        self._relies_on: list[Original] = []
        arguments = tree.args
        if (
            tree.decorator_list
            or arguments.vararg
            or arguments.kwarg
            or arguments.kwonlyargs
            or arguments.posonlyargs
            or arguments.defaults
            or len(arguments.args) < 2
        ):
            raise _NotUnderstoodError
        self._self, *given = (one.arg for one in arguments.args)
        self._names: dict[str, Expression] = {
            name: Given(position=at) for at, name in enumerate(given)
        }
        self._calls: list[Called] = []

    def result(self) -> Formula:
        """The expression that the function returns."""
        body = list(self._tree.body)
        if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            body = body[1:]  # the docstring
        if not body or not isinstance(body[-1], ast.Return) or body[-1].value is None:
            raise _NotUnderstoodError
        for statement in body[:-1]:
            self._assign(statement)
        result = self._value(body[-1].value)
        # A call whose result is not used has effects: a child's hooks, its random numbers.
        if set(map(id, self._calls)) - set(map(id, _parts(result))):
            raise _NotUnderstoodError
        return Formula(expression=result, relies_on=tuple(dict.fromkeys(self._relies_on)))

    def _assign(self, statement: ast.stmt) -> None:
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
            raise _NotUnderstoodError
        (target,) = statement.targets
        value = self._value(statement.value)
        match target:
            case ast.Name(id=name):
                self._names[name] = value
            case ast.Tuple(elts=[ast.Name(id=first), ast.Name(id=second)]) if isinstance(
                value, Halved
            ):
                self._names[first] = Half(of=value, second=False)
                self._names[second] = Half(of=value, second=True)
            case _:
                raise _NotUnderstoodError

    def _value(self, node: ast.expr) -> Expression:
        match node:
            case ast.Name(id=name) if name in self._names:
                return self._names[name]
            case ast.BinOp(left=left, op=ast.Mult() | ast.Add() as how, right=right):
                return Combined(
                    is_product=isinstance(how, ast.Mult),
                    left=self._value(left),
                    right=self._value(right),
                )
            case ast.Subscript(value=of, slice=ast.Constant(value=0 | 1 as at)) if isinstance(
                halved := self._value(of), Halved
            ):
                return Half(of=halved, second=at == 1)
            case ast.Call(func=called, args=given, keywords=named) if all(one.arg for one in named):
                return self._call(called, given, {str(one.arg): one.value for one in named})
            case _:
                raise _NotUnderstoodError

    def _call(
        self, called: ast.expr, given: list[ast.expr], named: dict[str, ast.expr]
    ) -> Expression:
        match called:
            case ast.Attribute(value=ast.Name(id=owner), attr=child) if owner == self._self:
                if len(given) != 1 or named or self._self in self._names:
                    raise _NotUnderstoodError
                call = Called(child=child, argument=self._value(given[0]))
                self._calls.append(call)
                return call
            case ast.Attribute(value=of, attr="chunk") if not self._is_global(of):
                self._rely(torch.Tensor, "chunk")
                return self._halves(self._value(of), given, named)
            case ast.Attribute(value=of, attr="square") if not (
                given or named or self._is_global(of)
            ):
                self._rely(torch.Tensor, "square")
                return self._square(self._value(of))
        function = self._function(called)
        if function is torch.chunk and given:
            return self._halves(self._value(given[0]), given[1:], named)
        if function is torch.square and len(given) == 1 and not named:
            return self._square(self._value(given[0]))
        if len(given) != 1:
            raise _NotUnderstoodError
        return Activated(activation=_activation(function, named), argument=self._value(given[0]))

    def _halves(
        self, argument: Expression, given: list[ast.expr], named: dict[str, ast.expr]
    ) -> Halved:
        values = dict(zip(("chunks", "dim"), map(_constant, given), strict=False))
        values |= {name: _constant(value) for name, value in named.items()}
        if values != {"chunks": 2, "dim": -1} or len(given) + len(named) != 2:
            raise _NotUnderstoodError
        return Halved(argument=argument)

    def _square(self, of: Expression) -> Activated:
        if not isinstance(of, Activated) or of.activation is not None:
            raise _NotUnderstoodError
        return Activated(activation=Activation.RELU2, argument=of.argument)

    def _is_global(self, node: ast.expr) -> bool:
        match node:
            case ast.Name(id=name):
                return name not in self._names
            case ast.Attribute(value=of):
                return self._is_global(of)
            case _:
                return False

    def _function(self, node: ast.expr) -> object:
        """The function of torch that a dotted name means in the function's module."""
        function = self._global(node)
        name = getattr(function, "__name__", "")
        for owner in (functional, torch):
            if getattr(owner, name, None) is function:
                self._rely(owner, name)
                return function
        raise _NotUnderstoodError

    def _global(self, node: ast.expr) -> object:
        match node:
            case ast.Name(id=name) if name not in self._names:
                owner: object = self._module
            case ast.Attribute(value=of, attr=name) if inspect.ismodule(owner := self._global(of)):
                pass
            case _:
                raise _NotUnderstoodError
        if not hasattr(owner, name):
            raise _NotUnderstoodError
        value = getattr(owner, name)
        self._relies_on.append(Original(owner, name, value))
        return value

    def _rely(self, owner: object, name: str) -> None:
        known = original(owner, name)
        if known is None:
            raise _NotUnderstoodError
        self._relies_on.append(known)


def _constant(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise _NotUnderstoodError from None


def _activation(function: object, named: dict[str, ast.expr]) -> Activation | None:
    how = {name: _constant(value) for name, value in named.items()}
    if function is functional.gelu and how.keys() <= {"approximate"}:
        match how.get("approximate", "none"):
            case "none":
                return Activation.GELU
            case "tanh":
                return Activation.GELU_TANH
    if how:
        raise _NotUnderstoodError
    if function is functional.silu:
        return Activation.SILU
    if function in (functional.relu, torch.relu):
        return None
    raise _NotUnderstoodError


def _parts(of: Expression) -> list[Expression]:
    """An expression and all expressions in it."""
    match of:
        case Given():
            inner: list[Expression] = []
        case Half():
            inner = [of.of]
        case Combined():
            inner = [of.left, of.right]
        case _:
            inner = [of.argument]
    return [of, *(part for one in inner for part in _parts(one))]
