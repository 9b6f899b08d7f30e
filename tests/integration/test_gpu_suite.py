"""The GPU tests on a machine without one: all of them are found, and skipped."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from gemmsmith.core.kernel import Kernel
from gemmsmith.core.launch import Launch
from gemmsmith.core.problem import DType
from tests.gpu import selection
from tests.gpu.support.jobs import Job
from tests.support.docs import ROOT


@pytest.mark.long
def test_every_gpu_test_can_be_imported() -> None:
    command = [sys.executable, "-m", "pytest", "tests/gpu", "--collect-only", "-q"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
    assert " tests collected" in done.stdout


@pytest.mark.parametrize("kind", ["pingpong", "multistage", "cluster_split_k"])
def test_a_job_reaches_the_process_that_launches(kind: str) -> None:
    kernel = selection.of_kind(kind, DType.BF16)
    assert isinstance(kernel, Kernel)
    problem = selection.suited(kernel, 200, 136, 512)
    job = Job(check="", kernel=kernel, launches=(Launch(),), pack="", problem=problem)
    assert msgspec.json.decode(msgspec.json.encode(job), type=Job) == job
