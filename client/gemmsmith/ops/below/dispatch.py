"""Puts tuned kernels below torch's own products, by a small compiled binding (dispatch.cpp).

These are `mm`, also with `out_dtype`, `bmm`, `_int_mm` and `addmm` of a bias, each also with
`out=`, and `_grouped_mm`. Products with factors or other addends go through Python
(`gemmsmith.ops.below.adding`), and so do grouped ones that are reported. FP32 operands are torch's
unless torch itself may multiply them in TF32. Every call reads that setting, and torch's others
that forbid kernels.

So forward and backward products of unchanged code run without any Python of ours: a call costs less
than 0.1 microseconds more than torch's. Python decides once for each product under each of torch's
settings (`Engine.plan`). The binding uses torch's C shim and a few other functions, so one build
suits every torch from 2.9 on. What it enters past the shim and past Python is checked first: the
schemas here, the classes in memory in `layouts_hold`. Where they differ, a call costs more. Without
the binding, `patch` does the same by a function mode, which costs more still.

torch keeps an operator's new kernel for as long as the process lives. So the binding is installed
once and then switched on and off, for every product or for those of some linear layers, which it
recognizes by their sizes. It runs the winners that the process uses at present (`engine.in_use`).
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import subprocess
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch

from gemmsmith.core.operation import Epilogue
from gemmsmith.errors import LaunchFailed, NotInvariant
from gemmsmith.ops.below import adding
from gemmsmith.ops.below.binding import binding
from gemmsmith.ops.below.blocks import Blocks, Weights, of_experts
from gemmsmith.ops.below.overriding import kernel_of
from gemmsmith.ops.below.prospects import may_add_biases
from gemmsmith.ops.below.shim import (
    MM_DTYPE,
    ShimTable,
    address_of,
    functions_for,
    handle_of,
    owned,
)
from gemmsmith.ops.engine.copying import CopyingPlan, written
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.forms import Form, Spec
from gemmsmith.ops.engine.in_use import in_use, on_install
from gemmsmith.ops.engine.plan import Plan, RawPlan
from gemmsmith.ops.engine.settings import allows_tf32
from gemmsmith.ops.engine.watching import Watching
from gemmsmith.runtime.abi import status_text
from gemmsmith.runtime.launch import torch_dtype

log = logging.getLogger("gemmsmith")

_DIMS = 3
_ASK_AGAIN = 1
_REFUSED = 2
_BY_PYTHON = 3
_DEVICE_TYPES = {"cpu": 0, "cuda": 1}
_DTYPES = {
    torch.bfloat16: 15,
    torch.float16: 5,
    torch.float32: 6,
    torch.int8: 1,
    torch.int32: 3,
}
"""c10::ScalarType of the element types that kernels read and write."""
_BY_CODE = {code: dtype for dtype, code in _DTYPES.items()}

_BY_SHIM = ("mm", "mm.out", "bmm", "bmm.out")
"""Operators that dispatch.cpp overrides by torch's shim, and has entries for."""
_SCHEMAS = {
    "mm": "aten::mm(Tensor self, Tensor mat2) -> Tensor",
    "mm.out": "aten::mm.out(Tensor self, Tensor mat2, *, Tensor(a!) out) -> Tensor(a!)",
    "bmm": "aten::bmm(Tensor self, Tensor mat2) -> Tensor",
    "bmm.out": "aten::bmm.out(Tensor self, Tensor mat2, *, Tensor(a!) out) -> Tensor(a!)",
    "addmm": "aten::addmm(Tensor self, Tensor mat1, Tensor mat2, *, Scalar beta=1, Scalar alpha=1) "
    "-> Tensor",
    "addmm.out": "aten::addmm.out(Tensor self, Tensor mat1, Tensor mat2, *, Scalar beta=1, "
    "Scalar alpha=1, Tensor(a!) out) -> Tensor(a!)",
    "_grouped_mm": "aten::_grouped_mm(Tensor self, Tensor mat2, Tensor? offs=None, "
    "Tensor? bias=None, ScalarType? out_dtype=None) -> Tensor",
}
"""Of the operators that dispatch.cpp has entries for, as it calls them."""

_BIASED, _SYMMETRIC = 1 << 24, 1 << 25
"""In the first word of a question from C: a row is added; b is a's transposed view."""

_Resolve = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(ctypes.c_int64))
_Failed = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32)
_ByPython = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 3, ctypes.c_int32)
_GroupedByPython = ctypes.CFUNCTYPE(*[ctypes.c_void_p] * 4)
_Stream = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))


class Dispatch:
    """The binding in this process, for one kind of device. Get it from `Dispatch.of`."""

    _made: ClassVar[dict[str, Dispatch | None]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self, kind: str, library: ctypes.CDLL, stream: Callable[[int], int] | None
    ) -> None:
        self._kind = kind
        self._library = library
        # Of plain products and of grouped ones. The C side numbers them so.
        self._blocks = Blocks(), Blocks(of_experts)
        self._decided_by: list[tuple[object, ...]] = [(), ()]
        self._switching = threading.RLock()
        self._engine: Engine | None = None
        # C holds the addresses, so the plans are kept alive. Each switch looks them up by plan.
        self._plans: dict[int, tuple[RawPlan, Plan]] = {}
        self._addresses: dict[Plan, int] = {}
        # Callbacks must outlive every call.
        self._callbacks = (
            _Resolve(self._resolve),
            _Failed(self._failed),
            _ByPython(self._by_python),
            _GroupedByPython(self._grouped_by_python),
        )
        self._get_stream = _Stream(_stream_of(stream)) if stream else None
        count = getattr(library, "gs_dispatch_bytes", None)  # an older binding returns another
        is_old = not hasattr(library, "gs_dispatch_enter")
        if count is None or is_old or count() != ctypes.sizeof(RawPlan) + ctypes.sizeof(ShimTable):
            raise OSError("the compiled binding is another gemmsmith's; install gemmsmith again")
        functions = functions_for(kind, self._get_stream)
        originals = {name: kernel_of(name, kind) for name in _BY_SHIM}
        status = _quietly(
            lambda: library.gs_dispatch_install(
                ctypes.byref(functions),
                ctypes.c_int32(_DEVICE_TYPES[kind]),
                kind.upper().encode(),
                *self._callbacks,
                ctypes.byref(Watching.flag),
            )
        )
        if status != 0:
            raise OSError(f"torch did not take the kernels (status {status})")
        for name, original in originals.items():
            self.enter(name, original, kernel_of(name, kind))
        adding.install(kind, without_mm=functions.has(MM_DTYPE) or kind == "cpu")
        on_install(self._switch)
        for at, _ in enumerate(self._blocks):  # no callback into a Python that ends
            atexit.register(library.gs_dispatch_enable, at, 0)

    @classmethod
    def of(cls, kind: str, *, stream: Callable[[int], int] | None = None) -> Dispatch | None:
        """The binding for `cuda` tensors. Returns None if it cannot be loaded: logged once.

        `stream` replaces torch's current stream, for tests: the CPU has no streams.
        """
        with cls._lock:
            if kind not in cls._made:
                try:
                    cls._made[kind] = cls(kind, ctypes.CDLL(str(binding())), stream)
                except (OSError, AttributeError, subprocess.SubprocessError) as error:
                    log.info("patch() works by a function mode, which costs more: %s", error)
                    cls._made[kind] = None
            return cls._made[kind]

    @contextmanager
    def on(
        self, only: Weights | None = None, groups: Weights | None = frozenset()
    ) -> Iterator[None]:
        """Run the kernels of the engine in use, in every thread, until the end of the block.

        Blocks may overlap: each adds to what the others replace.

        Args:
            only: weights of the linear layers whose products are replaced; None: all products.
            groups: each expert's weights of the grouped products that are replaced; None: all.
        """
        with ExitStack() as stack:
            stack.callback(self._switch)
            for blocks, of in zip(self._blocks, (only, groups), strict=True):
                stack.enter_context(blocks.opened(of))
            self._switch()
            yield

    def _switch(self) -> None:
        """Use the engine that is in use now, or switch off without one.

        Decisions hold until the engine, its winners or the blocks change. So a program may open a
        block for every step.
        """
        with self._switching:
            engine = in_use()
            is_idle = all(blocks.only == frozenset() for blocks in self._blocks)
            if engine is not None and (is_idle or engine.platform.kind != self._kind):
                engine = None
            before, self._engine = self._engine, engine
            if before is engine is None:
                return  # products of other devices may be another binding's
            if before is not None and before is not engine:
                before.on_swap(lambda: None)
            if engine is not None:
                engine.on_swap(self._forget)
            self._library.gs_dispatch_strict(int(engine is not None and engine.is_invariant))
            for at, blocks in enumerate(self._blocks):
                on = engine is not None and blocks.only != frozenset()
                by = (engine, engine and engine.snapshot, blocks.only)
                if on and by != self._decided_by[at]:
                    self._forget(at)
                    self._decided_by[at] = by
                self._library.gs_dispatch_enable(at, int(on))
            adding.switch(None if engine is None else self._blocks[0].hold)

    def _forget(self, *which: int) -> None:
        """Drop decisions of plain or grouped products; by default all. Override what wins now."""
        for at in which or (0, 1):
            self._library.gs_dispatch_forget(at)
        engine = self._engine
        if engine is not None and may_add_biases(engine, self._blocks[0].only):
            adding.install_biases(self._kind, self.enter)
        if engine is not None and engine.is_invariant:
            adding.install_sums(self._kind)
            self.leave()  # Python adds in the order that is demanded

    def enter(self, name: str, original: Any, override: Any) -> None:
        """`overriding.Enter`. Without it, a call costs the host more."""
        if name not in _SCHEMAS:
            return
        packet, _, overload = name.partition(".")
        schema = getattr(getattr(torch.ops.aten, packet), overload or "default")._schema
        addresses = [ctypes.c_void_p(address_of(kernel)) for kernel in (original, override)]
        enter = self._library.gs_dispatch_enter
        is_known = str(schema) == _SCHEMAS[name] and all(addresses)
        if not is_known or _quietly(lambda: enter(name.encode(), *addresses)) != 0:
            log.info("%s costs the host more: this torch's kernels are not known", name)

    def leave(self, *, left: bool = True) -> None:
        """Have all callers of operators that are overridden come to the overrides, or end that."""
        _quietly(lambda: self._library.gs_dispatch_leave(int(left)))

    def _resolve(self, words: Any) -> int | None:
        """`gs_resolve`. Nothing may be raised into C."""
        try:
            return self._decide(words)
        except Exception as error:
            engine = self._engine
            if isinstance(error, NotInvariant) or (engine is not None and engine.is_invariant):
                return self._refuse(error)
            log.warning("torch's own operator runs instead of a tuned kernel", exc_info=True)
            return None

    def _refuse(self, error: Exception) -> int:
        self._library.gs_dispatch_refuse(str(error).encode())
        return _REFUSED

    def _by_python(self, a: int, b: int, out: int, dtype: int) -> int:
        """`gs_by_python`. Nothing may be raised into C."""
        try:
            with torch._C._AutoDispatchBelowAutograd():
                left, right, into = (owned(handle) for handle in (a, b, out))
                return self._copied(left, right, into, _BY_CODE.get(dtype))
        except Exception as error:  # noqa: BLE001 - it becomes torch's error
            return self._refuse(error)

    def _grouped_by_python(self, a: int, b: int, offs: int) -> int | None:
        """`gs_grouped_by_python`. Nothing may be raised into C."""
        try:
            with torch._C._AutoDispatchBelowAutograd():
                left, right, ends = [owned(handle) for handle in (a, b, offs)]
                if self._engine is None or not self._blocks[1].hold(left, right):
                    return None
                d = self._engine.product(Form.GROUPED, left, right, {"offsets": ends})
                return None if d is None else handle_of(d)
        except Exception:
            log.warning("torch's own operator runs instead of a tuned kernel", exc_info=True)
            return None

    def _copied(self, a: Any, b: Any, out: Any, dtype: torch.dtype | None) -> int:
        engine = self._engine
        if engine is None:
            return _ASK_AGAIN
        d = engine.product(Form.MATMUL, a, b, output=None if dtype is a.dtype else dtype)
        if d is None:
            return _ASK_AGAIN
        written(d, out)
        return 0

    def _decide(self, words: Any) -> int | None:
        engine = self._engine
        dims = words[0] & 0xF, words[0] >> 4 & 0xF
        dtype, groups = _BY_CODE.get(words[0] >> 8 & 0xFF), words[0] >> 32
        output = _BY_CODE.get(words[0] >> 16 & 0xFF)
        epilogue = Epilogue.BIAS if words[0] & _BIASED else Epilogue.NONE
        if engine is None:
            return _ASK_AGAIN
        # The first launch of a kernel loads its code, which no capture allows.
        is_too_early = engine.platform.capturing()
        if is_too_early and not engine.is_invariant:
            return _ASK_AGAIN
        if dtype is None or output is None:
            return None
        device = torch.device(self._kind, words[1]) if self._kind == "cuda" else torch.device("cpu")
        a, b = (
            Spec(
                dtype,
                device,
                torch.Size(words[2 + at + i] for i in range(count)),
                tuple(words[2 + at + _DIMS + i] for i in range(count)),
            )
            for at, count in zip((0, 2 * _DIMS), dims, strict=True)
        )
        if not self._blocks[groups != 0].hold(a, b):
            return None
        other = None if output == dtype else output
        form = Form.GROUPED if groups else Form.MATMUL
        if is_too_early:
            engine.refuse(form, a, b, other, groups)
            return _ASK_AGAIN
        plan = None
        if words[0] & _SYMMETRIC and not engine.is_invariant:
            plan = engine.plan(Form.SYMMETRIC, a, b)
        if plan is None:
            plan = engine.plan(form, a, b, other, groups, epilogue)
        if plan is None:  # for good, unless TF32 was just forbidden
            return _ASK_AGAIN if dtype is torch.float32 and not allows_tf32() else None
        if isinstance(plan, CopyingPlan):
            return _BY_PYTHON
        address = self._addresses.get(plan)
        if address is None:
            raw = plan.raw(_DTYPES[torch_dtype(plan.config.kernel.operation.d)])
            address = ctypes.addressof(raw)
            self._plans[address] = (raw, plan)
            self._addresses[plan] = address
        return address

    def _failed(self, address: int, status: int) -> None:
        """`gs_failed`: the kernel or CUDA refused, and nothing was launched."""
        _, plan = self._plans[address]
        name = plan.config.kernel.name
        if self._engine is not None:
            error = LaunchFailed(f"{name}: {status_text(status)}", status)
            self._engine.give_up(plan, error)


def _quietly(install: Callable[[], int]) -> int:
    """Call `install` without torch's warning of the override. Returns the status.

    Python can silence warnings of torch's C++ only within a call of torch from Python; others go to
    standard error. So `install` runs in a function that torch calls back.
    """
    statuses = []

    def call(value: float) -> float:
        statuses.append(install())
        return value

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.zeros(1, device="cpu").apply_(call)
    return statuses[0]


def _stream_of(stream: Callable[[int], int]) -> Callable[[int, Any], int]:
    def give(index: int, into: Any) -> int:
        into[0] = stream(index)
        return 0

    return give
