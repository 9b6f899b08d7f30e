"""What limits the blocks on an SM, and what is read of a pack without loading it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gemmsmith.core.kernel import CublasLtKernel, CutlassKernel, Layout
from tests.support.compiled import ALIGN_1, CLUSTER_SPLIT_K, PINGPONG, STREAM_K
from tuner.explain import resources as module
from tuner.explain.resources import resources

PRINTED = """
Resource usage:
 Function _ZN9gemmsmith9copy_rowsILi2EEEvNS_10CopyParamsE:
  REG:32 STACK:0 SHARED:1024 LOCAL:0
 Function _ZN9gemmsmith11entry_pointI{size}{name}EEvNT_6ParamsE:
  REG:{registers} STACK:{stack} SHARED:1024 LOCAL:0
 Function _ZN9gemmsmith11entry_pointI5otherEEvNT_6ParamsE:
  REG:40 STACK:0 SHARED:1024 LOCAL:0
"""


@pytest.mark.parametrize(
    ("kernel", "threads"),
    [(PINGPONG, 384), (STREAM_K, 384), (CLUSTER_SPLIT_K, 160), (ALIGN_1, 128)],
    ids=lambda item: item.name if isinstance(item, CutlassKernel) else str(item),
)
def test_traits_say_threads_and_what_limits_the_blocks(kernel: CutlassKernel, threads: int) -> None:
    taken = resources(kernel)
    assert taken is not None
    assert taken.threads == threads
    assert taken.limited_by == "shared memory"
    assert taken.blocks_per_sm * (taken.shared_bytes + 1024) <= 228 * 1024
    assert (taken.registers, taken.spilled_bytes) == (None, None)


def test_registers_are_those_of_the_kernel_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = ALIGN_1.name
    printed = PRINTED.format(size=len(name), name=name, registers=255, stack=48)
    done = subprocess.CompletedProcess((), 0, stdout=printed)
    monkeypatch.setattr(module, "cuobjdump", lambda: Path("cuobjdump"))
    monkeypatch.setattr(module.subprocess, "run", lambda *_, **__: done)
    pack = tmp_path / "pack.so"
    pack.write_bytes(b"")
    taken = resources(ALIGN_1, pack)
    assert taken is not None
    assert (taken.registers, taken.spilled_bytes) == (255, 48)
    assert (taken.blocks_per_sm, taken.limited_by) == (2, "registers")


def test_a_pack_that_is_not_here_leaves_registers_out(tmp_path: Path) -> None:
    taken = resources(PINGPONG, tmp_path / "missing.so")
    assert taken is not None
    assert taken.registers is None


def test_an_algorithm_of_cublaslt_says_nothing() -> None:
    kernel = CublasLtKernel(
        name="cublaslt",
        arch="sm90",
        dtype="bf16",
        layout=Layout.TN,
        alignment_a=8,
        alignment_b=8,
        alignment_d=8,
    )
    assert resources(kernel) is None
