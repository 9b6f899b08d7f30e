"""The pack's source and how it is compiled: by the host's C++ compiler, in seconds.

The pack holds no device code and links neither CUDA nor cuBLAS: it finds both in the process that
runs it, so one build serves every GPU, driver and version of the library.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from gemmsmith.kernel import AnyKernel
from tuner.backends.cublaslt.operations import OPERATIONS, Compute, LibraryOperation, Scales
from tuner.codegen.unit import HEADERS
from tuner.errors import CompilerNotFound

INCLUDE = Path(__file__).parent / "include"
FLAGS = (
    "-std=c++17",
    "-O2",
    "-Wall",
    "-Wextra",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wl,--exclude-libs,ALL,-s",
)

_SHARED_HEADERS = ("abi.h", "arguments.hpp", "table.hpp")
_TYPES = {  # cudaDataType_t, bytes
    "f32": (0, 4),
    "f16": (2, 2),
    "s8": (3, 1),
    "s32": (10, 4),
    "bf16": (14, 2),
    "e4m3": (28, 1),
    "e5m2": (29, 1),
}
_COMPUTE = {  # cublasComputeType_t, the scale's cudaDataType_t
    Compute.F32: (68, 0),
    Compute.TF32: (77, 0),
    Compute.S32: (72, 10),
}
_SCALES = {Scales.NONE: "0", Scales.TENSOR: "kScales", Scales.ROW: "kRowScales"}


def described_by(kernels: Sequence[AnyKernel]) -> list[LibraryOperation]:
    """What each of the kernels is to the library."""
    known = {each.name: each for each in OPERATIONS}
    return [known[kernel.name] for kernel in kernels]


def unit_source(operations: Sequence[LibraryOperation] = OPERATIONS) -> str:
    """The translation unit of a pack with these kernels, in their order."""
    described = "\n".join(f"    {_described(each)}," for each in operations)
    entries = "\n".join(
        f'    entry<cublaslt::Product<{index}>>("{each.name}"),'
        for index, each in enumerate(operations)
    )
    return f"""#include "cublaslt/pack.hpp"
namespace gemmsmith {{
const cublaslt::Operation cublaslt::operations[] = {{
{described}
}};
const Entry kernel_table[] = {{
{entries}
}};
const int32_t kernel_table_size = {len(operations)};
}}  // namespace gemmsmith
"""


def digest(operations: Sequence[LibraryOperation] = OPERATIONS) -> str:
    """Hash of everything the pack is compiled from but the compiler."""
    hashed = hashlib.sha256("\0".join((unit_source(operations), *FLAGS)).encode())
    for path in (
        *(HEADERS / "gemmsmith" / name for name in _SHARED_HEADERS),
        *sorted(INCLUDE.rglob("*.h*")),
    ):
        hashed.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return hashed.hexdigest()


def build(path: Path, operations: Sequence[LibraryOperation] = OPERATIONS) -> None:
    """Compile the pack to `path`.

    Raises:
        CompilerNotFound: there is no C++ compiler.
        CalledProcessError: it refused; its words are in `stderr`.
    """
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise CompilerNotFound("no C++ compiler for cuBLASLt's pack: install g++, or set CXX")
    source = path.with_suffix(".cpp")
    source.write_text(unit_source(operations), encoding="utf-8")
    subprocess.run(
        [
            *(compiler, *FLAGS, f"-I{HEADERS}", f"-I{INCLUDE}"),
            *(str(source), "-o", str(path), "-ldl"),
        ],
        check=True,
        capture_output=True,
        text=True,
    )


def _described(operation: LibraryOperation) -> str:
    types = [_TYPES[each] for each in (operation.a, operation.b, operation.d)]
    values = (
        f'"{operation.name}"',
        *(str(number) for number, _ in types),
        *(str(size) for _, size in types),
        *(str(number) for number in _COMPUTE[operation.compute]),
        _boolean(operation.layout.a_row_major),
        _boolean(operation.layout.b_row_major),
        _SCALES[operation.scales],
        _boolean(operation.fast_accumulation),
    )
    return "{" + ", ".join(values) + "}"


def _boolean(value: bool) -> str:
    return "true" if value else "false"
