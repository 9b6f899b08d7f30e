"""What a trial measures: a kernel and how it is launched."""

from __future__ import annotations

from dataclasses import dataclass, field

from gemmsmith.core.kernel import AnyKernel
from gemmsmith.core.launch import Launch


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A kernel together with how it is launched: what a trial measures."""

    kernel: AnyKernel
    launch: Launch = field(default_factory=Launch)

    @property
    def has_fixed_order(self) -> bool:
        """Whether each output element is summed in one order: same inputs, same bits."""
        return self.kernel.has_fixed_order(self.launch)

    @property
    def key(self) -> str:
        """Unique short form: the kernel's name and the launch's key."""
        return key_of(self.kernel, self.launch)


def key_of(kernel: AnyKernel, launch: Launch) -> str:
    """The key of the candidate that these would make."""
    return f"{kernel.name}@{launch.key}"
