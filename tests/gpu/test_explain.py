"""What `gemmsmith explain` says of a kernel's registers and occupancy is what the driver says."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver

from gemmsmith.core.kernel import CutlassKernel, cutlass
from gemmsmith.core.problem import DType
from gemmsmith.runtime.pack import LoadedPack
from tests.gpu import selection
from tests.gpu.support.building import build
from tests.support.compiled import ALIGN_1, FP8_FAST, FP8_NO_SMEM, PADDED, PINGPONG, STREAM_K
from tuner.explain.resources import compiled, cuobjdump, resources

KINDS = ("warp_specialized", "pingpong", "cooperative", "stream_k", "cpasync")
"""Of `selection.KINDS`, those whose entries have the kernel's own name."""

Attribute = driver.CUfunction_attribute


def chosen() -> list[CutlassKernel]:
    """Eleven kernels of all schedules, by TMA, by cp.async and by older copies."""
    kinds = [selection.of_kind(kind, DType.BF16) for kind in KINDS]
    kernels = [*filter(None, kinds), PINGPONG, STREAM_K, PADDED, FP8_FAST, FP8_NO_SMEM, ALIGN_1]
    return list(dict.fromkeys(map(cutlass, kernels)))


@pytest.fixture(scope="module")
def built() -> dict[str, Path]:
    return build(chosen())[1]


@pytest.fixture(scope="module")
def context() -> Iterator[None]:
    """The first GPU's primary context, which torch uses too."""
    _call(driver.cuInit(0))
    _call(driver.cuCtxSetCurrent(_call(driver.cuDevicePrimaryCtxRetain(0))))
    yield
    _call(driver.cuDevicePrimaryCtxRelease(0))


def test_ten_kernels_are_compared() -> None:
    assert len(chosen()) >= 10


@pytest.mark.usefixtures("context")
@pytest.mark.parametrize("kernel", chosen(), ids=lambda kernel: kernel.name)
def test_registers_and_occupancy_are_the_driver_s(
    kernel: CutlassKernel, built: dict[str, Path], tmp_path: Path
) -> None:
    pack = built[kernel.name]
    assert cuobjdump() is not None, "cuobjdump is not beside nvcc"
    entry, taken = compiled(kernel, pack), resources(kernel, pack)
    assert entry is not None
    assert taken is not None
    described = LoadedPack.open(pack).kernel(kernel.name).describe()
    assert (taken.threads, taken.stages) == (described.threads, described.stages)

    module, function = _loaded(pack, entry.symbol, tmp_path)
    most = Attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _call(driver.cuFuncSetAttribute(function, most, described.shared_bytes))
    registers = _attribute(function, Attribute.CU_FUNC_ATTRIBUTE_NUM_REGS)
    spilled = _attribute(function, Attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)
    blocks = _call(
        driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            function, described.threads, described.shared_bytes
        )
    )
    _call(driver.cuModuleUnload(module))
    assert registers == taken.registers
    assert spilled == taken.spilled_bytes
    assert blocks == taken.blocks_per_sm


def _loaded(pack: Path, symbol: str, folder: Path) -> tuple[Any, Any]:
    """The pack's cubin that has the symbol as a module, and its function."""
    program = cuobjdump()
    assert program is not None
    # It disassembles with a program beside it, and writes into the current folder.
    search = os.pathsep.join([str(program.parent), os.environ.get("PATH", "")])
    subprocess.run(
        [program, "-xelf", "all", pack],
        cwd=folder,
        env={**os.environ, "PATH": search},
        check=True,
        capture_output=True,
        timeout=120,
    )
    for cubin in sorted(folder.glob("*.cubin")):
        image = cubin.read_bytes()
        if symbol.encode() + b"\0" in image:
            module = _call(driver.cuModuleLoadData(image))
            return module, _call(driver.cuModuleGetFunction(module, symbol.encode()))
    pytest.fail(f"no cubin of {pack.name} has {symbol}")


def _attribute(function: Any, attribute: driver.CUfunction_attribute) -> int:
    return int(_call(driver.cuFuncGetAttribute(attribute, function)))


def _call(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(driver.CUresult(status).name)
    return values[0] if values else None
