"""Trains transformers' Llama or Qwen3 with stock torch and with gemmsmith's winners, side by side.

    python examples/train_llama.py --winners winners.gspack         # or a service's URL
    python examples/train_llama.py --model qwen3-8b --compile --winners winners.gspack
    python examples/train_llama.py --model tiny --device cpu

The model is transformers' (`pip install transformers`) with the published sizes, some of its layers
(`--layers`) and random weights. The winners' side is the same model with `gemmsmith.patch(model)`,
which runs each MLP's gate, up and activation as one kernel, and their gradients within the input
gradient of the next layer, if such kernels win. See train_gpt.py for the comparison and the output.

Three models of 4 layers and AdamW's moments in bf16 are 46 GB (llama-3-8b) and 48 GB (qwen3-8b);
4096 tokens add about 10 GB, mostly for the FP32 loss.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import torch
import transformers
from models import Size
from torch import nn
from train_gpt import compare, parsed


@dataclass(frozen=True, kw_only=True)
class LlamaSize(Size):
    """A model with heads of width `head`; `config` names its configuration class."""

    head: int
    config: str
    theta: float


SIZES = {
    # config.json of meta-llama/Meta-Llama-3-8B and of Qwen/Qwen3-8B, except for `layers`.
    "llama-3-8b": LlamaSize(
        layers=4, width=4096, heads=32, kv_heads=8, head=128, feed=14336, vocabulary=128256,
        gated=True, batch=1, length=4096, config="LlamaConfig", theta=500_000.0,
    ),
    "qwen3-8b": LlamaSize(
        layers=4, width=4096, heads=32, kv_heads=8, head=128, feed=12288, vocabulary=151936,
        gated=True, batch=1, length=4096, config="Qwen3Config", theta=1_000_000.0,
    ),
    # To try the script without a GPU.
    "tiny": LlamaSize(
        layers=2, width=64, heads=4, kv_heads=2, head=16, feed=128, vocabulary=128,
        gated=True, batch=2, length=32, config="LlamaConfig", theta=10_000.0,
    ),
}  # fmt: skip


class Trained(nn.Module):
    """A language model that returns its loss, as those of models.py."""

    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        config = getattr(transformers, size.config)(
            num_hidden_layers=size.layers,
            hidden_size=size.width,
            intermediate_size=size.feed,
            num_attention_heads=size.heads,
            num_key_value_heads=size.kv_heads,
            head_dim=size.head,
            vocab_size=size.vocabulary,
            max_position_embeddings=size.length,
            rope_parameters={"rope_type": "default", "rope_theta": size.theta},
            bos_token_id=None,
            eos_token_id=None,
            use_cache=False,
        )
        self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of [batch, length + 1] token numbers, without the last one."""
        inputs = tokens[:, :-1]
        return self.model(input_ids=inputs, labels=inputs).loss


def main() -> int:
    """Train and compare, as the options say."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=sorted(SIZES), default="llama-3-8b")
    parser.add_argument("--layers", type=int, help="number of layers")
    parser.add_argument("--compile", action="store_true", help="compile all sides, torch's too")
    options = parsed(parser)
    options.precision, options.mode = "bf16", "compiled" if options.compile else "eager"
    size = SIZES[options.model]
    size = replace(size, layers=options.layers or size.layers)

    def make(ours: bool) -> Trained:  # noqa: ARG001 - both sides are the same
        with torch.device(options.device):
            return Trained(size)

    return compare(options, size, make)


if __name__ == "__main__":
    raise SystemExit(main())
