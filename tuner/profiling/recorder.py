"""Makes a profile on a GPU: one process for each contestant, which Nsight Compute starts.

Each holds the GPU's lock, so that no measurement runs meanwhile. The trace by torch's profiler has
a process of its own too: both profilers use CUPTI, which only one can.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.device import DeviceModel, Environment
from gemmsmith.core.problem import Problem
from tuner.errors import TunerError
from tuner.measure.gpu_lock import gpu_lock
from tuner.measure.local_gpu import gpu_uuid
from tuner.profiling import ncu
from tuner.profiling.launches import Contestant, LaunchOrder
from tuner.profiling.records import ProblemProfile, Profiled

LAUNCHES = 3
TIME_LIMIT_S = 180.0
"""Of one contestant: a profile of a large problem takes tens of seconds."""
_DEFAULT = Contestant(name="default")
_NO_RIGHTS = "ERR_NVGPUCTRPERM"


class ProfileFailed(TunerError):
    """A profiler did not run to its end; the message has its own, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Ncu:
    """Nsight Compute on this machine, and the metrics that the GPU has."""

    program: str
    tool: str
    metrics: tuple[str, ...]

    @classmethod
    def here(cls) -> Ncu | None:
        """Returns None if `ncu` is not on the path."""
        program = ncu.find_ncu()
        if program is None:
            return None
        taken = ncu.metrics(ncu.listed(program))
        return cls(program=program, tool=ncu.version(program), metrics=tuple(taken))


def record(
    problem: Problem,
    device: DeviceModel,
    candidates: Sequence[tuple[Candidate, Path]],
    with_ncu: Ncu,
    *,
    ordinal: int = 0,
) -> ProblemProfile:
    """Profile the default and candidates, each with its pack; the first is the winner's.

    Raises:
        ProfileFailed: Nsight Compute or a launch failed.
    """
    sides = []
    with tempfile.TemporaryDirectory() as folder:
        for contestant in (_DEFAULT, *_contestants(candidates)):
            order = LaunchOrder(
                problem=problem,
                contestants=(contestant,),
                launches=LAUNCHES,
                ordinal=ordinal,
                environment=f"{folder}/environment.json",
            )
            table = Path(folder) / "table.csv"
            _run(order, ncu.command(with_ncu.program, with_ncu.metrics, table), table)
            sides.append(profiled(contestant.candidate, table.read_text(errors="replace")))
        environment = msgspec.json.decode(Path(order.environment).read_bytes(), type=Environment)
    default, candidate, *others = sides
    return ProblemProfile(
        problem=problem,
        device=device,
        environment=environment,
        tool=with_ncu.tool,
        recorded_at=datetime.now(UTC).isoformat(timespec="seconds"),
        candidate=candidate,
        default=default,
        runners_up=tuple(others),
    )


def profiled(candidate: Candidate | None, table: str) -> Profiled:
    """One side, of ncu's table of its launches.

    Raises:
        ProfileFailed: the table has other kernels than those of LAUNCHES equal launches.
    """
    try:
        kernels = ncu.per_launch(ncu.read(table), LAUNCHES)
    except ValueError as error:
        raise ProfileFailed(f"ncu's table cannot be read: {error}") from None
    return Profiled(candidate=candidate, kernels=kernels)


def trace(
    problem: Problem, candidates: Sequence[tuple[Candidate, Path]], path: Path, *, ordinal: int = 0
) -> None:
    """Write a Chrome trace of the default and the candidates.

    Raises:
        ProfileFailed: a launch failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        order = LaunchOrder(
            problem=problem,
            contestants=(_DEFAULT, *_contestants(candidates)),
            launches=LAUNCHES,
            ordinal=ordinal,
            environment=f"{folder}/environment.json",
            trace=str(path.absolute()),
        )
        _run(order, (), None)


def _contestants(candidates: Sequence[tuple[Candidate, Path]]) -> list[Contestant]:
    names = ("winner", *(f"runner-up {i}" for i in range(1, len(candidates))))
    return [
        Contestant(name=name, candidate=candidate, pack=str(pack))
        for name, (candidate, pack) in zip(names, candidates, strict=False)
    ]


def _run(order: LaunchOrder, before: Sequence[str], table: Path | None) -> None:
    """Run an order, under the words of a profiler.

    Raises:
        ProfileFailed: it did not end well.
    """
    words = (*before, sys.executable, "-m", "tuner.profiling.launches")
    written = msgspec.json.encode(order).decode()
    name = order.contestants[0].name if len(order.contestants) == 1 else "the trace"
    with gpu_lock(gpu_uuid(order.ordinal)):
        try:
            done = subprocess.run(
                [*words, written], capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise ProfileFailed(f"{name}: not done after {TIME_LIMIT_S:.0f} s") from None
    said = table.read_text(errors="replace") if table is not None and table.exists() else ""
    if _NO_RIGHTS in said + done.stdout + done.stderr:
        raise ProfileFailed(
            "this user may not read the GPU's counters: ask the administrator for "
            "NVreg_RestrictProfilingToAdminUsers=0 (https://developer.nvidia.com/ERR_NVGPUCTRPERM)"
        )
    if done.returncode:
        errors = [line for line in said.splitlines() if line.startswith("==ERROR==")]
        last = (done.stderr.strip().splitlines() or errors or [f"exit {done.returncode}"])[-1]
        raise ProfileFailed(f"profiling {name} failed: {last}")
