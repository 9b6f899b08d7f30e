"""An ordinary fine-tune with transformers' Trainer, without gemmsmith; docs/finetuning.md tunes it.

    python examples/fine_tune.py --model meta-llama/Llama-3.1-8B --text book.txt --lora attention
    python examples/fine_tune.py --steps 3      # a tiny Llama with random weights, no GPU needed

`--lora` trains adapters of PEFT instead of all weights: beside the attention's layers, or beside
all. `--checkpointing` keeps less for the backward pass, `--compile` compiles the model.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

TINY = "tiny"
LAYERS = {
    "attention": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "all": "all-linear",  # PEFT's word for all but the head
}
"""The layers that get adapters."""


def main() -> None:
    """Train, and print the loss of every step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default=TINY, help="a name on the Hugging Face Hub, or a folder")
    parser.add_argument("--text", type=Path, default=Path(__file__), help="text to learn")
    parser.add_argument("--lora", choices=sorted(LAYERS))
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--compile", nargs="?", const="inductor", metavar="BACKEND")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a step")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("-o", "--output", default="fine-tuned", help="a folder for the model")
    options = parser.parse_args()
    trainer = trainer_of(options)
    trainer.train()
    trainer.save_model()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"step {entry['step']}: loss {float(entry['loss']):.4f}")


def trainer_of(options: argparse.Namespace) -> Trainer:
    """Make the model, the data and the Trainer."""
    model, tokens = _tiny(options) if options.model == TINY else _of_the_hub(options)
    if options.lora:
        model = _with_adapters(model, options.lora)
    arguments = TrainingArguments(
        output_dir=options.output,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        learning_rate=1e-3 if options.lora else 1e-4,
        gradient_checkpointing=options.checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        torch_compile=options.compile is not None,
        torch_compile_backend=options.compile,
        logging_steps=1,
        disable_tqdm=True,
        report_to=[],
        save_strategy="no",
        seed=1,
    )
    rows = tokens[: tokens.numel() // options.length * options.length].view(-1, options.length)
    return Trainer(
        model=model, args=arguments, train_dataset=TensorDataset(rows), data_collator=_batch
    )


def _of_the_hub(options: argparse.Namespace) -> tuple[PreTrainedModel, torch.Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
    text = options.text.read_text(encoding="utf-8")
    return model, tokenizer(text, return_tensors="pt").input_ids[0]


def _tiny(options: argparse.Namespace) -> tuple[PreTrainedModel, torch.Tensor]:
    """Return a model whose tokens are the bytes of the text."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    return model, torch.tensor(list(options.text.read_bytes()))


def _with_adapters(model: PreTrainedModel, layers: str) -> Any:
    from peft import LoraConfig, get_peft_model

    # One type for all: PEFT would keep adapters in FP32, and each product would be converted.
    return get_peft_model(
        model, LoraConfig(r=16, lora_alpha=32, target_modules=LAYERS[layers]),
        autocast_adapter_dtype=False,
    )  # fmt: skip


def _batch(rows: list[tuple[torch.Tensor]]) -> dict[str, torch.Tensor]:
    tokens = torch.stack([row for (row,) in rows])
    return {"input_ids": tokens, "labels": tokens}


if __name__ == "__main__":
    main()
