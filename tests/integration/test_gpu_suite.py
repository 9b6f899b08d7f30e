"""The GPU tests on a machine without one: all of them are found, and skipped."""

from __future__ import annotations

import importlib
from pathlib import Path

import msgspec
import pytest

from gemmsmith.kernel import Kernel
from gemmsmith.launch import Launch
from gemmsmith.problem import DType
from tests.gpu import selection
from tests.gpu.support.jobs import Job

ROOT = Path(__file__).resolve().parents[2]


def test_every_gpu_test_can_be_imported() -> None:
    files = sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
    assert len(files) > 20
    for file in files:
        module = importlib.import_module(f"tests.gpu.{file.stem}")
        assert any(name.startswith(("test_", "Test")) for name in vars(module)), file


@pytest.mark.parametrize("kind", ["pingpong", "multistage", "cluster_split_k"])
def test_a_job_reaches_the_process_that_launches(kind: str) -> None:
    kernel = selection.of_kind(kind, DType.BF16)
    assert isinstance(kernel, Kernel)
    problem = selection.suited(kernel, 200, 136, 512)
    job = Job(check="", kernel=kernel, launches=(Launch(),), pack="", problem=problem)
    assert msgspec.json.decode(msgspec.json.encode(job), type=Job) == job
