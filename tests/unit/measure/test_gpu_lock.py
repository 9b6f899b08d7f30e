"""The GPU's lock, in a folder where any user of the machine may have put something."""

from __future__ import annotations

import logging
import os
import re
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.processes import as_user
from tuner.errors import DeviceError
from tuner.measure import gpu_lock as module
from tuner.measure.gpu_lock import gpu_lock, lock_path

NOBODY = 65534

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """As /tmp is: all may put files there, and each remove their own."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("the worker's own")
    path.chmod(0o600)
    return path


def as_nobody(folder: Path, task: Callable[[], None]) -> int:
    """Run the task in a fork that is user nobody in `folder`; its exit status."""
    return as_user(NOBODY, task, folder)


def locked() -> None:
    with gpu_lock("GPU-x", Path()):
        pass


def test_it_is_the_same_for_all_whatever_their_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert lock_path("GPU-x") == Path("/tmp/gemmsmith-GPU-x.lock")


@pytest.mark.parametrize(
    ("planted", "reason"),
    [
        (lambda path, secret: path.symlink_to(secret), "is a symbolic link"),
        (lambda path, secret: path.hardlink_to(secret), "has another name"),
        (lambda path, secret: path.symlink_to(secret.with_name("new")), "is a symbolic link"),
        (lambda path, _: os.mkfifo(path), "is no plain file"),
        (lambda path, _: path.mkdir(), "is no plain file"),
        (lambda path, _: path.parent.rmdir(), "No such file or directory"),
    ],
    ids=["link", "hard link", "link to nothing", "pipe", "folder", "no folder"],
)
def test_what_is_no_lock_stops_nothing_and_is_left_alone(
    planted: Callable[[Path, Path], None],
    reason: str,
    shared: Path,
    secret: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    planted(lock_path("GPU-x", shared), secret)
    with caplog.at_level(logging.WARNING), gpu_lock("GPU-x", shared):
        pass
    (said,) = caplog.messages
    assert said.startswith("measuring without the GPU's lock: ")
    assert reason in said
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert not secret.with_name("new").exists()


@pytest.mark.parametrize("uuid", ["../../up", "MIG-GPU-1/3/0", "..", "", "a\0b"])
def test_no_name_leads_out_of_the_folder(uuid: str, shared: Path) -> None:
    with gpu_lock(uuid, shared):
        (path,) = shared.iterdir()
    assert path == lock_path(uuid, shared)


def test_what_others_need_to_lock_is_to_read_it(shared: Path) -> None:
    before = os.umask(0o077)
    try:
        with gpu_lock("GPU-x", shared):
            mode = lock_path("GPU-x", shared).stat().st_mode
    finally:
        os.umask(before)
    assert stat.S_IMODE(mode) == 0o644


def test_the_mode_of_a_file_that_is_there_already_stays(shared: Path) -> None:
    path = lock_path("GPU-x", shared)
    path.touch(mode=0o600)
    with gpu_lock("GPU-x", shared):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@as_root
def test_one_users_lock_excludes_another_user(shared: Path) -> None:
    with gpu_lock("GPU-x", shared):
        pid = os.fork()
        if pid == 0:
            os._exit(as_nobody(shared, locked))
        time.sleep(0.3)
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "nobody has the lock as well"
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "it comes after"


@as_root
def test_root_locks_what_another_user_has_made(shared: Path) -> None:
    assert as_nobody(shared, locked) == 0
    path = lock_path("GPU-x", shared)
    assert path.stat().st_uid == NOBODY
    with gpu_lock("GPU-x", shared):
        assert as_nobody(shared, refused) == 0


def refused() -> None:
    """The lock is held: it is not to be had at once."""
    assert not module._lock(module._open(lock_path("GPU-x", Path())))


@as_root
def test_a_file_that_is_not_to_be_read_stops_nothing(shared: Path) -> None:
    lock_path("GPU-x", shared).touch(mode=0o600)

    def attempt() -> None:
        with pytest.raises(DeviceError, match=r"cannot be read.*user 0"):
            module._acquire(lock_path("GPU-x", Path()))
        locked()

    assert as_nobody(shared, attempt) == 0


@as_root
def test_another_users_process_holds_it_no_longer_than_a_measurement_takes(
    shared: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_LONGEST_S", 0.3)
    pid = os.fork()
    if pid == 0:
        os._exit(as_nobody(shared, lambda: held(8.0)))
    while not lock_path("GPU-x", shared).exists():
        time.sleep(0.01)
    time.sleep(0.1)
    began = time.monotonic()
    with caplog.at_level(logging.WARNING), gpu_lock("GPU-x", shared):
        assert 0.2 < time.monotonic() - began < 5.0
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert re.search(r"without the GPU's lock: process \d+ .*for too long", caplog.messages[-1])


def test_this_users_own_process_is_waited_for(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LONGEST_S", 0.1)
    descriptor = module._acquire(lock_path("GPU-x", shared))
    timer = threading.Timer(0.5, os.close, (descriptor,))
    timer.start()
    began = time.monotonic()
    with gpu_lock("GPU-x", shared):
        assert time.monotonic() - began > 0.3
    timer.join()


def held(seconds: float) -> None:
    with gpu_lock("GPU-x", Path()):
        time.sleep(seconds)


def test_whoever_waits_for_a_file_that_is_gone_locks_the_new_one(shared: Path) -> None:
    path = lock_path("GPU-x", shared)
    entered = threading.Event()

    def wait() -> None:
        with gpu_lock("GPU-x", shared):
            assert not module._lock(os.open(path, os.O_RDONLY)), "no lock on the file there is"
            entered.set()

    with gpu_lock("GPU-x", shared):
        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.2)
        path.unlink()
    thread.join()
    assert entered.is_set()


def test_the_log_says_who_has_the_gpu(
    shared: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", 0.1)
    descriptor = module._acquire(lock_path("GPU-x", shared))
    timer = threading.Timer(0.4, os.close, (descriptor,))
    timer.start()
    with caplog.at_level(logging.WARNING), gpu_lock("GPU-x", shared):
        pass
    timer.join()
    (said,) = caplog.messages
    assert f"process {os.getpid()} (" in said
