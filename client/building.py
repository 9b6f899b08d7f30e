"""Which Pythons and systems a wheel says it is for: a build command of setuptools.

The library's wheel is for every Python from 3.11 on, and for every Linux that torch's own wheels
are for, if its binding needs no newer one: it installs wherever torch does. Without a C++
compiler the wheel is pure, and the binding is compiled on first use. A wheel of nothing but shared
objects, such as that of compiled kernels, is for every Python.
"""

from __future__ import annotations

import re
from os import uname
from pathlib import Path
from struct import iter_unpack, unpack_from

from setuptools.command.bdist_wheel import bdist_wheel

GLIBC = 28
"""Of manylinux_2_28, which torch's wheels are for since 2.6: no wheel needs to say less."""

NEWEST = {b"GLIBCXX": (3, 4, 24), b"CXXABI": (1, 3, 11), b"GCC": (7, 0, 0)}
"""The newest symbols that there are on every such system, by auditwheel's policy."""

LIBRARIES = {
    b"ld-linux-x86-64.so.2",
    b"ld-linux-aarch64.so.1",
    b"libc.so.6",
    b"libdl.so.2",
    b"libgcc_s.so.1",
    b"libm.so.6",
    b"libpthread.so.0",
    b"librt.so.1",
    b"libstdc++.so.6",
}
"""What is there on every such system, of what a compiler links by itself."""

MACHINES = ("x86_64", "aarch64")

_ELF_64 = b"\x7fELF\x02\x01"
_LOAD, _DYNAMIC = 1, 2  # kinds of segments
_NEEDED, _STRTAB = 1, 5  # tags of the dynamic section


class Wheel(bdist_wheel):
    """Builds the wheel, with the tag that suits what the compiler made."""

    def run(self) -> None:
        """Build, see what came of it, and pack it."""
        self.run_command("build")
        if not self._libraries():
            self.distribution.ext_modules = []
        self.root_is_pure = not self.distribution.ext_modules
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        """Python, ABI and platform."""
        python, abi, platform = super().get_tag()
        libraries = self._libraries()
        if not libraries:
            return python, abi, platform
        needed = [oldest_glibc(library.read_bytes()) for library in libraries]
        machine = uname().machine
        suits = None not in needed and machine in MACHINES
        system = f"manylinux_2_{max(GLIBC, *needed)}" if suits else "linux"
        return python, abi, f"{system}_{machine}"

    def _libraries(self) -> list[Path]:
        built = self.get_finalized_command("build").build_lib
        return sorted(Path(built).rglob("*.so"))


def oldest_glibc(library: bytes) -> int | None:
    """The y of the oldest glibc 2.y that a shared object runs with; None if it needs more than
    there is on every such system, or is not a shared object.

    The names of all versions that it needs are texts in it.
    """
    if not library.startswith(_ELF_64):
        return None
    needs = re.findall(rb"\0(GLIBC|GLIBCXX|CXXABI|GCC)_([0-9.]+)(?=\0)", library)
    versions = [(name, tuple(map(int, version.split(b".")))) for name, version in needs]
    if not needed(library) <= LIBRARIES or any(v > NEWEST.get(name, v) for name, v in versions):
        return None
    return max((v[1] for name, v in versions if name == b"GLIBC"), default=0)


def needed(library: bytes) -> set[bytes]:
    """The libraries that a 64-bit ELF file is linked to, by its dynamic section."""
    start, _, _, _, size, number, _ = unpack_from("<QQIHHHH", library, 32)
    headers = [unpack_from("<IIQQQQQQ", library, start + size * i) for i in range(number)]
    loaded = [(address, offset) for kind, _, offset, address, *_ in headers if kind == _LOAD]
    for kind, _, offset, _, _, length, *_ in headers:
        if kind == _DYNAMIC:
            entries = list(iter_unpack("<QQ", library[offset : offset + length]))
            names = next(value for tag, value in entries if tag == _STRTAB)
            base = max((one for one in loaded if one[0] <= names), default=(0, 0))
            names += base[1] - base[0]
            starts = [names + value for tag, value in entries if tag == _NEEDED]
            return {library[at : library.index(b"\0", at)] for at in starts}
    return set()
