"""Random operands of realistic spread, in as many rotating sets as leave the L2 cache cold.

A is drawn from N(0, 1); B is scaled so that D has a standard deviation near 1 whatever K is, as
trained layers have. FP8 operands use their type's range as per-tensor scaling would: the largest
value of a normal sample lands near the type's maximum, and the scales undo it. Sets of one kind
of operand share one allocation, each set starting on a 256-byte boundary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from gemmsmith.device import DeviceModel
from gemmsmith.problem import Element, Problem
from gemmsmith.runtime.abi import Arguments
from gemmsmith.runtime.launch import torch_dtype
from tuner.errors import DoesNotFit
from tuner.measure.footprint import ALIGNMENT, check_fits, footprint, set_count

POISON = 0x7FED
"""A NaN of bf16 and of fp16 that no arithmetic produces (hardware writes 0x7FFF)."""

HOST = -1
"""Ordinal that stands for the host: lets the arithmetic be tested without a GPU."""

_FILL_ELEMENTS = 2**26
_FP8_SIGMA = {Element.E4M3: 64.0, Element.E5M2: 8192.0}
"""Seven (E4M3: 448) and seven (E5M2: 57344) standard deviations reach the type's maximum."""
_FP8_MAX = {Element.E4M3: 448.0, Element.E5M2: 57344.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class OperandSet:
    """One launch's operands, as [batch, rows, columns] views in the problem's layout."""

    a: torch.Tensor
    b: torch.Tensor
    d: torch.Tensor


class Operands:
    """All operand sets of a problem, and the C ABI's arguments for each.

    Attributes:
        sets: what launches rotate over.
        check: one more output, for a second run of the same launch.
        scale_a, scale_b: FP8 scales as device tensors (and their values); None otherwise.
        sigma: expected standard deviation of an element of D.
    """

    def __init__(self, problem: Problem, device: DeviceModel, ordinal: int, seed: int) -> None:
        """Allocate and fill, on the current stream.

        Raises:
            DoesNotFit: before allocating, from the device's size; or when what is free now is
                too little.
        """
        check_fits(problem, device)
        self.problem = problem
        self.ordinal = ordinal
        free = free_bytes(ordinal)
        count = set_count(problem, replace(device, memory_bytes=min(free, device.memory_bytes)))
        generator = torch.Generator(device=place(ordinal)).manual_seed(seed)
        try:
            self._allocate(count, generator)
        except torch.cuda.OutOfMemoryError as error:
            raise DoesNotFit(
                f"{problem} needs {count * footprint(problem).one_set / 1e9:.1f} GB for operands, "
                f"but only {free / 1e9:.1f} GB of {device.name} are free; stop what else uses it"
            ) from error

    def _allocate(self, count: int, generator: torch.Generator) -> None:
        problem, operation = self.problem, self.problem.operation
        m, n, k, batch = problem.m, problem.n, problem.k, problem.batch
        b_scale = 2.0 ** -round(math.log2(math.sqrt(k)))
        self.scale_values = (1.0, 1.0)
        self.scale_a: torch.Tensor | None = None
        self.scale_b: torch.Tensor | None = None
        sigma_a, sigma_b = 1.0, b_scale
        if operation.is_narrow_float:
            sigma_a, sigma_b = _FP8_SIGMA[operation.a], _FP8_SIGMA[operation.b]
            self.scale_values = (1.0 / sigma_a, b_scale / sigma_b)
            self.scale_a = self._device_scalar(self.scale_values[0])
            self.scale_b = self._device_scalar(self.scale_values[1])
        self.sigma = math.sqrt(k) * b_scale
        all_a = self._empty(count, m * k * batch, operation.a)
        all_b = self._empty(count, k * n * batch, operation.b)
        all_d = self._empty(count, m * n * batch, operation.d)
        _fill(all_a, operation.a, sigma_a, generator)
        _fill(all_b, operation.b, sigma_b, generator)
        row_a, row_b = problem.layout.a_row_major, problem.layout.b_row_major
        self.sets = tuple(
            OperandSet(
                a=_matrix(all_a[i], batch, m, k, row_a),
                b=_matrix(all_b[i], batch, k, n, row_b),
                d=_matrix(all_d[i], batch, m, n, True),
            )
            for i in range(count)
        )
        self.check = _matrix(self._empty(1, m * n * batch, operation.d)[0], batch, m, n, True)

    def _device_scalar(self, value: float) -> torch.Tensor:
        return torch.full((1,), value, dtype=torch.float32, device=place(self.ordinal))

    def _empty(self, count: int, elements: int, element: Element) -> torch.Tensor:
        """[count, elements and padding]: every row starts on an ALIGNMENT boundary."""
        step = ALIGNMENT // element.bytes
        padded = -(-elements // step) * step
        return torch.empty((count, padded), dtype=torch_dtype(element), device=place(self.ordinal))

    def arguments(self, operands: OperandSet, d: torch.Tensor | None = None) -> Arguments:
        """The C ABI's arguments for a set, launch fields left to the caller."""
        problem = self.problem
        d = operands.d if d is None else d
        row_a, row_b = problem.layout.a_row_major, problem.layout.b_row_major
        return Arguments(
            m=problem.m,
            n=problem.n,
            k=problem.k,
            batch=problem.batch,
            a=operands.a.data_ptr(),
            b=operands.b.data_ptr(),
            c=d.data_ptr(),
            d=d.data_ptr(),
            lda=problem.k if row_a else problem.m,
            ldb=problem.n if row_b else problem.k,
            ldc=problem.n,
            ldd=problem.n,
            batch_stride_a=problem.m * problem.k,
            batch_stride_b=problem.k * problem.n,
            batch_stride_c=problem.m * problem.n,
            batch_stride_d=problem.m * problem.n,
            alpha=1.0,
            beta=0.0,
            scale_a=None if self.scale_a is None else self.scale_a.data_ptr(),
            scale_b=None if self.scale_b is None else self.scale_b.data_ptr(),
            device=self.ordinal,
        )


def place(ordinal: int) -> torch.device:
    """The GPU with that ordinal; the host for HOST."""
    return torch.device("cpu") if ordinal == HOST else torch.device("cuda", ordinal)


def free_bytes(ordinal: int) -> int:
    """Device memory that can still be allocated, torch's own cache included."""
    if ordinal == HOST:
        return 2**33
    return torch.cuda.mem_get_info(ordinal)[0] + torch.cuda.memory_reserved(ordinal)


def poison(output: torch.Tensor) -> None:
    """Fill an output with POISON, enqueued on the current stream."""
    output.view(torch.int16).fill_(POISON)


def _fill(rows: torch.Tensor, element: Element, sigma: float, generator: torch.Generator) -> None:
    """Normal samples, clamped to what an FP8 type holds."""
    limit = _FP8_MAX.get(element)
    for part in torch.split(rows.view(-1), _FILL_ELEMENTS):
        if limit is None:
            part.normal_(0.0, sigma, generator=generator)
        else:
            wide = torch.empty(part.shape, dtype=torch.float32, device=part.device)
            wide.normal_(0.0, sigma, generator=generator).clamp_(-limit, limit)
            part.copy_(wide)


def _matrix(
    flat: torch.Tensor, batch: int, rows: int, columns: int, row_major: bool
) -> torch.Tensor:
    flat = flat[: batch * rows * columns]
    if row_major:
        return flat.view(batch, rows, columns)
    return flat.view(batch, columns, rows).transpose(1, 2)
