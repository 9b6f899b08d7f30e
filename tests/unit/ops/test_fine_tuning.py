"""A fine-tune by transformers' Trainer, also with PEFT's adapters, learns alike with kernels."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from gemmsmith.core.operation import Epilogue
from gemmsmith.integrations.trainer import GemmsmithCallback
from gemmsmith.ops.engine.engine import Engine
from tests.support.docs import ROOT
from tests.support.stand_in import Chooser

STEPS = 3
FORWARD = 2 * 7 + 1
"""Products of a forward pass: the layers of attention and MLP of two blocks, and the head."""
FUSED = 2
"""Blocks whose two products of gate and up are one kernel, if no adapter is beside them."""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    where = importlib.util.spec_from_file_location("fine_tune", ROOT / "examples/fine_tune.py")
    assert where is not None
    assert where.loader is not None
    module = importlib.util.module_from_spec(where)
    where.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def losses(script: ModuleType, folder: Path, *callbacks: Any, **options: Any) -> list[float]:
    """Train as the script does, and return the loss of each step."""
    torch._dynamo.reset()
    defaults: dict[str, Any] = {
        "model": script.TINY, "text": Path(script.__file__ or ""), "lora": None,
        "checkpointing": False, "compile": None, "steps": STEPS, "batch": 4, "length": 64,
        "output": str(folder),
    }  # fmt: skip
    trainer = script.trainer_of(argparse.Namespace(**defaults | options))
    for callback in callbacks:
        trainer.add_callback(callback)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lora": "attention"},
        pytest.param({"checkpointing": True}, marks=pytest.mark.long),
        pytest.param({"compile": "aot_eager"}, marks=pytest.mark.long),
        pytest.param({"lora": "all", "checkpointing": True}, marks=pytest.mark.long),
        pytest.param({"lora": "attention", "compile": "aot_eager"}, marks=pytest.mark.long),
    ],
    ids=lambda options: " ".join(map(str, options.values())) or "all weights",
)
def test_a_fine_tune(
    script: ModuleType, engine: Engine, chooser: Chooser, runs: Callable[[], int], tmp_path: Path,
    options: dict[str, Any],
) -> None:  # fmt: skip
    plain = losses(script, tmp_path, **options)
    assert runs() == 0
    tuned = losses(script, tmp_path, GemmsmithCallback(), **options)
    # Without adapters each product is there for the weight's and the input's gradient, too.
    passes = 2 if options.get("lora") else 3
    assert runs() >= STEPS * (passes * FORWARD - FUSED)
    assert tuned == pytest.approx(plain, rel=1e-3)
    assert tuned[-1] < tuned[0]
    gates = {Epilogue.SILU_GATE, Epilogue.SILU_GATE_AUX}
    fused = any(problem.operation.epilogue in gates for problem in chooser.asked)
    assert fused == (options.get("lora") != "all")
