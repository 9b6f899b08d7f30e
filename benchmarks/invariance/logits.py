"""A prompt's logits in a batch of any size: processes on several GPUs must get the same bits.

    python -m benchmarks.invariance.logits --winners invariant.gspack --rows 64 -o logits-64.json
    python -m benchmarks.invariance.logits --same logits-1.json logits-64.json

Eight layers of Llama 3 8B with the same weights in every process (`--layers`), once by torch, once
with `gemmsmith.patch(model)` and `numerics="invariant"`. Attention runs one sequence at a time,
by torch's math backend, so that it does not depend on the batch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import transformers as transformers_
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import gemmsmith
from benchmarks.invariance.values import drawn, hashed
from benchmarks.programs import hugging
from benchmarks.turns import described
from gemmsmith.files import publish

transformers: Any = transformers_

LENGTH = 48
"""Tokens of the prompt: with 16 rows or more torch's norms sum a row in the same way."""
SIDES = ("torch", "invariant")


def main(arguments: Sequence[str] | None = None) -> int:
    """Compute and write the hashes, or compare files; 0 if the invariant logits are equal."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--winners", help="a bundle or a URL")
    parser.add_argument("--rows", type=int, default=1, help="sequences in the batch")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tiny", action="store_true", help="a small model")
    parser.add_argument("--same", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args(arguments)
    if options.same:
        return same(options.same)
    if not (options.winners and options.output):
        parser.error("--winners and -o are needed")
    model, tokens = made(options)
    result = described(options.device) | {"rows": options.rows, "hashes": {}}
    for side in SIDES:
        result["hashes"][side] = hashed(computed(side, model, tokens, options))
    publish(options.output, (json.dumps(result) + "\n").encode(), shared=True)
    print(json.dumps(result), flush=True)
    return 0


def made(options: argparse.Namespace) -> tuple[Any, torch.Tensor]:
    """The model, and [rows, LENGTH] token numbers: the prompt in the middle, other ones around."""
    transformers.AttentionInterface.register("one_by_one", one_by_one)
    layers = None if options.tiny else options.layers
    variant = hugging.Variant(tiny=options.tiny, layers=layers, rows=1)
    model, _ = hugging.built("decode", options.device, variant)
    model.set_attn_implementation("one_by_one")
    for seed, parameter in enumerate(model.parameters()):
        if parameter.dim() == 2:
            rows, columns = parameter.shape
            parameter.data.copy_(drawn(rows, columns, seed, options.device) * columns**-0.5)
    draw = torch.Generator().manual_seed(5)
    size, most = (options.rows, LENGTH), model.config.vocab_size
    tokens = torch.randint(most, size, generator=draw)
    tokens[options.rows // 2] = torch.arange(LENGTH) * 37 % most
    return model.eval(), tokens.to(options.device)


def computed(
    side: str, model: Any, tokens: torch.Tensor, options: argparse.Namespace
) -> torch.Tensor:
    """The prompt's logits on a side, [LENGTH, vocabulary]."""
    with ExitStack() as stack:
        if side == "invariant":
            gemmsmith.use(options.winners, numerics="invariant")
            stack.callback(gemmsmith.use, None)
            stack.enter_context(gemmsmith.patch(model))
        with torch.no_grad():
            logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits[len(tokens) // 2]


def one_by_one(
    _: object,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *__: object,
    scaling: float | None = None,
    **___: object,
) -> tuple[torch.Tensor, None]:
    """Causal attention, one sequence at a time; see transformers' attention functions."""
    groups = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    with sdpa_kernel(SDPBackend.MATH):
        rows = [
            functional.scaled_dot_product_attention(
                query[i : i + 1], key[i : i + 1], value[i : i + 1], is_causal=True, scale=scaling
            )
            for i in range(len(query))
        ]
    return torch.cat(rows).transpose(1, 2).contiguous(), None


def same(files: Sequence[Path]) -> int:
    """Compare the hashes of several processes; 0 if those of the invariant side are equal."""
    documents = [json.loads(file.read_text()) for file in files]
    batches = ", ".join(str(document["rows"]) for document in documents)
    equal = {side: len({d["hashes"][side] for d in documents}) == 1 for side in SIDES}
    for side in SIDES:
        words = "equal to the bit" if equal[side] else "different"
        print(f"{side}: logits in batches of {batches} are {words}", flush=True)
    return int(not equal["invariant"])


if __name__ == "__main__":
    sys.exit(main())
