"""The head of a language model and its cross-entropy, a chunk of logits at a time.

Logits are the largest tensor of a training step. Here a product gives those of some rows, and one
pass turns them in place into their gradient, with the loss of each row. The products of x and of
the weight follow at once, so the forward pass gives gradients too, and `backward` only multiplies
them by the gradient of the loss, on the device. Nothing waits for the device.

Where the gradient of the loss must come first, the backward pass computes the logits again: each
row has its own (`reduction="none"`), or FP16 would lose small gradients without the program's loss
scale, or the graph is kept for another backward pass.

Logits of a vocabulary that is not aligned are padded, with a copy of the weight: kernels for other
widths load single elements. Of an H200's work in a step of GPT-2 XL with 4096 tokens (vocabulary
50257), torch's three products are 16.4 of 40.4 ms, and of BERT with 8192 (30522) 6.1 of 48.4
(2026-11-27).

Sums are FP32, in a fixed order. Operands that are not bf16 or fp16 are left to torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from gemmsmith.ops.engine import functions
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.forms import Form
from gemmsmith.ops.engine.observers import dense, is_traced, only_torch_differentiates
from gemmsmith.ops.products import backward
from gemmsmith.ops.products.loss_passes import (
    LossOptions,
    capped,
    cross_entropy,
    losses_of,
    multiply,
)
from gemmsmith.ops.products.registry import CallWay, register, wants_gradient

MOST_BYTES = 2**29
"""Logits of a chunk, unless a weight's gradient lets them be larger. 16384×1024×50304 on an H200
takes 10.4, 9.8 and 9.7 ms with 256, 512 and 1024 MiB, and 0.50, 0.65 and 1.06 GB (2026-11-27)."""
ONE_CHUNK = 4
"""Of a weight's gradient, so many times K rows are one chunk. 8192×2048×151936 on an H100 takes
25.3 ms and 3.2 GB as one chunk, 27.5 ms and 1.9 GB as two or four, and torch 41.0 ms and 14.9 GB
(2026-11-27)."""
LEAST_VOCABULARY = 8192
"""Least number of outputs of a linear layer that is taken for a head. Not measured yet."""
MULTIPLE = 256
"""Rows of a chunk are a multiple, so that they fill tiles."""

ALIGNED, LINE = 8, 64
"""16-bit elements: widths of these multiples have fast kernels, and fill lines of memory."""
LEAST_PADDED = 256
"""Rows from which logits are padded. A copy of the weight takes 131 / rows of the time of three
products, by the rates of an H200: 3.3 TB/s and 650 TFLOPS. Not measured yet."""

_NARROW = (torch.bfloat16, torch.float16)


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
    num_items_in_batch: int | torch.Tensor | None = None,
    logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """The cross-entropy of `linear(x, weight, bias)`, a chunk of logits at a time.

    Args:
        x: [..., K].
        weight: [V, K].
        labels: [...], int64, from 0 to V - 1, or ignore_index. Of others, torch raises an error on
            the host; on a GPU the row's loss and gradient are NaN.
        bias: [V]; None adds nothing.
        ignore_index: rows with this label have no loss and no gradient.
        label_smoothing: from 0 to 1, as of `torch.nn.functional.cross_entropy`.
        softcap: logits become `softcap * tanh(logits / softcap)`.
        z_loss: adds `z_loss * logsumexp(logits)²` to the loss of each row.
        reduction: `mean` over the rows that are not ignored, `sum`, or `none`, the loss of each.
        num_items_in_batch: what `mean` divides by instead; of one element.
        logits: [..., V], `linear(x, weight, bias)`, if the program has computed them. They are only
            read, and get no gradient: those of x, weight and bias are computed as without them.

    Returns:
        The loss, in FP32 if operands are bf16 or fp16: [] or, without a reduction, [...].

    Raises:
        ValueError: sizes do not match, labels are not int64, or an option is out of its range.
    """
    _check_sizes(x, weight, labels, bias, logits)
    options = LossOptions(ignore_index, label_smoothing, softcap, z_loss, reduction)
    options.check(num_items_in_batch)
    count = num_items_in_batch
    if isinstance(count, torch.Tensor):
        count = count.detach().reshape(()).to(x.device, torch.float32)
    elif count is not None:
        count = torch.full((), count, dtype=torch.float32, device=x.device)
    values = logits if logits is None else logits.detach()
    loss: torch.Tensor = _linear_cross_entropy(x, weight, bias, labels, count, values, *options)
    return loss


def _check_sizes(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None,
    logits: torch.Tensor | None,
) -> None:
    if x.dim() == 0 or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"x must be [..., K] and weight [V, K], got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if labels.dtype != torch.int64 or labels.shape != x.shape[:-1]:
        raise ValueError(
            f"labels must be int64 {tuple(x.shape[:-1])}, one for each row of x, got "
            f"{labels.dtype} {tuple(labels.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [{weight.shape[0]}], got {tuple(bias.shape)}")
    size = (*labels.shape, weight.shape[0])
    if logits is not None and logits.shape != size:
        raise ValueError(f"logits must be {size}, got {tuple(logits.shape)}")


def chunk_rows(rows: int, vocabulary: int, depth: int, size: int) -> int:
    """How many rows of logits are computed at a time.

    FP32 sums of a weight's gradient over chunks take time and as much memory as `2 * depth` rows.
    So `ONE_CHUNK * depth` rows are one chunk, and a chunk has no fewer than `depth`.

    Args:
        rows: in all.
        vocabulary: logits of a row.
        depth: K, if the weight needs a gradient, else 0.
        size: bytes of a logit.
    """
    most = max(MOST_BYTES // (vocabulary * size), depth)
    if rows <= max(most, ONE_CHUNK * depth):
        return rows
    most = max(most // MULTIPLE, 1) * MULTIPLE
    chunks = -(-rows // most)
    return -(-rows // (chunks * MULTIPLE)) * MULTIPLE


def padding(rows: int, vocabulary: int, depth: int) -> int:
    """How many columns are added to logits, so that all three products have aligned operands.

    The copy of the weight takes at most the memory of torch's logits in 16 and 32 bits.
    """
    is_aligned = vocabulary % ALIGNED == 0
    if is_aligned or depth % ALIGNED or rows < max(LEAST_PADDED, depth // 3):
        return 0
    return -vocabulary % LINE


def _padded(
    weight: torch.Tensor, bias: torch.Tensor | None, columns: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias with so many further outputs, which are 0."""
    weight = torch.cat((weight, weight.new_zeros(columns, weight.shape[1])))
    return weight, None if bias is None else functional.pad(bias, (0, columns))


def _divisor(
    labels: torch.Tensor, count: torch.Tensor | None, options: LossOptions
) -> torch.Tensor | None:
    """What the sum of losses is divided by, in FP32. None of a sum, or without a reduction."""
    if options.reduction != "mean" or count is not None:
        return count
    return (labels != options.ignore_index).sum().to(torch.float32)


def _reduced(
    losses: torch.Tensor, labels: torch.Tensor, divisor: torch.Tensor | None, options: LossOptions
) -> torch.Tensor:
    if options.reduction == "none":
        return losses.reshape(labels.shape)
    total = losses.sum()
    return total if divisor is None else total / divisor


def _by_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    count: torch.Tensor | None,
    _logits: torch.Tensor | None,  # they have no graph
    *others: Any,
) -> torch.Tensor:
    options = LossOptions(*others)
    logits = functional.linear(x, weight, bias)
    logits = logits.float() if logits.dtype in _NARROW else logits
    logits = capped(logits.reshape(-1, logits.shape[-1]), options.softcap)
    losses = losses_of(logits, labels.reshape(-1), options)
    return _reduced(losses, labels, _divisor(labels, count, options), options)


Computed = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Losses [R] in FP32, and the gradients of x, weight and bias; empty where not needed."""


def _compute(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    scale: torch.Tensor | None,
    logits: torch.Tensor | None,
    needs: Sequence[bool],
    *others: Any,
) -> Computed:
    """On a device, chunk by chunk, of x[R, K] and labels[R]. Without a scale no gradients."""
    options, rows, vocabulary = LossOptions(*others), x.shape[0], weight.shape[0]
    engine, columns = functions.engine_here(), 0
    logits = logits if logits is None or logits.dtype == x.dtype else None
    if engine is None or not engine.is_invariant:  # else the number of rows must not matter
        columns = padding(rows, vocabulary, x.shape[1])
        weight, bias = _padded(weight, bias, columns) if columns else (weight, bias)
    needs_x, needs_weight, needs_bias = (need and scale is not None for need in needs)
    step = chunk_rows(rows, weight.shape[0], x.shape[1] * needs_weight, x.element_size())
    of_weight = of_bias = None
    if needs_weight and step < rows:
        of_weight = torch.zeros(weight.shape, dtype=torch.float32, device=x.device)
    losses, of_x = [], []
    for first in range(0, max(rows, 1), max(step, 1)):
        part = slice(first, first + step)
        factor = scale if scale is None or scale.numel() == 1 else scale[part]
        if logits is None:
            chunk = backward.linear(x[part], weight, bias)
        else:
            chunk = functional.pad(logits[part], (0, columns)) if columns else logits[part]
        keeps = logits is not None and not columns
        of_rows, chunk = cross_entropy(chunk, labels[part], factor, options, vocabulary, keeps)
        losses.append(of_rows)
        if needs_x:
            of_x.append(functions.product(Form.MATMUL, chunk, weight))
        if of_weight is not None:
            functions.accumulate(of_weight, chunk, x[part])
        elif needs_weight:
            of_weight = functions.product(Form.WEIGHT_GRADIENT, chunk, x)
        if needs_bias:
            sums = chunk.sum(0, dtype=torch.float32)
            of_bias = sums if of_bias is None else of_bias.add_(sums)
        del chunk  # before the next one is computed
    return (
        _joined(losses),
        _joined(of_x) if of_x else x.new_empty(0),
        x.new_empty(0)
        if of_weight is None
        else of_weight[:vocabulary].to(weight.dtype).contiguous(),
        x.new_empty(0) if of_bias is None else of_bias[:vocabulary].to(x.dtype),
    )


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()


def _below(*arguments: Any) -> Computed:
    """The same below autograd: one operator where a graph is made of it."""
    if torch.compiler.is_compiling() or is_traced(arguments[0]):
        with torch._C._AutoDispatchBelowAutograd():
            outputs: Computed = torch.ops.gemmsmith.cross_entropy_gradients(*arguments)
            return outputs
    return _compute(*arguments)


class LinearCrossEntropy(torch.autograd.Function):
    """See `linear_cross_entropy`; of x[R, K] and labels[R]."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        """The loss; gradients are computed here if they do not depend on that of the loss."""
        x, weight, bias, labels, count, logits, *others = arguments
        options = LossOptions(*others)
        divisor = _divisor(labels, count, options)
        scale = None
        if options.reduction != "none" and x.dtype is not torch.float16:
            ones = torch.ones(1, dtype=torch.float32, device=x.device)
            scale = ones if divisor is None else ones / divisor
        needs = list(ctx.needs_input_grad[:3])
        losses, *gradients = _below(x, weight, bias, labels, scale, logits, needs, *options)
        ctx.save_for_backward(x, weight, bias, labels, divisor)
        ctx.options, ctx.gradients = options, None if scale is None else gradients
        return _reduced(losses, labels, divisor, options)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Gradients of x, weight and bias."""
        gradient, options, needs = dense(grads[0]), ctx.options, ctx.needs_input_grad[:3]
        x, weight, bias, labels, divisor = ctx.saved_tensors
        nothing = (None,) * (len(ctx.needs_input_grad) - 3)
        if only_torch_differentiates(gradient):
            operands = (x, weight, bias, labels, divisor, None, *options)
            return *_differentiated(gradient, operands, needs), *nothing
        # They are multiplied in place, so another pass over the same graph computes them again.
        gradients, ctx.gradients = ctx.gradients, None
        scale = gradient.float().reshape(-1)
        if gradients is None:
            scale = scale if divisor is None else scale / divisor
            _, *gradients = _below(x, weight, bias, labels, scale, None, list(needs), *options)
        else:
            for part, need in zip(gradients, needs, strict=True):
                if need:
                    multiply(part, scale)
        of_operands = (part if need else None for part, need in zip(gradients, needs, strict=True))
        return *of_operands, *nothing


def _differentiated(
    gradient: torch.Tensor, operands: Sequence[Any], needs: Sequence[bool]
) -> list[torch.Tensor | None]:
    """The gradients of x, weight and bias by torch, which differentiates them again."""
    again = torch.is_grad_enabled()
    leaves = [leaf for leaf, need in zip(operands, needs, strict=False) if need]
    with torch.enable_grad():
        loss = _by_torch(*operands)
    parts = iter(torch.autograd.grad(loss, leaves, gradient, create_graph=again))
    return [next(parts) if need else None for need in needs]


def _is_ours(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    of_one_type = x.dtype == weight.dtype and (bias is None or bias.dtype == x.dtype)
    return of_one_type and x.dtype in _NARROW and 0 not in (*x.shape, weight.shape[0])


def _autograd(_way: CallWay, _engine: Engine | None, *arguments: Any) -> torch.Tensor:
    x, weight, bias, labels, count, logits, *others = arguments
    if not wants_gradient(x, weight, bias):
        return _loss(*arguments)
    if not _is_ours(x, weight, bias):
        return _by_torch(*arguments)
    rows, logits = _rows(x), _rows(logits)
    loss: torch.Tensor = LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        rows, weight, bias, labels.reshape(-1), count, logits, *others
    )
    return loss.reshape(labels.shape) if others[-1] == "none" else loss


def _rows(tensor: torch.Tensor | None) -> Any:
    return tensor if tensor is None else tensor.reshape(-1, tensor.shape[-1])


def _loss(*arguments: Any) -> torch.Tensor:
    """The loss alone. Below autograd."""
    x, weight, bias, labels, count, logits, *others = arguments
    if not _is_ours(x, weight, bias):
        return _by_torch(*arguments)
    options, needs = LossOptions(*others), [False, False, False]
    operands = (_rows(x), weight, bias, labels.reshape(-1), None, _rows(logits))
    losses = _below(*operands, needs, *options)[0]
    return _reduced(losses, labels, _divisor(labels, count, options), options)


def _fake_loss(*arguments: Any) -> torch.Tensor:
    x, _, _, labels, *others = arguments
    dtype = torch.float32 if x.dtype in _NARROW else x.dtype
    size = tuple(labels.shape) if others[-1] == "none" else ()
    empty: torch.Tensor = x.new_empty(size, dtype=dtype)
    return empty


def _fake(x: torch.Tensor, weight: torch.Tensor, *others: Any) -> Computed:
    scale, needs = others[2], others[4]
    sizes = (x.shape, weight.shape, weight.shape[:1])
    of_x, of_weight, of_bias = (
        x.new_empty(tuple(size) if need and scale is not None else (0,))
        for size, need in zip(sizes, needs, strict=True)
    )
    return x.new_empty(x.shape[0], dtype=torch.float32), of_x, of_weight, of_bias


_OPTIONS = "int ignore_index, float label_smoothing, float? softcap, float z_loss, str reduction"
_linear_cross_entropy = register(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor? bias, Tensor labels, Tensor? count, "
    f"Tensor? logits, {_OPTIONS}) -> Tensor",
    _loss,
    _fake_loss,
    _autograd,
    by_torch=_by_torch,
    casts=3,
)
register(
    "cross_entropy_gradients(Tensor x, Tensor weight, Tensor? bias, Tensor labels, Tensor? scale, "
    f"Tensor? logits, bool[3] needs, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _compute,
    _fake,
)
