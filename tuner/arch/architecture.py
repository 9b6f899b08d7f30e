"""What a GPU architecture is to those who make kernels for it: limits, compiler flags, rates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Architecture:
    """One architecture; there is one object of each, so two are equal if they are the same.

    Attributes:
        name: `sm90` and so on, as kernels and device models say it.
        gpus: models that have it, for people.
        target: the compiler's, such as `90a`. A letter: nothing else runs the code, and it may use
            every instruction.
        measured: whether kernels are tuned on it; of the others kernels can only be compiled.
        compiler_flags: what the compiler is told beside the target.
        shared_bytes: shared memory that one thread block may own.
        max_cluster: thread blocks in a cluster that every GPU can run (portable size); 1: none.
        max_cluster_side: of these along M or N.
        reads_fp8: whether tensor cores take FP8 operands.
        sms_per_gpc: streaming multiprocessors of a whole GPU processing cluster: a cluster of
            blocks stays inside. 0 where there are no clusters.
        resident: measured numbers of blocks that run at once, by SM count and cluster size.
        flops_per_clock: 16-bit FLOP that one SM's tensor cores do in a clock, FP32 sums.
        typical_sm_count: SMs of the model that constants were fitted on, or the usual one; for a
            device of which no more is known.
        l2_bytes: level-2 cache of that model.
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
        """What makes the compiler build for this architecture and no other. No PTX is kept."""
        target = f"-gencode=arch=compute_{self.target},code=sm_{self.target}"
        return (target, *self.compiler_flags)

    def peak_flops_per_clock(self, bits: int) -> int:
        """FLOP of one SM's tensor cores in a clock, with operands of so many bits."""
        return self.flops_per_clock * 16 // bits

    def __reduce__(self) -> tuple[Callable[[str], Architecture], tuple[str]]:
        """Another process has its own object of the same architecture."""
        return _named, (self.name,)

    def resident_blocks(self, sm_count: int, cluster: int) -> int:
        """Thread blocks that run at once, one per SM, clusters inside their GPC.

        What was measured, else CUTLASS's `get_max_cta_occupancy`, which takes all GPCs for whole
        ones.
        """
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
    whole, rest = divmod(sm_count, arch.sms_per_gpc)
    per_gpc = arch.sms_per_gpc - arch.sms_per_gpc % cluster
    return min(sm_count, whole * per_gpc + rest - rest % cluster)
