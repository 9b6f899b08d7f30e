"""The models of `train_gpt.py` (a GPT of 350 M parameters, and blocks of an 8 B Llama), and of
`train_moe.py` (a mixture of experts).

Plain PyTorch. Only `Fp8Linear` depends on who multiplies: torch or gemmsmith.
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
    """The sizes of a model; `feed` is the width of its feed-forward layers."""

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
        return self.batch * self.length


@dataclass(frozen=True, kw_only=True)
class MoeSize(Size):
    """A mixture of experts: `feed` is the width of an expert; each token has `chosen` experts."""

    experts: int
    chosen: int


SIZES = {
    # GPT-3 Medium's sizes, 355 M parameters with tied embeddings.
    "gpt-350m": Size(
        layers=24, width=1024, heads=16, kv_heads=16, feed=4096, vocabulary=50304,
        gated=False, batch=16, length=1024,
    ),
    # Two of Llama 3 8B's 32 blocks, with a small vocabulary, so that blocks take most of the time.
    "llama-8b-blocks": Size(
        layers=2, width=4096, heads=32, kv_heads=8, feed=14336, vocabulary=8192,
        gated=True, batch=2, length=4096,
    ),
    # To try the script without a GPU.
    "tiny": Size(
        layers=2, width=64, heads=4, kv_heads=2, feed=128, vocabulary=128,
        gated=True, batch=2, length=32,
    ),
}  # fmt: skip

MOE_SIZES = {
    # OLMoE's proportions at half its width: 1.0 B parameters, of which a token uses 0.2 B.
    "moe-1b": MoeSize(
        layers=9, width=1024, heads=16, kv_heads=16, feed=512, vocabulary=50304,
        gated=True, batch=16, length=1024, experts=64, chosen=8,
    ),
    # To try the script without a GPU.
    "moe-tiny": MoeSize(
        layers=2, width=64, heads=4, kv_heads=2, feed=32, vocabulary=128,
        gated=True, batch=2, length=32, experts=4, chosen=2,
    ),
}  # fmt: skip


Linear = Callable[..., nn.Module]
"""`nn.Linear`, or a replacement with the same arguments."""


class FeedForward(nn.Module):
    """GPT's feed-forward layer."""

    def __init__(self, size: Size, linear: Linear) -> None:
        super().__init__()
        self.up = linear(size.width, size.feed, bias=True)
        self.down = linear(size.feed, size.width, bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., width] to the same shape."""
        return self.down(functional.gelu(self.up(x), approximate="tanh"))


class GatedFeedForward(nn.Module):
    """Llama's feed-forward layer; gate and up are one linear layer."""

    def __init__(self, size: Size, linear: Linear) -> None:
        super().__init__()
        self.up = linear(size.width, 2 * size.feed)
        self.down = linear(size.feed, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., width] to the same shape."""
        gate, hidden = self.up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * hidden)


class Block(nn.Module):
    """Attention and feed-forward layer (plain, gated or experts), each after a norm."""

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
        """Map [batch, length, width] to the same shape."""
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

    Two grouped products over tokens sorted by expert, as in transformers and torchtitan. Only the
    device knows how many tokens an expert gets. No loss balances the experts.
    """

    def __init__(self, size: MoeSize) -> None:
        super().__init__()
        self.chosen = size.chosen
        self.router = nn.Linear(size.width, size.experts, bias=False)
        self.up = nn.Parameter(torch.empty(size.experts, 2 * size.feed, size.width))
        self.down = nn.Parameter(torch.empty(size.experts, size.width, size.feed))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [batch, length, width] to the same shape."""
        flat = x.flatten(0, 1)
        shares, experts = self.router(flat).float().softmax(dim=-1).topk(self.chosen)
        shares = (shares / shares.sum(dim=-1, keepdim=True)).to(x.dtype)
        sorted_experts, order = experts.flatten().sort(stable=True)
        numbers = torch.arange(self.up.shape[0], device=x.device)
        offsets = torch.searchsorted(sorted_experts, numbers, right=True, out_int32=True)
        rows = flat.index_select(0, order // self.chosen)
        gate, hidden = torch._grouped_mm(rows, self.up.mT, offs=offsets).chunk(2, dim=-1)
        out = torch._grouped_mm(functional.silu(gate) * hidden, self.down.mT, offs=offsets)
        by_token = out.index_select(0, order.argsort()).view(*shares.shape, -1)
        return (by_token * shares[..., None]).sum(dim=1).view_as(x)


class Model(nn.Module):
    """A language model that returns the mean cross-entropy of the next tokens."""

    def __init__(self, size: Size, *, fp8: Multiply | None) -> None:
        super().__init__()

        def linear(inner: int, outer: int, *, bias: bool = False) -> nn.Module:
            if fp8 is not None:  # FP8 layers have no biases
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
        """Return the loss of [batch, length + 1] token numbers."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.embedding(inputs) + self.positions
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Fp8Linear(nn.Module):
    """A linear layer without bias whose three products are FP8, with a scale for each tensor.

    E4M3 in the forward pass and E5M2 for the gradient, scaled by the tensor's largest value. Sums
    stay in the tensor core (`use_fast_accum`), for torch too, because winners are measured so.
    """

    def __init__(self, inner: int, outer: int, *, multiply: Multiply) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outer, inner))
        self.multiply = multiply

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute [..., outer] from [..., inner]."""
        flat = x.reshape(-1, x.shape[-1])
        out: torch.Tensor = _Fp8Product.apply(flat, self.weight, self.multiply)
        return out.view(*x.shape[:-1], out.shape[-1])


_OPTIONS = {"out_dtype": torch.bfloat16, "use_fast_accum": True}


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, multiply):
        a, scale_a = _quantized(x, torch.float8_e4m3fn)
        b, scale_b = _quantized(weight, torch.float8_e4m3fn)
        ctx.save_for_backward(a, scale_a, b, scale_b)
        ctx.multiply = multiply
        return multiply(a, b.t(), scale_a, scale_b, **_OPTIONS)

    @staticmethod
    def backward(ctx, dy):
        a, scale_a, b, scale_b = ctx.saved_tensors
        multiply = ctx.multiply
        g, scale = _quantized(dy, torch.float8_e5m2)
        # FP8 kernels need operands that are contiguous along K, so these are transposed in memory.
        dx = multiply(g, _transposed(b).t(), scale, scale_b, **_OPTIONS)
        dw = multiply(_transposed(g), _transposed(a).t(), scale, scale_a, **_OPTIONS)
        return dx, dw, None


def _transposed(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous()


def _quantized(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `x / scale` in FP8, and the scale, which stays on the device."""
    scale = (x.abs().amax().float() / torch.finfo(dtype).max).clamp(min=1e-12)
    return (x / scale).to(dtype), scale
