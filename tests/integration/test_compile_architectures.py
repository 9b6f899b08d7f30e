"""One kernel of each architecture that is not measured: through the pipeline, to its instruction.

The pack is asked on this machine what it holds, and disassembled: a kernel of an architecture that
does without the tensor-core instruction it was chosen for would be no kernel of that architecture.
"""

from __future__ import annotations

import re

import pytest

from gemmsmith.core.kernel import CutlassKernel
from gemmsmith.core.problem import Problem
from tests.support.arguments import packed_arguments
from tests.support.compiled import COMPILING, MISALIGNED, CompiledPacks, Loaded, build, kept, sass
from tuner.arch import ARCHITECTURES
from tuner.backends import kernels
from tuner.compile import Builder

pytestmark = [*COMPILING, pytest.mark.long]

ODD = (4095, 4095, 4095)

CASES = [
    ("sm80", "bf16", "_128x128_32x4_", r"HMMA\.16816\.F32\.BF16", 128),
    ("sm89", "bf16", "_128x128_32x3_", r"HMMA\.16816\.F32\.BF16", 128),
    ("sm89", "fp8_e4m3", "_128x128_64x3_", r"QMMA\.16832\.F32\.E4M3\.E4M3", 128),
    ("sm120", "fp16", "_128x128_32x3_", r"HMMA\.16816\.F32", 128),
    ("sm120", "fp8_e5m2", "_128x128_64x3_", r"QMMA\.16832\.F32\.E5M2\.E4M3", 128),
    ("sm100", "bf16", "_128x128x64_1x1x1_0_tnt_", r"UTCHMMA", 128),
    ("sm100", "bf16", "_256x128x64_2x1x1_0_tnt_", r"UTCHMMA\.2CTA", 128),
    ("sm100", "fp8_e4m3", "_128x128x128_1x1x1_0_tnt_", r"UTCQMMA", 128),
]


def chosen(arch: str, dtype: str, part: str) -> CutlassKernel:
    for kernel in kernels(Problem(m=4096, n=4096, k=4096, dtype=dtype), arch):
        if part in kernel.name:
            assert isinstance(kernel, CutlassKernel)
            return kernel
    raise AssertionError(f"no kernel {part} of {arch}")


@pytest.fixture(scope="module")
def packs() -> CompiledPacks:
    return build(kept(), [chosen(*case[:3]) for case in CASES], workers=2, mixed=True)


@pytest.mark.parametrize(
    ("arch", "dtype", "part", "instruction", "tile_m"),
    CASES,
    ids=[f"{arch}-{dtype}{part}" for arch, dtype, part, _, _ in CASES],
)
def test_a_kernel_compiles_to_its_instruction(
    packs: CompiledPacks, arch: str, dtype: str, part: str, instruction: str, tile_m: int
) -> None:
    kernel = chosen(arch, dtype, part)
    assert kernel.tile[0] == tile_m
    assert Builder(packs.store, packs.toolchain).has(kernel)
    pack = packs.pack(kernel)
    assert re.search(rf"\b{instruction}\b", packs.code(kernel))
    assert set(re.findall(r"arch = sm_(\w+)", sass(pack.path))) == {ARCHITECTURES[arch].target}

    loaded = Loaded(packs, kernel)
    assert 0 < loaded.describe().shared_bytes <= ARCHITECTURES[arch].shared_bytes
    fits = packed_arguments(Problem(m=256, n=512, k=1024, dtype=dtype))
    assert loaded.can_implement(fits) == 0
    m, n, k = ODD
    odd = packed_arguments(Problem(m=m, n=n, k=k, dtype=dtype))
    assert loaded.can_implement(odd) == MISALIGNED
