"""Writes one C++ translation unit for a batch of kernels: the backends' text and a table.

Invariants: the text depends only on the kernels, their order, and the installed CUTLASS; a kernel's
position in the table is its index in the pack. `kernel_digest` and the toolchain's digest
(compiler, flags, CUTLASS release) together cover everything that is compiled. Neither a compiler
nor a GPU is needed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path

from gemmsmith.core.kernel import AnyKernel
from tuner.backends.backend import Part
from tuner.backends.registry import backend_of

__all__ = ["include_dirs", "kernel_digest", "unit_source"]

_TABLE = "gemmsmith/table.hpp"
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


def unit_source(kernels: Sequence[AnyKernel]) -> str:
    """The translation unit of a pack holding `kernels`, in their order.

    Raises:
        ValueError: there are no kernels, two have the same name, or a kernel's backend is not
            known.
    """
    if not kernels:
        raise ValueError("a unit needs at least one kernel")
    names = [kernel.name for kernel in kernels]
    if len(set(names)) != len(names):
        raise ValueError("a unit cannot hold two kernels of the same name")
    parts = [_part(kernel) for kernel in kernels]
    headers = [*sorted({part.header for part in parts}), _TABLE]
    # Two kernels can share a definition: one reads its operands directly, the other copies
    # unaligned operands first.
    definitions = dict.fromkeys(part.definition for part in parts)
    entries = ",\n".join(f"    {part.entry}" for part in parts)
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


def include_dirs(kernels: Sequence[AnyKernel]) -> list[Path]:
    """The folders of the project's headers that these kernels include, for `-I`."""
    return list(dict.fromkeys(folder for kernel in kernels for folder in _part(kernel).include))


@lru_cache(maxsize=65536)
def kernel_digest(kernel: AnyKernel) -> str:
    """Hash of everything in this project that the kernel is compiled from: its text and headers.

    A kernel whose backend is not known cannot be compiled: its digest is one that no pack has.
    """
    if backend_of(kernel) is None:
        text = f"{kernel.source}\0{kernel.name}"
    else:
        part = _part(kernel)
        text = "\0".join([headers_digest(part.header, *part.include), part.definition, part.entry])
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def headers_digest(header: str, *folders: Path) -> str:
    """Hash of a header, the table's header, and all headers of the project that they include.

    A change in a header changes the digests of the kernels that include it, and of no others.
    """
    pending = [header, _TABLE]
    texts: dict[str, bytes] = {}
    while pending:
        name = pending.pop()
        path = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if path is None or name in texts:  # CUTLASS's headers are in the toolchain's digest
            continue
        texts[name] = path.read_bytes()
        pending += _INCLUDE.findall(texts[name].decode())
    digest = hashlib.sha256()
    for name, text in sorted(texts.items()):
        digest.update(name.encode() + b"\0" + text + b"\0")
    return digest.hexdigest()


@lru_cache(maxsize=256)
def _part(kernel: AnyKernel) -> Part:
    backend = backend_of(kernel)
    if backend is None:
        raise ValueError(f"{kernel.name} of {kernel.source} is not compiled here")
    return backend.part(kernel)
