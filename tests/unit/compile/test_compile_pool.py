"""The compile pool: one result per kernel whatever happens, and no compiler left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gemmsmith.core.problem import DType
from tests.support import fake_nvcc
from tests.support.candidates import several
from tuner.compile import ArtifactStore, Builder, nvcc
from tuner.errors import CompileFailed, DiskFull, JobAborted
from tuner.trial import FailureKind


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where units are compiled; nothing may be left in it."""
    directory = tmp_path / "scratch"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "packs")


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def test_builds_once_and_finds_it_the_next_time(
    store: ArtifactStore, scratch: Path, tmp_path: Path
) -> None:
    builder = Builder(store, fake_nvcc.toolchain(tmp_path), workers=2)
    wanted = several(5)
    built = list(builder.build([*wanted, wanted[0]]))
    assert sorted(item.kernel.name for item in built) == sorted(each.name for each in wanted)
    for item in built:
        assert item.pack is not None
        assert item.failure is None
        assert not item.cached
        assert item.kernel.name in item.pack.kernels
    assert fake_nvcc.calls(tmp_path) == 2
    again = list(Builder(ArtifactStore(store.root), builder.toolchain).build(wanted))
    assert all(item.cached and item.pack is not None for item in again)
    assert fake_nvcc.calls(tmp_path) == 2
    assert list(scratch.iterdir()) == []


def test_kernel_that_does_not_compile_is_one_failure(
    store: ArtifactStore, scratch: Path, tmp_path: Path
) -> None:
    wanted = several(5)
    bad = wanted[3]
    builder = Builder(store, fake_nvcc.toolchain(tmp_path, bad=[bad.name]), workers=1)
    built = {item.kernel.name: item for item in builder.build(wanted)}
    assert len(built) == 5
    failure = built.pop(bad.name).failure
    assert failure is not None
    assert failure.kind is FailureKind.COMPILE
    assert f"error: in {bad.name}_mainloop" in failure.message
    assert all(item.pack is not None for item in built.values())
    # The unit, then the four others together and the suspect alone.
    assert fake_nvcc.calls(tmp_path) == 3
    assert list(scratch.iterdir()) == []


def test_kernel_that_the_compiler_does_not_name_is_found_by_halving(
    store: ArtifactStore, scratch: Path, tmp_path: Path
) -> None:
    wanted = several(8)
    bad = [wanted[1].name, wanted[6].name]
    toolchain = fake_nvcc.toolchain(tmp_path, bad=bad, message="internal error: no idea where")
    built = list(Builder(store, toolchain, workers=1).build(wanted))
    assert len(built) == 8
    assert {item.kernel.name for item in built if item.failure} == set(bad)
    assert list(scratch.iterdir()) == []


def test_closing_the_generator_kills_the_compilers_and_their_helpers(
    store: ArtifactStore, scratch: Path, tmp_path: Path
) -> None:
    quick, slow = several(2)
    builder = Builder(store, fake_nvcc.toolchain(tmp_path, slow=[slow.name]), workers=2)
    results = builder.build([quick, slow])
    assert next(results).kernel == quick
    helper = fake_nvcc.helper(tmp_path)
    assert alive(helper)
    results.close()
    wait_for(lambda: not alive(helper))
    assert list(scratch.iterdir()) == []
    assert store.find(quick) is not None
    assert store.find(slow) is None


def test_another_thread_can_stop_a_build(
    store: ArtifactStore, scratch: Path, tmp_path: Path
) -> None:
    quick, slow = several(2)
    builder = Builder(store, fake_nvcc.toolchain(tmp_path, slow=[slow.name]), workers=2)
    builder.stop()  # nothing to stop yet: harmless
    results = builder.build([quick, slow])
    assert next(results).kernel == quick
    helper = fake_nvcc.helper(tmp_path)
    stopper = threading.Timer(0.2, builder.stop)
    stopper.start()
    with pytest.raises(JobAborted, match="finished packs are kept"):
        next(results)
    stopper.join()
    wait_for(lambda: not alive(helper))
    assert list(scratch.iterdir()) == []
    assert [item.cached for item in builder.build([quick])] == [True]


def test_compilation_goes_on_while_the_caller_is_busy(
    store: ArtifactStore, scratch: Path, tmp_path: Path
) -> None:
    wanted = several(3, DType.BF16) + several(3, DType.FP16)
    results = Builder(store, fake_nvcc.toolchain(tmp_path), workers=1).build(wanted)
    next(results)
    wait_for(lambda: len(ArtifactStore(store.root).packs()) == 2)
    assert len(list(results)) == 5
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("end", ["pass", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_process_that_ends_leaves_no_compiler(scratch: Path, tmp_path: Path, end: str) -> None:
    script = tmp_path / "abandon.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os, signal
            from pathlib import Path
            from tests.support import fake_nvcc
            from tests.support.candidates import several
            from tuner.compile import ArtifactStore, Builder

            here = Path({str(tmp_path)!r})
            quick, slow = several(2)
            toolchain = fake_nvcc.toolchain(here, slow=[slow.name])
            builder = Builder(ArtifactStore(here / "packs"), toolchain, workers=2)
            results = builder.build([quick, slow])
            next(results)
            fake_nvcc.helper(here)
            {end}
            """
        )
    )
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "TMPDIR": str(scratch)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    wait_for(lambda: not alive(fake_nvcc.helper(tmp_path)))
    wait_for(lambda: list(scratch.iterdir()) == [])


def test_compiler_that_hangs_is_a_failure_of_its_kernel(
    store: ArtifactStore, scratch: Path, tmp_path: Path
) -> None:
    wanted = several(3)
    toolchain = fake_nvcc.toolchain(tmp_path, slow=[wanted[2].name])
    builder = Builder(store, toolchain, workers=1, time_limit_s=5.0)
    built = {item.kernel: item for item in builder.build(wanted)}
    failure = built.pop(wanted[2]).failure
    assert failure is not None
    assert "did not finish within 5 s" in failure.message
    assert all(item.pack for item in built.values())
    wait_for(lambda: not alive(fake_nvcc.helper(tmp_path)))
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize(
    ("message", "error", "says"),
    [
        ("error: unsupported GNU version! gcc versions later than 15", CompileFailed, "doctor"),
        ("fatal error: error writing to x.o: No space left on device", DiskFull, "TMPDIR"),
    ],
)
def test_fault_of_the_machine_is_raised_and_not_blamed_on_kernels(
    store: ArtifactStore,
    scratch: Path,
    tmp_path: Path,
    message: str,
    error: type[Exception],
    says: str,
) -> None:
    wanted = several(4)
    toolchain = fake_nvcc.toolchain(tmp_path, bad=[wanted[0].name], message=message)
    with pytest.raises(error, match=says):
        list(Builder(store, toolchain, workers=1).build(wanted))
    assert list(scratch.iterdir()) == []
    assert store.packs() == []


def test_compiler_out_of_memory_is_tried_again_with_less_at_once(
    store: ArtifactStore, scratch: Path, tmp_path: Path
) -> None:
    wanted = several(4)
    message = "nvcc error : 'cicc' died due to signal 9 (Kill signal)"
    toolchain = fake_nvcc.toolchain(tmp_path, bad=[wanted[0].name], message=message)
    built = {item.kernel: item for item in Builder(store, toolchain, workers=2).build(wanted)}
    failure = built.pop(wanted[0]).failure
    assert failure is not None
    assert "out of memory" in failure.message
    assert all(item.pack for item in built.values())


def test_full_disk_in_the_store_is_raised_and_loses_nothing(
    small_disk: Path, scratch: Path, tmp_path: Path
) -> None:
    first, second = several(2)
    builder = Builder(ArtifactStore(small_disk / "packs"), fake_nvcc.toolchain(tmp_path))
    (built,) = builder.build([first])
    (small_disk / "ballast").write_bytes(bytes(4096 * (os.statvfs(small_disk).f_bavail)))
    with pytest.raises(DiskFull, match="free some space"):
        list(builder.build([first, second]))
    assert builder.store.find(first) == built.pack
    assert list(scratch.iterdir()) == []


def test_summary_is_short_and_holds_the_errors() -> None:
    log = "\n".join(["note: noise " + "x" * 5000] * 50 + ["unit.cu(3): error: the cause"] + ["end"])
    text = nvcc.summary(log)
    assert "error: the cause" in text
    assert text.endswith("end")
    assert len(text) < 6000
