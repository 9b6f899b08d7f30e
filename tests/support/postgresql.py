"""A temporary PostgreSQL server from the distribution's programs."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "max_connections": "200",
}
_FORGETFUL = {
    # The data is temporary, so nothing needs to reach the disk.
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "off",
}


def programs() -> Path | None:
    """The folder of the newest installed server's programs."""
    on_path = shutil.which("initdb")
    if on_path:
        return Path(on_path).resolve().parent
    versions = sorted(
        (p for p in Path("/usr/lib/postgresql").glob("*/bin") if (p / "initdb").exists()),
        key=lambda p: float(p.parent.name),
    )
    return versions[-1] if versions else None


@dataclass(frozen=True, kw_only=True)
class Server:
    """A running server; `url` is without a database's name, `data` its folder."""

    url: str
    data: Path
    control: tuple[str, ...]
    start: tuple[str, ...]

    def pid(self) -> int:
        """The process id of the server's main process."""
        return int((self.data / "postmaster.pid").read_text().split()[0])

    def restart(self) -> None:
        """Close all connections and start again."""
        _run(*self.control, "-m", "fast", "stop")
        _run(*self.control, *self.start)


@contextmanager
def running(binaries: Path) -> Iterator[str]:
    """A server on a free port of this machine. Yields its URL without a database's name."""
    with server(binaries) as started:
        yield started.url


@contextmanager
def server(binaries: Path, *, durable: bool = False) -> Iterator[Server]:
    """The same server, which can be restarted. If `durable`, committed data is on the disk."""
    folder = Path(tempfile.mkdtemp(prefix="gemmsmith-pg-"))
    user = []
    if os.geteuid() == 0:  # the server refuses to run as root
        give(folder)
        user = ["runuser", "-u", "postgres", "--"]
    data = folder / "data"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    values = _SETTINGS if durable else {**_SETTINGS, **_FORGETFUL}
    settings = " ".join(f"-c {name}={value}" for name, value in values.items())
    control = [*user, str(binaries / "pg_ctl"), "-D", str(data), "-s", "-w"]
    try:
        _run(
            *user,
            str(binaries / "initdb"),
            *("-D", str(data), "-U", "postgres", "-A", "trust", "-E", "UTF8"),
            *("--locale=C", "--no-sync"),
        )
        log = str(folder / "log")
        start = ("-l", log, "-o", f"-k {folder} -p {port} {settings}", "start")
        _run(*control, *start)
        try:
            url = f"postgresql+psycopg://postgres@127.0.0.1:{port}"
            yield Server(url=url, data=data, control=tuple(control), start=start)
        finally:
            _run(*control, "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def give(folder: Path) -> None:
    """Let the server write to this folder."""
    if os.geteuid() == 0:
        shutil.chown(folder, "postgres", "postgres")


def administer(server: str, statement: str) -> None:
    """Run a statement without a transaction; `server` is a URL without a database's name."""
    import psycopg  # not installed on GPU hosts, which run tests/gpu only

    plain = server.replace("postgresql+psycopg", "postgresql")
    with psycopg.connect(f"{plain}/postgres", autocommit=True) as connection:
        connection.execute(statement)


def _run(*command: str) -> None:
    # The server inherits the standard output of pg_ctl, so a pipe would never end.
    with tempfile.TemporaryFile() as said:
        done = subprocess.run(command, stdout=said, stderr=said, cwd="/", check=False)
        if done.returncode:
            said.seek(0)
            raise RuntimeError(f"{command} failed: {said.read().decode(errors='replace')}")
