"""Logits of a head that are not computed yet, and what a model does to them before a loss."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from gemmsmith.errors import GemmsmithError
from gemmsmith.ops.products import backward
from gemmsmith.ops.products.losses import padding

_held: Any = WeakTensorKeyDictionary()
"""Weights whose logits a program has held in the backward pass of their loss."""


@dataclass(eq=False)
class HeadCall:
    """A call of a linear layer whose logits are deferred.

    Attributes:
        x: [..., K], or empty, like the weight, where values need their operands no longer.
        weight: [V, K].
        bias: [V].
        parameter: the weight before autocast has cast it.
        versions: of the operands, at the call.
        steps: the deferred values.
        node: returns the logits' node of autograd, which has saved x, or None.
        is_read: whether an operator has read values.
        is_shared: whether something may write to values.
        has_loss: whether a loss was computed without logits.
        is_kept: whether the operands that values are computed from can no longer change.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    parameter: torch.Tensor
    versions: list[int] = field(default_factory=list)
    steps: list[weakref.ref[Deferred]] = field(default_factory=list)
    node: Callable[[], Any] = lambda: None
    is_read: bool = False
    is_shared: bool = False
    has_loss: bool = False
    is_kept: bool = False

    def __post_init__(self) -> None:
        self.versions = self._versions()

    def _versions(self) -> list[int]:
        operands = (self.x, self.weight, self.bias)
        return [operand._version for operand in operands if operand is not None]

    def is_unchanged(self) -> bool:
        """Whether operands have the values of the forward pass."""
        return self.versions == self._versions()

    def compute(self) -> torch.Tensor:
        """The logits.

        Raises:
            GemmsmithError: an operand has changed.
        """
        if not self.is_unchanged():
            raise GemmsmithError(
                "these logits were not computed before their layer's weight or input was changed: "
                "read them before that, or set GEMMSMITH_DEFER_LOGITS=0"
            )
        return _linear(self.x, self.weight, self.bias)

    def settle(self) -> None:
        """Compute what follows from the logits already, before something writes to them."""
        self.is_shared = True
        for reference in self.steps:
            deferred = reference()
            if deferred is not None:
                deferred.compute()

    def belongs_to_call(self) -> bool:
        """Whether nothing else can change the weight: autocast has cast it for this call."""
        return self.weight is not self.parameter

    def favours_logits(self) -> bool:
        """Whether held logits are computed, and not the weight, or a copy of it, is held.

        They take no more memory, and they have as many columns as the logits of the loss.
        """
        vocabulary, depth = self.weight.shape
        rows = self.x.numel() // depth
        return rows <= depth and not padding(rows, vocabulary, depth)

    def held_logits(self, x: torch.Tensor) -> torch.Tensor | None:
        """Logits [..., V] of x [..., K] for a loss, computed before it if the program holds them.

        They take the memory that they have without gemmsmith, and no fourth product. Returns None
        if the loss should compute its own, as it must if x is not the head's, but for its sizes.
        """
        is_held = self.parameter in _held
        is_own = (x.data_ptr(), x.numel()) == (self.x.data_ptr(), self.x.numel())
        root = self.steps[0]()
        if not (is_held and is_own and self.favours_logits()) or root is None:
            return None
        return root.compute().view(*x.shape[:-1], -1)

    def keep(self) -> None:
        """Make values independent of later changes of the weight. Called by the backward pass.

        Logits that are computed need their operands no longer, and torch would free x now.
        """
        if not torch.compiler.is_compiling():
            self._free_saved()
        if self.is_kept:
            return
        self.is_kept = True
        _held[self.parameter] = True
        root = self.steps[0]()
        if root is None:
            return
        if root.values is None and self.favours_logits():
            root.compute()
        if root.values is not None:
            self.x, self.weight = self.x.new_empty(0), self.weight.new_empty(0)
        elif not self.belongs_to_call():
            self.weight = self.weight.detach().clone()
            self.bias = self.bias if self.bias is None else self.bias.detach().clone()
            self.versions = self._versions()

    def _free_saved(self) -> None:
        """Free x, saved for a gradient of the logits, unless it is still needed."""
        node, is_in_pass = self.node(), torch._C._current_graph_task_id() >= 0
        if node is not None and is_in_pass and not torch._C._will_engine_execute_node(node):
            node.maybe_clear_saved_tensors()


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    with torch.autocast(x.device.type, enabled=False), torch._C._AutoDispatchBelowAutograd():
        return backward.linear(x, weight, bias).contiguous()


@dataclass(eq=False)
class Deferred:
    """Values that are not computed yet: `step(source, *arguments)`, or a head's logits.

    Attributes:
        head: whose logits they are.
        like: a tensor on `meta` with their sizes, strides and type.
        source: what the step is applied to. None: these are the logits.
        tensor: the tensor of the source. None of a detached one: autograd itself holds such a
            tensor, which must not hold the graph that it is a part of.
        step: an operator of torch.
        arguments: of the step.
        named: of the step.
        is_recorded: whether autograd has recorded the step as torch's own.
        values: None until they are computed.
    """

    head: HeadCall
    like: torch.Tensor
    source: Deferred | None = None
    tensor: Any = None
    step: Callable[..., torch.Tensor] | None = None
    arguments: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)
    is_recorded: bool = False
    values: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.head.steps.append(weakref.ref(self))

    def compute(self) -> torch.Tensor:
        if self.values is None and self.source is None:
            self.values = self.head.compute()
        elif self.values is None and self.source is not None and self.step is not None:
            with torch._C._AutoDispatchBelowAutograd():
                self.values = self.step(self.source.compute(), *self.arguments, **self.named)
        assert self.values is not None  # noqa: S101 - a step has a source
        return self.values
