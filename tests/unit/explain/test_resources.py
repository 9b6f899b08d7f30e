"""What limits the blocks on an SM, and what is read of a pack without loading it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gemmsmith.core.kernel import CublasLtKernel, CutlassKernel, Layout
from gemmsmith.core.problem import Problem
from tests.support.compiled import ALIGN_1, CLUSTER_SPLIT_K, PINGPONG, STREAM_K
from tests.support.serving import H200
from tuner.explain import resources as module
from tuner.explain.named_grid import of_names
from tuner.explain.resources import named_resources, resources

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


@pytest.mark.parametrize(
    ("name", "stages", "shared", "blocks"),
    [
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN", 4, 4 * 64 * (192 + 192) * 2, 1),
        ("nvjet_sm90_hss_64x8_64x16_1x1_h_bz_splitK_NNT", 16, 16 * 64 * (64 + 8) * 2, 1),
        ("cutlass_80_tensorop_bf16_s16816gemm_bf16_64x64_32x6_tn_align8", 6, 6 * 32 * 128 * 2, 4),
        (
            "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_stage4_"
            "warpgroupsize1x1x1_tensor64x128x16_kernel",
            4,
            4 * 64 * 256 * 2,
            1,
        ),
    ],
)
def test_a_name_says_what_the_default_takes_at_least(
    name: str, stages: int, shared: int, blocks: int
) -> None:
    problem = Problem(m=4096, n=4096, k=4096)
    taken = named_resources(of_names([name], problem, H200), problem, H200.arch)
    assert taken is not None
    assert taken.is_named
    assert (taken.stages, taken.shared_bytes, taken.blocks_per_sm) == (stages, shared, blocks)
    assert (taken.threads, taken.registers, taken.spilled_bytes) == (None, None, None)


@pytest.mark.parametrize(
    "name", ["ampere_sgemm_32x32_sliced1x4_tn", "cutlass_80_simt_gemm_64x64_tn_align1", "kernel"]
)
def test_a_name_without_stages_says_nothing(name: str) -> None:
    problem = Problem(m=64, n=64, k=64)
    assert named_resources(of_names([name], problem, H200), problem, H200.arch) is None


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
