"""A GPU architecture as the tuner needs it: limits, compiler flags and peak rates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Architecture:
    """One GPU architecture. Each has exactly one object per process, compared by identity.

    Attributes:
        name: such as `sm90`, as kernels and device models spell it.
        gpus: GPU models of this architecture, for messages.
        target: the compiler's name, such as `90a`. Code for a target with a letter may use every
            instruction of the architecture, and runs on no other.
        measured: whether kernels are tuned on it; otherwise they can only be compiled.
        compiler_flags: compiler options beside the target.
        shared_bytes: bytes of shared memory that one thread block may own.
        max_cluster: thread blocks in the largest portable cluster; 1 without clusters.
        max_cluster_side: the most thread blocks of a cluster along M or along N.
        reads_fp8: whether tensor cores take FP8 operands.
        sms_per_gpc: streaming multiprocessors of a complete GPU processing cluster (GPC); a cluster
            of thread blocks stays inside one. 0 without clusters.
        resident: measured numbers of thread blocks that run at once, by SM count and cluster size.
        flops_per_clock: 16-bit FLOP of one SM's tensor cores in a clock, summed in FP32.
        typical_sm_count: SMs of the model that constants were fitted on, or of the usual model;
            used for a device whose SM count is not known.
        l2_bytes: bytes of the level-2 cache of that model.
    """

    name: str
    gpus: str
    target: str
    measured: bool
    compiler_flags: tuple[str, ...] = ()
    shared_bytes: int
    max_cluster: int = 1
    max_cluster_side: int = 1
    reads_fp8: bool = True
    sms_per_gpc: int = 0
    resident: Mapping[int, Mapping[int, int]] = field(default_factory=lambda: MappingProxyType({}))
    flops_per_clock: int
    typical_sm_count: int
    l2_bytes: int

    @property
    def target_flags(self) -> tuple[str, ...]:
        # Machine code for this architecture only: no PTX, which a driver would compile again.
        target = f"-gencode=arch=compute_{self.target},code=sm_{self.target}"
        return (target, *self.compiler_flags)

    def peak_flops_per_clock(self, bits: int) -> int:
        """FLOP of one SM's tensor cores in a clock, with operands of `bits` bits."""
        return self.flops_per_clock * 16 // bits

    def __reduce__(self) -> tuple[Callable[[str], Architecture], tuple[str]]:
        # Architectures are compared by identity: an unpickled one is its own process's object.
        return _named, (self.name,)

    def resident_blocks(self, sm_count: int, cluster: int) -> int:
        """Thread blocks that run at once, one per SM and in clusters of `cluster` blocks."""
        # The measured number if there is one. Otherwise CUTLASS's `get_max_cta_occupancy`, which
        # assumes that all GPCs but the last are complete.
        return _resident_blocks(self, sm_count, cluster)


def _named(name: str) -> Architecture:
    from tuner.arch import architecture

    return architecture(name)


@lru_cache(maxsize=1024)
def _resident_blocks(arch: Architecture, sm_count: int, cluster: int) -> int:
    if cluster == 1:
        return sm_count
    if measured := arch.resident.get(sm_count, {}).get(cluster):
        return measured
    # A cluster does not span GPCs: the SMs of a GPC beyond a multiple of the cluster stay idle.
    complete, rest = divmod(sm_count, arch.sms_per_gpc)
    per_gpc = arch.sms_per_gpc - arch.sms_per_gpc % cluster
    return min(sm_count, complete * per_gpc + rest - rest % cluster)
