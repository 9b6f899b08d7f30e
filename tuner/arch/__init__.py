"""GPU architectures, one file each. To add an architecture, write a file and a line in `_ALL`."""

from __future__ import annotations

from tuner.arch.architecture import Architecture
from tuner.arch.sm80 import SM80
from tuner.arch.sm89 import SM89
from tuner.arch.sm90 import SM90
from tuner.arch.sm100 import SM100
from tuner.arch.sm120 import SM120
from tuner.errors import NoLegalCandidate

__all__ = [
    "ARCHITECTURES",
    "MEASURED",
    "SM80",
    "SM89",
    "SM90",
    "SM100",
    "SM120",
    "Architecture",
    "architecture",
]

_ALL = (SM80, SM89, SM90, SM100, SM120)

ARCHITECTURES: dict[str, Architecture] = {arch.name: arch for arch in _ALL}
"""Every architecture that kernels can be compiled for, by name."""

MEASURED = tuple(arch.name for arch in _ALL if arch.measured)
"""Names of the architectures that kernels are tuned on."""


def architecture(name: str) -> Architecture:
    """Return the architecture of that name.

    Raises:
        NoLegalCandidate: no kernels can be compiled for it; the message lists the known names.
    """
    if name not in ARCHITECTURES:
        raise NoLegalCandidate(
            f"no kernels for architecture {name!r}: choose one of {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]
