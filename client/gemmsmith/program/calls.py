"""Records the matrix products of this process: the operators, their operands' sizes, and counts.

During a recording, a function of ours is registered for torch's products in its dispatcher, under
the key `BackendSelect`, where torch chooses a backend. The key is below autograd, autocast,
functorch, tracers and modes, and above all kernels. So the function sees eager and compiled code,
backward passes and all threads, and a program cannot notice it except by the time it takes. Calls
that a tracer makes without data, and calls that a compiler makes to time a kernel, are not counted.

A call is stored with the description of its arguments, which takes some microseconds;
`gemmsmith.ops.capturing` interprets it later. This module imports nothing but torch.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch._guards import CompileContext
from torch._subclasses.fake_tensor import FakeTensor

ATEN = (
    "mm",
    "bmm",
    "_int_mm",
    "addmm",
    "addmm_",
    "baddbmm",
    "_addmm_activation",
    "_scaled_mm",
    "_scaled_mm_v2",
    "_grouped_mm",
    "_scaled_grouped_mm",
    "_scaled_grouped_mm_v2",
)
"""torch's operators that are products; older versions lack some."""

OWN = (
    "linear",
    "matmul",
    "weight_gradient",
    "accumulate",
    "scaled_mm",
    "int8_mm",
    "grouped_mm",
    "scaled_linear",
    "scaled_gated_linear",
    "experts",
    "experts_backward",
)
"""Operators of `gemmsmith::` that are products. Products that they call are not counted again."""

FUSED = ("fused_product", "gated_product", "backward_product")
"""Operators of `gemmsmith::` for a product with an epilogue. If no kernel fuses the two, the plain
products that they call are counted as well."""

_IN_GRAPHS = "products recorded into CUDA graphs: each counts once, however often it is replayed"

_TRITON = "Triton kernels of torch.compile that hold products or attention, such as "
_WRAPPED = "programs of torch.compile in C++, which call no operators of torch's"
_PACKAGED = "use of AOTInductor, whose programs call no operators of torch's"

_KEY = torch._C.DispatchKey.BackendSelect
_ONLY_KEY = torch._C.DispatchKeySet(_KEY)
_BELOW = torch._C._dispatch_keyset_full_after(_KEY)
_PYTHON = torch._C.DispatchKey.PythonDispatcher
_precision = torch._C._get_fp32_precision_getter


class Operand(NamedTuple):
    """The description of a tensor, without its data."""

    dtype: torch.dtype
    device: torch.device
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Operand:
        return cls(tensor.dtype, tensor.device, tensor.size(), tensor.stride())


class Call(NamedTuple):
    """A call of an operator.

    Attributes:
        operator: the operator and its overload.
        arguments: positional arguments: an `Operand` for each tensor, and a tuple for each list.
        named: keyword arguments, converted in the same way.
        is_tf32: whether torch was allowed to multiply FP32 matrices in TF32.
        is_mirrored: whether its only two tensors are a matrix and its transposed view.
    """

    operator: torch._ops.OpOverload
    arguments: tuple[Any, ...]
    named: tuple[tuple[str, Any], ...]
    is_tf32: bool
    is_mirrored: bool = False


class Fusion(NamedTuple):
    """A linear layer's product and an epilogue that a kernel could compute with it.

    Attributes:
        x, weight: the layer's operands; with a gate, the weight's rows for the gate only.
        epilogue: name of the epilogue.
        groups: number of groups of a grouped product.
        is_tf32: as in `Call`.
    """

    x: Operand
    weight: Operand
    epilogue: str
    groups: int
    is_tf32: bool


class Calls:
    """A recording of calls.

    Attributes:
        unseen: why calls could not be recorded, and how many.
    """

    def __init__(
        self, *, without_data: bool = False, on_growth: Callable[[], None] = lambda: None
    ) -> None:
        """Create a recording that has not started.

        Args:
            without_data: also count products of tensors on the device `meta`.
            on_growth: called when 1, 2, 4, 8 … different calls have been recorded; in the main
                thread only, and not if a tracer, a mode or a CUDA graph would notice the call.
        """
        self._without_data, self._on_growth = without_data, on_growth
        self._by_thread: dict[int, dict[Call | Fusion, int]] = {}
        self.unseen: Counter[str] = Counter()

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record until the end of the block."""
        self.start()
        try:
            yield
        finally:
            self.stop()

    def start(self) -> None:
        with _Hooks.lock:
            _recording.append(self)
            _install()
        for react in _reactions:
            react()

    def stop(self) -> None:
        with _Hooks.lock:
            _recording.remove(self)
            _uninstall()

    def clear(self) -> None:
        self._by_thread.clear()
        self.unseen.clear()

    @property
    def total(self) -> Counter[Call | Fusion]:
        """How often each call was made, in all threads."""
        total: Counter[Call | Fusion] = Counter()
        for counts in tuple(self._by_thread.values()):
            # A copy is atomic. Iterating would fail if the counts' thread added to them meanwhile.
            total.update(counts.copy())
        return total

    def see(self, operator: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Record a call. Never raises: an error of ours must not stop the program."""
        try:
            tensors = [*_tensors((*arguments, *named.values()))]
            if any(tensor.is_meta for tensor in tensors) and not self._without_data:
                return
            if any(tensor.layout is not torch.strided or tensor.is_nested for tensor in tensors):
                self.unseen[f"{operator} of sparse or nested tensors"] += 1
                return
            on_gpu = any(tensor.is_cuda for tensor in tensors)
            is_graph = on_gpu and torch.cuda.is_current_stream_capturing()
            if is_graph:
                self.unseen[_IN_GRAPHS] += 1
            in_f32 = any(tensor.dtype is torch.float32 for tensor in tensors)
            tf32 = in_f32 and allows_tf32()
            by_place = tuple(map(_described, arguments))
            by_name = tuple((name, _described(value)) for name, value in named.items())
            mirrored = len(tensors) == 2 and is_mirrored(*tensors)
            kinds = self._note(Call(operator, by_place, by_name, tf32, mirrored))
            if kinds.bit_count() == 1 and not is_graph and _is_quiet():
                self._on_growth()
        except Exception as error:  # noqa: BLE001 - reported as `unseen`
            self.unseen[f"{operator}: {type(error).__name__}"] += 1

    def record(self, x: torch.Tensor, weight: torch.Tensor, epilogue: str, groups: int) -> None:
        """Record a product that a kernel could compute together with an epilogue."""
        is_traced = any(isinstance(t, FakeTensor) or t.is_meta for t in (x, weight))
        if self._without_data or not is_traced:
            tf32 = x.dtype is torch.float32 and allows_tf32()
            self._note(Fusion(Operand.of(x), Operand.of(weight), epilogue, groups, tf32))

    def _note(self, call: Call | Fusion) -> int:
        """Count a call. Returns the thread's number of different calls if it is new, else 0."""
        # Threads have separate counts: two threads that increment the same count could lose a call.
        counts = self._by_thread.setdefault(threading.get_ident(), {})
        before = counts.get(call, 0)
        counts[call] = before + 1
        return 0 if before else len(counts)


_recording: list[Calls] = []


def recording() -> list[Calls]:
    return _recording


_reactions: list[Callable[[], None]] = []


def on_start(react: Callable[[], None]) -> None:
    """Have `react` called whenever a recording starts."""
    _reactions.append(react)


def compiled() -> Counter[str]:
    """Code from torch's compilers in this process that may run products without being recorded."""
    unseen: Counter[str] = Counter()
    cache = getattr(sys.modules.get("torch._inductor.codecache"), "PyCodeCache", None)
    programs = [vars(module) for module in getattr(cache, "modules", ())]
    kernels = {name for names in programs for name in names if name.startswith("triton_tem_")}
    if kernels:
        unseen[_TRITON + min(kernels)] = len(kernels)
    unseen[_WRAPPED] = sum("cpp_wrapper_src" in names for names in programs)
    unseen[_PACKAGED] = int("torch._inductor.package.package" in sys.modules)
    return +unseen


def _is_quiet() -> bool:
    """Whether this is the main thread, without dispatch modes, functorch or tracing."""
    return (
        threading.current_thread() is threading.main_thread()
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
    )


def _tensors(values: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(tuple(value))


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Operand.of(value)
    return tuple(map(_described, value)) if isinstance(value, (list, tuple)) else value


def is_mirrored(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether b is a's transposed view: the same memory, with rows and columns exchanged."""
    if not a.dim() == b.dim() >= 2 or a.dtype is not b.dtype:
        return False
    (*batch_a, rows, columns), (*batch_b, depth, width) = a.shape, b.shape
    (*steps_a, row, column), (*steps_b, down, across) = a.stride(), b.stride()
    return (
        (rows, columns, row, column) == (width, depth, across, down)
        and (batch_a, steps_a) == (batch_b, steps_b)
        and a.storage_offset() == b.storage_offset()
        and a.untyped_storage()._cdata == b.untyped_storage()._cdata
    )


def allows_tf32() -> bool:
    return bool(_precision("cuda", "matmul") == "tf32")


class _Hooks:
    """Our functions in torch's dispatcher, and the threads that have run such a function."""

    lock = threading.Lock()
    libraries: list[Any] = []  # noqa: RUF012 - shared by the whole process
    threads: set[int] = set()  # noqa: RUF012 - shared by the whole process


class _Within(threading.local):
    """Whether this thread is running a product whose inner products are not counted."""

    product = False


_within = _Within()


def _install() -> None:
    """Register our functions for torch's products, unless they are registered."""
    if _Hooks.libraries:
        return
    # torch.library.Library would remove the functions when Python ends, while threads still run.
    library = _library("aten")
    for name in ATEN:
        packet = getattr(torch.ops.aten, name, None)
        for overload in () if packet is None else packet.overloads():
            full = name if overload == "default" else f"{name}.{overload}"
            if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{full}", _KEY):
                for calls in _recording:
                    calls.unseen[f"aten::{full}, which another library replaces"] += 1
            else:
                library.impl(full, _KEY.name, _recorder(torch.ops.aten, name, overload), True)
    library = _library("gemmsmith")  # its operators may be defined later
    for name in (*OWN, *FUSED):
        library.impl(name, _KEY.name, _recorder(torch.ops.gemmsmith, name, "default"), True)


def _library(namespace: str) -> Any:
    library = torch._C._dispatch_library("IMPL", namespace, _KEY.name, __file__, 1)
    _Hooks.libraries.append(library)
    return library


def _uninstall() -> None:
    """Remove our functions if nothing is recording and no other thread may be running them."""
    # torch does not support the removal of a function that another thread is about to call. So the
    # functions stay as long as another Python thread that has called them is alive. torch's own
    # threads are idle here: they work only while a Python thread waits for them.
    alive = {
        thread.ident
        for thread in threading.enumerate()
        if not isinstance(thread, threading._DummyThread)
    }
    if not _recording and not (alive & _Hooks.threads) - {threading.get_ident()}:
        for library in _Hooks.libraries:
            library.reset()
        _Hooks.libraries.clear()
        _Hooks.threads.clear()


def _recorder(operators: Any, name: str, overload: str) -> Callable[..., Any]:
    """A function that records a call of an operator, then runs the operator."""
    is_product = name not in FUSED

    def call(keys: Any, *arguments: Any, **named: Any) -> Any:
        operator = getattr(getattr(operators, name), overload)
        _Hooks.threads.add(threading.get_ident())
        if not _recording or _within.product:
            return _below(operator, keys, arguments, named)
        _see(operator, arguments, named)
        _within.product = is_product
        try:
            return _below(operator, keys, arguments, named)
        finally:
            _within.product = False

    return call


def _see(operator: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Record a call, unless a tracer or a compiler makes it."""
    with torch._C.DisableTorchFunction():  # neither subclasses nor modes may see our own calls
        tensors = _tensors((*arguments, *named.values()))
        if CompileContext.current_compile_id() is not None or any(
            isinstance(tensor, FakeTensor) for tensor in tensors
        ):
            return
        for calls in _recording:
            calls.see(operator, arguments, named)


def _below(operator: Any, keys: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Run the operator as if our function were not registered."""
    if torch._C._dispatch_tls_is_dispatch_key_included(_PYTHON):
        # A tracer with symbolic sizes has its own kernels. A redispatch would skip them.
        with torch._C._ExcludeDispatchKeyGuard(_ONLY_KEY):
            return operator(*arguments, **named)
    return operator.redispatch(keys & _BELOW, *arguments, **named)
