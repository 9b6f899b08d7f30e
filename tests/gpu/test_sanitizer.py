"""compute-sanitizer on one kernel of each hand-written kind, in a process of its own.

A tool that finds fault with CUTLASS's own ping-pong kernel does not understand TMA pipelines: it
then says nothing about ours, and the test is skipped with that reason.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from gemmsmith.core.kernel import Backend, Kernel, MainloopSchedule, cutlass
from gemmsmith.core.launch import Launch
from gemmsmith.core.problem import DType, Problem
from tests.gpu import selection
from tests.gpu.conftest import Packs
from tests.gpu.support.building import build
from tests.gpu.support.jobs import Job
from tuner.backends import kernels

ROOT = Path(__file__).resolve().parents[2]
TIME_LIMIT_S = 300
FOUND = 86
UNSUPPORTED = re.compile(r"not supported|unsupported|[Uu]nable to|driver version", re.IGNORECASE)
CONTROL = "pingpong"
GROUPED = Problem(m=200, n=136, k=264, batch=5, dtype="bf16.group_rows")


def _sanitizer() -> str:
    program = shutil.which("compute-sanitizer")
    for home in filter(None, (os.environ.get("CUDA_HOME"), "/usr/local/cuda")):
        program = program or shutil.which(f"{home}/bin/compute-sanitizer")
    if program is None:
        pytest.skip("compute-sanitizer is not installed")
    return program


def _problem(kernel: Kernel) -> Problem:
    if kernel.alignment_a == 1:
        return selection.suited(kernel, 200, 136, 509)
    return selection.suited(kernel, 200, 136, 512, splits=2)


def _run(
    tool: str,
    kernel: Kernel,
    launches: tuple[Launch, ...],
    pack: Path | None,
    problem: Problem,
    folder: Path,
) -> tuple[int, str]:
    """Exit status and output; FOUND says that the tool found something."""
    job = Job(check="", kernel=kernel, launches=launches, pack=str(pack), problem=problem)
    path = folder / "job.json"
    path.write_bytes(msgspec.json.encode(job))
    command = [_sanitizer(), "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "10"]
    search = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    try:
        done = subprocess.run(
            [*command, sys.executable, "-m", "tests.gpu.support.sanitized", str(path)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": search},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIME_LIMIT_S,
        )
    except subprocess.TimeoutExpired as expired:
        said = expired.stdout.decode() if isinstance(expired.stdout, bytes) else expired.stdout
        return FOUND, f"{said or ''}\nno end within {TIME_LIMIT_S} s"
    return done.returncode, done.stdout


@pytest.fixture(scope="module", params=["memcheck", "racecheck"])
def tool(
    request: pytest.FixtureRequest, packs: Packs, tmp_path_factory: pytest.TempPathFactory
) -> str:
    """A tool that works here and has nothing to say about CUTLASS's own kernel."""
    name = str(request.param)
    control = selection.of_kind(CONTROL, DType.BF16)
    assert control is not None
    pack = packs.contender(control).pack
    folder = tmp_path_factory.mktemp(name)
    code, said = _run(name, control, (Launch(),), pack, _problem(control), folder)
    if code and "right" not in said.splitlines():
        if UNSUPPORTED.search(said):
            pytest.skip(f"{name} does not work here: {said.strip().splitlines()[-1]}")
        pytest.fail(f"the control did not run under {name}:\n{said[-2000:]}")
    if code:
        pytest.skip(f"{name} finds fault with CUTLASS's own {CONTROL} kernel:\n{said[-500:]}")
    return name


@pytest.mark.parametrize("kind", selection.HAND_WRITTEN)
def test_hand_written_kernels_are_clean(kind: str, tool: str, packs: Packs, tmp_path: Path) -> None:
    kernel = selection.of_kind(kind, DType.BF16)
    if kernel is None:
        pytest.skip(f"the space has no {kind} kernel")
    some = selection.splits_of(kernel)
    launches = tuple(launch for launch in some if launch.splits in (1, 2))
    pack = packs.contender(kernel).pack
    code, said = _run(tool, kernel, launches, pack, _problem(kernel), tmp_path)
    assert code == 0, f"{kernel.name} under {tool}:\n{said[-4000:]}"
    assert "right" in said.splitlines(), said[-2000:]


@pytest.fixture(scope="module")
def walking() -> dict[MainloopSchedule, tuple[Kernel, Path]]:
    """A kernel of each schedule that walks groups, and its pack."""
    first: dict[MainloopSchedule, Kernel] = {}
    for kernel in map(cutlass, kernels(GROUPED)):
        if kernel.backend is Backend.CUTE:
            first.setdefault(kernel.mainloop, kernel)
    _, packs = build(first.values())
    return {mainloop: (kernel, packs[kernel.name]) for mainloop, kernel in first.items()}


@pytest.mark.parametrize(
    "mainloop",
    [
        MainloopSchedule.WARP_SPECIALIZED,
        MainloopSchedule.PINGPONG,
        MainloopSchedule.COOPERATIVE,
    ],
)
def test_kernels_that_walk_groups_are_clean(
    mainloop: MainloopSchedule,
    walking: dict[MainloopSchedule, tuple[Kernel, Path]],
    tool: str,
    tmp_path: Path,
) -> None:
    kernel, pack = walking[mainloop]
    code, said = _run(tool, kernel, (Launch(),), pack, GROUPED, tmp_path)
    assert code == 0, f"{kernel.name} under {tool}:\n{said[-4000:]}"
    assert "right" in said.splitlines(), said[-2000:]
