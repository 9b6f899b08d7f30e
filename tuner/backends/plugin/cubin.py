"""The share of a unit that launches a cubin: for plugins whose compiler makes cubins, as Triton's.

The pack holds the cubin and a few lines of host code behind the C ABI, so it runs like any other:
without the plugin, without its compiler, in CUDA graphs, and what was measured is what runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from gemmsmith.core.kernel import PluginKernel
from tuner.backends.backend import Part
from tuner.backends.cublaslt.build import INCLUDE as DRIVER
from tuner.backends.cutlass import HEADERS

INCLUDE = Path(__file__).parent / "include"


def part(
    kernel: PluginKernel,
    *,
    origin: Sequence[str],
    grid: Sequence[str],
    parameters: Sequence[str],
    takes: str = "true",
    reads: str = "0",
) -> Part:
    """A kernel's share of a translation unit, which launches the cubin of `files`.

    The arguments beside `origin` are C++ expressions over `g`, the `gs_arguments` of a launch.

    Args:
        kernel: the kernel. Rows and batches are checked against its alignment.
        origin: what decides the cubin beside the kernel's description: the compiler's version
            (`installed`), its options, the kernel's source.
        grid: thread blocks along x, y and z; `tiles(extent, tile)` divides and rounds up.
        parameters: the kernel's parameters, in order, each of the type that it has there.
        takes: whether the kernel can run a launch; it need not check what `reads` covers.
        reads: which `Extra`s (`gemmsmith/arguments.hpp`) it reads beside A, B, C, D, alpha and
            beta, such as `kBias | kResidual`. Launches with any other are refused.
    """
    operation = kernel.operation
    alignment = ", ".join(
        str(number)
        for number in (
            *(kernel.alignment_a, kernel.alignment_b, kernel.alignment_d),
            *(operation.a.bytes, operation.b.bytes, operation.d.bytes),
        )
    )
    name = kernel.name
    described = msgspec.json.encode(kernel).decode()
    digest = hashlib.sha256("\0".join([described, *origin]).encode()).hexdigest()
    return Part(
        header="cubin/kernel.hpp",
        definition=(
            f'#include "{_file(kernel)}"  // {digest}\n'
            "namespace gemmsmith::cubin {\n"
            f"struct {name} {{\n"
            f"  static constexpr Image const& kImage = image_{name};\n"
            f"  static constexpr Alignment kAlignment{{{alignment}}};\n"
            f"  static constexpr uint32_t kReads = {reads};\n"
            f"  static bool takes([[maybe_unused]] gs_arguments const& g) {{ return {takes}; }}\n"
            f"  static Grid grid([[maybe_unused]] gs_arguments const& g) {{\n"
            f"    return {{{', '.join(grid)}}};\n"
            "  }\n"
            "  template <class Launch>\n"
            "  static int32_t run([[maybe_unused]] gs_arguments const& g, Launch launch) {\n"
            f"    return launch({', '.join(parameters)});\n"
            "  }\n"
            "};\n"
            "}\n"
        ),
        entry=f'entry<gemmsmith::cubin::Product<gemmsmith::cubin::{name}>>("{name}")',
        include=(HEADERS, DRIVER, INCLUDE),
    )


def files(
    kernel: PluginKernel, cubin: bytes, *, function: str, threads: int, shared_bytes: int
) -> Mapping[str, str]:
    """The file that `part` includes.

    Args:
        kernel: the kernel.
        cubin: its machine code.
        function: its name in there.
        threads: of a thread block.
        shared_bytes: dynamic shared memory of a thread block.
    """
    name = kernel.name
    text = (
        "namespace gemmsmith::cubin {\n"
        f"alignas(16) constexpr unsigned char code_{name}[] = {{{','.join(map(str, cubin))}}};\n"
        f'constexpr Image image_{name}{{code_{name}, "{function}", {threads}, {shared_bytes}}};\n'
        "}\n"
    )
    return {_file(kernel): text}


def installed(package: str) -> str:
    """The version of an installed package, for `origin`; empty if it is not installed.

    Without the compiler, kernels can be listed, and those that others compiled can be served.
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _file(kernel: PluginKernel) -> str:
    return f"{kernel.name}.cubin.hpp"
