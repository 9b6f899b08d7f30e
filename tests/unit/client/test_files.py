"""Writing to all kinds of files that a user names, and gemmsmith's own private files."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from gemmsmith import files
from gemmsmith.answers.cache import PackCache, default_cache_dir
from gemmsmith.errors import PackError
from gemmsmith.files import data_folder, is_stream, private_folder, publish, replacing, turn, unsafe
from gemmsmith.files import write as write_file
from gemmsmith.program.captured import Captured
from gemmsmith.signing import Signer, Trusted, trusted_folder
from gemmsmith.winners.bundle import write_bundle
from tests.support.processes import as_user
from tests.support.replacing import replace
from tests.support.serving import winner
from tests.support.snapshots import BIG, CONFIG, CONTENT, PACK, row, snapshot
from tests.support.sqlite import empty_store
from tuner.compile import ArtifactStore
from tuner.compile.archive import archive
from tuner.errors import StoreError
from tuner.exchange import write_winners
from tuner.store.backup import backup

OLD = b"what was there"
ANOTHER_USER = 12345

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    with umask(0o022):
        yield


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


class Place:
    """A path that a user names, and the content that arrives there."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.path, self.real, self.kind = folder / "named", folder / "real", kind
        self._pipe: tuple[int, int] | None = None
        getattr(self, kind.replace(" ", "_"))()

    def file(self) -> None:
        self.real = self.path
        self.path.write_bytes(OLD)
        self.path.chmod(0o640)

    def new_file(self) -> None:
        self.real = self.path = self.path.parent / "new" / "folder" / "file"

    def link(self) -> None:
        self.real.write_bytes(OLD)
        self.path.symlink_to("real")

    def links(self) -> None:
        (self.path.parent / "inner").mkdir()
        self.real = self.path.parent / "inner" / "real"
        self.real.write_bytes(OLD)
        (self.path.parent / "inner" / "second").symlink_to("real")
        (self.path.parent / "folder").symlink_to("inner")
        self.path.symlink_to("folder/second")

    def link_to_nothing(self) -> None:
        self.path.symlink_to("real")

    def pipe(self) -> None:
        os.mkfifo(self.path)
        self._pipe = (os.open(self.path, os.O_RDONLY | os.O_NONBLOCK), -1)

    def link_to_pipe(self) -> None:
        os.mkfifo(self.real)
        self.path.symlink_to(self.real)
        self._pipe = (os.open(self.real, os.O_RDONLY | os.O_NONBLOCK), -1)

    def descriptor(self) -> None:
        self._pipe = os.pipe()
        self.path = Path(f"/dev/fd/{self._pipe[1]}")

    def link_to_descriptor(self) -> None:
        self._pipe = os.pipe()
        self.path.symlink_to(f"/proc/self/fd/{self._pipe[1]}")

    def appended(self) -> None:
        """Appends, like the shell's `export /dev/fd/3 3>>real`."""
        self.real.write_bytes(OLD)
        number = os.open(self.real, os.O_WRONLY | os.O_APPEND)
        self._pipe, self.path = (-1, number), Path(f"/dev/fd/{number}")

    @property
    def expected(self) -> bytes:
        """The content that must precede the written content."""
        return OLD if self.kind == "appended" else b""

    def arrived(self) -> bytes:
        if self._pipe is not None and self._pipe[0] >= 0:
            os.set_blocking(self._pipe[0], False)
            try:
                return os.read(self._pipe[0], 2**16)
            except BlockingIOError:
                return b""
        return self.real.read_bytes() if self.real.exists() else b""

    def close(self) -> None:
        for number in self._pipe or ():
            if number >= 0:
                os.close(number)


KINDS = (
    "file", "new file", "link", "links", "link to nothing", "pipe", "link to pipe", "descriptor",
    "link to descriptor", "appended",
)  # fmt: skip


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path, request.param)
    yield made
    made.close()


def test_a_target_is_written_to_and_keeps_its_kind(place: Place) -> None:
    before = place.path.lstat() if place.path.is_symlink() or place.path.exists() else None
    kind = before and stat.S_IFMT(before.st_mode)
    write_file(place.path, b"new")
    assert place.arrived() == place.expected + b"new"
    assert kind in (None, stat.S_IFMT(place.path.lstat().st_mode))
    if place.kind == "file":
        assert mode(place.path) == 0o640
    if place.kind in ("new file", "link to nothing"):
        assert mode(place.real) == 0o644
    assert litter(place) == []


def test_a_failure_leaves_the_target_unchanged(place: Place) -> None:
    before = place.arrived()
    with suppress(ZeroDivisionError), replacing(place.path) as aside:
        aside.write_bytes(b"half")
        1 / 0  # noqa: B018
    assert place.arrived() == before
    assert litter(place) == []


def litter(place: Place) -> list[Path]:
    """Files that writing has left behind."""
    folder = place.real.parent if place.real.parent.exists() else place.path.parent
    return [path for path in folder.rglob(".*") if not str(path).startswith("/dev")]


@pytest.mark.parametrize(
    ("make", "number"),
    [
        (lambda path: path.mkdir(), errno.EISDIR),
        (lambda path: path.symlink_to(path), errno.ELOOP),
        (lambda path: path.symlink_to("/dev/full"), errno.ENOSPC),
        (lambda path: path.symlink_to("/dev/fd/987"), errno.EBADF),
        (lambda path: path.symlink_to(".."), errno.EISDIR),
        (
            lambda path: (path.symlink_to("loop/x"), (path.parent / "loop").symlink_to("loop")),
            errno.ELOOP,
        ),
    ],
    ids=["folder", "loop", "full", "not open", "folder above", "loop of folders"],
)
def test_an_error_names_the_path_that_cannot_be_written(
    make: Callable[[Path], None], number: int, tmp_path: Path
) -> None:
    path = tmp_path / "named"
    make(path)
    with pytest.raises(OSError, match=r"named") as caught:
        write_file(path, b"new")
    assert (caught.value.errno, caught.value.filename) == (number, str(path))


def test_a_large_file_goes_through_a_pipe_at_its_readers_pace(tmp_path: Path) -> None:
    path, content, taken = tmp_path / "pipe", os.urandom(2**22), []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: taken.append(path.read_bytes()))
    reader.start()
    write_file(path, content)
    reader.join()
    assert taken == [content]


def test_a_pipe_without_a_reader_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_UNREAD_S", 0.2)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(TimeoutError, match="nothing is read from this pipe"):
        write_file(path, bytes(2**21))
    os.close(reader)


def test_only_files_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev/null")
    for path, stream in (
        ("none", False), ("link", True), ("/dev/null", True), ("/dev/stdout", True),
        ("/dev/fd/2", True), ("/proc/self/fd/1", True), ("/proc/thread-self/fd/1", True),
    ):  # fmt: skip
        assert is_stream(tmp_path / path) is stream


def _write_backup(path: Path) -> None:
    database = path.parent / "some.db"
    database.write_bytes(empty_store())
    backup(f"sqlite:///{database}", path)


WRITERS: dict[str, Callable[[Path], object]] = {
    "snapshot": lambda path: snapshot(row(BIG)).save(path),
    "captured": lambda path: Captured().save(path),
    "bundle": lambda path: write_bundle(
        path, snapshot(row(BIG, config=replace(CONFIG, pack=None))), {}
    ),
    "winners": lambda path: write_winners(path, [winner(BIG)]),
    "archive": lambda path: archive(ArtifactStore(path.parent / "packs"), path),
    "backup": _write_backup,
}


@pytest.mark.parametrize("writer", WRITERS)
def test_each_function_that_writes_a_file_follows_links(writer: str, tmp_path: Path) -> None:
    for name in ("file", "pipe"):
        (tmp_path / f"link to {name}").symlink_to(name)
    WRITERS[writer](tmp_path / "link to file")
    os.mkfifo(tmp_path / "pipe")
    taken: list[bytes] = []
    reader = threading.Thread(target=lambda: taken.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    WRITERS[writer](tmp_path / "link to pipe")
    reader.join()
    assert [len(content) for content in taken] == [(tmp_path / "file").stat().st_size]
    assert taken[0]
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert all((tmp_path / f"link to {name}").is_symlink() for name in ("file", "pipe"))


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o077])
def test_its_own_folders_are_private_for_every_umask(mask: int, tmp_path: Path) -> None:
    with umask(mask):
        publish(tmp_path / "cache" / "a" / "b" / "file", b"")
        private_folder(tmp_path / "state" / "inner")
        Signer.create(tmp_path / "keys" / "signing.key")
        PackCache(tmp_path / "packed").store(PACK, CONTENT)
    folders = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert len(folders) == 8
    assert {mode(path) for path in folders} == {0o700}
    assert {mode(path) for path in tmp_path.rglob("*") if path.is_file()} == {0o600}


UNSAFE = [
    (0o700, 0, None),
    (0o755, 0, None),
    (0o770, 0, "chmod go-w"),
    (0o775, 0, "chmod go-w"),
    (0o757, 0, "chmod go-w"),
    (0o1777, 0, "chmod go-w"),
    (0o700, ANOTHER_USER, "belongs to another user"),
]


@as_root
@pytest.mark.parametrize(("permissions", "owner", "reason"), UNSAFE)
@pytest.mark.parametrize("what", ["folder", "file"])
def test_keys_and_packs_that_others_may_change_are_not_used(
    what: str, permissions: int, owner: int, reason: str | None, tmp_path: Path
) -> None:
    """All folders and files from which keys or code are read."""
    cache, trusted = PackCache(tmp_path), tmp_path / "trusted"
    pack = cache.store(PACK, CONTENT)
    key = Signer.create(tmp_path / "signing.key").public
    publish(trusted / "some.pub", key.line.encode())
    for place in (pack.parent, trusted) if what == "folder" else (pack, trusted / "some.pub"):
        place.chmod(permissions)
        os.chown(place, owner, -1)
        assert (unsafe(place) is None) is (reason is None)
    if reason is None:
        assert cache.find(PACK) == pack
        assert Trusted.load(trusted).keys.keys() == {key.id}
        return
    with pytest.raises(PackError, match=reason):
        cache.find(PACK)
    with pytest.raises(ValueError, match=reason):
        Trusted.load(trusted)
    if what == "folder":
        with pytest.raises(StoreError, match=reason):
            ArtifactStore(pack.parent).manifests()


@as_root
def test_files_of_root_are_safe(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)

    def look() -> None:
        assert unsafe(Path("/usr")) is None
        assert unsafe(Path("/tmp")) is not None

    assert as_user(ANOTHER_USER, look) == 0


@as_root
def test_a_private_key_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "signing.key"
    Signer.create(path)
    os.chown(path, ANOTHER_USER, -1)
    with pytest.raises(ValueError, match="belongs to another user"):
        Signer.load(path)


@pytest.mark.parametrize("value", ["", "relative", "./here", "../up", "~/x"])
def test_a_relative_base_folder_does_not_count(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, value)
    for name in ("GEMMSMITH_TRUSTED", "GEMMSMITH_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    assert trusted_folder() == home / ".config" / "gemmsmith" / "trusted"
    assert data_folder() == home / ".local" / "share" / "gemmsmith"
    assert default_cache_dir() == home / ".cache" / "gemmsmith"


@pytest.mark.parametrize("text", [b"\xef\xbb\xbfa\r\nb\r\n", b"a\nb\n"])
def test_a_byte_order_mark_and_other_ends_of_lines_are_no_text(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(text)
    assert files.read_text(tmp_path / "file") == "a\nb\n"


@pytest.mark.parametrize("text", ["a".encode("utf-16"), b"\xe9"])
def test_another_encoding_is_named(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(text)
    with pytest.raises(ValueError, match="not UTF-8"):
        files.read_text(tmp_path / "file")


@as_root
def test_a_lock_that_another_user_holds_is_not_waited_for_long(tmp_path: Path) -> None:
    folder = tmp_path / "packs"
    folder.mkdir(mode=0o755)
    for above in (folder, *folder.parents[:4]):
        above.chmod(above.stat().st_mode | 0o055)

    def hold() -> None:
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX)
        (end, _) = os.pipe()
        os.write(said, b"held")
        os.read(end, 1)

    heard, said = os.pipe()
    pid = os.fork()
    if pid == 0:
        os._exit(as_user(ANOTHER_USER, hold))
    assert os.read(heard, 4) == b"held"
    began = time.monotonic()
    for exclusive in (True, False):
        with turn(folder, patience_s=0.2, exclusive=exclusive):
            pass
    assert 0.4 <= time.monotonic() - began < 5
    os.kill(pid, 9)
    os.waitpid(pid, 0)
