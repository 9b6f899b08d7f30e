"""Which Pythons and systems the wheel says it is for: a build command of setuptools.

With the binding it is for every Python from 3.11 on, and for every Linux as old as torch's own
wheels are for, if the binding needs no newer one: whoever can install torch can install it. Without
(no C++ compiler, or none that could) the wheel is pure, and the binding is compiled on first use.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from setuptools.command.bdist_wheel import bdist_wheel

MANYLINUX = "manylinux_2_28"
"""What torch's wheels are for since 2.6."""

NEWEST = {b"GLIBC": (2, 28), b"GLIBCXX": (3, 4, 24), b"CXXABI": (1, 3, 11), b"GCC": (7, 0, 0)}
"""The newest symbols that there are on every such system, by the policies of auditwheel."""

LIBRARIES = {b"libc.so.6", b"libm.so.6", b"libgcc_s.so.1", b"libstdc++.so.6", b"libpthread.so.0"}
"""What is there on every such system, of what a compiler links by itself."""


class Wheel(bdist_wheel):
    """Builds the wheel, with the tag that suits what the compiler made."""

    def run(self) -> None:
        """Build, see what came of it, and pack it."""
        self.run_command("build")
        if self._binding() is None:
            self.distribution.ext_modules = []
            self.root_is_pure = True
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        """Python, ABI and platform."""
        python, abi, platform = super().get_tag()
        binding = None if self.root_is_pure else self._binding()
        if binding is not None and suits_all(binding.read_bytes()):
            platform = platform.removeprefix("linux_")
            if platform in ("x86_64", "aarch64"):
                return python, abi, f"{MANYLINUX}_{platform}"
        return super().get_tag()

    def _binding(self) -> Path | None:
        made: Iterable[str] = self.get_finalized_command("build_ext").get_outputs()
        return next((path for path in map(Path, made) if path.is_file()), None)


def suits_all(library: bytes) -> bool:
    """Whether a shared object needs nothing that systems of `MANYLINUX` may lack.

    The names of all versions and libraries that it needs are texts in it.
    """
    for name, version in re.findall(rb"\0(GLIBC|GLIBCXX|CXXABI|GCC)_([0-9.]+)(?=\0)", library):
        if tuple(map(int, version.split(b"."))) > NEWEST[name]:
            return False
    needed = set(re.findall(rb"\0(lib[a-zA-Z0-9_+.-]+\.so[0-9.]*)(?=\0)", library))
    return needed <= LIBRARIES
