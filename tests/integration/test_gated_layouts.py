"""What gated kernels assume about CuTe's layouts, and the TMA descriptors that they ask for.

A host program goes through every element of a tile, and prints the descriptors. It needs nvcc, but
no GPU.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tuner.compile import find_toolchain

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Each line: address, swizzle, then extent/bytes to the next/box, innermost first."""
    toolchain, program = find_toolchain(), tmp_path_factory.mktemp("layouts") / "layouts"
    command = [str(toolchain.nvcc), "-std=c++17", "-arch=sm_90a", "--expt-relaxed-constexpr", "-O0"]
    command += ["-DNDEBUG", "-DCUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL=1", *toolchain.search]
    source = Path(__file__).with_name("gated_layouts.cu")
    subprocess.run([*command, str(source), "-o", str(program)], check=True, capture_output=True)
    return subprocess.run(
        [str(program)], check=True, capture_output=True, text=True
    ).stdout.splitlines()


@pytest.mark.parametrize(
    ("tile", "rows", "columns", "swizzle"),
    [("tile 128 192 cluster 2", 48, 32, 2), ("tile 256 128 cluster 1", 64, 64, 3)],
)
def test_gate_up_and_a_16_bit_output(
    tile: str, rows: int, columns: int, swizzle: int, lines: list[str]
) -> None:
    m, first = int(tile.split()[1]), lines.index(tile) + 1
    assert lines[first : first + 6] == [
        f"map 10000 swizzle 3 520/2/64 1000/1056/{m} 1/0/1",
        f"map 20000 swizzle 3 520/2/64 504/2080/{rows} 1/0/1",
        f"map 30000 swizzle 3 520/2/64 504/2080/{rows} 1/0/1",
        f"map 40000 swizzle {swizzle} 504/2/{columns} 1000/1024/64",
        f"map 50000 swizzle {swizzle} 504/2/{columns} 1000/2032/64",
        f"map 503f0 swizzle {swizzle} 504/2/{columns} 1000/2032/64",
    ]


def test_an_fp8_output(lines: list[str]) -> None:
    assert lines[14:] == [
        f"map 40000 swizzle {swizzle} 512/1/{columns} 1000/528/64"
        for swizzle, columns in ((3, 128), (2, 64), (1, 32), (0, 16))
    ]
