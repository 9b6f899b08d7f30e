"""Which matrix products this process runs: how often which operator, with operands of which sizes.

While anything records, a function of ours stands before torch's products in its dispatcher, where
torch chooses a backend. That is below autograd, autocast, functorch, tracers and modes, and above
all kernels: eager and compiled code, backward passes and all threads come by, and a program can
notice nothing of it but the time. What a tracer tries without data, and what a compiler runs to
time it, do not count.

A call is noted as its arguments are, which takes some microseconds; `gemmsmith.ops.capturing` reads
it later. Nothing but torch is imported here.
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
"""torch's operators that are products; an older torch lacks some."""

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
"""Operators of `gemmsmith::` that are products. What their kernels call does not count again."""

FUSED = ("fused_product", "gated_product", "backward_product")
"""Operators of `gemmsmith::` for a product and what follows it. Where no kernel does all of it,
what they call counts as well."""

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
    """A tensor without its data."""

    dtype: torch.dtype
    device: torch.device
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Operand:
        """That of a tensor."""
        return cls(tensor.dtype, tensor.device, tensor.size(), tensor.stride())


class Call(NamedTuple):
    """A call of an operator.

    Attributes:
        operator: with its overload.
        arguments: by place; an `Operand` for each tensor, and a tuple for each list.
        named: the others, by name.
        is_tf32: whether torch multiplied FP32 matrices in TF32 then.
    """

    operator: torch._ops.OpOverload
    arguments: tuple[Any, ...]
    named: tuple[tuple[str, Any], ...]
    is_tf32: bool


class Fusion(NamedTuple):
    """A linear layer and what could follow its product within one kernel.

    Attributes:
        x, weight: as the layer's; of a gate, its own rows.
        epilogue: name of what follows.
        groups: how many, of a grouped product.
        is_tf32: as of a `Call`.
    """

    x: Operand
    weight: Operand
    epilogue: str
    groups: int
    is_tf32: bool


class Calls:
    """What has run while it recorded.

    Attributes:
        unseen: what ran and could not be noted, by what keeps it from that, and how often.
    """

    def __init__(
        self, *, without_data: bool = False, more: Callable[[], None] = lambda: None
    ) -> None:
        """Record nothing yet.

        Args:
            without_data: tensors of the device `meta` count.
            more: called when products of 1, 2, 4, 8 … kinds have been noted, in the main thread,
                unless a tracer, a mode or a CUDA graph would see what it does.
        """
        self._without_data, self._more = without_data, more
        self._by_thread: dict[int, dict[Call | Fusion, int]] = {}
        self.unseen: Counter[str] = Counter()

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Note what runs until the end of the block."""
        self.start()
        try:
            yield
        finally:
            self.stop()

    def start(self) -> None:
        """Note what runs from now on."""
        with _Standing.lock:
            _recording.append(self)
            _stand()

    def stop(self) -> None:
        """Note no more."""
        with _Standing.lock:
            _recording.remove(self)
            _withdraw()

    def clear(self) -> None:
        """Forget what has run."""
        self._by_thread.clear()
        self.unseen.clear()

    @property
    def total(self) -> Counter[Call | Fusion]:
        """How often each call was made, in all threads."""
        total: Counter[Call | Fusion] = Counter()
        for counts in tuple(self._by_thread.values()):
            total.update(counts.copy())  # whole, whatever its thread adds meanwhile
        return total

    def see(self, operator: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Note a call. Nothing is raised: the program must run as without us."""
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
            tf32 = in_f32 and _allows_tf32()
            by_place = tuple(map(_noted, arguments))
            by_name = tuple((name, _noted(value)) for name, value in named.items())
            kinds = self._note(Call(operator, by_place, by_name, tf32))
            if kinds.bit_count() == 1 and not is_graph and _is_quiet():
                self._more()
        except Exception as error:  # noqa: BLE001 - said at the end, as `unseen`
            self.unseen[f"{operator}: {type(error).__name__}"] += 1

    def tell(self, x: torch.Tensor, weight: torch.Tensor, epilogue: str, groups: int) -> None:
        """Note what could be fused."""
        is_traced = any(isinstance(t, FakeTensor) or t.is_meta for t in (x, weight))
        if self._without_data or not is_traced:
            tf32 = x.dtype is torch.float32 and _allows_tf32()
            self._note(Fusion(Operand.of(x), Operand.of(weight), epilogue, groups, tf32))

    def _note(self, call: Call | Fusion) -> int:
        """How many kinds this thread has made, if this is the first of its kind; else 0."""
        # Each thread counts by itself: two that added to one number could lose one.
        counts = self._by_thread.setdefault(threading.get_ident(), {})
        before = counts.get(call, 0)
        counts[call] = before + 1
        return 0 if before else len(counts)


_recording: list[Calls] = []


def recording() -> list[Calls]:
    """Those that record at present."""
    return _recording


def compiled() -> Counter[str]:
    """What compilers of torch's have made in this process that may run products unseen."""
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
    """Whether this is the program's main thread, and sees no more of operators than autograd."""
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


def _noted(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Operand.of(value)
    return tuple(map(_noted, value)) if isinstance(value, (list, tuple)) else value


def _allows_tf32() -> bool:
    return bool(_precision("cuda", "matmul") == "tf32")


class _Standing:
    """Our functions in torch's dispatcher, and the threads that have run one."""

    lock = threading.Lock()
    libraries: list[Any] = []  # noqa: RUF012 - one a process
    threads: set[int] = set()  # noqa: RUF012 - one a process


class _Within(threading.local):
    """Whether this thread is in the kernel of a product."""

    product = False


_within = _Within()


def _stand() -> None:
    """Put our functions before torch's products. Does nothing the second time."""
    if _Standing.libraries:
        return
    # Not torch.library's class, which takes them away when Python ends, under running threads.
    library = _library("aten")
    for name in ATEN:
        packet = getattr(torch.ops.aten, name, None)
        for overload in () if packet is None else packet.overloads():
            full = name if overload == "default" else f"{name}.{overload}"
            if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{full}", _KEY):
                for calls in _recording:
                    calls.unseen[f"aten::{full}, which another library replaces"] += 1
            else:
                library.impl(full, _KEY.name, _before(torch.ops.aten, name, overload), True)
    library = _library("gemmsmith")  # whose operators may be defined later
    for name in (*OWN, *FUSED):
        library.impl(name, _KEY.name, _before(torch.ops.gemmsmith, name, "default"), True)


def _library(namespace: str) -> Any:
    library = torch._C._dispatch_library("IMPL", namespace, _KEY.name, __file__, 1)
    _Standing.libraries.append(library)
    return library


def _withdraw() -> None:
    """Take our functions away, once nothing records.

    torch does not expect a kernel to go while another thread is about to run it. So ours stay where
    another thread of Python that has multiplied is still there. torch's own threads rest by now:
    they work while one of Python's waits for them.
    """
    alive = {
        thread.ident
        for thread in threading.enumerate()
        if not isinstance(thread, threading._DummyThread)
    }
    if not _recording and not (alive & _Standing.threads) - {threading.get_ident()}:
        for library in _Standing.libraries:
            library.reset()
        _Standing.libraries.clear()
        _Standing.threads.clear()


def _before(operators: Any, name: str, overload: str) -> Callable[..., Any]:
    """What stands before an operator."""
    is_product = name not in FUSED

    def call(keys: Any, *arguments: Any, **named: Any) -> Any:
        operator = getattr(getattr(operators, name), overload)
        _Standing.threads.add(threading.get_ident())
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
    """Note a call that runs: no tracer's, and no compiler's."""
    with torch._C.DisableTorchFunction():  # of subclasses, and of the program's modes
        tensors = _tensors((*arguments, *named.values()))
        if CompileContext.current_compile_id() is not None or any(
            isinstance(tensor, FakeTensor) for tensor in tensors
        ):
            return
        for calls in _recording:
            calls.see(operator, arguments, named)


def _below(operator: Any, keys: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """The operator as it runs without us."""
    if torch._C._dispatch_tls_is_dispatch_key_included(_PYTHON):
        # A tracer with symbolic sizes has kernels of its own, which only a call meets.
        with torch._C._ExcludeDispatchKeyGuard(_ONLY_KEY):
            return operator(*arguments, **named)
    return operator.redispatch(keys & _BELOW, *arguments, **named)
