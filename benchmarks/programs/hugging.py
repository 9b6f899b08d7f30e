"""Trains a model of transformers, or decodes with one: an ordinary program, without gemmsmith.

    python benchmarks/programs/hugging.py llama --steps 12
    gemmsmith run --tune -- python benchmarks/programs/hugging.py llama --steps 12
    torchrun --nproc-per-node 2 benchmarks/programs/hugging.py llama
    python benchmarks/programs/hugging.py decode --rows 16 --tiny --device cpu

The sizes are published ones with fewer layers, the weights are random, and the text is noise. Every
few steps it prints a line with the milliseconds of a step; the last line has the median. A step is
an optimizer's, or a call of `generate` that decodes 32 tokens. With `--parts` it prints before that
the times of host and GPU for each part of a step. Started by `torchrun`, each rank has a GPU and
text of its own, FSDP2 shards the model's layers, and rank 0 prints.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers as transformers_

transformers: Any = transformers_

NEW_TOKENS = 32

MODELS: dict[str, dict[str, Any]] = {
    # gpt2-medium, without dropout.
    "gpt2": {
        "config": "GPT2Config", "n_layer": 24, "n_embd": 1024, "n_head": 16, "n_positions": 1024,
        "vocab_size": 50304, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        "batch": 16, "length": 1024,
    },
    # Meta-Llama-3-8B.
    "llama": {
        "config": "LlamaConfig", "num_hidden_layers": 4, "hidden_size": 4096,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 128256, "batch": 1, "length": 4096,
    },
    # SmolLM2-135M, whole: its gates are smaller in N and K than all that are tuned.
    "smollm2": {
        "config": "LlamaConfig", "num_hidden_layers": 30, "hidden_size": 576,
        "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3,
        "vocab_size": 49152, "tie_word_embeddings": True, "batch": 8, "length": 2048,
    },
    # Qwen3-8B.
    "qwen3": {
        "config": "Qwen3Config", "num_hidden_layers": 4, "hidden_size": 4096, "head_dim": 128,
        "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 151936, "batch": 1, "length": 4096,
    },
    # Qwen3-30B-A3B.
    "qwen3-moe": {
        "config": "Qwen3MoeConfig", "num_hidden_layers": 4, "hidden_size": 2048, "head_dim": 128,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "num_attention_heads": 32, "num_key_value_heads": 4,
        "vocab_size": 151936, "batch": 2, "length": 2048,
    },
    # vit-large-patch16-224.
    "vit": {
        "config": "ViTConfig", "num_hidden_layers": 24, "hidden_size": 1024,
        "intermediate_size": 4096, "num_attention_heads": 16, "num_labels": 1000,
        "batch": 64, "length": 197,
    },
    # Falcon3-7B.
    "falcon3": {
        "config": "LlamaConfig", "num_hidden_layers": 4, "hidden_size": 3072, "head_dim": 256,
        "intermediate_size": 23040, "num_attention_heads": 12, "num_key_value_heads": 4,
        "vocab_size": 131072, "batch": 1, "length": 3500,
    },
    # granite-3.3-2b.
    "granite3": {
        "config": "GraniteConfig", "num_hidden_layers": 8, "hidden_size": 2048,
        "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 49159, "batch": 2, "length": 1800,
    },
    # phi-2, without dropout.
    "phi2": {
        "config": "PhiConfig", "num_hidden_layers": 6, "hidden_size": 2560,
        "intermediate_size": 10240, "num_attention_heads": 32, "num_key_value_heads": 32,
        "vocab_size": 51200, "resid_pdrop": 0.0, "max_position_embeddings": 2048,
        "batch": 3, "length": 1300,
    },
    # Meta-Llama-3-8B, whole.
    "decode": {
        "config": "LlamaConfig", "num_hidden_layers": 32, "hidden_size": 4096,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 128256, "batch": 16, "length": 128,
    },
}  # fmt: skip

TINY = {
    "n_layer": 2, "n_embd": 64, "n_head": 4, "num_hidden_layers": 2, "hidden_size": 64,
    "head_dim": 16, "intermediate_size": 128, "moe_intermediate_size": 32, "num_experts": 4,
    "num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 128, "batch": 2, "length": 16, "image_size": 32, "num_labels": 8,
}  # fmt: skip


def main() -> None:
    """Run the steps and print their times."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--every", type=int, default=5, help="steps in a line")
    parser.add_argument("--rows", type=int, help="sequences in a batch")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--parts", action="store_true", help="time the parts of a step as well")
    options = parser.parse_args()
    rank = joined(options.device)
    variant = Variant(
        tiny=options.tiny, layers=options.layers, rows=options.rows, compiles=options.compile
    )
    _, parts = built(options.model, options.device, variant, rank)
    result = timed(parts, options.steps, options.every, options.device)
    if options.parts:
        say(json.dumps({"parts": split(parts, options.device)}))
    say(json.dumps(result))
    if rank is not None:
        torch.distributed.destroy_process_group()


def joined(device: str) -> int | None:
    """Join the process group if `torchrun` started this process; return its rank, else None."""
    if "LOCAL_RANK" not in os.environ:
        return None
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    return torch.distributed.get_rank()


def shard(model: Any) -> None:
    """Shard the parameters of each layer, and the model's other ones, by FSDP2."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)


def say(line: str) -> None:
    """Print a line, in rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        print(line, flush=True)


Part = Callable[[Any], Any]
"""A part of a step: its argument is the result of the part before it."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How a model differs from `MODELS`; None for `layers` or `rows` of a batch means as there."""

    tiny: bool = False
    layers: int | None = None
    rows: int | None = None
    compiles: bool = False
    new_tokens: int = NEW_TOKENS


def built(
    name: str, device: str, variant: Variant, rank: int | None = None
) -> tuple[Any, Mapping[str, Part]]:
    """Make a model with fixed weights, and the parts of its step; a rank shards the model."""
    sizes = dict(MODELS[name])
    if variant.tiny:
        sizes |= {key: value for key, value in TINY.items() if key in sizes or "size" in key}
    if variant.layers:
        sizes["n_layer" if "n_layer" in sizes else "num_hidden_layers"] = variant.layers
    batch, length = variant.rows or sizes.pop("batch"), sizes.pop("length")
    sizes.pop("batch", None)
    config = getattr(transformers, sizes.pop("config"))(**sizes)
    torch.manual_seed(1)
    with torch.device(device):
        if name == "vit":
            model = transformers.ViTForImageClassification(config).to(torch.bfloat16)
        else:
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        if rank is not None:
            shard(model)
            torch.manual_seed(1 + rank)
        if name == "decode":
            return model, decoding(model, batch, length, variant)
        return model, training(model, name, batch, length, variant.compiles)


def training(model: Any, name: str, batch: int, length: int, compiles: bool) -> Mapping[str, Part]:
    """Return the parts of a step of AdamW on fixed noise; the last one returns the loss."""
    inputs: dict[str, Any]
    if name == "vit":
        size = model.config.image_size
        inputs = {
            "pixel_values": torch.randn(batch, 3, size, size, dtype=torch.bfloat16),
            "labels": torch.randint(model.config.num_labels, (batch,)),
        }
    else:
        tokens = torch.randint(model.config.vocab_size, (batch, length))
        inputs = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    model.train()
    run = torch.compile(model) if compiles else model

    def backward(loss: Any) -> Any:
        loss.backward()
        return loss.detach()

    def optimize(loss: Any) -> Any:
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return {"forward": lambda _: run(**inputs).loss, "backward": backward, "optimizer": optimize}


def decoding(model: Any, batch: int, length: int, variant: Variant) -> Mapping[str, Part]:
    """Return the one part of a step that decodes after a prompt of noise; it returns the tokens."""
    prompt = torch.randint(model.config.vocab_size, (batch, length))
    model.eval()
    model.generation_config.pad_token_id = 0
    cache = {"cache_implementation": "static"} if variant.compiles else {}

    def generate(_: Any) -> Any:
        return model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            min_new_tokens=variant.new_tokens,
            max_new_tokens=variant.new_tokens,
            **cache,
        )

    return {"generate": generate}


def waiting(device: str) -> Callable[[], Any]:
    """Return a function that waits until the device is idle."""
    return torch.cuda.synchronize if device == "cuda" else lambda: None


def timed(parts: Mapping[str, Part], steps: int, every: int, device: str) -> dict[str, Any]:
    """Run the steps, the first three one by one, and print a step's milliseconds in each line."""
    wait = waiting(device)
    out: Any = None
    times, done = [], 0
    while done < steps:
        count = 1 if done < 3 else min(every, steps - done)
        wait()
        began = time.perf_counter()
        for _ in range(count):
            for part in parts.values():
                out = part(out)
        wait()
        ms = 1e3 * (time.perf_counter() - began) / count
        say(f"step {done}: {float(out.flatten()[-1]):.4f}, {ms:.2f} ms")
        if done >= 3:
            times.append(ms)
        done += count
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    last = float(out.flatten()[-1])
    median = statistics.median(times) if times else None
    return {"ms": median, "all": times, "peak_bytes": peak, "last": last}


def split(parts: Mapping[str, Part], device: str, repeats: int = 5) -> dict[str, dict[str, float]]:
    """Measure each part alone: medians of the host's time, of all time, and the kernels' sum, in
    ms.

    The GPU is idle when a part begins. If a part has more kernels than the GPU's queue holds (about
    a thousand), the host waits, and its time is only an upper bound.
    """
    from torch.profiler import ProfilerActivity, profile

    wait = waiting(device)
    times: dict[str, dict[str, list[float]]] = {name: {"host": [], "all": []} for name in parts}
    for _ in range(repeats):
        out = None
        for name, part in parts.items():
            wait()
            began = time.perf_counter()
            out = part(out)
            times[name]["host"].append(1e3 * (time.perf_counter() - began))
            wait()
            times[name]["all"].append(1e3 * (time.perf_counter() - began))
    result = {
        name: {kind: round(statistics.median(ms), 3) for kind, ms in kinds.items()}
        for name, kinds in times.items()
    }
    if device == "cuda":
        out = None
        for name, part in parts.items():
            with profile(activities=[ProfilerActivity.CUDA]) as profiled:
                out = part(out)
                wait()
            kernels: Any = profiled.key_averages()
            result[name]["kernels"] = round(sum(k.self_device_time_total for k in kernels) / 1e3, 3)
            for kernel in sorted(kernels, key=lambda k: -k.self_device_time_total)[:12]:
                ms = kernel.self_device_time_total / 1e3
                say(f"{name}: {ms:8.3f} ms {kernel.count:5} × {kernel.key[:110]}")
    return result


if __name__ == "__main__":
    main()
