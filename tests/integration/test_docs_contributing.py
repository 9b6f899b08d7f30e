"""CONTRIBUTING.md: the epilogue that it adds works in a copy of the project."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.docs import ROOT

CHECKS = """
import torch
from gemmsmith.core.activations import FUNCTIONS
from gemmsmith.core.epilogue import Epilogue, EpilogueStep
from gemmsmith.core.problem import Problem
from tests.support.judging import SMALL
from tuner.backends import kernels
from tuner.backends.unit import unit_source
from tuner.workloads import ways
from tuner.workloads.operands import HOST, Operands
from tuner.workloads.registry import workload_of

ways.COMPILER = "eager"
assert Epilogue.TANH_GATE_AUX.steps == (EpilogueStep("store", "aux"), EpilogueStep("gate", "tanh"))
for dtype, part in (
    ("bf16.then_tanh_gate", "activation::tanh"),
    ("bf16.then_tanh_gate_aux", "activation::tanh"),
    ("fp16.then_dtanh_gate_act", "slope::tanh"),
    ("fp8_e4m3.then_tanh_gate", "activation::tanh"),
    ("fp8_e4m3.out_e4m3.then_tanh_gate", "activation::tanh"),
    ("bf16.group_rows.then_tanh_gate_aux", "activation::tanh"),
    ("bf16.group_rows.then_dtanh_gate", "slope::tanh"),
):
    batch = 4 if "group" in dtype else 1
    problem = Problem(m=256, n=256, k=128, batch=batch, dtype=dtype)
    assert part in unit_source(kernels(problem)[:1]), dtype

problem = Problem(m=96, n=160, k=208, dtype="bf16.then_tanh_gate")
operands = Operands(problem, SMALL, HOST, seed=1)
s = operands.sets[0]
gate, up = torch.bmm(s.a.double(), s.b.double())[0].chunk(2, -1)
right = torch.tanh(gate) * up
workload = workload_of(problem.operation)
sequences = [*workload.defaults(problem), *workload.alternatives(problem)]
assert len(sequences) == 4
for way in sequences:
    result = way.launches(problem, [s], 2**30)[0]().double()
    assert torch.linalg.norm(result - right) < 1e-2 * torch.linalg.norm(right), way.name

x = torch.linspace(-3, 3, 101, dtype=torch.float64, requires_grad=True)
FUNCTIONS["tanh"].value(x).sum().backward()
torch.testing.assert_close(FUNCTIONS["tanh"].gradient(torch.ones_like(x), x), x.grad)
"""


def test_the_addition_of_an_epilogue(tmp_path: Path) -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (diff,) = re.findall(r"```diff\n(.*?)```", page, re.DOTALL)
    for folder in ("client", "tuner", "tests", "configs"):
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    subprocess.run(["git", "apply"], cwd=tmp_path, input=diff, text=True, check=True)
    (tmp_path / "checks.py").write_text(CHECKS)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'client'}:{tmp_path}"}
    done = subprocess.run(
        [sys.executable, "checks.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
