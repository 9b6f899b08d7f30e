"""cuBLASLt's pack, compiled by the host's compiler, because it has no device code."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from gemmsmith.core.kernel import CublasLtKernel
from gemmsmith.core.operation import Layout
from tuner.backends.cublaslt.operations import OPERATIONS, LibraryOperation
from tuner.backends.unit import include_dirs, unit_source

FLAGS = ("-std=c++17", "-O2", "-Wall", "-Wextra", "-shared", "-fPIC", "-fvisibility=hidden")


def kernel(operation: LibraryOperation) -> CublasLtKernel:
    """The kernel for an operation of the library, even if none of our operations needs it."""
    return CublasLtKernel(
        name=operation.name,
        arch="sm90",
        dtype="bf16",
        layout=Layout.TN,
        alignment_a=8,
        alignment_b=8,
        alignment_d=8,
    )


def build(
    path: Path,
    operations: Sequence[LibraryOperation] = OPERATIONS,
    first: Sequence[Path] = (),
) -> None:
    """Compile a pack with these kernels to `path`; `first` is the first include folder."""
    kernels = [kernel(each) for each in operations]
    source = path.with_suffix(".cpp")
    source.write_text(unit_source(kernels), encoding="utf-8")
    include = [f"-I{folder}" for folder in (*first, *include_dirs(kernels))]
    words = ["g++", *FLAGS, *include, str(source), "-o", str(path), "-ldl"]
    subprocess.run(words, check=True, capture_output=True, text=True)
