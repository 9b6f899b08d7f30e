"""Which Pythons and systems a wheel says it is for: a build command of setuptools.

The library's wheel is for every Python from 3.11 on, and for every Linux that torch's own wheels
are for, if its binding needs no newer one: whoever can install torch can install it. Without a C++
compiler the wheel is pure, and the binding is compiled on first use. A wheel of nothing but shared
objects, such as that of compiled kernels, is for every Python.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools.command.bdist_wheel import bdist_wheel

GLIBC = 28
"""Of manylinux_2_28, which torch's wheels are for since 2.6: no wheel needs to say less."""

NEWEST = {b"GLIBCXX": (3, 4, 24), b"CXXABI": (1, 3, 11), b"GCC": (7, 0, 0)}
"""The newest symbols that there are on every such system, by auditwheel's policy."""

LIBRARIES = {b"libc.so.6", b"libm.so.6", b"libdl.so.2", b"librt.so.1", b"libpthread.so.0"} | {
    b"libgcc_s.so.1",
    b"libstdc++.so.6",
}
"""What is there on every such system, of what a compiler links by itself."""

MACHINES = ("x86_64", "aarch64")


class Wheel(bdist_wheel):
    """Builds the wheel, with the tag that suits what the compiler made."""

    def run(self) -> None:
        """Build, see what came of it, and pack it."""
        self.run_command("build")
        self.root_is_pure = not self._libraries()
        if self.root_is_pure:
            self.distribution.ext_modules = []
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        """Python, ABI and platform."""
        python, abi, platform = super().get_tag()
        libraries = [] if self.root_is_pure else self._libraries()
        if not libraries:
            return python, abi, platform
        if not self.distribution.ext_modules:
            python, abi = "py3", "none"
        needed = [oldest_glibc(library.read_bytes()) for library in libraries]
        machine = platform.removeprefix("linux_")
        if None not in needed and machine in MACHINES:
            platform = f"manylinux_2_{max(GLIBC, *needed)}_{machine}"
        return python, abi, platform

    def _libraries(self) -> list[Path]:
        built = self.get_finalized_command("build").build_lib
        return sorted(Path(built).rglob("*.so"))


def oldest_glibc(library: bytes) -> int | None:
    """The y of the oldest glibc 2.y that a shared object runs with; None if it needs more than
    there is on every such system.

    The names of all versions and libraries that it needs are texts in it.
    """
    found = re.findall(rb"\0(GLIBC|GLIBCXX|CXXABI|GCC)_([0-9.]+)(?=\0)", library)
    versions = [(name, tuple(map(int, version.split(b".")))) for name, version in found]
    needed = set(re.findall(rb"\0(lib[a-zA-Z0-9_+.-]+\.so[0-9.]*)(?=\0)", library))
    if not needed <= LIBRARIES or any(v > NEWEST.get(name, v) for name, v in versions):
        return None
    return max((v[1] for name, v in versions if name == b"GLIBC"), default=0)
