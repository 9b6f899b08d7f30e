"""Launches kernels for the tests, in a process that may hang or crash: `python -m …worker`.

One job a line on stdin, one verdict a line on stdout. `Worker` is the tests' side: a job that does
not end costs its own test, and the next one gets a new process.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO

import msgspec

from tests.gpu.support.jobs import Job, Verdict
from tuner.devices.supervisor import reap

ROOT = Path(__file__).resolve().parents[3]
JOB_LIMIT_S = 120.0
"""A job takes a second or two; the first one waits for torch and a CUDA context."""


class Worker:
    """Use as a context manager."""

    def __init__(self, limit_s: float = JOB_LIMIT_S) -> None:
        self._limit_s = limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as self

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._stderr.close()

    def run(self, job: Job) -> Verdict:
        """The job's verdict; a hang and a crash are failures like any other."""
        process = self._started()
        assert process.stdin is not None
        try:
            process.stdin.write(msgspec.json.encode(job) + b"\n")
            process.stdin.flush()
            line = self._lines.get(timeout=self._limit_s)
        except queue.Empty:
            self._end()
            return Verdict(failure=f"hung: no verdict within {self._limit_s:g} s")
        except OSError:
            line = b""
        if line:
            verdict = msgspec.json.decode(line, type=Verdict)
            if verdict.failure is not None:
                self._end()  # what comes next must not start from a ruined context
            return verdict
        code = process.wait()
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - 2000))
        said = self._stderr.read().decode(errors="replace")
        self._end()
        return Verdict(failure=f"crashed with status {code}: {said}")

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.support.worker"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
        )
        self._lines = queue.SimpleQueue()
        assert self._process.stdout is not None
        source, lines = self._process.stdout, self._lines
        threading.Thread(target=_read, args=(source, lines), daemon=True).start()
        return self._process

    def _end(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        reap(self._process)
        self._process = None


def _read(source: IO[bytes], lines: queue.SimpleQueue[bytes]) -> None:
    try:
        for line in source:
            lines.put(line)
    except ValueError:  # closed while reading
        pass
    lines.put(b"")


def main() -> int:
    """Serve jobs until the end of stdin; a CUDA error that stays ends the process."""
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    import torch

    from tests.gpu.support import checks

    for line in sys.stdin.buffer:
        job = msgspec.json.decode(line, type=Job)
        try:
            verdict = getattr(checks, job.check)(job)
        except Exception as error:  # noqa: BLE001 - whatever happened is the verdict
            verdict = Verdict(failure=f"{type(error).__name__}: {error}")
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            output.write(
                msgspec.json.encode(Verdict(failure=f"{verdict.failure}; {error}")) + b"\n"
            )
            return 70
        output.write(msgspec.json.encode(verdict) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
