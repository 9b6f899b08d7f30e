"""One C++ translation unit per batch of kernels: the backends' own text and a table of them.

Invariants: the text depends only on the kernels, their order, and the installed CUTLASS; a
kernel's place in the table is its index in the pack. What the text compiles from is covered by
`kernel_digest` together with the toolchain's digest (compiler, flags, CUTLASS release).
Emitting needs no compiler and no GPU.
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
        ValueError: no kernels, two with the same name, or one of a backend that is not known.
    """
    if not kernels:
        raise ValueError("a unit needs at least one kernel")
    names = [kernel.name for kernel in kernels]
    if len(set(names)) != len(names):
        raise ValueError("a unit cannot hold two kernels of the same name")
    parts = [_part(kernel) for kernel in kernels]
    headers = [*sorted({part.header for part in parts}), _TABLE]
    # Two kernels can be made of one definition: with and without copies of unaligned operands.
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
    """The project's own headers that the unit of these kernels includes, for `-I`."""
    return list(dict.fromkeys(folder for kernel in kernels for folder in _part(kernel).include))


@lru_cache(maxsize=65536)
def kernel_digest(kernel: AnyKernel) -> str:
    """Hash of everything of ours that the kernel compiles from: its own text and its headers.

    Of a kernel whose backend is not known here nothing can be compiled: its digest is its own, and
    no pack's.
    """
    if backend_of(kernel) is None:
        text = f"{kernel.backend}\0{kernel.name}"
    else:
        part = _part(kernel)
        text = "\0".join([headers_digest(part.header, *part.include), part.definition, part.entry])
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def headers_digest(header: str, *folders: Path) -> str:
    """Hash of one of our headers, the table of kernels, and all of ours that the two include.

    A pack built with other headers is another pack; one that a kernel never sees makes none.
    """
    wanted = [header, _TABLE]
    found: dict[str, bytes] = {}
    while wanted:
        name = wanted.pop()
        path = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if path is None or name in found:  # CUTLASS's own are the toolchain's
            continue
        found[name] = path.read_bytes()
        wanted += _INCLUDE.findall(found[name].decode())
    digest = hashlib.sha256()
    for name, text in sorted(found.items()):
        digest.update(name.encode() + b"\0" + text + b"\0")
    return digest.hexdigest()


@lru_cache(maxsize=256)
def _part(kernel: AnyKernel) -> Part:
    backend = backend_of(kernel)
    if backend is None:
        raise ValueError(f"{kernel.name} of {kernel.backend} is not compiled here")
    return backend.part(kernel)
