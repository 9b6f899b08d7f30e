"""The platform tag of the library's wheel, which depends on what its binding needs."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

from tests.support.docs import ROOT

spec = importlib.util.spec_from_file_location("building", ROOT / "client" / "building.py")
assert spec is not None
assert spec.loader is not None
building = importlib.util.module_from_spec(spec)
spec.loader.exec_module(building)


def library(folder: Path, *options: str) -> bytes:
    """A shared object, compiled with this machine's compiler."""
    source = folder / "one.c"
    source.write_text("int one(void) { return 1; }")
    made = folder / "one.so"
    words = ["gcc", "-shared", "-fPIC", "-nostdlib", *options, str(source), "-o", str(made)]
    subprocess.run(words, check=True)
    return made.read_bytes()


@pytest.mark.parametrize(
    ("versions", "glibc"),
    [
        ((), 0),
        (("GLIBC_2.2.5", "GLIBC_2.28", "GLIBCXX_3.4", "GLIBCXX_3.4.24", "GCC_3.0"), 28),
        (("GLIBC_2.14", "GLIBC_2.34", "GLIBC_2.4"), 34),
        (("GLIBCXX_3.4.25",), None),
        (("CXXABI_1.3.13",), None),
    ],
)
def test_newer_symbols_are_noticed(
    versions: tuple[str, ...], glibc: int | None, tmp_path: Path
) -> None:
    content = library(tmp_path) + b"\0" + b"\0".join(name.encode() for name in versions) + b"\0"
    assert building.oldest_glibc(content) == glibc


def test_other_libraries_are_noticed(tmp_path: Path) -> None:
    content = library(tmp_path, "-Wl,--no-as-needed", "-lm", "-lc")
    assert building.needed(content) == {b"libm.so.6", b"libc.so.6"}
    assert building.oldest_glibc(content) is not None
    (tmp_path / "libours.so").write_bytes(library(tmp_path))
    content = library(tmp_path, "-Wl,--no-as-needed", f"-L{tmp_path}", "-lours")
    assert building.needed(content) == {b"libours.so"}
    assert building.oldest_glibc(content) is None


def test_libraries_opened_at_run_time_are_not_required(tmp_path: Path) -> None:
    assert building.oldest_glibc(library(tmp_path) + b"\0libcuda.so.1\0") == 0
    assert building.oldest_glibc(b"PE") is None
