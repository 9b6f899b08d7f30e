"""One nvcc run over one unit, and the meaning of its error messages.

nvcc runs in its own process group with its own temporary directory. `stop` kills the whole group,
so that neither a time-out nor a cancelled build leaves compilers behind. If this process itself is
killed by SIGKILL, a watcher in the group notices that its pipe was closed, and kills the group.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from gemmsmith.core.kernel import AnyKernel, Backend
from tuner.backends.cutlass.slim import write_slim_headers
from tuner.backends.unit import include_dirs, unit_source
from tuner.compile.toolchain import Toolchain
from tuner.errors import CompileFailed, DiskFull, TunerError

_WORD = re.compile(r"\w+")
_DERIVED = re.compile(r"_(?:mainloop|epilogue|base)$")
_ERROR = re.compile(r"\b(?:error|fatal)\b", re.IGNORECASE)
_OUT_OF_MEMORY = re.compile(
    r"died due to signal 9|Killed|out of memory|cannot allocate|bad_alloc", re.IGNORECASE
)
_ENVIRONMENT = re.compile(
    r"unsupported GNU version|Cannot find compiler|Failed to preprocess host compiler"
    r"|fatal error: (?:gemmsmith|cutlass|cute|cuda)\S* ?:? ?No such file"
    r"|cannot find -lcudart|cicc: not found|ptxas: not found"
)
_NO_SPACE = re.compile(r"No space left on device|Disk quota exceeded|File too large")
_GUARDED = (
    'exec 3<&0; (cat <&3 >/dev/null; rm -rf -- "$1"; kill -KILL 0) & shift; "$@" </dev/null 3<&-'
)
"""Shell script that runs a command; when standard input ends, it removes the directory of its first
argument and kills the whole process group. This process never writes to that pipe, so the input
ends only when this process does."""
PRELUDE = (sys.executable, "-P", "-m", "tuner.compile.prelude")
_SHELL_SIGKILL = 128 + signal.SIGKILL
_LINE_LENGTH = 400
_QUOTED_LINES = 12


@dataclass(slots=True)
class Compilation:
    """An nvcc process that compiles one unit."""

    kernels: Sequence[AnyKernel]
    toolchain: Toolchain
    directory: Path
    process: subprocess.Popen[bytes]
    started: float = field(default_factory=time.monotonic)

    @classmethod
    def start(cls, kernels: Sequence[AnyKernel], toolchain: Toolchain) -> Compilation:
        """Write the unit's source and headers, and start nvcc.

        All kernels have one architecture, which replaces that of `toolchain`.

        Raises:
            DiskFull: no space for source and headers.
        """
        toolchain = toolchain.targeting(kernels[0].arch)
        try:
            directory = Path(tempfile.mkdtemp(prefix="gemmsmith-unit-"))
            source = directory / "unit.cu"
            source.write_text(unit_source(kernels), encoding="utf-8")
            slim = directory / "include"
            write_slim_headers(slim, [kernel.operation for kernel in kernels])
            with (directory / "log").open("wb") as log:
                include = (slim, *include_dirs(kernels))
                compiler = toolchain.command(source, directory / "unit.so", *include)
                command = _after_plugins(directory, kernels, compiler)
                process = subprocess.Popen(
                    ["/bin/sh", "-c", _GUARDED, "gemmsmith-unit", str(directory), *command],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    # nvcc's temporary files are removed with the directory.
                    env={**os.environ, "TMPDIR": str(directory)},
                    start_new_session=True,
                )
        except OSError as error:
            raise _operating_system_fault(error) from error
        return cls(kernels, toolchain, directory, process)

    @property
    def output(self) -> Path:
        """The shared object; complete when the process has ended with status 0."""
        return self.directory / "unit.so"

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def log(self) -> str:
        return (self.directory / "log").read_text(encoding="utf-8", errors="replace")

    def stop(self) -> None:
        """Kill the process group, in which at least the watcher still runs, and wait for nvcc."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()

    def discard(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)


def _after_plugins(directory: Path, kernels: Sequence[AnyKernel], compiler: list[str]) -> list[str]:
    """The command of a unit: the compiler's, after plugins have made their files for it."""
    if not any(kernel.backend is Backend.PLUGIN for kernel in kernels):
        return compiler
    (directory / "kernels.json").write_bytes(msgspec.json.encode(kernels))
    return [*PRELUDE, str(directory), *compiler]


def out_of_memory(returncode: int, log: str) -> bool:
    # When memory runs out, Linux ends nvcc, or one of its children, by SIGKILL.
    return returncode in (-signal.SIGKILL, _SHELL_SIGKILL) or bool(_OUT_OF_MEMORY.search(log))


def environment_fault(log: str) -> TunerError | None:
    """The error to raise if the machine is at fault; None if a kernel is."""
    if _NO_SPACE.search(log):
        return DiskFull(
            f"no space left for the compiler under {tempfile.gettempdir()}: free some space, or "
            "set TMPDIR to a larger disk, and try again"
        )
    if _ENVIRONMENT.search(log):
        return CompileFailed(
            "nvcc cannot compile anything on this machine; `gemmsmith doctor` says what is "
            f"missing. nvcc printed:\n{summary(log)}"
        )
    return None


def suspects(kernels: Sequence[AnyKernel], log: str) -> list[AnyKernel]:
    mentioned = {_DERIVED.sub("", word) for word in _WORD.findall(log)}
    return [kernel for kernel in kernels if kernel.name in mentioned]


def summary(log: str) -> str:
    """The compiler's first errors and last lines, short enough to be stored with a trial."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.search(line)][: _QUOTED_LINES - 4]
    last = [line for line in lines[-4:] if line not in errors]
    quoted = [
        line if len(line) <= _LINE_LENGTH else line[:_LINE_LENGTH] + " …"
        for line in [*errors, *last]
    ]
    return "\n".join(quoted) or "nvcc failed without a message"


def _operating_system_fault(error: OSError) -> TunerError:
    if error.errno is not None and _NO_SPACE.search(os.strerror(error.errno)):
        return DiskFull(
            f"no space left for a unit's source under {tempfile.gettempdir()}: free some space, "
            "or set TMPDIR to a larger disk, and try again"
        )
    return CompileFailed(f"nvcc cannot be started: {error}")
