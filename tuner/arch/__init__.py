"""GPU architectures, one file each. A new one is a file and a line in `_ALL`."""

from __future__ import annotations

from tuner.arch.architecture import Architecture
from tuner.arch.sm90 import SM90
from tuner.errors import NoLegalCandidate

__all__ = ["ARCHITECTURES", "MEASURED", "SM90", "Architecture", "architecture"]

_ALL = (SM90,)

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
