"""The location of the installed CUTLASS, which no other module depends on.

Invariant: the headers and `cutlass_library` come from one installed package, so that the headers
define what the emitters write. Raises `NoLegalCandidate` if the package is missing or incomplete.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from functools import cache
from pathlib import Path

from tuner.errors import NoLegalCandidate

DISTRIBUTION = "nvidia-cutlass"
"""The distribution that contains both `cutlass_library` and the headers."""


@cache
def source_dir() -> Path:
    """The root of the CUTLASS sources in the installed package.

    Raises:
        NoLegalCandidate: the package is missing, or lacks its headers.
    """
    spec = importlib.util.find_spec("cutlass_library")
    if spec is None or not spec.submodule_search_locations:
        raise NoLegalCandidate(
            f"CUTLASS is not installed: run `pip install {DISTRIBUTION}` in this environment"
        )
    root = Path(next(iter(spec.submodule_search_locations))) / "source"
    if not (root / "include" / "cutlass" / "cutlass.h").is_file():
        raise NoLegalCandidate(
            f"CUTLASS's headers are missing under {root}: "
            f"run `pip install --force-reinstall {DISTRIBUTION}`"
        )
    return root


def include_dirs() -> list[Path]:
    """Directories for the compiler's `-I`: the template headers, then the host utilities."""
    root = source_dir()
    return [root / "include", root / "tools" / "util" / "include"]


@cache
def version() -> str:
    """The installed CUTLASS release, such as `4.2.0.0`."""
    return importlib.metadata.version(DISTRIBUTION)
