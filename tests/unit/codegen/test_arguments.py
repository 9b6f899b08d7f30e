"""Packs and callers of different ages: the table of a real pack, compiled without CUTLASS.

Another age is the header itself with a field more or less, as another release would have it.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gemmsmith.runtime.abi import ABI_VERSION, Arguments, KernelInfo, declare
from tests.support.host import INCLUDE

UNIT = r"""
#include "gemmsmith/table.hpp"
namespace gemmsmith {
struct Probe {
  static int32_t describe(gs_kernel_info& info) {
    info.threads = 384;
    info.local_bytes = -1;
    return 0;
  }
  static int32_t can_implement(gs_arguments const& g) { return takes_only(g, ALLOWED) ? 0 : 5; }
  static int64_t workspace_bytes(gs_arguments const& g) { return LAST; }
  static int32_t run(gs_arguments const& g, void*, void*) { return 1000 + g.splits; }
};
const Entry kernel_table[] = {entry<Probe>("probe")};
const int32_t kernel_table_size = 1;
}
"""
BAD_ABI = -2
KNOWN = ctypes.sizeof(Arguments)
RESERVED = len(Arguments().reserved)

Build = Callable[..., ctypes.CDLL]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """A pack from a header in which texts are replaced, with probes of its own."""

    def build(
        replacing: dict[str, str] | None = None, allowed: str = "0", last: str = "g.batch"
    ) -> ctypes.CDLL:
        include = tmp_path / "include"
        shutil.copytree(INCLUDE, include, dirs_exist_ok=True)
        header = include / "gemmsmith" / "abi.h"
        text = header.read_text()
        for old, new in (replacing or {}).items():
            assert old in text
            text = text.replace(old, new)
        header.write_text(text)
        source, path = tmp_path / "unit.cpp", tmp_path / "unit.so"
        source.write_text(UNIT)
        flags = ["-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Werror"]
        subprocess.run(
            [
                *("g++", *flags, f"-DALLOWED={allowed}", f"-DLAST={last}"),
                *(f"-I{include}", str(source), "-o", str(path)),
            ],
            check=True,
        )
        library = ctypes.CDLL(str(path))
        declare(library)
        return library

    return build


NEWER = {
    "#define GS_ABI_VERSION 2": "#define GS_ABI_VERSION 3",
    f"reserved[{RESERVED}];": f"reserved[{RESERVED}]; int64_t later;",
}


def larger(tail: int) -> ctypes.Array[ctypes.c_char]:
    """Arguments of a caller that knows one field more."""
    arguments = Arguments(size=KNOWN + 8, batch=7)
    return ctypes.create_string_buffer(bytes(arguments) + tail.to_bytes(8, "little"), KNOWN + 8)


def as_arguments(buffer: ctypes.Array[ctypes.c_char]) -> ctypes._Pointer[Arguments]:
    return ctypes.cast(buffer, ctypes.POINTER(Arguments))


def test_an_older_caller_s_missing_fields_are_zero(build: Build) -> None:
    pack = build(NEWER, last="g.later + 10 * g.batch")
    assert (pack.gs_abi_version(), pack.gs_abi_oldest()) == (3, 2)
    assert pack.gs_arguments_bytes() == KNOWN + 8
    arguments = (Arguments * 2)(Arguments(batch=7), Arguments(batch=9))  # never read past the first
    assert pack.gs_workspace_bytes(0, ctypes.byref(arguments[0])) == 70


def test_a_newer_caller_is_taken_where_it_uses_nothing_new(build: Build) -> None:
    pack = build()
    assert pack.gs_workspace_bytes(0, as_arguments(larger(0))) == 7
    for call in (pack.gs_can_implement, pack.gs_workspace_bytes):
        assert call(0, as_arguments(larger(1 << 40))) == BAD_ABI
    assert pack.gs_run(0, as_arguments(larger(1)), None, None) == BAD_ABI


def test_reserved_fields_are_refused_unless_zero(build: Build) -> None:
    last = (ctypes.c_uint64 * RESERVED)(*[0] * (RESERVED - 1), 1)
    pack = build()
    for field, value in (("unused", 1), ("reserved", last)):
        arguments = Arguments(**{field: value})
        assert pack.gs_can_implement(0, ctypes.byref(arguments)) == BAD_ABI
    assert pack.gs_can_implement(0, ctypes.byref(Arguments())) == 0


@pytest.mark.parametrize("abi", [0, 1, ABI_VERSION + 1])
def test_versions_out_of_range_are_refused(build: Build, abi: int) -> None:
    pack = build()
    assert pack.gs_can_implement(0, ctypes.byref(Arguments(abi=abi))) == BAD_ABI
    assert pack.gs_kernel_describe(0, ctypes.byref(KernelInfo(abi=abi))) == BAD_ABI


@pytest.mark.parametrize("size", [-1, 0, 8, KNOWN - 8, 1 << 20])
def test_sizes_that_cannot_be_are_refused(build: Build, size: int) -> None:
    assert build().gs_can_implement(0, ctypes.byref(Arguments(size=size))) == BAD_ABI


def test_a_description_is_as_long_as_its_reader_knows(build: Build) -> None:
    pack = build()
    info = KernelInfo(size=12, local_bytes=55)
    assert pack.gs_kernel_describe(0, ctypes.byref(info)) == 0
    assert (info.threads, info.local_bytes, info.size) == (384, 55, 12)
    whole = KernelInfo(local_bytes=55)
    assert pack.gs_kernel_describe(0, ctypes.byref(whole)) == 0
    assert whole.local_bytes == -1
    assert pack.gs_kernel_describe(0, ctypes.byref(KernelInfo(size=4))) == BAD_ABI


EXTRAS: dict[str, dict[str, object]] = {
    "kScales": {"scale_a": 64},
    "kRowScales": {"scaling": 1, "scale_a": 64},
    "kBlockScales": {"scaling": 2, "scale_b": 64},
    "kOutputScale": {"scale_d": 64},
    "kAmax": {"amax": 64},
    "kBias": {"bias": 64},
    "kResidual": {"residual": 64},
    "kAux": {"aux": 64},
    "kGroups": {"offsets": 64},
    "kLibraryAlgorithm": {"algorithm": (ctypes.c_uint64 * 8)(0, 1)},
}


def test_what_an_operation_does_not_read_is_refused(build: Build) -> None:
    plain = build()
    for fields in EXTRAS.values():
        assert plain.gs_can_implement(0, ctypes.byref(Arguments(**fields))) == 5, fields
    for fields in ({"library_version": 1}, {"workspace_limit": 1}, {"scaling": 3}):
        assert plain.gs_can_implement(0, ctypes.byref(Arguments(**fields))) == 5, fields


@pytest.mark.parametrize("extra", EXTRAS)
def test_what_an_operation_reads_is_taken_and_nothing_else(build: Build, extra: str) -> None:
    pack = build(allowed=f"gemmsmith::{extra}")
    for name, fields in EXTRAS.items():
        expected = 0 if name == extra else 5
        assert pack.gs_can_implement(0, ctypes.byref(Arguments(**fields))) == expected, fields
