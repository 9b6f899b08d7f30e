"""What the library's wheel is for, by what its binding needs."""

from __future__ import annotations

import importlib.util

import pytest

from tests.support.docs import ROOT

spec = importlib.util.spec_from_file_location("building", ROOT / "client" / "building.py")
assert spec is not None
assert spec.loader is not None
building = importlib.util.module_from_spec(spec)
spec.loader.exec_module(building)


@pytest.mark.parametrize(
    ("needs", "glibc"),
    [
        ((), 0),
        (("GLIBC_2.2.5", "GLIBC_2.28", "GLIBCXX_3.4", "GLIBCXX_3.4.24", "GCC_3.0"), 28),
        (("GLIBC_2.14", "GLIBC_2.34", "GLIBC_2.4"), 34),
        (("libc.so.6", "libstdc++.so.6", "libgcc_s.so.1", "libm.so.6"), 0),
        (("GLIBCXX_3.4.25",), None),
        (("CXXABI_1.3.13",), None),
        (("libpython3.11.so.1.0",), None),
        (("libcuda.so.1",), None),
    ],
)
def test_what_a_library_needs_is_noticed(needs: tuple[str, ...], glibc: int | None) -> None:
    library = b"\x7fELF\0" + b"\0".join(need.encode() for need in needs) + b"\0rest"
    assert building.oldest_glibc(library) == glibc
