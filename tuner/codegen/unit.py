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
from cutlass_library.library import DataTypeTag, KernelScheduleTag, LayoutTag

from gemmsmith.kernel import Backend, CutlassKernel, TileScheduler
from tuner.space.footprint import stages
from tuner.space.operation import DATA_TYPES, gemm_operation, is_padded

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

_STREAM_K_TAG = ("cutlass::gemm::StreamKScheduler>", "gemmsmith::StreamKScheduler>")
"""CUTLASS's scheduler does not compile with programmatic dependent launch; see stream_k.hpp."""

_MAINLOOP = """using {name} =
  typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp,
    {a},
    {b},
    float,
    cute::Shape<{tile}>,
    cute::Shape<cute::_1, cute::_1, cute::_1>,
    cutlass::gemm::collective::StageCount<{stages}>,
    {schedule}
  >::CollectiveOp;
"""


def unit_source(kernels: Sequence[CutlassKernel]) -> str:
    """The translation unit of a pack holding `kernels`, in their order.

    Raises:
        ValueError: no kernels, or two with the same name.
    """
    if not kernels:
        raise ValueError("a unit needs at least one kernel")
    names = [kernel.name for kernel in kernels]
    if len(set(names)) != len(names):
        raise ValueError("a unit cannot hold two kernels of the same name")
    headers = [*sorted({_adapter_header(kernel) for kernel in kernels}), "gemmsmith/table.hpp"]
    # Two kernels can be made of one definition: with and without copies of unaligned operands.
    definitions = dict.fromkeys(_definition(kernel) for kernel in kernels)
    entries = ",\n".join(f"    {_entry(kernel)}" for kernel in kernels)
    return "\n".join(
        [
            *(f'#include "{header}"' for header in headers),
            *definitions,
            "namespace gemmsmith {",
            f"const Entry kernel_table[] = {{\n{entries},\n}};",
            f"const int32_t kernel_table_size = {len(kernels)};",
            "}  // namespace gemmsmith",
            "",
        ]
    )


@lru_cache(maxsize=65536)
def kernel_digest(kernel: CutlassKernel) -> str:
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


def _adapter_header(kernel: CutlassKernel) -> str:
    """The header with the adapter that the kernel's entry names."""
    if kernel.backend is Backend.CUTLASS2X:
        return "gemmsmith/gemm2x.hpp"
    if is_padded(kernel):
        return "gemmsmith/padded.hpp"
    return {
        TileScheduler.STREAM_K: "gemmsmith/stream_k.hpp",
        TileScheduler.SPLIT_K: "gemmsmith/split_k.hpp",
        TileScheduler.CLUSTER_SPLIT_K: "gemmsmith/cluster_split_k.hpp",
    }.get(kernel.scheduler, "gemmsmith/gemm3x.hpp")


def _definition(kernel: CutlassKernel) -> str:
    """CUTLASS's text that defines a struct of the operation's name; of ours, a mainloop."""
    if kernel.backend is Backend.CUTE:
        return _mainloop(kernel)
    if kernel.backend is Backend.CUTLASS3X:
        emitter = EmitGemmUniversal3xInstance()
        scaled = _FP8_EPILOGUE_3X
    else:
        emitter = EmitGemmUniversalInstance()
        scaled = _FP8_EPILOGUE_2X
    if kernel.operation.is_narrow_float:
        emitter.builtin_epilogue_functor_template = scaled
    text: str = emitter.emit(gemm_operation(kernel))
    return text.strip().replace(*_STREAM_K_TAG) + "\n"


def _mainloop(kernel: CutlassKernel) -> str:
    described = gemm_operation(kernel)
    tile = ", ".join(f"cute::Int<{extent}>" for extent in kernel.tile)
    a, b = (
        f"{DataTypeTag[each.element]}, {LayoutTag[each.layout]}, {each.alignment}"
        for each in (described.A, described.B)
    )
    return _MAINLOOP.format(
        name=kernel.name,
        a=a,
        b=b,
        tile=tile,
        stages=stages(kernel),
        schedule=KernelScheduleTag[described.kernel_schedule],
    )


def _entry(kernel: CutlassKernel) -> str:
    """The table's line: the adapter around the struct, told the problem's own orientation."""
    described = gemm_operation(kernel)
    traits = _traits(kernel, described.A.alignment)
    swapped = _boolean(kernel.swapped)
    struct = described.procedural_name()
    element_d = DataTypeTag[DATA_TYPES[kernel.operation.d]]
    if kernel.scheduler is TileScheduler.CLUSTER_SPLIT_K:
        adapter = f"ClusterSplitKGemm<{kernel.name}, {element_d}, {traits}, {swapped}>"
    elif kernel.scheduler is TileScheduler.SPLIT_K:
        adapter = f"SplitKGemm<{struct}, {traits}, {swapped}, {element_d}>"
    elif kernel.backend is Backend.CUTLASS2X:
        adapter = f"Gemm2x<{struct}, {traits}>"
    else:
        adapter = f"Gemm3x<{struct}, {traits}, {swapped}>"
    if is_padded(kernel):
        adapter = f"PaddedGemm<gemmsmith::{adapter}, {_traits(kernel, kernel.alignment_a)}>"
    return f'entry<gemmsmith::{adapter}>("{kernel.name}")'


def _traits(kernel: CutlassKernel, alignment: int) -> str:
    """`alignment` of A and B: of the operation, or of what is given to a kernel that copies."""
    values = (
        _boolean(kernel.layout.a_row_major),
        _boolean(kernel.layout.b_row_major),
        str(alignment),
        str(alignment),
        str(kernel.alignment_d),
    )
    return f"gemmsmith::Traits<{', '.join(values)}>"


def _boolean(value: bool) -> str:
    return "true" if value else "false"
