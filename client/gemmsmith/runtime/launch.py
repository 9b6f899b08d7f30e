"""Launches a config on torch tensors and torch's current stream.

Nothing here synchronizes. The output and the workspace come from torch's caching allocator on the
current stream, so a call can be captured in a CUDA graph. Shapes follow `torch.matmul`: `a` is
[M, K] or [batch, M, K], `b` is [K, N] or [batch, K, N] — for a linear layer's weight [N, K],
pass `weight.t()`. Operands that the config's kernel does not support are rejected before the
launch.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, NamedTuple

from gemmsmith.core.config import Config
from gemmsmith.core.operation import Scaling
from gemmsmith.core.problem import Element, Problem
from gemmsmith.errors import LaunchFailed
from gemmsmith.runtime.abi import SCALING_CODES, Arguments, status_text
from gemmsmith.runtime.pack import LoadedKernel, LoadedPack

if TYPE_CHECKING:
    import torch


class _View(NamedTuple):
    """A matrix operand in the terms of the C ABI."""

    rows: int
    columns: int
    batch: int
    leading: int
    batch_stride: int


def run(
    config: Config,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    pack_path: str | os.PathLike[str],
    c: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
) -> torch.Tensor:
    """`alpha · scale_a · scale_b · a @ b + beta · c` with the config's kernel and launch.

    Args:
        config: kernel and launch, such as `Client.best` returns.
        a: [M, K] or [batch, M, K], in the kernel's layout.
        b: [K, N] or [batch, K, N], in the kernel's layout.
        pack_path: the compiled pack that holds `config.kernel`.
        c: [M, N] or [batch, M, N], row-major; required when `beta` is not 0.
        out: where to write, row-major; allocated when None. May be `c`.
        scale_a: FP32 factors on the device. For per-tensor scaling an element, or None for 1; for
            row scaling a factor for each row of a, contiguous: [M, 1], [batch, M, 1].
        scale_b: the same for b, with a factor for each column: [1, N], [batch, 1, N].
        alpha: factor of the product.
        beta: factor of c.

    Raises:
        LaunchFailed: the kernel does not support the operands, or the launch failed.
        PackError: the pack cannot be loaded or does not hold the kernel.
    """
    import torch

    kernel_description = config.kernel
    operation = kernel_description.operation
    layout = operation.layout
    problem_device = a.device
    if problem_device.type != "cuda":
        raise LaunchFailed(f"a is on {problem_device}; move the operands to a CUDA device")
    for name, tensor, element in (("a", a, operation.a), ("b", b, operation.b)):
        _check_tensor(name, tensor, element, problem_device)
    view_a = _view("a", a, layout.a_row_major, layout.value)
    view_b = _view("b", b, layout.b_row_major, layout.value)
    m, k, n = view_a.rows, view_a.columns, view_b.columns
    if view_b.rows != k or view_b.batch != view_a.batch:
        raise LaunchFailed(
            f"a {tuple(a.shape)} and b {tuple(b.shape)} do not multiply: need a [.., M, K] and "
            "b [.., K, N] with one K and one batch"
        )
    problem = Problem(
        m=m, n=n, k=k, batch=view_a.batch, dtype=kernel_description.dtype, layout=layout
    )
    shape = (m, n) if a.dim() == 2 else (view_a.batch, m, n)
    if out is None:
        out = torch.empty(shape, dtype=torch_dtype(operation.d), device=problem_device)
    view_out = _check_matrix("out", out, shape, operation.d, problem_device)
    view_c = view_out
    if beta != 0.0:
        if c is None:
            raise LaunchFailed(f"beta is {beta} but c is missing; pass c or set beta to 0")
        view_c = _check_matrix("c", c, shape, operation.d, problem_device)
    source = c if beta != 0.0 and c is not None else out
    for name, scale, extent in (("scale_a", scale_a, m), ("scale_b", scale_b, n)):
        _check_scale(name, scale, operation.scaling, extent * view_a.batch, problem_device)

    index = problem_device.index or 0
    arguments = Arguments(
        m=m,
        n=n,
        k=k,
        batch=problem.batch,
        a=a.data_ptr(),
        b=b.data_ptr(),
        c=source.data_ptr(),
        d=out.data_ptr(),
        lda=view_a.leading,
        ldb=view_b.leading,
        ldc=view_c.leading,
        ldd=view_out.leading,
        batch_stride_a=view_a.batch_stride,
        batch_stride_b=view_b.batch_stride,
        batch_stride_c=view_c.batch_stride,
        batch_stride_d=view_out.batch_stride,
        alpha=alpha,
        beta=beta,
        scale_a=None if scale_a is None else scale_a.data_ptr(),
        scale_b=None if scale_b is None else scale_b.data_ptr(),
        scaling=SCALING_CODES[operation.scaling],
        batch_stride_scale_a=m if operation.scaling is Scaling.ROW else 0,
        batch_stride_scale_b=n if operation.scaling is Scaling.ROW else 0,
        device=index,
    )
    arguments.set_launch(config.launch, sm_count=_sm_count(index))
    _check_alignment(config, arguments)
    with torch.cuda.device(problem_device):
        _launch(LoadedPack.open(pack_path).kernel(kernel_description.name), arguments, out)
    return out


def _launch(kernel: LoadedKernel, arguments: Arguments, out: torch.Tensor) -> None:
    import torch

    status = kernel.can_implement(arguments)
    if status != 0:
        raise LaunchFailed(
            f"{kernel.name} does not take {arguments.m}×{arguments.n}×{arguments.k}: "
            f"{status_text(status)}; ask for the best kernel of exactly this problem",
            status,
        )
    size = kernel.workspace_bytes(arguments)
    workspace = torch.empty(size, dtype=torch.uint8, device=out.device) if size else None
    stream = torch.cuda.current_stream(out.device).cuda_stream
    kernel.run(arguments, workspace.data_ptr() if workspace is not None else 0, stream)


def torch_dtype(element: Element) -> torch.dtype:
    import torch

    return {
        Element.BF16: torch.bfloat16,
        Element.F16: torch.float16,
        Element.E4M3: torch.float8_e4m3fn,
        Element.E5M2: torch.float8_e5m2,
        Element.S8: torch.int8,
        Element.TF32: torch.float32,
        Element.F32: torch.float32,
        Element.S32: torch.int32,
    }[element]


@functools.lru_cache(maxsize=16)
def _sm_count(index: int) -> int:
    import torch

    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def _check_tensor(name: str, tensor: torch.Tensor, element: Element, device: torch.device) -> None:
    if tensor.dtype != torch_dtype(element):
        raise LaunchFailed(f"{name} is {tensor.dtype}; this kernel takes {torch_dtype(element)}")
    if tensor.device != device:
        raise LaunchFailed(f"{name} is on {tensor.device}, but a is on {device}")
    if tensor.dim() not in (2, 3):
        raise LaunchFailed(f"{name} has {tensor.dim()} dimensions; 2 or 3 (batched) are accepted")
    if 0 in tensor.shape:
        raise LaunchFailed(f"{name} is empty: {tuple(tensor.shape)}")


def _view(name: str, tensor: torch.Tensor, row_major: bool, layout: str) -> _View:
    """Rows, columns and leading dimension of an operand in the kernel's layout.

    The stride of an extent of 1 is arbitrary, so such an operand suits both orders.
    """
    rows, columns = int(tensor.shape[-2]), int(tensor.shape[-1])
    row_stride, column_stride = int(tensor.stride(-2)), int(tensor.stride(-1))
    inner, outer, contiguous, leading = (
        (columns, rows, column_stride, row_stride)
        if row_major
        else (rows, columns, row_stride, column_stride)
    )
    if outer == 1:
        leading = inner
    if (contiguous != 1 and inner != 1) or leading < inner:
        order = "row-major" if row_major else "column-major"
        raise LaunchFailed(
            f"{name} {tuple(tensor.shape)} has strides {tuple(tensor.stride())}; a {layout} kernel "
            f"needs it {order} with rows that do not overlap: pass a transposed view or a copy, or "
            "ask for another layout's kernel"
        )
    batch = int(tensor.shape[0]) if tensor.dim() == 3 else 1
    batch_stride = int(tensor.stride(0)) if tensor.dim() == 3 else leading * outer
    return _View(rows, columns, batch, leading, batch_stride)


def _check_matrix(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], element: Element, device: torch.device
) -> _View:
    _check_tensor(name, tensor, element, device)
    if tuple(tensor.shape) != shape:
        raise LaunchFailed(f"{name} is {tuple(tensor.shape)}, expected {shape}")
    return _view(name, tensor, True, "row-major-output")


def _check_scale(
    name: str, scale: torch.Tensor | None, scaling: Scaling, count: int, device: torch.device
) -> None:
    """`count` is the number of factors for row scaling: all rows, or columns, of all matrices."""
    import torch

    if scale is None:
        if scaling is Scaling.ROW:
            raise LaunchFailed(f"{name} is missing; this kernel takes one factor for each row")
        return
    if scaling is Scaling.NONE:
        raise LaunchFailed(f"{name} is for kernels of FP8 or with scaling; fold it into alpha")
    expected = count if scaling is Scaling.ROW else 1
    if scale.dtype != torch.float32 or scale.numel() != expected or scale.device != device:
        raise LaunchFailed(
            f"{name} must be {expected} float32 element(s) on {device}, got {scale.numel()} of "
            f"{scale.dtype} on {scale.device}"
        )
    if not scale.is_contiguous():
        raise LaunchFailed(f"{name} has strides {tuple(scale.stride())}; pass a packed copy")


def _check_alignment(config: Config, arguments: Arguments) -> None:
    # `can_implement` checks strides only: a misaligned pointer would be an illegal access.
    kernel = config.kernel
    checks = (
        ("a", kernel.alignment_a, kernel.operation.a),
        ("b", kernel.alignment_b, kernel.operation.b),
        ("c", kernel.alignment_d, kernel.operation.d),
        ("d", kernel.alignment_d, kernel.operation.d),
    )
    for name, alignment, element in checks:
        leading = getattr(arguments, f"ld{name}")
        stride = getattr(arguments, f"batch_stride_{name}") if arguments.batch > 1 else 0
        pointer = getattr(arguments, name)
        if pointer % (alignment * element.bytes) or leading % alignment or stride % alignment:
            raise LaunchFailed(
                f"{'out' if name == 'd' else name} is not aligned: {kernel.name} needs its start, "
                f"every row and every batch on a multiple of {alignment} elements "
                f"(leading dimension {leading}, batch stride {stride})"
            )
