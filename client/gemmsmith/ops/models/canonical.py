"""A text of a function's source that is equal for functions that differ only in names."""

from __future__ import annotations

import ast
import copy
from collections.abc import Container
from types import FunctionType

from gemmsmith.ops.models.reading import parsed


class Canonical(ast.NodeTransformer):
    """Renames variables to the order of their appearance."""

    def __init__(self, tree: ast.FunctionDef) -> None:
        self._tree = copy.deepcopy(tree)
        parameters = [node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)]
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
        assigned = (node.id for node in names if isinstance(node.ctx, ast.Store))
        self._local = {*parameters, *assigned}
        self._new_names: dict[str, str] = {}

    def text(self) -> str:
        """The function without docstring and annotations. To be called once."""
        tree = self._tree
        tree.returns = None
        if ast.get_docstring(tree, clean=False) is not None:
            del tree.body[0]
        return ast.dump(self.visit(tree))

    def _renamed(self, name: str) -> str:
        if name not in self._local:
            return name
        return self._new_names.setdefault(name, str(len(self._new_names)))

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(arg=self._renamed(node.arg))

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(id=self._renamed(node.id), ctx=node.ctx)


class OfFunction(Canonical):
    """Of a function that is no method, without its name and its parameters' defaults.

    Attributes:
        parameters: their names in the function.
    """

    def __init__(self, tree: ast.FunctionDef) -> None:
        super().__init__(tree)
        self._tree.name, self._tree.decorator_list, self._tree.args.defaults = "_", [], []
        self.parameters = [parameter.arg for parameter in self._tree.args.args]

    def keep(self, parameters: Container[str]) -> None:
        """Leave out all others. Before `text()`."""
        self.parameters = [name for name in self.parameters if name in parameters]
        self._tree.args.args = [ast.arg(arg=name) for name in self.parameters]


def parsed_plain(function: object) -> ast.FunctionDef | None:
    """As `parsed`; None of a closure, or with parameters that are not plain ones."""
    if not isinstance(function, FunctionType) or function.__closure__:
        return None
    tree = parsed(function)
    if tree is None:
        return None
    of = tree.args
    return None if of.posonlyargs or of.kwonlyargs or of.vararg or of.kwarg else tree


class OfModule(Canonical):
    """Renames the module's attributes as well, but those that are kept.

    Attributes:
        attributes: their names in the order of their appearance, after `text()`.
    """

    def __init__(self, tree: ast.FunctionDef, kept: Container[str]) -> None:
        super().__init__(tree)
        self._self = tree.args.args[0].arg if tree.args.args else None
        self._kept = kept
        self.attributes: list[str] = []

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        is_own = isinstance(node.value, ast.Name) and node.value.id == self._self
        if is_own and node.attr not in self._kept:
            if node.attr not in self.attributes:
                self.attributes.append(node.attr)
            node.attr = f"attribute_{self.attributes.index(node.attr)}"
        return self.generic_visit(node)
