"""configs/suites/train_fused.toml: what a step of the examples multiplies, and nothing else."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import gemmsmith
from gemmsmith.core.problem import Problem
from tuner.suites import load
from tuner.workloads.footprint import footprint_bytes

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_it_is_what_one_step_of_each_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """By patched models of the true sizes, with neither memory nor arithmetic behind them."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import models
    import train_llama

    captured: Counter[Problem] = Counter()
    with torch.device("meta"):
        for name in ("gpt-350m", "llama-8b-blocks"):
            size = models.SIZES[name]
            captured += products(models.Model(size, fp8=None).to(torch.bfloat16), size)
    with FakeTensorMode():
        for name in ("llama-3-8b", "qwen3-8b"):
            size = train_llama.SIZES[name]
            captured += products(train_llama.Trained(size), size)
    suite = load(ROOT / "configs" / "suites" / "train_fused.toml")
    problems = suite.problems("bf16")
    assert {problem: entry.calls for entry, problem in problems} == captured
    assert len(problems) == len(suite.entries)
    assert max(footprint_bytes(problem) for _, problem in problems) < 80e9


def products(model: torch.nn.Module, size: Any) -> Counter[Problem]:
    """Of one step, forwards and backwards, in bf16; attention's are FP32 here and not listed."""
    tokens = torch.zeros(size.batch, size.length + 1, dtype=torch.long)
    with gemmsmith.capture() as shapes, gemmsmith.patch(model):
        model(tokens).backward()
    assert set(shapes.skipped) <= {"float32 × float32"}
    return shapes.problems
