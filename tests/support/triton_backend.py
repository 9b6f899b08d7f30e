"""The package `examples/triton_backend`, installed by pip into a folder of its own, from a copy."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.docs import ROOT

EXAMPLE = ROOT / "examples" / "triton_backend"
HAS_TRITON = importlib.util.find_spec("triton") is not None
"""torch's build for the CPU does not bring Triton."""


def install(folder: Path) -> Path:
    """The folder of packages with the example in it. Nothing is downloaded."""
    copy, packages = folder / "triton_backend", folder / "packages"
    ignored = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    shutil.copytree(EXAMPLE, copy, ignore=ignored)  # pip builds in the folder of the source
    words = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *words, str(packages), str(copy)], check=True
    )
    return packages
