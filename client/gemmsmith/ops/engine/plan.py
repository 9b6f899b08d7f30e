"""A prepared launch: everything that does not change from call to call, done once.

`Plan.prepare` makes the checks that `gemmsmith.runtime.run` makes on every call. A call then fills
in pointers and launches: two allocations from torch's allocator at most, no lock, nothing
synchronized. Each thread has its own arguments, as ctypes lets go of the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch

from gemmsmith.core.config import Config
from gemmsmith.core.operation import Grouping, Scaling
from gemmsmith.errors import LaunchFailed
from gemmsmith.ops.engine.beside import Beside
from gemmsmith.ops.engine.forms import Shape
from gemmsmith.ops.engine.platform import Platform
from gemmsmith.ops.engine.settings import Permission
from gemmsmith.runtime.abi import SCALING_CODES, Arguments, status_text
from gemmsmith.runtime.launch import torch_dtype
from gemmsmith.runtime.pack import LoadedKernel

_SAMPLE_POINTER = 1 << 20
"""Stands for every operand in a kernel's own check of arguments, which reads none of them."""


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
    """Copies of the arguments, one a thread."""

    def __init__(self, template: bytes) -> None:
        self.arguments = Arguments.from_buffer_copy(template)
        self.pointer = ctypes.byref(self.arguments)


class Plan:
    """One kernel, launch, shape and device. Call it with the operands.

    Attributes:
        config: kernel and launch.
        shape: the product.
        needs: what torch must permit at each run; empty for most.
        has_failed: whether a launch failed. It is not tried again.
        saving_us, time_us: µs that a call should save over torch's, and take; None: not known.
    """

    __slots__ = (
        "_bias_dtype",
        "_cold",
        "_device",
        "_dtype",
        "_index",
        "_kernel",
        "_local",
        "_mask_a",
        "_mask_b",
        "_mask_d",
        "_output",
        "_platform",
        "_run",
        "_template",
        "_workspace",
        "config",
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
        saving_us: float | None,
    ) -> None:
        self.config, self.shape, self.saving_us = config, shape, saving_us
        self.time_us: float | None = None
        self.needs: tuple[Permission, ...] = ()
        self.has_failed = False
        self._platform, self._device, self._index = platform, device, index
        description = config.kernel
        operation = description.operation
        backward = operation.epilogue.backward
        halves = backward.halves if backward else 1
        self._output = (*shape.output[:-1], shape.output[-1] * halves)
        self._dtype = torch_dtype(operation.d)
        self._bias_dtype = torch_dtype(operation.bias)
        # Alignments are powers of two.
        self._mask_a = description.alignment_a * operation.a.bytes - 1
        self._mask_b = description.alignment_b * operation.b.bytes - 1
        self._mask_d = description.alignment_d * operation.d.bytes - 1
        arguments = self._arguments()
        status = kernel.can_implement(arguments)  # which makes them fit the pack
        if status != 0:
            raise LaunchFailed(
                f"{kernel.name} does not take {shape.problem}: {status_text(status)}", status
            )
        self._workspace = kernel.workspace_bytes(arguments)
        self._template = bytes(arguments)
        self._local = _ThreadArguments(self._template)
        self._kernel = kernel.index
        self._run: Any = kernel.pack.library.gs_run
        self._cold = True

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
            ldc=problem.columns,
            ldd=problem.columns,
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
        if operation.epilogue.has_bias:
            arguments.bias = _SAMPLE_POINTER
        if operation.epilogue.has_residual:
            arguments.residual, arguments.ld_residual = _SAMPLE_POINTER, problem.n
        if operation.epilogue.has_column_scale:
            arguments.column_scale = _SAMPLE_POINTER
        if operation.epilogue.has_row_scale:
            arguments.row_scale = _SAMPLE_POINTER
        if operation.epilogue.stores_aux:
            arguments.aux, arguments.ld_aux = _SAMPLE_POINTER, problem.n
        if operation.epilogue.is_gated:
            rows = problem.n // 2 * shape.ldb
            arguments.b_up = _SAMPLE_POINTER + rows * operation.b.bytes
        if backward := operation.epilogue.backward:
            arguments.aux, arguments.ld_aux = _SAMPLE_POINTER, problem.n * backward.halves
            arguments.ldc = arguments.ldd = problem.n * backward.halves
            if backward.activated:
                arguments.activated, arguments.ld_activated = _SAMPLE_POINTER, problem.n
            if backward.bias_gradient:
                arguments.bias_gradient = _SAMPLE_POINTER
        if operation.scaling is Scaling.ROW:
            arguments.scale_a = arguments.scale_b = _SAMPLE_POINTER
            # Tokens have one factor each; a group's own matrix has its own.
            by_rows = operation.grouping is Grouping.ROWS
            arguments.batch_stride_scale_a = 0 if by_rows else problem.m
            arguments.batch_stride_scale_b = problem.n
        arguments.set_launch(self.config.launch, sm_count=self._platform.sm_count(self._index))
        return arguments

    def raw(self, dtype: int) -> RawPlan:
        """The same for C; `dtype` is torch's number for the output's type."""
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

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
        into: torch.Tensor | None = None,
        added: torch.Tensor | None = None,
        offs: torch.Tensor | None = None,
        beside: Beside | None = None,
    ) -> torch.Tensor | None:
        """The product; None where these very operands are not aligned, or it is too early.

        Args:
            a: as the plan's shape says.
            b: likewise.
            scale_a: contiguous FP32 factors: one element, or one for each row of a.
            scale_b: one element, or one for each column of b.
            into: where to write, if the plan `accepts` it; None: a new tensor.
            added: what a plan that accumulates adds, likewise; None: what `into` holds.
            offs: contiguous int32 on the device, where each group of a grouped product ends.
            beside: what the epilogue has, if there is one.

        Raises:
            LaunchFailed: the kernel or CUDA refused; nothing was launched.
        """
        platform, index = self._platform, self._index
        at_a, at_b = a.data_ptr(), b.data_ptr()
        if at_a & self._mask_a or at_b & self._mask_b:
            return None
        if beside is not None and beside.up is not None and beside.up.data_ptr() & self._mask_b:
            return None
        if self._cold:
            # The driver loads a kernel's code when it is first launched, which no capture allows.
            if platform.capturing():
                return None
            self._cold = False
        if platform.current() != index:
            with platform.guard(index):
                return self._launch(at_a, at_b, scale_a, scale_b, into, added, offs, beside)
        return self._launch(at_a, at_b, scale_a, scale_b, into, added, offs, beside)

    @property
    def adds_bias(self) -> bool:
        """Whether the kernel adds a bias itself."""
        return self.shape.problem.operation.epilogue.has_bias

    def empty(self) -> torch.Tensor:
        """Memory for the result."""
        return torch.empty(self._output, dtype=self._dtype, device=self._device)

    def empty_aux(self) -> torch.Tensor:
        """Memory for what the activation is applied to: N columns, where D may have fewer."""
        size = (*self._output[:-1], self.shape.problem.n)
        return torch.empty(size, dtype=self._dtype, device=self._device)

    def pairs(self, gate: torch.Tensor, up: torch.Tensor) -> bool:
        """Whether a gated kernel can read both as they lie; of traced tensors too."""
        return (gate.dtype, gate.device, gate.size(), gate.stride()) == (
            up.dtype,
            up.device,
            up.size(),
            up.stride(),
        )

    def backward_outputs(self, aux: torch.Tensor) -> Beside:
        """What its backward epilogue reads and writes beside D: `aux`, and new tensors."""
        parts = self.shape.problem.operation.epilogue.backward
        output, activated, bias_gradient = self.shape.output, None, None
        if parts is not None and parts.activated:
            activated = torch.empty(output, dtype=self._dtype, device=self._device)
        if parts is not None and parts.bias_gradient:
            bias_gradient = torch.empty(output[-1], dtype=self._dtype, device=self._device)
        return Beside(aux=aux, activated=activated, bias_gradient=bias_gradient)

    def accepts(self, into: torch.Tensor) -> bool:
        """Whether the kernel can write to this tensor: packed, aligned, of the result's type."""
        return self._is_packed(into) and not into.data_ptr() & self._mask_d

    def suits(
        self,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        column_scale: torch.Tensor | None = None,
        row_scale: torch.Tensor | None = None,
    ) -> bool:
        """Whether the epilogue has these and can read them as they lie; of traced tensors too."""
        epilogue = self.shape.problem.operation.epilogue
        added = (epilogue.has_bias, epilogue.has_residual)
        factors = (epilogue.has_column_scale, epilogue.has_row_scale)
        given = (bias, residual, column_scale, row_scale)
        if (*added, *factors) != tuple(one is not None for one in given):
            return False
        if residual is not None and not self._is_packed(residual):
            return False
        if row_scale is not None and not self._is_of_rows(row_scale):
            return False
        return all(self._is_of_columns(one) for one in (bias, column_scale) if one is not None)

    def _is_of_columns(self, vector: torch.Tensor) -> bool:
        n = self.shape.problem.n
        return (
            vector.dtype == self._bias_dtype
            and vector.device == self._device
            and vector.size() == (n,)
            and (n == 1 or vector.stride() == (1,))
        )

    def _is_of_rows(self, vector: torch.Tensor) -> bool:
        return (
            vector.dtype == torch.float32
            and vector.device == self._device
            and vector.size() == torch.Size(self._output[:-1])
            and vector.is_contiguous()
        )

    def _is_packed(self, tensor: torch.Tensor) -> bool:
        return (
            tensor.dtype == self._dtype
            and tensor.device == self._device
            and tensor.size() == torch.Size(self._output)
            and tensor.is_contiguous()
        )

    def _launch(
        self,
        at_a: int,
        at_b: int,
        scale_a: torch.Tensor | None,
        scale_b: torch.Tensor | None,
        into: torch.Tensor | None,
        added: torch.Tensor | None,
        offs: torch.Tensor | None,
        beside: Beside | None,
    ) -> torch.Tensor:
        out = into
        if out is None:
            out = self.empty()
        local = self._local
        arguments = local.arguments
        arguments.a = at_a
        arguments.b = at_b
        arguments.c = arguments.d = out.data_ptr()
        if added is not None:
            arguments.c = added.data_ptr()
        if scale_a is not None and scale_b is not None:
            arguments.scale_a, arguments.scale_b = scale_a.data_ptr(), scale_b.data_ptr()
        if offs is not None:
            arguments.offsets = offs.data_ptr()
        if beside is not None:
            bias, residual, aux, up, activated, bias_gradient, scale_d, amax, rows, columns = beside
            arguments.bias = None if bias is None else bias.data_ptr()
            arguments.residual = None if residual is None else residual.data_ptr()
            arguments.aux = None if aux is None else aux.data_ptr()
            arguments.b_up = None if up is None else up.data_ptr()
            arguments.activated = None if activated is None else activated.data_ptr()
            arguments.bias_gradient = None if bias_gradient is None else bias_gradient.data_ptr()
            arguments.scale_d = None if scale_d is None else scale_d.data_ptr()
            arguments.amax = None if amax is None else amax.data_ptr()
            arguments.row_scale = None if rows is None else rows.data_ptr()
            arguments.column_scale = None if columns is None else columns.data_ptr()
        workspace = 0
        if self._workspace:
            # Freed on return, but to this stream only: the next owner's work comes after ours.
            held = torch.empty(self._workspace, dtype=torch.uint8, device=self._device)
            workspace = held.data_ptr()
        stream = self._platform.stream(self._index)
        status = self._run(self._kernel, local.pointer, workspace, stream)
        if status != 0:
            raise LaunchFailed(f"{self.config.kernel.name}: {status_text(status)}", status)
        return out
