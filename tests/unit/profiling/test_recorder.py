"""Making a profile: processes that a played ncu starts, and launches on a played GPU."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.problem import Problem
from tests.support import played_ncu
from tests.support.candidates import KERNEL
from tests.support.host import MODEL, HostEvent, HostStream, build_pack
from tests.support.replacing import replace
from tests.support.serving import H200
from tuner.measure import bench, graphs
from tuner.profiling import launches, recorder
from tuner.profiling.launches import Contestant, LaunchOrder
from tuner.profiling.recorder import Ncu, ProfileFailed, record
from tuner.workloads.operands import HOST

PROBLEM = Problem(m=1024, n=2304, k=768)
SMALL = Problem(m=24, n=16, k=40)


def candidate(name: str = "good") -> Candidate:
    return Candidate(kernel=replace(KERNEL, name=name))


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch, state: str = "") -> Ncu:
    played_ncu.install(folder, state)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    with_ncu = Ncu.here()
    assert with_ncu is not None
    return with_ncu


def test_each_contestant_has_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_ncu = installed(tmp_path, monkeypatch)
    assert with_ncu.tool == "ncu 2025.3.1.0"
    assert "sm__inst_issued.avg.pct_of_peak_sustained_active" in with_ncu.metrics
    pack = tmp_path / "pack.so"
    profile = record(PROBLEM, H200, [(candidate(), pack), (candidate("other"), pack)], with_ncu)
    assert (profile.problem, profile.device) == (PROBLEM, H200)
    assert profile.environment.driver == "played"
    assert profile.candidate.candidate == candidate()
    assert "cutlass3x_sm90" in profile.candidate.main.name
    assert profile.default.main.name.startswith("nvjet")
    assert [side.candidate for side in profile.runners_up] == [candidate("other")]
    assert profile.candidate.main.waits["gmma"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("no rights", "may not read the GPU's counters"),
        ("fails", "profiling default failed: CUDA out of memory"),
        ("other kernels", "2 kernels, not the same ones"),
    ],
)
def test_what_went_wrong_is_said(
    state: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_ncu = installed(tmp_path, monkeypatch, state)
    with pytest.raises(ProfileFailed, match=reason):
        record(PROBLEM, H200, [(candidate(), tmp_path / "pack.so")], with_ncu)


def test_without_ncu_nothing_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Ncu.here() is None


def test_without_a_gpu_the_trace_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of the launches is a real one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    with pytest.raises(ProfileFailed, match="profiling the trace failed: no CUDA device 0 here"):
        recorder.trace(PROBLEM, [(candidate(), tmp_path / "pack.so")], tmp_path / "trace.json")


def test_only_the_launches_are_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "Event", HostEvent)
    monkeypatch.setattr(bench, "context_is_dead", lambda: "")
    monkeypatch.setattr(
        bench, "fill_bytes", lambda pointer, value, size, _: ctypes.memset(pointer, value, size)
    )
    pack = build_pack(tmp_path)
    order = LaunchOrder(
        problem=SMALL,
        contestants=(
            Contestant(name="default"),
            Contestant(name="winner", candidate=candidate(), pack=str(pack)),
        ),
        launches=3,
        ordinal=HOST,
        environment=str(tmp_path / "environment.json"),
    )
    opened = bench.Bench(SMALL, MODEL, HOST, HostStream(), 1)  # type: ignore[arg-type]
    launched: list[str] = []
    inner = bench.Bench.launch

    def launch(self: bench.Bench, prepared: bench.Prepared, i: int) -> None:
        launched.append(f"launch {i}")
        inner(self, prepared, i)

    @contextmanager
    def watched(name: str) -> Iterator[None]:
        launched.append(f"begin {name}")
        yield
        launched.append(f"end {name}")

    monkeypatch.setattr(bench.Bench, "launch", launch)
    launches.launch_all(order, opened, watched)
    at = launched.index("begin winner")
    assert launched[at:] == ["begin winner", "launch 1", "launch 2", "launch 3", "end winner"]
    assert launched[:2] == ["begin default", "end default"]


def test_a_trace_names_the_contestants(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with launches.traced(path), launches.annotated("runner-up 1"):
        pass
    events = json.loads(path.read_text())["traceEvents"]
    assert "runner-up 1" in {event.get("name") for event in events}
