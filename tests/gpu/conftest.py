"""Kernels are built once, tests skip where there is no GPU, and a report says what happened.

Environment: GEMMSMITH_TEST_PACKS is the folder that keeps packs between sessions,
GEMMSMITH_GPU_REPORT where the machine-readable report goes, GEMMSMITH_COMMIT the commit to name
in it where there is no git. GEMMSMITH_GPU_TESTS=build builds the kernels at the end, and runs no
test; most files need no GPU for that.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gemmsmith.answers.snapshot import Row, Snapshot
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.config import Config, Use
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import Kernel
from gemmsmith.core.launch import Launch
from gemmsmith.core.problem import DType, Layout, Problem
from gemmsmith.files import publish
from gemmsmith.ops.products import layer
from tests.gpu import selection
from tests.gpu.support.building import BUILD_ONLY, build_needed, need
from tests.support.compiled import kept
from tests.support.replacing import replace
from tests.support.serving import H200
from tuner.compile import ArtifactStore, Builder, find_toolchain
from tuner.devices import local_gpu
from tuner.devices.base import Contender
from tuner.devices.cuda import CudaDevice

HERE = Path(__file__).parent
TEST_TIMEOUT_S = 1500
"""The first test waits for the compiler."""

MESSAGE_CHARACTERS = 2000


def pytest_configure(config: pytest.Config) -> None:
    # Warnings of the GPU host's own torch are not ours to fix.
    config.addinivalue_line("filterwarnings", "default")
    config.pluginmanager.register(Report(config), "gpu-report")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = _missing()
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S))
        if missing:
            item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture(autouse=True)
def _small_layers_run_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """In training, too: they are torch's where products are as small as in most tests."""
    monkeypatch.setattr(layer, "LAYER_FLOPS", 0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    if BUILD_ONLY:
        pytest.skip("its kernels are built")


def _missing() -> str:
    """Why the GPU tests cannot run here; empty if they can."""
    if BUILD_ONLY:
        return ""
    model = local_gpu()
    if model is None:
        return "no CUDA GPU on this machine"
    if model.arch != "sm90":
        return f"{model.name} is {model.arch}; these tests need sm90 (H100, H200)"
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return "" if torch.cuda.is_available() else f"torch {torch.__version__} has no CUDA support"


@pytest.fixture
def in_use() -> Iterator[None]:
    """Winners are in use, though none of a product here: some passes need none of their own."""
    import gemmsmith
    from gemmsmith.ops.engine.source import local_model

    class Missing:
        def path(self, pack: str) -> Path:
            raise FileNotFoundError(pack)

    row = Row(problem=Problem(m=1, n=8, k=8), use=Use.CUBLAS)
    gemmsmith.use((Snapshot.of(local_model(), [row]), Missing()))
    yield
    gemmsmith.use(None)


class Packs:
    """The compiled kernels, and contenders made of them."""

    def __init__(self, paths: dict[str, Path], failures: dict[str, str]) -> None:
        self.paths = paths
        self.failures = failures

    def contender(self, kernel: Kernel, launch: Launch | None = None) -> Contender:
        """A kernel with a launch; fails the test if the kernel did not compile."""
        if kernel.name in self.failures:
            pytest.fail(f"{kernel.name} does not compile: {self.failures[kernel.name]}")
        candidate = Candidate(kernel=kernel, launch=launch or Launch())
        return Contender(candidate=candidate, pack=self.paths[kernel.name])

    def config(self, kernel: Kernel, launch: Launch | None = None) -> tuple[Config, Path]:
        """The same for `gemmsmith.runtime.run`."""
        contender = self.contender(kernel, launch)
        assert contender.pack is not None
        return Config(kernel=kernel, launch=launch or Launch()), contender.pack


@pytest.fixture(scope="session")
def packs() -> Packs:
    """Every chosen kernel, built or kept from an earlier session."""
    kernels = selection.everything()
    need(kernels)
    builder = Builder(ArtifactStore(kept()), find_toolchain())
    paths: dict[str, Path] = {}
    failures: dict[str, str] = {}
    for built in builder.build(kernels):
        if built.pack is not None:
            paths[built.kernel.name] = built.pack.path
        elif built.failure is not None:
            failures[built.kernel.name] = built.failure.message
    return Packs(paths, failures)


@pytest.fixture(scope="session")
def model() -> DeviceModel:
    found = local_gpu() or (H200 if BUILD_ONLY else None)
    assert found is not None
    return found


@pytest.fixture(scope="session")
def device(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[CudaDevice]:
    """The local GPU, measured by a child process as in production."""
    if BUILD_ONLY:
        yield None  # type: ignore[misc]  # no test runs that would use it
        return
    with CudaDevice(0, locks=tmp_path_factory.mktemp("locks")) as opened:
        report = request.config.pluginmanager.get_plugin("gpu-report")
        if isinstance(report, Report):
            report.described = {
                "device": msgspec.to_builtins(opened.model),
                "environment": msgspec.to_builtins(opened.environment),
            }
        yield opened


@pytest.fixture(scope="session")
def misbehaving(tmp_path_factory: pytest.TempPathFactory) -> Misbehaving:
    """The pack of kernels that do what no kernel should."""
    need(())
    output = tmp_path_factory.mktemp("misbehaving") / "misbehaving.so"
    command = find_toolchain().command(HERE / "packs" / "misbehaving.cu", output)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.fail(f"misbehaving.cu does not compile: {done.stderr[-2000:]}")
    return Misbehaving(output)


class Misbehaving:
    """Contenders by the name of their behaviour; all are bf16, tn, any size."""

    def __init__(self, pack: Path) -> None:
        self.pack = pack
        self._like = selection.chosen(DType.BF16, Layout.TN)[0]

    def __call__(self, *names: str) -> list[Contender]:
        return [
            Contender(candidate=Candidate(kernel=replace(self._like, name=name)), pack=self.pack)
            for name in names
        ]


class Report:
    """Writes what ran, where, and how it went, as JSON.

    After every test, so that a session that is cut off leaves all but its last one: `exit_status`
    is null until the end.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._path = os.environ.get("GEMMSMITH_GPU_REPORT")
        self._commit = _commit(config.rootpath)
        self._began = time.time()
        self._tests: dict[str, dict[str, Any]] = {}
        self.described: dict[str, Any] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "tests/gpu" not in report.nodeid and "gpu/" not in report.nodeid:
            return
        entry = self._tests.setdefault(
            report.nodeid, {"test": report.nodeid, "outcome": "passed", "seconds": 0.0}
        )
        entry["seconds"] = round(entry["seconds"] + report.duration, 3)
        if report.outcome != "passed":
            entry["outcome"] = report.outcome
            entry.setdefault("message", _message(report))
        for name, value in report.user_properties:
            entry.setdefault("figures", {})[name] = value
        if report.when == "call" or report.outcome != "passed":
            self._write(None)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if BUILD_ONLY:
            build_needed()
        self._write(int(exitstatus))

    def _write(self, exit_status: int | None) -> None:
        if not self._path:
            return
        outcomes = [entry["outcome"] for entry in self._tests.values()]
        document = {
            "commit": self._commit,
            "began": datetime.fromtimestamp(self._began, UTC).isoformat(timespec="seconds"),
            "seconds": round(time.time() - self._began, 1),
            **self.described,
            "exit_status": exit_status,
            "passed": outcomes.count("passed"),
            "failed": outcomes.count("failed"),
            "skipped": outcomes.count("skipped"),
            "tests": list(self._tests.values()),
        }
        text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
        publish(Path(self._path), text.encode(), shared=True)


def _message(report: pytest.TestReport) -> str:
    """Where and why, as far as 2000 characters go; the whole traceback is in the log."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = f"{crash.path}:{crash.lineno}: {crash.message}" if crash else report.longreprtext
    return text.replace(f"{HERE.parents[1]}/", "")[:MESSAGE_CHARACTERS]


def _commit(root: Path) -> str:
    named = os.environ.get("GEMMSMITH_COMMIT")
    if named:
        return named
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True
        )
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"
