"""Blocks per SM by a table of its own, from what compiled packs say of their kernels.

`tests/gpu/test_explain.py` compares the same with the driver.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gemmsmith.core.kernel import Backend, CutlassKernel, cutlass
from gemmsmith.runtime.pack import LoadedPack
from tests.gpu import selection
from tests.integration.test_compile_operations import KERNELS as OPERATIONS
from tests.support.compiled import COMPILING, KERNELS, QUICK, CompiledPacks, disassembler, registers
from tuner.compile import Pack
from tuner.explain import resources as module
from tuner.explain.resources import resources

pytestmark = COMPILING

SM_REGISTERS, SM_WARPS, SM_BLOCKS = 64 * 1024, 64, 32
SM_SHARED, BLOCK_SHARED = 228 * 1024, 1024
PARTITIONS = 4


def test_blocks_of_every_compiled_kernel_follow_from_the_table(
    compiled_packs: CompiledPacks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "cuobjdump", disassembler)
    limits: set[str] = set()
    checked = list(compiled(compiled_packs))
    assert {kernel.name for kernel, _ in checked} >= {kernel.name for kernel in QUICK}
    for kernel, pack in checked:
        taken = resources(kernel, pack.path)
        described = LoadedPack.open(pack.path).kernel(kernel.name).describe()
        assert taken is not None
        assert (taken.threads, taken.stages) == (described.threads, described.stages), kernel.name
        assert 0 <= taken.shared_bytes - described.shared_bytes <= 384, kernel.name
        if taken.registers is None:  # its entry has no name of its own among several
            assert kernel.backend is Backend.CUTE or kernel.operation.epilogue.is_gated
            assert len(pack.kernels) > 1
        else:
            assert taken.registers in registers(pack.path)
        blocks = {
            "shared memory": SM_SHARED // (BLOCK_SHARED + round_up(described.shared_bytes, 128)),
            "threads": SM_WARPS * 32 // described.threads,
            "blocks": SM_BLOCKS,
        }
        if taken.registers is not None:
            warp = round_up(32 * taken.registers, 256)
            warps = PARTITIONS * (SM_REGISTERS // PARTITIONS // warp)
            blocks["registers"] = warps // (described.threads // 32)
        assert taken.blocks_per_sm == min(blocks.values()), kernel.name
        assert blocks[taken.limited_by] == taken.blocks_per_sm, kernel.name
        limits.add(taken.limited_by)
    assert limits == {"shared memory", "registers"}


def compiled(packs: CompiledPacks) -> Iterator[tuple[CutlassKernel, Pack]]:
    """The kernels of tests that are compiled here, each with its pack."""
    chosen = [*KERNELS, *OPERATIONS.values(), *selection.everything()]
    for kernel in dict.fromkeys(map(cutlass, chosen)):
        if (pack := packs.store.find(kernel)) is not None:
            yield kernel, pack


def round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
