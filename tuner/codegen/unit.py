"""One C++ translation unit per batch of kernels: CUTLASS's own emitted text plus a table of them.

Invariants: the text depends only on the kernels, their order, and the installed CUTLASS; a
kernel's place in the table is its index in the pack. What the text compiles from is covered by
`kernel_digest` together with the toolchain's digest (compiler, flags, CUTLASS release).
Emitting needs no compiler and no GPU.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path

from cutlass_library.gemm_operation import EmitGemmUniversal3xInstance, EmitGemmUniversalInstance

from gemmsmith.kernel import Backend, Kernel
from tuner.space.operation import operation

HEADERS = Path(__file__).parent / "include"
"""Directory for the compiler's `-I`: the C ABI and its adapters."""

_FP8_EPILOGUE_3X = (
    "gemmsmith::ScaledLinearCombination<"
    "${element_d}, ${element_epilogue}, ${element_c}, ${element_epilogue}>"
)
_FP8_EPILOGUE_2X = (
    "gemmsmith::thread::ScaledLinearCombination<"
    "${element_c}, ${epilogue_vector_length}, ${element_accumulator}, ${element_epilogue}>"
)
"""The emitters know CUTLASS's functors by enumerator only; ours, with the scales, is text."""

_ADAPTER_HEADERS = {
    Backend.CUTLASS3X: "gemmsmith/gemm3x.hpp",
    Backend.CUTLASS2X: "gemmsmith/gemm2x.hpp",
}


def unit_source(kernels: Sequence[Kernel]) -> str:
    """The translation unit of a pack holding `kernels`, in their order.

    Raises:
        ValueError: no kernels, or two with the same name.
    """
    if not kernels:
        raise ValueError("a unit needs at least one kernel")
    names = [kernel.name for kernel in kernels]
    if len(set(names)) != len(names):
        raise ValueError("a unit cannot hold two kernels of the same name")
    backends = sorted({kernel.backend for kernel in kernels})
    headers = [*(_ADAPTER_HEADERS[backend] for backend in backends), "gemmsmith/table.hpp"]
    entries = ",\n".join(f"    {_entry(kernel)}" for kernel in kernels)
    return "\n".join(
        [
            *(f'#include "{header}"' for header in headers),
            *(_definition(kernel) for kernel in kernels),
            "namespace gemmsmith {",
            f"const Entry kernel_table[] = {{\n{entries},\n}};",
            f"const int32_t kernel_table_size = {len(kernels)};",
            "}  // namespace gemmsmith",
            "",
        ]
    )


@lru_cache(maxsize=65536)
def kernel_digest(kernel: Kernel) -> str:
    """Hash of everything of ours that the kernel compiles from: its own text and our headers."""
    text = "\0".join([headers_digest(), _definition(kernel), _entry(kernel)])
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def headers_digest() -> str:
    """Hash of the C ABI and the adapters; a pack built with other headers is another pack."""
    digest = hashlib.sha256()
    for path in sorted(HEADERS.rglob("*.h*")):
        digest.update(path.relative_to(HEADERS).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def _definition(kernel: Kernel) -> str:
    """CUTLASS's text that defines a struct of the kernel's own name."""
    if kernel.backend is Backend.CUTLASS3X:
        emitter = EmitGemmUniversal3xInstance()
        scaled = _FP8_EPILOGUE_3X
    else:
        emitter = EmitGemmUniversalInstance()
        scaled = _FP8_EPILOGUE_2X
    if kernel.dtype.is_fp8:
        emitter.builtin_epilogue_functor_template = scaled
    text: str = emitter.emit(operation(kernel))
    return text.strip() + "\n"


def _entry(kernel: Kernel) -> str:
    """The table's line: the adapter around the struct, told the problem's own orientation."""
    traits = ", ".join(
        [
            _boolean(kernel.layout.a_row_major),
            _boolean(kernel.layout.b_row_major),
            str(kernel.alignment_a),
            str(kernel.alignment_b),
            str(kernel.alignment_d),
        ]
    )
    parameters = f"{kernel.name}, gemmsmith::Traits<{traits}>"
    if kernel.backend is Backend.CUTLASS3X:
        adapter = f"gemmsmith::Gemm3x<{parameters}, {_boolean(kernel.swapped)}>"
    else:
        adapter = f"gemmsmith::Gemm2x<{parameters}>"
    return f'entry<{adapter}>("{kernel.name}")'


def _boolean(value: bool) -> str:
    return "true" if value else "false"
