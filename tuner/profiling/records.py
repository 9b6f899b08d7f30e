"""A profile: Nsight Compute's counters of the kernels of a candidate and of the default.

Shares are in 0 … 1. A counter is None if it was not taken. Counters are medians over the launches
that were profiled; each launch begins with a cold L2, at a clock that is not fixed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.device import DeviceModel, Environment
from gemmsmith.core.problem import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """One kernel of a launch.

    Attributes:
        blocks, threads: thread blocks of the grid, and threads of a block.
        us: its duration, which is longer than outside the profiler.
        clock_mhz: of the SMs meanwhile.
        waves: blocks, divided by those that fit on the GPU at once by Nsight Compute's occupancy.
        registers: of a thread.
        shared_bytes: of a block, with the 1 KiB that CUDA keeps for itself.
        occupancy: warps on an SM, of those that it can hold.
        tensor: time in which the tensor pipe is active.
        issue: cycles in which a scheduler issues an instruction.
        sm, l2, dram: the highest throughput of any unit of the SM, of L2 and of DRAM.
        l2_bytes, dram_bytes: read and written.
        stalls: cycles between two instructions of a warp, by what it waits for.
    """

    name: str
    blocks: int
    threads: int
    us: float
    clock_mhz: float | None = None
    waves: float | None = None
    registers: int | None = None
    shared_bytes: int | None = None
    occupancy: float | None = None
    tensor: float | None = None
    issue: float | None = None
    sm: float | None = None
    l2: float | None = None
    dram: float | None = None
    l2_bytes: int | None = None
    dram_bytes: int | None = None
    stalls: Mapping[str, float] = field(default_factory=dict)

    @property
    def waits(self) -> dict[str, float]:
        """The share of a warp's time by what it waits for, the largest first."""
        whole = sum(self.stalls.values())
        order = sorted(self.stalls, key=self.stalls.__getitem__, reverse=True)
        return {reason: self.stalls[reason] / whole for reason in order if whole}


@dataclass(frozen=True, kw_only=True, slots=True)
class Profiled:
    """What one launch runs. `candidate` is None for the default; `kernels` has at least one."""

    candidate: Candidate | None
    kernels: tuple[Counters, ...]

    @property
    def main(self) -> Counters:
        """The kernel that takes longest."""
        return max(self.kernels, key=lambda counters: counters.us)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProblemProfile:
    """A candidate and the default of a problem on a device model.

    Attributes:
        tool: name and version of the profiler.
        recorded_at: UTC, ISO 8601.
        runners_up: other candidates, the fastest first.
    """

    problem: Problem
    device: DeviceModel
    environment: Environment
    tool: str
    recorded_at: str
    candidate: Profiled
    default: Profiled
    runners_up: tuple[Profiled, ...] = ()
