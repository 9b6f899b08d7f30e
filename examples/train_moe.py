"""Trains a mixture of experts with stock torch and with gemmsmith's winners, side by side.

    python examples/train_moe.py --winners winners.gspack           # or a service's URL
    python examples/train_moe.py --tiny --device cpu

The model has 1.0 B parameters in 9 layers of 64 experts, 8 of them per token. It is plain torch:
its experts are `torch._grouped_mm`, which `gemmsmith.patch` replaces, forward and backward. See
train_gpt.py for the comparison and the output.
"""

from __future__ import annotations

import argparse

import torch
from models import MOE_SIZES, Model
from train_gpt import compare, parsed


def main() -> int:
    """Train and compare, as the options say."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="a small model, to try without a GPU")
    parser.add_argument("--compile", action="store_true", help="compile all sides, torch's too")
    options = parsed(parser)
    options.model = "moe-tiny" if options.tiny else "moe-1b"
    options.precision, options.mode = "bf16", "compiled" if options.compile else "eager"
    size = MOE_SIZES[options.model]

    def make(_: bool) -> Model:
        return Model(size, fp8=None).to(options.device, torch.bfloat16)

    return compare(options, size, make)


if __name__ == "__main__":
    raise SystemExit(main())
