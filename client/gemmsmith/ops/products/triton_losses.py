"""The passes of loss_passes.py as Triton kernels. A model's widths do not change, so kernels are
compiled for them.

Only imported where there is a GPU: torch's builds for CUDA bring Triton.
"""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-def, untyped-decorator, attr-defined, no-untyped-call"
import torch
import triton
import triton.language as tl

from gemmsmith.ops.engine.launching import TritonKernel, power_of_2
from gemmsmith.ops.products.loss_passes import LossOptions

BLOCK, WARPS = 8192, 8
"""Logits at a time of a thread block with a row of its own, and its warps. 4096 rows of 128256
logits take 0.757 ms, 8192 of 151936 1.742 and 5632 of 50304 0.403, where passes that read and
write them once take 0.499, 1.171 and 0.268; the second pass in the order of the first and without
hints for the cache 0.826, 1.891 and 0.486; with 4 warps 0.820, 1.935 and 0.602 (H200,
2026-11-28)."""
COLUMNS = 4096
"""Elements at a time that are multiplied. Not measured yet."""


@triton.jit
def _load(
    logits, at, width: tl.constexpr, pitch: tl.constexpr, cap: tl.constexpr, evict: tl.constexpr
):  # fmt: skip
    # Whole rows with their padding: a width that is not aligned would load single elements.
    value = tl.load(logits + at, mask=at < pitch, other=float("-inf"), eviction_policy=evict)
    value = value.to(tl.float32)
    if cap > 0:
        # tanh; its absolute error is that of FP32.
        value = cap * (2 * tl.sigmoid(value * (2 / cap)) - 1)
    if cap > 0 or pitch > width:
        value = tl.where(at < width, value, float("-inf"))
    return value


@TritonKernel
@triton.jit
def _cross_entropy(
    logits, gradients, labels, scale, losses,
    width: tl.constexpr, pitch: tl.constexpr, ignored: tl.constexpr, smoothing: tl.constexpr,
    cap: tl.constexpr, z_loss: tl.constexpr, scaled: tl.constexpr, by_row: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * pitch
    gradients += row * pitch
    label = tl.load(labels + row)
    if label == ignored:
        tl.store(losses + row, 0.0)
        if scaled:
            zeros = tl.zeros((block,), dtype=gradients.dtype.element_ty)
            for first in range(0, pitch, block):
                at = first + tl.arange(0, block)
                tl.store(gradients + at, zeros, mask=at < pitch)
    else:
        # One largest logit and one sum of the row, not of each lane: one exponential an element,
        # and few registers, so that many rows are read at once.
        largest = -3.0e38
        total = 0.0
        plain = 0.0
        for first in range(0, width, block):
            at = first + tl.arange(0, block)
            value = _load(logits, at, width, pitch, cap, "evict_last")
            higher = tl.maximum(largest, tl.max(value, axis=0))
            total = total * tl.exp(largest - higher) + tl.sum(tl.exp(value - higher), axis=0)
            largest = higher
            if smoothing > 0:
                plain += tl.sum(tl.where(at < width, value, 0.0), axis=0)
        sums = largest + tl.log(total)
        is_label = (label >= 0) & (label < width)
        target = _load(logits, tl.where(is_label, label, 0), width, pitch, cap, "")
        loss = sums - (1 - smoothing) * target
        if smoothing > 0:
            loss -= smoothing / width * plain
        loss += z_loss * sums * sums
        tl.store(losses + row, tl.where(is_label, loss, float("nan")))
        if scaled:
            factor = tl.load(scale + row * by_row)
            factor = tl.where(is_label, factor, float("nan"))
            share = 1 + 2 * z_loss * sums
            # From the end: what was read last is still in the L2 cache.
            last = tl.cdiv(pitch, block) * block - block
            for first in range(0, pitch, block):
                at = last - first + tl.arange(0, block)
                value = _load(logits, at, width, pitch, cap, "evict_first")
                gradient = tl.exp(value - sums) * share - smoothing / width
                gradient -= tl.where(at == label, 1.0 - smoothing, 0.0)
                if cap > 0:
                    gradient *= 1 - (value / cap) * (value / cap)
                gradient *= factor
                if pitch > width:
                    gradient = tl.where(at < width, gradient, 0.0)
                gradient = gradient.to(gradients.dtype.element_ty)
                tl.store(gradients + at, gradient, mask=at < pitch, eviction_policy="evict_first")


@TritonKernel
@triton.jit
def _multiply(matrix, factor, width: tl.constexpr, block: tl.constexpr):
    by = tl.load(factor)
    if by != 1:
        matrix += tl.program_id(0).to(tl.int64) * width
        for first in range(0, width, block):
            at = first + tl.arange(0, block)
            value = tl.load(matrix + at, mask=at < width, other=0.0).to(tl.float32) * by
            tl.store(matrix + at, value.to(matrix.dtype.element_ty), mask=at < width)


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    scale: torch.Tensor | None,
    options: LossOptions,
    vocabulary: int,
    keeps: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As loss_passes.cross_entropy."""
    ignored, smoothing, cap, z_loss, _ = options
    logits, labels = logits.contiguous(), labels.contiguous()
    rows, pitch = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    gradients = torch.empty_like(logits) if keeps and scale is not None else logits
    # The kernel needs a tensor for every argument.
    factors = losses if scale is None else scale.contiguous()
    by_row = int(scale is not None and scale.numel() > 1)
    block = min(BLOCK, power_of_2(vocabulary))
    sizes, terms = (vocabulary, pitch), (ignored, smoothing, cap or 0.0, z_loss)
    constants = (*sizes, *terms, scale is not None, by_row, block)
    operands = (logits, gradients, labels, factors, losses)
    _cross_entropy(rows, operands, *constants, warps=WARPS)
    return losses, gradients


def multiply(matrix: torch.Tensor, factor: torch.Tensor) -> None:
    """As loss_passes.multiply, of a matrix or a vector without gaps."""
    width = matrix.shape[-1]
    block = min(COLUMNS, power_of_2(width))
    _multiply(matrix.numel() // width, (matrix, factor), width, block)
