"""A session: its files, the environment of its commands, and its preparation.

Several sessions may share a host. Each has its own device, database and log names; they share the
pack store.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.session import carrying
from benchmarks.site import ARCHIVE

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / ".gpu-site"
STATE = ROOT / ".state"
CARRIED = ROOT / ".packs"
CORES = len(os.sched_getaffinity(0))
"""Cores that this session may use; on a host of several GPUs that may be a share."""


def gpus() -> int:
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


@dataclass(frozen=True, kw_only=True)
class Session:
    """The options of a session.

    Attributes:
        suite: for `compile`, `tune`, `record` and `peers`; None for the suite of each step.
        models: models for `train`, `train_moe` and `train_fused`; each trains those that it has.
        modes: modes of training: eager, compiled, graph.
        tests: files that `test` runs.
        bundle: winners that `programs` runs with; None if it tunes its own.
        rounds: processes of `programs` with winners; one more runs without. The last process of
            each kind also times the parts of a step.
        tag: device and element types, in the names of this session's files.
    """

    out: Path
    dry_run: bool
    dtypes: tuple[str, ...]
    time_limit: int
    effort: str
    limit: int | None
    device: str
    suite: str | None
    problems: tuple[str, ...]
    models: tuple[str, ...]
    modes: tuple[str, ...]
    tests: tuple[str, ...]
    bundle: Path | None
    rounds: int
    tag: str

    @property
    def ordinal(self) -> int:
        return int(self.device.partition(":")[2] or 0)

    def file(self, stem: str, suffix: str, dtype: str | None = None) -> Path:
        """Return a file of this session in --out, such as `tune-cuda1-bf16.log`."""
        middle = self.tag if dtype is None else f"{self.tag.partition('-')[0]}-{dtype}"
        return self.out / f"{stem}-{middle}{suffix}"

    def database(self, stem: str = "gemmsmith") -> str:
        return f"sqlite:///{self.file(stem, '.db')}"

    def only_device(self) -> dict[str, str]:
        """Return an environment in which the session's GPU is the only one, as cuda:0."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = visible.split(",") if visible else []
        name = names[self.ordinal] if self.ordinal < len(names) else str(self.ordinal)
        return {"CUDA_VISIBLE_DEVICES": name}

    def command(
        self,
        *words: str,
        log: Path,
        env: Mapping[str, str] | None = None,
        stdout: IO[bytes] | None = None,
        time_limit: float | None = None,
    ) -> int:
        """Run a command with the carried packages, and write its output to `log` and to stdout.

        Args:
            stdout: a file for the command's standard output, which is then not shown.
            time_limit: seconds after which it gets SIGTERM, because background jobs ignore SIGINT.
        """
        print(f"$ {' '.join(words)}", flush=True)
        if self.dry_run:
            return 0
        with (
            log.open("ab") as file,
            subprocess.Popen(
                words,
                cwd=ROOT,
                env=self.environment(env),
                stdout=stdout or subprocess.PIPE,
                stderr=subprocess.PIPE if stdout else subprocess.STDOUT,
            ) as process,
        ):
            shown = process.stderr if stdout else process.stdout
            assert shown is not None
            alarm = threading.Timer(time_limit or 0, process.terminate)
            if time_limit is not None:
                alarm.start()
            try:
                for line in shown:
                    file.write(line)
                    sys.stdout.write(line.decode(errors="replace"))
                    sys.stdout.flush()
                return process.wait()
            except BaseException:  # a signal ends the session
                process.terminate()
                raise
            finally:
                alarm.cancel()

    def environment(self, env: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment of this session's commands; `env` overrides it."""
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(SITE), str(ROOT / "client"), str(ROOT)]),
            "PYTHONUNBUFFERED": "1",
            "GEMMSMITH_DATABASE": self.database(),
            "GEMMSMITH_PACKS": str(STATE / "packs"),
            # Steps import the winners that they begin with.
            "GEMMSMITH_WINNERS": str(STATE / "no-winners"),
            # Carried packs have the signature of another machine, or none.
            "GEMMSMITH_UNSIGNED": "1",
            "GEMMSMITH_SIGNING_KEY": str(STATE / "signing.key"),
            "GEMMSMITH_TRUSTED": str(STATE / "trusted"),
            **(env or {}),
        }

    def gemmsmith(
        self,
        *words: str,
        log: Path,
        env: Mapping[str, str] | None = None,
        stdout: IO[bytes] | None = None,
        time_limit: float | None = None,
    ) -> int:
        """Run the command line of this checkout; arguments as in `command`."""
        return self.command(
            *(sys.executable, "-m", "service.cli.main", *words),
            log=log,
            env=env,
            stdout=stdout,
            time_limit=time_limit,
        )

    def pytest(
        self,
        *words: str,
        log: Path,
        env: Mapping[str, str],
        stdout: IO[bytes] | None = None,
        time_limit: float | None = None,
    ) -> int:
        """Run tests; arguments as in `command`. Kernels that they compile are kept."""
        return self.command(
            *(sys.executable, "-m", "pytest", *words, "-q", "--tb=short", "-p", "no:cacheprovider"),
            log=log,
            # Tests do not see the variables of an installation, but those of tests.
            env={"GEMMSMITH_TEST_PACKS": str(STATE / "packs"), **env},
            stdout=stdout,
            time_limit=time_limit,
        )

    def ask(
        self,
        *words: str,
        log: Path,
        env: Mapping[str, str] | None = None,
        time_limit: float | None = None,
    ) -> tuple[int, Any]:
        """Run a command of this checkout with --json; return its exit status and its document.

        The document is None if the command printed none, as in a dry run.
        """
        with tempfile.TemporaryFile() as stdout:
            code = self.gemmsmith(
                *words, "--json", log=log, env=env, stdout=stdout, time_limit=time_limit
            )
            stdout.seek(0)
            try:
                return code, json.loads(stdout.read())
            except ValueError:
                return code, None

    def keep(self, stem: str, result: object) -> None:
        """Write a result to a file of this session, atomically."""
        if not self.dry_run:
            path = self.file(stem, ".json")
            part = path.with_suffix(".part")
            part.write_text(json.dumps(result) + "\n")
            part.replace(path)


class Deadline:
    """The session's time limit, for steps that divide it."""

    def __init__(self, session: Session) -> None:
        self._at = time.monotonic() + session.time_limit

    def over(self) -> bool:
        return time.monotonic() >= self._at

    def left(self) -> str:
        return str(max(10, int(self._at - time.monotonic())))


def prepare(session: Session) -> int:
    """Install the wheels into a folder of their own and unpack carried packs."""
    session.out.mkdir(parents=True, exist_ok=True)
    if not session.dry_run and not (
        any(Path("/dev").glob("nvidia*")) or shutil.which("nvidia-smi")
    ):
        print("no NVIDIA GPU on this machine; these steps need one (see `gemmsmith doctor`)")
        return 2
    log = session.file("setup", ".log")
    # A dry run changes nothing, and so may run beside a session.
    with nullcontext() if session.dry_run else _alone():
        code = _install(session, log)
        if code:
            return code
        if not session.dry_run:
            (STATE / "packs").mkdir(parents=True, exist_ok=True)
            carrying.unpack(CARRIED, STATE / "packs", SITE)
    code = session.gemmsmith("db", "upgrade", log=log)
    # Tuning tries earlier winners first.
    shipped = sorted(str(path) for path in (ROOT / "configs" / "winners").glob("*.jsonl"))
    code = code or session.gemmsmith("import", *shipped, log=log)
    for kernels in sorted(CARRIED.glob("*.gskernels")):
        code = code or session.gemmsmith("kernels", "install", str(kernels), log=log)
    return code


def _install(session: Session, log: Path) -> int:
    # Into a temporary folder, renamed when it is complete, so that no session sees half of it.
    archive = ROOT / ".wheels" / ARCHIVE
    wheels = sorted(str(path) for path in (ROOT / ".wheels").glob("*.whl"))
    if not (wheels or archive.exists()) or SITE.exists():
        return 0
    part = STATE / "gpu-site.part"
    if not session.dry_run:
        shutil.rmtree(part, ignore_errors=True)
    if archive.exists():
        print(f"unpacking {archive.name}", flush=True)
        if not session.dry_run:
            with tarfile.open(archive) as tar:
                tar.extraction_filter = getattr(tarfile, "data_filter", None)  # new in 3.11.4
                tar.extractall(part)
            part.rename(SITE)
        return 0
    code = session.command(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"),
        *("--no-compile", "--target", str(part), *wheels),
        log=log,
    )
    if code == 0 and not session.dry_run:
        part.rename(SITE)
    return code


@contextmanager
def _alone() -> Iterator[None]:
    """Hold the lock of preparations: one session prepares at a time."""
    STATE.mkdir(exist_ok=True)
    with (STATE / "session.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
