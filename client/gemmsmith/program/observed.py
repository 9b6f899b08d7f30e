"""A training step of a program: the operators that its own code calls, and its optimizers.

`gemmsmith advise` reads it. Needs no torch.
"""

from __future__ import annotations

from typing import Annotated

import msgspec


class ObservedTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor without its data.

    Attributes:
        name: a number; the same within a function for the same tensor.
        dtype: torch's name of the type, such as `bfloat16`.
        size, stride: of each dimension, in elements.
        needs_grad: whether a gradient is computed for it.
    """

    name: int
    dtype: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    needs_grad: bool = False

    @property
    def is_half(self) -> bool:
        return self.dtype in ("bfloat16", "float16")


Value = ObservedTensor | bool | int | float | str | None


class ObservedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of an operator of `aten::` in the forward pass.

    Attributes:
        operator: name and overload, such as `mul.Tensor`.
        line: of the program's code.
        arguments: positional arguments. A tensor of one number on the host is that number.
        named: keyword arguments.
        result: what it returned, if that is a tensor.
        is_tf32: whether torch was allowed to multiply FP32 matrices in TF32.
    """

    operator: str
    line: int
    arguments: tuple[Value, ...]
    named: tuple[tuple[str, Value], ...] = ()
    result: ObservedTensor | None = None
    is_tf32: bool = False

    @property
    def packet(self) -> str:
        """The operator without its overload."""
        return self.operator.partition(".")[0]

    @property
    def tensors(self) -> list[ObservedTensor]:
        return [value for value in self.arguments if isinstance(value, ObservedTensor)]


class ObservedFunction(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of a function of the program, all with the same operators and sizes.

    Attributes:
        file, function: where its code is.
        calls: the operators that it and torch's code under it call, in their order.
        count: how often the function ran in the step.
    """

    file: str
    function: str
    calls: tuple[ObservedCall, ...]
    count: Annotated[int, msgspec.Meta(ge=1)] = 1

    def place(self, call: ObservedCall) -> str:
        return f"{self.file}:{call.line} {self.function}"


class ObservedOptimizer(msgspec.Struct, frozen=True, kw_only=True):
    """An optimizer whose step was taken.

    Attributes:
        kind: its class in `torch.optim`.
        options: of its first group, such as `betas`, without the parameters.
        groups: type and size of the parameters that have a gradient, group by group.
    """

    kind: str
    options: dict[str, bool | int | float | str | tuple[float, ...] | None]
    groups: list[list[tuple[str, tuple[int, ...]]]]


class ObservedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One training step of a process.

    Attributes:
        rank: of the process in its job.
        device: `cpu` or `cuda`, where its parameters are.
        threads: that torch uses on the host.
        milliseconds: of each step after the observed one, without anything of ours in it.
        is_compiled: whether code of torch.compile ran.
        functions, optimizers: what ran in the step.
    """

    rank: int
    device: str
    threads: int
    milliseconds: list[float]
    is_compiled: bool
    functions: list[ObservedFunction]
    optimizers: list[ObservedOptimizer]

    @property
    def document(self) -> bytes:
        """As JSON, for `parse`."""
        return msgspec.json.encode(self)

    @staticmethod
    def parse(document: bytes) -> ObservedStep:
        """Read a document that `document` returned.

        Raises:
            ValueError: it is no such document.
        """
        return msgspec.json.decode(document, type=ObservedStep)
