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
    ("needs", "suits"),
    [
        ((), True),
        (("GLIBC_2.2.5", "GLIBC_2.28", "GLIBCXX_3.4", "GLIBCXX_3.4.24", "GCC_3.0"), True),
        (("libc.so.6", "libstdc++.so.6", "libgcc_s.so.1", "libm.so.6"), True),
        (("GLIBC_2.29",), False),
        (("GLIBCXX_3.4.25",), False),
        (("CXXABI_1.3.13",), False),
        (("libpython3.11.so.1.0",), False),
        (("libcuda.so.1",), False),
        (("GLIBC_2.14", "GLIBC_2.34"), False),
    ],
)
def test_newer_symbols_and_other_libraries_are_noticed(needs: tuple[str, ...], suits: bool) -> None:
    library = b"\x7fELF\0" + b"\0".join(need.encode() for need in needs) + b"\0rest"
    assert building.suits_all(library) is suits
