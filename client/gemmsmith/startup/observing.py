"""Describes a training step of a program that does not use gemmsmith, for `gemmsmith advise`.

A step is that of the first optimizer. The second is observed: the operators of the forward pass by
the functions of the program that call them, and all optimizers. The steps after it are timed, with
nothing of ours in them but a synchronization of the GPU between two steps.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
import weakref
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import msgspec
import torch
from torch._compile import _disable_dynamo
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from gemmsmith.files import publish
from gemmsmith.program.calls import allows_tf32
from gemmsmith.program.observed import (
    ObservedCall,
    ObservedFunction,
    ObservedOptimizer,
    ObservedStep,
    ObservedTensor,
    Value,
)
from gemmsmith.program.variables import STEP, Ending

OBSERVED = 2
"""The step that is observed: the first one allocates, compiles and creates the states."""

_WATCHED = frozenset(
    (
        *("mm", "addmm", "bmm", "baddbmm"),
        *("add", "sub", "mul", "div", "pow", "neg", "reciprocal"),
        *("exp", "tanh", "erf", "sigmoid"),
        *("masked_fill", "_softmax", "_log_softmax"),
    )
)

# Code of these packages, and what has no file, is not the program's.
_SKIPPED = (
    "<",
    *(f"{Path(str(sys.modules[name].__file__)).parent}{os.sep}" for name in ("torch", "gemmsmith")),
)


def observe(folder: Path) -> None:
    """Observe this process from now on. The result goes to its own file in `folder`."""
    observer = _Observer(folder, Ending.asked())

    @_disable_dynamo  # a program may compile its optimizer's step
    def begins(optimizer: Any, *_: Any) -> None:
        observer.begins(optimizer)

    @_disable_dynamo
    def stepped(optimizer: Any, *_: Any) -> None:
        observer.stepped(optimizer)

    register_optimizer_step_pre_hook(begins)
    register_optimizer_step_post_hook(stepped)
    atexit.register(observer.write)
    os.register_at_fork(after_in_child=observer.restart)


class _Observer:
    _watch: _Watch | None = None

    def __init__(self, folder: Path, ending: Ending) -> None:
        self._folder, self._ending = folder, ending
        self.restart()

    def restart(self) -> None:
        """Forget the steps so far: they are a parent process's, or of an optimizer that is gone."""
        if self._watch is not None:
            self._watch.end()
        self._first: weakref.ref[Any] | None = None
        self._steps = 0
        self._seconds: list[float] = []
        self._began = 0.0
        self._watch = None
        self._optimizers: list[ObservedOptimizer] = []
        self._device = "cpu"

    def begins(self, optimizer: Any) -> None:
        if self._watch is not None and self._steps < OBSERVED:
            self._watch.is_paused = True
            with suppress(Exception):  # an error of ours must not stop the program
                observed, self._device = _observed(optimizer)
                self._optimizers.append(observed)

    def stepped(self, optimizer: Any) -> None:
        if self._watch is not None and self._steps < OBSERVED:
            self._watch.is_paused = False
        if self._first is None or self._first() is None:
            self.restart()
            self._first = weakref.ref(optimizer)
        limit = self._ending.steps
        if self._first() is not optimizer or (limit and self._steps >= limit):
            return
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            if torch.cuda.is_current_stream_capturing():
                return  # a CUDA graph of the step: its replays are not seen
            torch.cuda.synchronize()
        now = time.perf_counter()
        self._steps += 1
        if self._steps > OBSERVED:
            self._seconds.append(now - self._began)
        if self._steps == OBSERVED - 1:
            self._watch = _Watch()
            self._watch.begin()
        elif self._steps == OBSERVED and self._watch is not None:
            self._watch.end()
        if limit and self._steps == limit:
            self.write()
            self._ending.carry_out(self._folder)
        self._began = time.perf_counter()

    def write(self) -> None:
        """Write the step, if it was observed, replacing the file's earlier content."""
        if self._steps < OBSERVED or self._watch is None:
            return
        try:
            rank = os.environ.get("RANK", "0")
            step = ObservedStep(
                rank=int(rank) if rank.isdecimal() else 0,
                device=self._device,
                threads=torch.get_num_threads(),
                milliseconds=[seconds * 1e3 for seconds in self._seconds],
                is_compiled=_is_compiled(),
                functions=self._watch.functions,
                optimizers=self._optimizers,
            )
            publish(self._folder / f"{socket.gethostname()}-{os.getpid()}{STEP}", step.document)
        except Exception as error:  # noqa: BLE001 - it must not stop the program
            sys.stderr.write(f"gemmsmith: the step cannot be written: {error}\n")


def _observed(optimizer: Any) -> tuple[ObservedOptimizer, str]:
    """An optimizer that is about to step, and the kind of device of its parameters."""
    trained = [
        [getattr(parameter, "_local_tensor", parameter) for parameter in group["params"]
         if parameter.grad is not None]
        for group in optimizer.param_groups
    ]  # fmt: skip
    options = {name: value for name, value in optimizer.param_groups[0].items() if _is_plain(value)}
    devices = {parameter.device.type for group in trained for parameter in group}
    observed = ObservedOptimizer(
        kind=type(optimizer).__name__ if type(optimizer).__module__.startswith("torch.") else "",
        options=options,
        groups=[
            [(_name(parameter.dtype), tuple(parameter.shape)) for parameter in group]
            for group in trained
        ],
    )
    return observed, min(devices, default="cpu", key=lambda device: device == "cpu")


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(isinstance(element, (int, float)) for element in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the forward operators of the thread that begins it, by the functions that call them.

    Attributes:
        is_paused: whether an optimizer runs.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_paused = False
        self._thread = threading.get_ident()
        self._runs: list[tuple[CodeType | None, list[ObservedCall]]] = []
        self._open: dict[CodeType | None, tuple[int, list[ObservedCall]]] = {}
        self._names: dict[int, tuple[weakref.ref[Any], int, int]] = {}
        self._next = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether torch.compile works as without this mode, if the program begins to use it now."""
        return True

    def begin(self) -> None:
        """Begin, unless the program would notice: it compiles, or has dispatch modes itself."""
        if not _is_compiled() and not torch._C._len_torch_dispatch_stack():
            self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        depth = torch._C._len_torch_dispatch_stack()
        if depth and torch._C._get_dispatch_stack_at(depth - 1) is self:
            self.__exit__(None, None, None)
        self.is_paused = True
        self._names.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if (
            getattr(getattr(func, "overloadpacket", None), "__name__", "") in _WATCHED
            and not self.is_paused
            and threading.get_ident() == self._thread
            and torch._C._current_graph_task_id() == -1  # not the backward pass
        ):
            # An error of ours must not stop the program.
            with suppress(Exception), _disable_current_modes():
                self._add(func, args, kwargs or {}, result)
        return result

    def _add(self, operator: Any, args: tuple[Any, ...], named: dict[str, Any], out: Any) -> None:
        code, at, line = _caller()
        arguments = tuple(map(self._value, args))
        by_name = tuple((name, self._value(value)) for name, value in named.items())
        result = self._value(out)
        last, run = self._open.get(code, (at + 1, []))
        if at < last:  # the function was called again, or begins its loop again
            run = []
            self._runs.append((code, run))
        self._open[code] = at, run
        run.append(
            ObservedCall(
                operator=str(operator).removeprefix("aten."),
                line=line,
                arguments=arguments,
                named=by_name,
                result=result if isinstance(result, ObservedTensor) else None,
                is_tf32=allows_tf32(),
            )
        )

    @property
    def functions(self) -> list[ObservedFunction]:
        """What was recorded; functions that did the same are counted."""
        counted = Counter((code, _renamed(calls)) for code, calls in self._runs)
        return [
            ObservedFunction(
                file="" if code is None else _short(code.co_filename),
                function="" if code is None else code.co_qualname,
                calls=calls,
                count=count,
            )
            for (code, calls), count in counted.items()
        ]

    def _value(self, value: Any) -> Value:
        if isinstance(value, torch.Tensor):
            if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.is_meta:
                raise TypeError("a tensor without data, or of parts")
            if value.dim() == 0 and value.device.type == "cpu":
                number: float = value.item()
                return number
            return ObservedTensor(
                name=self._named(value),
                dtype=_name(value.dtype),
                size=tuple(value.shape),
                stride=tuple(value.stride()),
                needs_grad=value.requires_grad,
            )
        return value if isinstance(value, (bool, int, float)) or value is None else str(value)

    def _named(self, tensor: torch.Tensor) -> int:
        # What was written to in place is another tensor.
        version = 0 if tensor.is_inference() else tensor._version
        reference, before, name = self._names.get(id(tensor), (None, 0, 0))
        if reference is None or reference() is not tensor or version != before:
            name = self._next
            self._next += 1
            self._names[id(tensor)] = weakref.ref(tensor), version, name
        return name


def _is_compiled() -> bool:
    """Whether torch.compile has traced code of this program."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return bool(counters.get("stats"))  # `fullgraph=True` counts no frames


def _caller() -> tuple[CodeType | None, int, int]:
    """Code, instruction and line of the program's innermost function."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (frame.f_code.co_filename.startswith(_SKIPPED)):
        frame = frame.f_back
    return (None, 0, 0) if frame is None else (frame.f_code, frame.f_lasti, frame.f_lineno)


def _renamed(calls: list[ObservedCall]) -> tuple[ObservedCall, ...]:
    """The calls with their tensors numbered from 0, so that equal ones are equal."""
    names: dict[int, int] = {}

    def renamed(value: Value) -> Value:
        return named(value) if isinstance(value, ObservedTensor) else value

    def named(tensor: ObservedTensor) -> ObservedTensor:
        name = names.setdefault(tensor.name, len(names))
        return msgspec.structs.replace(tensor, name=name)

    return tuple(
        msgspec.structs.replace(
            call,
            arguments=tuple(map(renamed, call.arguments)),
            named=tuple((name, renamed(value)) for name, value in call.named),
            result=None if call.result is None else named(call.result),
        )
        for call in calls
    )


def _short(file: str) -> str:
    """A file by its place in a package or under the working folder."""
    _, is_package, inner = file.rpartition(f"{os.sep}site-packages{os.sep}")
    return inner if is_package else os.path.relpath(file)
