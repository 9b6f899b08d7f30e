"""configs/suites/train_moe.toml: what a step of the two examples multiplies, and nothing else."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import gemmsmith
from gemmsmith.core.problem import Problem
from gemmsmith.integrations.transformers import register_experts
from tuner.suites import load
from tuner.workloads.footprint import footprint_bytes

ROOT = Path(__file__).resolve().parents[2]


def test_it_is_what_one_step_of_each_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """By models of the true sizes, with neither memory nor arithmetic behind them."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import models
    import train_qwen3_moe

    register_experts()

    size = models.MOE_SIZES["moe-1b"]
    with torch.device("meta"):
        captured = products(models.Model(size, fp8=None).to(torch.bfloat16), size)
    for tokens in (2048, 16384):
        size = train_qwen3_moe.sized(tokens)
        assert size.tokens == tokens
        # transformers reads a value of its attention mask: of fake tensors it knows not to.
        with FakeTensorMode():
            captured += products(train_qwen3_moe.Trained(size), size)
            # As gemmsmith.experts runs it, whose first products may have their gate in one kernel.
            ours = products(train_qwen3_moe.Trained(size, "gemmsmith"), size)
        captured += Counter({one: n for one, n in ours.items() if one.operation.is_fused})
    suite = load(ROOT / "configs" / "suites" / "train_moe.toml")
    problems = suite.problems("bf16")
    assert {problem: entry.calls for entry, problem in problems} == captured
    assert len(problems) == len(suite.entries)
    assert max(footprint_bytes(problem) for _, problem in problems) < 80e9


def products(model: torch.nn.Module, size: Any) -> Counter[Problem]:
    """Of one step, forwards and backwards, in bf16; attention's are FP32 here and not listed."""
    tokens = torch.zeros(size.batch, size.length + 1, dtype=torch.long)
    with gemmsmith.capture() as shapes:
        model(tokens).backward()
    assert set(shapes.skipped) <= {"float32 × float32"}
    return shapes.problems
