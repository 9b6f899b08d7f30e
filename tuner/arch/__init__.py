"""GPU architectures, one file each. A new one is a file and a line in `_ALL`."""

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

ARCHITECTURES: dict[str, Architecture] = {each.name: each for each in _ALL}
"""By name: all that kernels can be compiled for."""

MEASURED = tuple(each.name for each in _ALL if each.measured)
"""Those that kernels are tuned on."""


def architecture(name: str) -> Architecture:
    """The architecture of a kernel or a device model.

    Raises:
        NoLegalCandidate: there are no kernels for it; says which there are.
    """
    if (found := ARCHITECTURES.get(name)) is None:
        raise NoLegalCandidate(
            f"no kernels for architecture {name!r}: choose one of {', '.join(ARCHITECTURES)}"
        )
    return found
