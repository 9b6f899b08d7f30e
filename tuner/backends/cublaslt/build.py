"""The C++ of the library's kernels: plain host code, which compiles in seconds.

The pack holds no device code and links neither CUDA nor cuBLAS. It looks both up in the process
that runs it, so one build serves every GPU, driver and version of the library.
"""

from __future__ import annotations

from pathlib import Path

from gemmsmith.core.operation import Scaling
from tuner.backends.backend import Part
from tuner.backends.cublaslt.operations import OPERATIONS, Compute, LibraryOperation
from tuner.backends.cutlass import HEADERS, text

INCLUDE = Path(__file__).parent / "include"

TYPES = {  # cudaDataType_t, bytes
    "f32": (0, 4),
    "f16": (2, 2),
    "s8": (3, 1),
    "s32": (10, 4),
    "bf16": (14, 2),
    "e4m3": (28, 1),
    "e5m2": (29, 1),
}
COMPUTES = {  # cublasComputeType_t, the scale's cudaDataType_t
    Compute.F32: (68, 0),
    Compute.TF32: (77, 0),
    Compute.S32: (72, 10),
}
_SCALES = {Scaling.NONE: "0", Scaling.TENSOR: "kScales", Scaling.ROW: "kRowScales"}
_BY_NAME = {operation.name: operation for operation in OPERATIONS}


def part(name: str) -> Part:
    """The kernel's share of a translation unit, by its name."""
    operation = _BY_NAME[name]
    struct = f"gemmsmith::cublaslt::{name}"
    return Part(
        header="cublaslt/pack.hpp",
        definition=(
            "namespace gemmsmith::cublaslt {\n"
            f"constexpr Operation {name}{_described(operation)};\n"
            f"const Listed listed_{name}({name});\n"
            "}\n"
        ),
        entry=f'entry<gemmsmith::cublaslt::Product<{struct}>>("{name}")',
        include=(HEADERS, INCLUDE),
    )


def _described(operation: LibraryOperation) -> str:
    types = [TYPES[element] for element in (operation.a, operation.b, operation.d)]
    values = (
        f'"{operation.name}"',
        *(str(number) for number, _ in types),
        *(str(size) for _, size in types),
        *(str(number) for number in COMPUTES[operation.compute]),
        text.boolean(operation.layout.a_row_major),
        text.boolean(operation.layout.b_row_major),
        _SCALES[operation.scales],
        text.boolean(operation.fast_accumulation),
    )
    return "{" + ", ".join(values) + "}"
