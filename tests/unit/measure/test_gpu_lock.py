"""The GPU's lock, in a folder where any user of the machine may have put something."""

from __future__ import annotations

import logging
import os
import signal
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

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
    pid = os.fork()
    if pid == 0:
        status = 1
        signal.alarm(10)  # whatever it waits for, it does not stay
        try:
            os.chdir(folder)
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            task()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def locked() -> None:
    with gpu_lock("GPU-x", Path()):
        pass


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_planted_link_is_refused_and_its_target_left_alone(
    link: Callable[[Path, Path], None], shared: Path, secret: Path
) -> None:
    link(secret, lock_path("GPU-x", shared))
    with (
        pytest.raises(DeviceError, match="remove it as that user or as root"),
        gpu_lock("GPU-x", shared),
    ):
        pass
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600


def test_a_link_to_nothing_makes_no_file(shared: Path, tmp_path: Path) -> None:
    lock_path("GPU-x", shared).symlink_to(tmp_path / "new")
    with pytest.raises(DeviceError, match="is a symbolic link"), gpu_lock("GPU-x", shared):
        pass
    assert not (tmp_path / "new").exists()


def test_a_planted_pipe_does_not_hold_anybody_up(shared: Path) -> None:
    os.mkfifo(lock_path("GPU-x", shared))
    with pytest.raises(DeviceError, match="is no plain file"), gpu_lock("GPU-x", shared):
        pass


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
def test_a_file_that_is_not_to_be_read_is_a_clear_error(shared: Path) -> None:
    lock_path("GPU-x", shared).touch(mode=0o600)

    def attempt() -> None:
        with pytest.raises(DeviceError, match=r"cannot be read.*user 0"):
            locked()

    assert as_nobody(shared, attempt) == 0


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
