"""Compares the ctypes structures with the C header."""

from __future__ import annotations

import ctypes
import subprocess

import pytest

from gemmsmith.core.launch import Decomposition, Launch, RasterOrder
from gemmsmith.runtime.abi import (
    ABI_VERSION,
    DECOMPOSITION_CODES,
    OLDEST_ABI_VERSION,
    RASTER_CODES,
    Arguments,
    KernelInfo,
    Sized,
    status_text,
)
from tuner.backends.cutlass import HEADERS

INCLUDE = HEADERS
STRUCTURES = {"gs_arguments": Arguments, "gs_kernel_info": KernelInfo}


@pytest.fixture(scope="module")
def layout_in_c(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """The offset of every field and the size of every structure, according to gcc."""
    folder = tmp_path_factory.mktemp("abi")
    wanted = {name: f"(int){name}" for name in ("GS_ABI_VERSION", "GS_ABI_OLDEST")}
    for name, structure in STRUCTURES.items():
        wanted[f"sizeof.{name}"] = f"(int)sizeof({name})"
        for field, *_ in structure._fields_:
            wanted[f"{name}.{field}"] = f"(int)offsetof({name}, {field})"
            wanted[f"{name}.{field}.size"] = f"(int)sizeof((({name}*)0)->{field})"
    prints = "".join(f'printf("{key} %d\\n", {value});' for key, value in wanted.items())
    source = folder / "layout.c"
    source.write_text(
        "#include <stdio.h>\n#include <stddef.h>\n#include <gemmsmith/abi.h>\n"
        f"int main(void) {{ {prints} return 0; }}\n"
    )
    program = folder / "layout"
    subprocess.run(["gcc", f"-I{INCLUDE}", str(source), "-o", str(program)], check=True)
    output = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    return {key: int(value) for key, value in (line.split() for line in output.splitlines())}


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_match_the_header(name: str, layout_in_c: dict[str, int]) -> None:
    structure = STRUCTURES[name]
    assert ctypes.sizeof(structure) == layout_in_c[f"sizeof.{name}"]
    for field, *_ in structure._fields_:
        descriptor = getattr(structure, field)
        assert descriptor.offset == layout_in_c[f"{name}.{field}"], field
        assert descriptor.size == layout_in_c[f"{name}.{field}.size"], field


def test_version_matches_the_header(layout_in_c: dict[str, int]) -> None:
    assert layout_in_c["GS_ABI_VERSION"] == ABI_VERSION
    assert layout_in_c["GS_ABI_OLDEST"] == OLDEST_ABI_VERSION


@pytest.mark.parametrize("structure", STRUCTURES.values())
def test_structures_tell_their_version_and_size(structure: type[Sized]) -> None:
    made = structure()
    assert (made.abi, made.size) == (ABI_VERSION, ctypes.sizeof(structure))
    assert not any(bytes(made)[8:])


def test_a_library_s_algorithm_does_not_outlive_its_launch() -> None:
    arguments = Arguments()
    arguments.set_algorithm(130100, range(1, 9), 4096)
    assert list(arguments.algorithm) == list(range(1, 9))
    assert (arguments.library_version, arguments.workspace_limit) == (130100, 4096)
    arguments.set_launch(Launch(), sm_count=132)
    assert not any(arguments.algorithm)
    assert (arguments.library_version, arguments.workspace_limit) == (0, 0)


def test_every_launch_choice_has_a_code() -> None:
    assert set(RASTER_CODES) == set(RasterOrder)
    assert set(DECOMPOSITION_CODES) == set(Decomposition)


def test_sm_budget_limits_the_device_count() -> None:
    arguments = Arguments()
    arguments.set_launch(Launch(), sm_count=132)
    assert arguments.sm_count == 132
    arguments.set_launch(Launch(sm_budget=64), sm_count=132)
    assert arguments.sm_count == 64
    arguments.set_launch(Launch(sm_budget=500), sm_count=132)
    assert arguments.sm_count == 132


def test_status_codes_have_different_texts() -> None:
    assert "CUDA error 700" in status_text(1700)
    assert "aligned" in status_text(1)
    assert status_text(0) == "success"
    assert "cuBLAS status 15" in status_text(2015)
    assert "another version" in status_text(3001)
    assert "wrongly" in status_text(-2)
