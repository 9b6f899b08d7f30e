"""A prepared launch: everything that does not change from call to call is done once.

Making a `Plan` makes the checks that `gemmsmith.runtime.run` makes on every call. A call then sets
pointers and launches: it allocates D and a workspace, takes no lock and synchronizes nothing.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch

from gemmsmith.core.config import Config
from gemmsmith.core.elements import Element
from gemmsmith.core.operation import Grouping, Operation, Scaling
from gemmsmith.errors import LaunchFailed
from gemmsmith.ops.engine.forms import Shape
from gemmsmith.ops.engine.operands import NO_OPERANDS, OPERANDS, Operands
from gemmsmith.ops.engine.platform import Platform
from gemmsmith.ops.engine.settings import Permission
from gemmsmith.runtime.abi import SCALING_CODES, Arguments, status_text
from gemmsmith.runtime.launch import torch_dtype
from gemmsmith.runtime.pack import LoadedKernel

_SAMPLE_POINTER = 1 << 20
"""Stands for every operand in a kernel's own check of arguments, which reads none of them."""
_COPIED_MASK = 15
"""Bits of an address that are 0 if TMA reads the operand where it is."""


class RawPlan(ctypes.Structure):
    """`gs_plan` of dispatch.cpp."""

    _fields_ = [
        ("run", ctypes.c_void_p),
        ("kernel", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("workspace", ctypes.c_int64),
        ("mask_a", ctypes.c_uint64),
        ("mask_b", ctypes.c_uint64),
        ("mask_d", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("at_a", ctypes.c_uint64),
        ("at_b", ctypes.c_uint64),
        ("at_c", ctypes.c_uint64),
        ("at_d", ctypes.c_uint64),
        ("at_bias", ctypes.c_uint64),
        ("at_offsets", ctypes.c_uint64),
        ("arguments", ctypes.c_ubyte * 1024),
    ]


if ctypes.sizeof(Arguments) > RawPlan.arguments.size:
    raise ImportError("gs_plan has no room for gs_arguments; enlarge kArgumentsBytes")


class _ThreadArguments(threading.local):
    """A thread's own copy of the arguments: ctypes releases the interpreter's lock in a call."""

    def __init__(self, template: bytes) -> None:
        self.arguments = Arguments.from_buffer_copy(template)
        self.pointer = ctypes.byref(self.arguments)


def _product_pointers(operation: Operation) -> dict[str, str]:
    """The C ABI's pointers for operands that a product has apart from its epilogue, by name."""
    names: dict[str, str] = {}
    if operation.epilogue.is_gated:
        names["up"] = "b_up"
    if operation.is_grouped and operation.is_fused:
        names["row_scale"] = "row_scale"
        if operation.epilogue.backward:
            names["row_gradient"] = "row_gradient"
    if operation.scaling is not Scaling.NONE:
        names |= {"scale_a": "scale_a", "scale_b": "scale_b"}
    if operation.is_grouped:
        names["offsets"] = "offsets"
    if operation.d is Element.E4M3:
        names |= {"scale_d": "scale_d", "amax": "amax"}
    return names


class Plan:
    """One kernel, launch, shape and device. Call it with the operands.

    Attributes:
        config: kernel and launch.
        shape: the product.
        epilogue: what the kernel does with it.
        needs: what torch must permit at each run; empty for most.
        has_failed: whether a launch failed. It is not tried again.
        saving_us: µs that a call should save over torch's. None if it was not measured.
        time_us: µs that a call should take. None if it was not measured.
    """

    __slots__ = (
        "_cold",
        "_device",
        "_dtype",
        "_index",
        "_kernel",
        "_layouts",
        "_local",
        "_mask_a",
        "_mask_b",
        "_mask_d",
        "_output",
        "_platform",
        "_reads",
        "_run",
        "_slots",
        "_template",
        "_workspace",
        "_writes",
        "config",
        "epilogue",
        "has_failed",
        "needs",
        "saving_us",
        "shape",
        "time_us",
    )

    def __init__(
        self,
        config: Config,
        shape: Shape,
        kernel: LoadedKernel,
        platform: Platform,
        device: torch.device,
        index: int,
    ) -> None:
        self.config, self.shape = config, shape
        self.saving_us: float | None = None
        self.time_us: float | None = None
        self.needs: tuple[Permission, ...] = ()
        self.has_failed = False
        self._platform, self._device, self._index = platform, device, index
        description = config.kernel
        operation = description.operation
        self.epilogue = epilogue = operation.epilogue
        backward = epilogue.backward
        halves = backward.halves if backward else 1
        self._output = (*shape.output[:-1], shape.output[-1] * halves)
        self._dtype = torch_dtype(operation.d)
        # Alignments are powers of two.
        self._mask_a = description.alignment_a * operation.a.bytes - 1
        self._mask_b = description.alignment_b * operation.b.bytes - 1
        self._mask_d = description.alignment_d * operation.d.bytes - 1
        self._name_operands(operation)
        arguments = self._arguments()
        status = kernel.can_implement(arguments)  # which makes them fit the pack
        if status != 0:
            raise LaunchFailed(
                f"{kernel.name} does not take {shape.problem}: {status_text(status)}", status
            )
        self._workspace = kernel.workspace_bytes(arguments)
        for name in ("a", "b"):
            self._align(name, kernel, arguments)
        self._template = bytes(arguments)
        self._local = _ThreadArguments(self._template)
        self._kernel = kernel.index
        self._run: Any = kernel.pack.library.gs_run
        self._cold = True

    def _align(self, name: str, kernel: LoadedKernel, arguments: Arguments) -> None:
        """Require an address of 16 bytes if the kernel copied the operand at any other one.

        Such a copy lies in the workspace, of which there is as much as aligned addresses need.
        """
        mask = getattr(self, f"_mask_{name}")
        if mask >= _COPIED_MASK:
            return
        setattr(arguments, name, _SAMPLE_POINTER + mask + 1)
        if kernel.workspace_bytes(arguments) != self._workspace:
            setattr(self, f"_mask_{name}", _COPIED_MASK)
        setattr(arguments, name, _SAMPLE_POINTER)

    def _name_operands(self, operation: Operation) -> None:
        """Derive from the operation which operands the kernel has, and how they must lie."""
        of = operation.epilogue
        self._reads, self._writes = set(of.operands), of.results
        pointers = {name: name for name in (*self._reads, *self._writes)}
        pointers |= _product_pointers(operation)
        # Every kernel may have these two: callers may add to a tensor, or write to their own.
        self._layouts = {"c": (self._dtype, self._output), "d": (self._dtype, self._output)}
        # Matrices must begin where the kernel's loads and stores can.
        masks = {"up": self._mask_b}
        for name in pointers.keys() & OPERANDS.keys():
            operand = OPERANDS[name]
            self._layouts[name] = torch_dtype(operand.element(operation)), operand.size(self.shape)
            if operand.leading is not None:
                masks[name] = self._mask_d
        self._slots = tuple(
            (name, pointer, masks.get(name, 0)) for name, pointer in pointers.items()
        )

    def _arguments(self) -> Arguments:
        problem, shape = self.shape.problem, self.shape
        operation = problem.operation
        arguments = Arguments(
            m=problem.m,
            n=problem.n,
            k=problem.k,
            batch=problem.batch,
            a=_SAMPLE_POINTER,
            b=_SAMPLE_POINTER,
            c=_SAMPLE_POINTER,
            d=_SAMPLE_POINTER,
            lda=shape.lda,
            ldb=shape.ldb,
            ldc=self._output[-1],
            ldd=self._output[-1],
            batch_stride_a=shape.stride_a,
            batch_stride_b=shape.stride_b,
            batch_stride_c=shape.stride_d,
            batch_stride_d=shape.stride_d,
            alpha=1.0,
            beta=1.0 if operation.accumulate else 0.0,
            scaling=SCALING_CODES[operation.scaling],
            device=self._index,
            offsets=_SAMPLE_POINTER if operation.is_grouped else None,
        )
        for name in (*self._reads, *self._writes):
            setattr(arguments, name, _SAMPLE_POINTER)
            leading = OPERANDS[name].leading
            if leading is not None:
                setattr(arguments, leading, self._layouts[name][1][-1])
        if operation.epilogue.is_gated:
            rows = problem.n // 2 * shape.ldb
            arguments.b_up = _SAMPLE_POINTER + rows * operation.b.bytes
        if operation.scaling is Scaling.ROW:
            arguments.scale_a = arguments.scale_b = _SAMPLE_POINTER
            # Tokens have one factor each; a group's own matrix has its own.
            by_rows = operation.grouping is Grouping.ROWS
            arguments.batch_stride_scale_a = 0 if by_rows else problem.m
            arguments.batch_stride_scale_b = problem.n
        arguments.set_launch(self.config.launch, sm_count=self._platform.sm_count(self._index))
        return arguments

    def raw(self, dtype: int) -> RawPlan:
        """The plan for C; `dtype` is torch's number for D's type."""
        template = self._template
        raw = RawPlan(
            run=ctypes.cast(self._run, ctypes.c_void_p).value,
            kernel=self._kernel,
            dtype=dtype,
            workspace=self._workspace,
            mask_a=self._mask_a,
            mask_b=self._mask_b,
            mask_d=self._mask_d,
            size=len(template),
            at_a=Arguments.a.offset,
            at_b=Arguments.b.offset,
            at_c=Arguments.c.offset,
            at_d=Arguments.d.offset,
            at_bias=Arguments.bias.offset,
            at_offsets=Arguments.offsets.offset,
        )
        ctypes.memmove(raw.arguments, template, len(template))
        return raw

    @property
    def dtype(self) -> torch.dtype:
        """Element type of D."""
        return self._dtype

    def suits(self, operands: Operands) -> bool:
        """Whether these are the epilogue's operands, and lie as the kernel reads and writes them.

        Tensors may be traced ones: their addresses are not read.
        """
        for name, tensor in operands.items():
            layout = self._layouts.get(name)
            if layout is None:
                if name in OPERANDS:
                    return False
                continue
            dtype, size = layout
            if (
                tensor.dtype != dtype
                or tensor.device != self._device
                or tensor.size() != size
                or not tensor.is_contiguous()
            ):
                return False
        return self._reads <= operands.keys()

    def outputs(self) -> dict[str, torch.Tensor]:
        """New tensors for what the epilogue writes beside D."""
        if not self._writes:
            return {}
        return {name: self._empty(self._layouts[name][1]) for name in self._writes}

    def _empty(self, size: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(size, dtype=self._dtype, device=self._device)

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, operands: Operands = NO_OPERANDS
    ) -> torch.Tensor | None:
        """D, a new tensor without `d`. Returns None if an address is not aligned, or too early.

        A kernel that adds to its output adds to `d` without `c`.

        Args:
            a: as the plan's shape says.
            b: as the plan's shape says.
            operands: those that the plan `suits`, and its `outputs`.

        Raises:
            LaunchFailed: the kernel or CUDA refused; nothing was launched.
        """
        at_a, at_b = a.data_ptr(), b.data_ptr()
        if at_a & self._mask_a or at_b & self._mask_b:
            return None
        # Every address is checked before memory for D is allocated.
        pointers = []
        for name, field, mask in self._slots:
            operand = operands.get(name)
            address = 0 if operand is None else operand.data_ptr()
            if address & mask:
                return None
            pointers.append((field, address))
        d, c = operands.get("d"), operands.get("c")
        if d is None:
            d = self._empty(self._output)
        at_d = d.data_ptr()
        at_c = at_d if c is None else c.data_ptr()
        if (at_c | at_d) & self._mask_d:
            return None
        platform, index = self._platform, self._index
        if self._cold:
            # The driver loads a kernel's code when it is first launched, which no capture allows.
            if platform.capturing():
                return None
            self._cold = False
        matrices = (at_a, at_b, at_c, at_d)
        if platform.current() != index:
            with platform.guard(index):
                self._launch(matrices, pointers)
        else:
            self._launch(matrices, pointers)
        return d

    def set_factors(self, alpha: float, beta: float) -> None:
        """Of the product and of `c`, in this thread's next calls. By default 1, and 0 or 1."""
        arguments = self._local.arguments
        arguments.alpha, arguments.beta = alpha, beta

    def _launch(self, matrices: tuple[int, ...], pointers: list[tuple[str, int]]) -> None:
        local = self._local
        arguments = local.arguments
        arguments.a, arguments.b, arguments.c, arguments.d = matrices
        for field, address in pointers:
            setattr(arguments, field, address)
        workspace = 0
        if self._workspace:
            # Freed on return, but to this stream only: the next owner's work comes after ours.
            held = torch.empty(self._workspace, dtype=torch.uint8, device=self._device)
            workspace = held.data_ptr()
        stream = self._platform.stream(self._index)
        status = self._run(self._kernel, local.pointer, workspace, stream)
        if status != 0:
            raise LaunchFailed(f"{self.config.kernel.name}: {status_text(status)}", status)
