"""A candidate: what a trial measures."""

from __future__ import annotations

from dataclasses import dataclass, field

from gemmsmith.core.kernel import AnyKernel
from gemmsmith.core.launch import Launch


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A kernel together with its launch."""

    kernel: AnyKernel
    launch: Launch = field(default_factory=Launch)

    @property
    def has_fixed_order(self) -> bool:
        """Whether each output element is summed in one order: same inputs, same bits."""
        return self.kernel.has_fixed_order(self.launch)

    @property
    def summation(self) -> str | None:
        """The order of its sums; see `Kernel.summation`."""
        return self.kernel.summation(self.launch)

    @property
    def key(self) -> str:
        return f"{self.kernel.name}@{self.launch.key}"
