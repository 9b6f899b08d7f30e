"""Models whose head computes no logits in training, on a GPU: values, memory and graphs."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers

import gemmsmith
from gemmsmith.ops.models.deferred_logits import DeferredLogits
from tests.unit.ops.test_heads import stays_within_torchs_own_distance

SIZES: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
KINDS = ("LlamaConfig", "Qwen3Config", "Gemma2Config")
BATCH, TOKENS = 8, 1024


pytestmark = pytest.mark.usefixtures("in_use")


def made(kind: str) -> Any:
    torch.manual_seed(3)
    config = getattr(transformers, kind)(**SIZES)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.train()


def batch(size: int = BATCH) -> dict[str, torch.Tensor]:
    torch.manual_seed(4)
    tokens = torch.randint(SIZES["vocab_size"], (size, TOKENS), device="cuda")
    labels = tokens.clone()
    labels[:, :100] = -100
    return {"input_ids": tokens, "labels": labels}


def step(model: Any, **more: Any) -> tuple[list[torch.Tensor], int]:
    """The loss and the gradients, and the peak of memory above what was allocated before."""
    model.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = model(**batch(), **more).loss
    loss.backward()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    parts = [part.grad.clone() for part in model.parameters() if part.grad is not None]
    return [loss.detach(), *parts], peak


@pytest.mark.parametrize("items", [None, 5000])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_without_logits(kind: str, items: int | None) -> None:
    model = made(kind)
    more = {} if items is None else {"num_items_in_batch": torch.tensor(items, device="cuda")}
    step(model, **more)
    torchs, of_torch = step(model, **more)
    with gemmsmith.patch(model):
        step(model, **more)
        ours, of_ours = step(model, **more)
        assert type(model(**batch()).logits) is DeferredLogits
    for mine, theirs in zip(ours, torchs, strict=True):
        assert (mine.double() - theirs.double()).norm() <= 4e-2 * theirs.double().norm() + 1e-12
    assert of_ours < of_torch - BATCH * TOKENS * SIZES["vocab_size"] * 4


def test_logits_are_those_before_the_step() -> None:
    model = made("LlamaConfig")
    with torch.no_grad():
        expected = model(**batch()).logits
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with gemmsmith.patch(model):
        out = model(**batch())
        out.loss.backward()
        optimizer.step()
        off = (out.logits.double() - expected.double()).norm() / expected.double().norm()
        assert off < 1e-2
        assert type(model(**batch()).logits) is torch.Tensor  # they were read


@pytest.mark.parametrize("size", [1, 4])
def test_a_loop_that_holds_its_output_takes_no_more_memory_than_torch(size: int) -> None:
    """1024 rows, the width of the model, or four times as many: logits or a copy of the weight."""
    peaks = {}
    for side in ("torch", "ours"):
        gc.collect()
        before = torch.cuda.memory_allocated()
        model, data = made("LlamaConfig"), batch(size)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        with gemmsmith.patch(model) if side == "ours" else nullcontext():
            for number in range(4):
                torch.cuda.reset_peak_memory_stats()
                with torch.no_grad():
                    expected = model(**data).logits if number == 3 else None
                out = model(**data)
                out.loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if number == 2:
                    peaks[side] = torch.cuda.max_memory_allocated() - before
            assert type(out.logits) is (DeferredLogits if side == "ours" else torch.Tensor)
            off = (out.logits.double() - expected.double()).norm() / expected.double().norm()
            assert off < 1e-2
        del model, optimizer, out, expected
    assert peaks["ours"] <= peaks["torch"]


def test_training_stays_within_torchs_own_distance() -> None:
    data = {name: part.view(4, -1) for name, part in batch(1).items()}
    stays_within_torchs_own_distance(lambda: made("LlamaConfig"), data)


def test_captured_steps_compute_logits() -> None:
    model, data = made("LlamaConfig"), batch()
    with gemmsmith.patch(model):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                model(**data).loss.backward()
        torch.cuda.current_stream().wait_stream(stream)
        model.zero_grad(set_to_none=False)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(**data)
            out.loss.backward()
        graph.replay()
        assert type(out.logits) is torch.Tensor
    model.zero_grad(set_to_none=False)
    loss = model(**data).loss
    assert abs(out.loss.item() - loss.item()) < 1e-2 * loss.item()
