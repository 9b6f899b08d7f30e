"""The models of `train_gpt.py`: a GPT of 350 M parameters, and blocks of an 8 B Llama; and that of
`train_moe.py`, a mixture of experts.

Plain PyTorch. Only `Fp8Linear` knows that there is more than one way to multiply.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

Multiply = Callable[..., torch.Tensor]
"""`torch._scaled_mm` or `gemmsmith.scaled_mm`: (a, b, scale_a, scale_b, *, out_dtype,
use_fast_accum)."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """What a model is made of; `feed` is the width of the feed-forward layer."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    feed: int
    vocabulary: int
    gated: bool
    batch: int
    length: int

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.length


@dataclass(frozen=True, kw_only=True)
class MoeSize(Size):
    """A mixture of experts: `feed` is the width of one, and each token has `chosen` of them."""

    experts: int
    chosen: int


SIZES = {
    # GPT-3 Medium's sizes, 355 M parameters with tied embeddings.
    "gpt-350m": Size(
        layers=24, width=1024, heads=16, kv_heads=16, feed=4096, vocabulary=50304,
        gated=False, batch=16, length=1024,
    ),
    # Llama 3 8B's blocks; two of its 32, and a small vocabulary so that blocks are what is timed.
    "llama-8b-blocks": Size(
        layers=2, width=4096, heads=32, kv_heads=8, feed=14336, vocabulary=8192,
        gated=True, batch=2, length=4096,
    ),
    # For trying the script without a GPU.
    "tiny": Size(
        layers=2, width=64, heads=4, kv_heads=2, feed=128, vocabulary=128,
        gated=True, batch=2, length=32,
    ),
}  # fmt: skip

MOE_SIZES = {
    # OLMoE's proportions at half its width: 1.0 B parameters, of which a token meets 0.2 B.
    "moe-1b": MoeSize(
        layers=9, width=1024, heads=16, kv_heads=16, feed=512, vocabulary=50304,
        gated=True, batch=16, length=1024, experts=64, chosen=8,
    ),
    # For trying the script without a GPU.
    "moe-tiny": MoeSize(
        layers=2, width=64, heads=4, kv_heads=2, feed=32, vocabulary=128,
        gated=True, batch=2, length=32, experts=4, chosen=2,
    ),
}  # fmt: skip


Linear = Callable[..., nn.Module]
"""`nn.Linear`, or what stands in its place."""


class FeedForward(nn.Module):
    """GPT's."""

    def __init__(self, size: Size, linear: Linear) -> None:
        super().__init__()
        self.up = linear(size.width, size.feed, bias=True)
        self.down = linear(size.feed, size.width, bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] to the same."""
        return self.down(functional.gelu(self.up(x), approximate="tanh"))


class GatedFeedForward(nn.Module):
    """Llama's, gate and up being one layer."""

    def __init__(self, size: Size, linear: Linear) -> None:
        super().__init__()
        self.up = linear(size.width, 2 * size.feed)
        self.down = linear(size.feed, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] to the same."""
        gate, hidden = self.up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * hidden)


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm: GPT's with GELU, a gated one, or experts."""

    def __init__(self, size: Size, linear: Linear) -> None:
        super().__init__()
        self.heads, self.kv_heads = size.heads, size.kv_heads
        self.head = size.width // size.heads
        self.norm_1, self.norm_2 = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        self.qkv = linear(size.width, (size.heads + 2 * size.kv_heads) * self.head)
        self.out = linear(size.width, size.width)
        if isinstance(size, MoeSize):
            self.feed: nn.Module = Experts(size)
        else:
            self.feed = (GatedFeedForward if size.gated else FeedForward)(size, linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, width] to the same."""
        batch, length, width = x.shape
        shared = self.kv_heads * self.head
        q, k, v = self.qkv(self.norm_1(x)).split([width, shared, shared], dim=-1)
        q = q.view(batch, length, self.heads, self.head).transpose(1, 2)
        k = k.view(batch, length, self.kv_heads, self.head).transpose(1, 2)
        v = v.view(batch, length, self.kv_heads, self.head).transpose(1, 2)
        attended = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.kv_heads != self.heads
        )
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(self.norm_2(x))


class Experts(nn.Module):
    """Gated feed-forward layers, of which a router chooses some for each token.

    Two grouped products over tokens sorted by expert, as transformers and torchtitan have them. How
    many tokens an expert gets is known to the device alone. No loss balances the experts.
    """

    def __init__(self, size: MoeSize) -> None:
        super().__init__()
        self.chosen = size.chosen
        self.router = nn.Linear(size.width, size.experts, bias=False)
        self.up = nn.Parameter(torch.empty(size.experts, 2 * size.feed, size.width))
        self.down = nn.Parameter(torch.empty(size.experts, size.width, size.feed))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, width] to the same."""
        flat = x.flatten(0, 1)
        shares, experts = self.router(flat).float().softmax(dim=-1).topk(self.chosen)
        shares = (shares / shares.sum(dim=-1, keepdim=True)).to(x.dtype)
        sorted_experts, order = experts.flatten().sort(stable=True)
        numbers = torch.arange(self.up.shape[0], device=x.device)
        ends = torch.searchsorted(sorted_experts, numbers, right=True, out_int32=True)
        rows = flat.index_select(0, order // self.chosen)
        gate, hidden = torch._grouped_mm(rows, self.up.mT, offs=ends).chunk(2, dim=-1)
        out = torch._grouped_mm(functional.silu(gate) * hidden, self.down.mT, offs=ends)
        found = out.index_select(0, order.argsort()).view(*shares.shape, -1)
        return (found * shares[..., None]).sum(dim=1).view_as(x)


class Model(nn.Module):
    """Tokens in, the mean cross-entropy of the next tokens out."""

    def __init__(self, size: Size, *, fp8: Multiply | None) -> None:
        super().__init__()

        def linear(inner: int, outer: int, *, bias: bool = False) -> nn.Module:
            if fp8 is not None:  # without biases
                return Fp8Linear(inner, outer, multiply=fp8)
            return nn.Linear(inner, outer, bias=bias)

        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Parameter(torch.zeros(size.length, size.width))
        self.blocks = nn.ModuleList(Block(size, linear) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[batch, length + 1] token numbers to the loss."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.embedding(inputs) + self.positions
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Fp8Linear(nn.Module):
    """A linear layer without bias whose three products are FP8, scaled tensor by tensor.

    E4M3 forwards and E5M2 for the gradient, scaled by the largest value of the moment. Sums stay in
    the tensor core (`use_fast_accum`): what winners are measured with, torch does as well here.
    """

    def __init__(self, inner: int, outer: int, *, multiply: Multiply) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outer, inner))
        self.multiply = multiply

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inner] to [..., outer]."""
        flat = x.reshape(-1, x.shape[-1])
        out: torch.Tensor = _Fp8Product.apply(flat, self.weight, self.multiply)
        return out.view(*x.shape[:-1], out.shape[-1])


_HOW = {"out_dtype": torch.bfloat16, "use_fast_accum": True}


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, multiply):
        a, scale_a = _quantized(x, torch.float8_e4m3fn)
        b, scale_b = _quantized(weight, torch.float8_e4m3fn)
        ctx.save_for_backward(a, scale_a, b, scale_b)
        ctx.multiply = multiply
        return multiply(a, b.t(), scale_a, scale_b, **_HOW)

    @staticmethod
    def backward(ctx, dy):
        a, scale_a, b, scale_b = ctx.saved_tensors
        multiply = ctx.multiply
        g, scale = _quantized(dy, torch.float8_e5m2)
        # FP8 kernels take rows of K only, so the operands are transposed in memory first.
        dx = multiply(g, _turned(b).t(), scale, scale_b, **_HOW)
        dw = multiply(_turned(g), _turned(a).t(), scale, scale_a, **_HOW)
        return dx, dw, None


def _turned(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous()


def _quantized(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """`x / scale` in FP8, and the scale, which stays on the device."""
    scale = (x.abs().amax().float() / torch.finfo(dtype).max).clamp(min=1e-12)
    return (x / scale).to(dtype), scale
