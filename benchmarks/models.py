"""Training steps of models that nothing was tuned for: torch's, ours, and Liger's.

    python -m benchmarks.models -o models.json [--winners FILE] [--model NAME …] [--compiled]

Models of docs/fusing.md in their published widths, with few layers, random weights and text of
noise, in bf16. A step is both passes and AdamW. The sides alternate in one process: torch, the
model under `gemmsmith.patch(model)`, and torch again. Liger, if it can be imported, replaces
functions of transformers for good: its blocks come last, and are compared with torch's median.
A line of JSON for each model is printed and saved at once; `make figures` makes the table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as transformers_

import gemmsmith
from benchmarks.programs import hugging
from benchmarks.programs.hugging import MODELS as PROGRAMS
from benchmarks.turns import Side, compared, described, in_turns, keep, peak

transformers: Any = transformers_

_LLAMA = {"config": "LlamaConfig", "batch": 1, "length": 4096}
MODELS: dict[str, dict[str, Any]] = {
    "Llama 3 8B": PROGRAMS["llama"],
    "Llama 3.2 1B": {
        **_LLAMA, "num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "SmolLM2 135M": PROGRAMS["smollm2"],
    "Mistral 7B": {
        **_LLAMA, "config": "MistralConfig", "num_hidden_layers": 4, "hidden_size": 4096,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 32000,
    },
    "Qwen2.5 7B": {
        **_LLAMA, "config": "Qwen2Config", "num_hidden_layers": 4, "hidden_size": 3584,
        "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4,
        "vocab_size": 152064, "length": 3000,
    },
    "Qwen3 8B": PROGRAMS["qwen3"],
    "Phi-3 mini": {
        **_LLAMA, "config": "Phi3Config", "num_hidden_layers": 4, "hidden_size": 3072,
        "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 32,
        "vocab_size": 32064, "pad_token_id": 0,
    },
    "OLMo 2 7B": {
        **_LLAMA, "config": "Olmo2Config", "num_hidden_layers": 4, "hidden_size": 4096,
        "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32,
        "vocab_size": 100352,
    },
    "Gemma 2 9B": {
        **_LLAMA, "config": "Gemma2Config", "num_hidden_layers": 4, "hidden_size": 3584,
        "intermediate_size": 14336, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 256, "vocab_size": 256000, "length": 2048,
    },
    "GPT-NeoX 1.4B": {
        **_LLAMA, "config": "GPTNeoXConfig", "num_hidden_layers": 12, "hidden_size": 2048,
        "intermediate_size": 8192, "num_attention_heads": 16, "vocab_size": 50304,
        "max_position_embeddings": 4096,
    },
    "GPT-2 XL": {
        **PROGRAMS["gpt2"], "n_layer": 8, "n_embd": 1600, "n_head": 25, "vocab_size": 50257,
        "batch": 4,
    },
    "OLMoE 1B-7B": {
        **_LLAMA, "config": "OlmoeConfig", "num_hidden_layers": 4, "hidden_size": 2048,
        "intermediate_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 16,
        "num_experts": 64, "num_experts_per_tok": 8, "vocab_size": 50304,
    },
    "Qwen3-30B-A3B": PROGRAMS["qwen3-moe"],
    "Mixtral 8x7B": {
        **_LLAMA, "config": "MixtralConfig", "num_hidden_layers": 2, "hidden_size": 4096,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_local_experts": 8, "vocab_size": 32000,
    },
    "DeepSeek-V2-Lite": {
        **_LLAMA, "config": "DeepseekV2Config", "num_hidden_layers": 3, "hidden_size": 2048,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64,
        "num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1,
        "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "n_group": 1, "topk_group": 1, "vocab_size": 102400,
    },
    "gpt-oss 20B": {
        **_LLAMA, "config": "GptOssConfig", "num_hidden_layers": 3, "hidden_size": 2880,
        "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "vocab_size": 201088,
        "length": 2048,
    },
    "BERT large": {
        "config": "BertConfig", "made_by": "AutoModelForMaskedLM", "num_hidden_layers": 24,
        "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16,
        "vocab_size": 30522, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
        "batch": 16, "length": 512,
    },
    "ModernBERT large": {
        "config": "ModernBertConfig", "made_by": "AutoModelForMaskedLM", "num_hidden_layers": 14,
        "hidden_size": 1024, "intermediate_size": 2624, "num_attention_heads": 16,
        "vocab_size": 50368, "batch": 8, "length": 1024,
    },
    "DINOv2 large": {
        "config": "Dinov2Config", "made_by": "AutoModel", "num_hidden_layers": 24,
        "hidden_size": 1024, "num_attention_heads": 16, "image_size": 224, "patch_size": 14,
        "batch": 32,
    },
    "SigLIP so400m": {
        "config": "SiglipVisionConfig", "made_by": "AutoModel", "num_hidden_layers": 12,
        "hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16,
        "image_size": 224, "patch_size": 14, "batch": 32,
    },
    "Whisper large": {
        "config": "WhisperConfig", "made_by": "AutoModelForSpeechSeq2Seq", "encoder_layers": 6,
        "decoder_layers": 6, "d_model": 1280, "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120,
        "encoder_attention_heads": 20, "decoder_attention_heads": 20, "num_mel_bins": 128,
        "vocab_size": 51866, "batch": 4, "length": 448,
    },
}  # fmt: skip

TINY = {
    **hugging.TINY, "num_local_experts": 4, "n_routed_experts": 4, "kv_lora_rank": 16,
    "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4,
    "encoder_layers": 2, "decoder_layers": 2, "d_model": 64, "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "image_size": 28,
}  # fmt: skip
TINY_TOKENS = {
    f"{kind}_token_id": 0 for kind in ("pad", "bos", "eos", "cls", "sep", "decoder_start")
}

Step = Callable[[], torch.Tensor]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the chosen models; the status is 1 if a model did not run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--winners", help="as `gemmsmith.use` takes them (default: auto)")
    parser.add_argument("--model", choices=MODELS, action="append", help="(default: all)")
    parser.add_argument(
        "--share", default="0/1", metavar="I/N", help="every N-th, from the I-th on"
    )
    parser.add_argument("--compiled", action="store_true", help="compiled steps")
    parser.add_argument("--tiny", action="store_true", help="small sizes, few repeats")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    # A process for each model: Liger's functions stay in it, and so do compiled graphs.
    first, _, step = options.share.partition("/")
    names, failed = (options.model or [*MODELS])[int(first) :: int(step)], 0
    if len(names) == 1:
        result = _earlier(options)
        keep(result, "models", measured(names[0], options), options.output)
        return 0
    for name in names:
        words = [word for word in sys.argv[1:] if word not in {"--model", *MODELS}]
        failed += os.spawnl(
            os.P_WAIT, sys.executable, sys.executable, "-m", "benchmarks.models", *words,
            "--share", "0/1", "--model", name,
        ) != 0  # fmt: skip
    return int(failed > 0)


def _earlier(options: argparse.Namespace) -> dict[str, Any]:
    with suppress(FileNotFoundError):
        return dict(json.loads(options.output.read_text()))
    return described(options.device) | {"models": []}


def measured(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the steps of a model on all sides."""
    if options.winners or options.device != "cpu":
        gemmsmith.use(options.winners or "auto")
    model, step = built(name, options)
    sides: dict[str, Side] = {
        "torch": nullcontext,
        "ours": partial(_patched, model),
        "again": nullcontext,
    }
    steps: dict[str, Step] = dict.fromkeys(sides, partial(step, model))
    if options.compiled:
        passed: Any = {"joint_custom_pre_pass": gemmsmith.inductor_pass()}
        compiled: Any = torch.compile(model)
        steps = dict.fromkeys(sides, partial(step, compiled))
        steps["ours"] = partial(step, torch.compile(model, options=passed))
    losses, peaks = {}, {}
    for side in ("torch", "ours"):
        with sides[side]():
            losses[side] = [float(steps[side]()) for _ in range(3)]
            peaks[side] = peak(steps[side], options.device).most
    seconds = in_turns(steps, sides, device=options.device, tiny=options.tiny)
    row = {"model": name, "compiled": options.compiled, **compared(seconds, "ours")}
    row |= {"losses": losses, "peak_bytes": peaks}
    if _applies_liger(model):
        run = partial(step, torch.compile(model) if options.compiled else model)
        row["peak_bytes"]["liger"] = peak(run, options.device).most
        times = in_turns(run, {"liger": nullcontext}, device=options.device, tiny=options.tiny)
        ms = round(1e3 * statistics.median(times["liger"]), 3)
        row["ms"]["liger"] = ms
        row["liger_gain"] = round(row["ms"]["torch"] / ms, 4)
    return row


@contextmanager
def _patched(model: torch.nn.Module) -> Iterator[None]:
    with gemmsmith.patch(model), gemmsmith.patch():
        yield


def _applies_liger(model: torch.nn.Module) -> bool:
    """Let Liger replace what it can, for good; False if it is not here or has nothing for it."""
    try:
        from liger_kernel.transformers import (  # type: ignore[import-not-found]
            _apply_liger_kernel_to_instance,
        )
        from liger_kernel.transformers.monkey_patch import (  # type: ignore[import-not-found]
            MODEL_TYPE_TO_APPLY_LIGER_FN,
        )
    except ImportError:
        return False
    if getattr(model.config, "model_type", None) not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        return False
    _apply_liger_kernel_to_instance(model=model)
    return True


def built(name: str, options: argparse.Namespace) -> tuple[Any, Callable[[Any], torch.Tensor]]:
    """A model in training, and a step of it or of what it is compiled to; returns the loss."""
    sizes = dict(MODELS[name])
    if options.tiny:
        sizes |= {key: value for key, value in TINY.items() if key in sizes} | TINY_TOKENS
    made_by = sizes.pop("made_by", "AutoModelForCausalLM")
    batch, length = sizes.pop("batch"), sizes.pop("length", 0)
    config = getattr(transformers, sizes.pop("config"))(**sizes)
    torch.manual_seed(1)
    with torch.device(options.device):
        model = getattr(transformers, made_by).from_config(config, dtype=torch.bfloat16)
        inputs = _inputs(config, batch, length)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=True)

    def step(run: Any) -> torch.Tensor:
        out = run(**inputs)
        loss = out.loss if "labels" in inputs else out.last_hidden_state.float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return torch.as_tensor(loss.detach())

    return model, step


def _inputs(config: Any, batch: int, length: int) -> Mapping[str, Any]:
    if not length:
        size = config.image_size
        return {"pixel_values": torch.randn(batch, 3, size, size, dtype=torch.bfloat16)}
    tokens = torch.randint(3, config.vocab_size, (batch, length))
    if config.model_type == "whisper":
        frames = 2 * config.max_source_positions
        features = torch.randn(batch, config.num_mel_bins, frames, dtype=torch.bfloat16)
        return {"input_features": features, "labels": tokens}
    cache = {} if "bert" in config.model_type else {"use_cache": False}
    return {"input_ids": tokens, "labels": tokens, **cache}


if __name__ == "__main__":
    sys.exit(main())
