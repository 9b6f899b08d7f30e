"""Trains transformers' Qwen3-MoE with stock torch and with gemmsmith's winners, side by side.

    python examples/train_qwen3_moe.py --winners winners.gspack     # or a service's URL
    python examples/train_qwen3_moe.py --tokens 16384 --compile --winners winners.gspack
    python examples/train_qwen3_moe.py --experts gemmsmith --winners winners.gspack
    python examples/train_qwen3_moe.py --tiny --device cpu

The model is transformers' (`pip install transformers`, 5.17 or newer) with the sizes of
Qwen3-30B-A3B, 4 of its 48 layers (`--layers`) and random weights. Its experts are transformers'
default `grouped_mm`, which uses `torch._grouped_mm`. `gemmsmith.patch` replaces it, like the other
products. With `--experts gemmsmith`, the layers of experts on our side are `gemmsmith.experts`. See
train_gpt.py for the comparison and the output.

Memory, by torch's tracker on tensors without data: the three models and AdamW's moments, all bf16,
are 56 GB. A step adds 8 GB at 2048 tokens and 43 GB at 16384, mostly for FP32 tensors of [tokens,
vocabulary] in the loss. The sums are 64 GB and 99 GB; another layer adds 14 GB at 16384.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import torch
from models import MoeSize
from torch import nn
from train_gpt import compare, parsed
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from gemmsmith.integrations.transformers import register_experts

LENGTH = 2048


@dataclass(frozen=True, kw_only=True)
class QwenSize(MoeSize):
    """A model with heads of width `head`, which does not depend on `width`."""

    head: int


# config.json of Qwen/Qwen3-30B-A3B, except for `layers`.
PUBLISHED = QwenSize(
    layers=4, width=2048, heads=32, kv_heads=4, head=128, feed=768, vocabulary=151936,
    gated=True, batch=1, length=LENGTH, experts=128, chosen=8,
)  # fmt: skip

# To try the script without a GPU.
TINY = QwenSize(
    layers=2, width=64, heads=4, kv_heads=2, head=16, feed=32, vocabulary=128,
    gated=True, batch=2, length=32, experts=4, chosen=2,
)  # fmt: skip


class Trained(nn.Module):
    """A language model that returns its loss, as those of models.py."""

    def __init__(self, size: QwenSize, experts: str = "grouped_mm") -> None:
        super().__init__()
        config = Qwen3MoeConfig(
            num_hidden_layers=size.layers,
            hidden_size=size.width,
            num_attention_heads=size.heads,
            num_key_value_heads=size.kv_heads,
            head_dim=size.head,
            vocab_size=size.vocabulary,
            moe_intermediate_size=size.feed,
            num_experts=size.experts,
            num_experts_per_tok=size.chosen,
            norm_topk_prob=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
            use_cache=False,
        )
        # bf16, except for parameters that transformers keeps in FP32; `.to(bfloat16)` would not.
        self.model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, experts_implementation=experts
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of [batch, length + 1] token numbers, without the last one."""
        inputs = tokens[:, :-1]
        return self.model(input_ids=inputs, labels=inputs).loss


def sized(tokens: int, layers: int = PUBLISHED.layers) -> QwenSize:
    """Return the size with that many tokens in a step, in sequences of 2048."""
    return replace(PUBLISHED, layers=layers, batch=tokens // LENGTH)


def main() -> int:
    """Train and compare, as the options say."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--layers", type=int, default=PUBLISHED.layers, help="number of layers, of 48"
    )
    parser.add_argument("--tokens", type=int, choices=(2048, 16384), default=2048, help="in a step")
    parser.add_argument(
        "--experts", choices=("grouped_mm", "gemmsmith"), default="grouped_mm", help="on our side"
    )
    parser.add_argument("--tiny", action="store_true", help="a small model, to try without a GPU")
    parser.add_argument("--compile", action="store_true", help="compile all sides, torch's too")
    options = parsed(parser)
    options.model = "qwen3-moe-tiny" if options.tiny else "qwen3-30b-a3b"
    options.precision, options.mode = "bf16", "compiled" if options.compile else "eager"
    size = TINY if options.tiny else sized(options.tokens, options.layers)
    register_experts()

    def make(ours: bool) -> Trained:
        with torch.device(options.device):
            return Trained(size, options.experts if ours else "grouped_mm")

    return compare(options, size, make)


if __name__ == "__main__":
    raise SystemExit(main())
