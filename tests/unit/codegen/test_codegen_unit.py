"""The generated translation unit: CUTLASS's own text, in order, with our adapters around it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from cutlass_library.gemm_operation import EmitGemmUniversal3xInstance

from gemmsmith.core.kernel import Backend, EpilogueSchedule, Kernel, MainloopSchedule, TileScheduler
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import DType, Layout, Problem
from tests.support.compiled import CLUSTER_SPLIT_K, PADDED, PINGPONG, SPLIT_K, STREAM_K
from tests.support.replacing import replace
from tuner.backends import kernels as legal_kernels
from tuner.backends.cutlass import HEADERS
from tuner.backends.cutlass.footprint import stages
from tuner.backends.cutlass.operation import gemm_operation, kernel
from tuner.backends.unit import headers_digest, kernel_digest, unit_source

SWAPPED = kernel(
    operation=Operation.of(DType.BF16, Layout.TT),
    tile=(64, 16, 64),
    mainloop=MainloopSchedule.PINGPONG,
    epilogue=EpilogueSchedule.TMA,
    scheduler=TileScheduler.PERSISTENT,
    alignment=8,
    swapped=True,
)
ALIGN_1 = kernel(
    operation=Operation.of(DType.FP8_E4M3, Layout.TN),
    tile=(64, 64, 64),
    stages=2,
    mainloop=MainloopSchedule.MULTISTAGE,
    epilogue=EpilogueSchedule.THREADBLOCK,
    scheduler=TileScheduler.GRID,
    alignment=1,
)


def test_unit_is_deterministic_and_keeps_the_order_it_was_given() -> None:
    source = unit_source([STREAM_K, PINGPONG])
    assert source == unit_source([STREAM_K, PINGPONG])
    table = source[source.index("kernel_table[]") :]
    assert table.index(STREAM_K.name) < table.index(PINGPONG.name)
    assert "kernel_table_size = 2;" in source


def test_kernels_are_defined_by_cutlass_own_text() -> None:
    emitted = EmitGemmUniversal3xInstance().emit(gemm_operation(PINGPONG)).strip()
    assert emitted in unit_source([PINGPONG])


@pytest.mark.parametrize("dtype", [DType.FP8_E4M3, DType.FP8_E5M2])
def test_fp8_kernels_get_the_epilogue_with_scales(dtype: DType) -> None:
    tma = kernel(
        operation=Operation.of(dtype, Layout.TN),
        tile=(128, 128, 128),
        mainloop=MainloopSchedule.COOPERATIVE,
        epilogue=EpilogueSchedule.TMA,
        scheduler=TileScheduler.PERSISTENT,
        alignment=16,
        fast_accumulation=True,
    )
    assert "gemmsmith::ScaledLinearCombination<" in unit_source([tma])
    assert "gemmsmith::thread::ScaledLinearCombination<" in unit_source([ALIGN_1])
    assert "ScaledLinearCombination" not in unit_source([PINGPONG])


def test_adapter_is_told_the_problem_s_own_orientation() -> None:
    source = unit_source([SWAPPED])
    assert f"Gemm3x<{SWAPPED.name}, gemmsmith::Traits<true, true, 8, 8, 8>, true>" in source
    assert f"Gemm2x<{ALIGN_1.name}, gemmsmith::Traits<true, false, 1, 1, 1>>" in unit_source(
        [ALIGN_1]
    )


def test_split_k_computes_fp32_partials_and_stores_the_problem_s_own_type() -> None:
    source = unit_source([SPLIT_K])
    partial = gemm_operation(SPLIT_K).procedural_name()
    assert f"struct {partial} :" in source
    assert "_f32_f32_f32_" in partial
    assert (
        f"entry<gemmsmith::SplitKGemm<{partial}, gemmsmith::Traits<true, false, 8, 8, 8>, false, "
        f'cutlass::bfloat16_t>>("{SPLIT_K.name}")'
    ) in source


def test_cluster_split_k_is_our_kernel_around_cutlass_s_mainloop() -> None:
    source = unit_source([CLUSTER_SPLIT_K])
    assert f"using {CLUSTER_SPLIT_K.name} =" in source
    assert f"StageCount<{stages(CLUSTER_SPLIT_K)}>" in source
    assert "cute::Shape<cute::Int<64>, cute::Int<16>, cute::Int<128>>" in source
    assert "epilogue::collective" not in source
    assert (
        f"entry<gemmsmith::ClusterSplitKGemm<{CLUSTER_SPLIT_K.name}, cutlass::bfloat16_t, "
        f'gemmsmith::Traits<true, false, 8, 8, 1>, true>>("{CLUSTER_SPLIT_K.name}")'
    ) in source


def test_padded_kernel_wraps_its_aligned_sibling() -> None:
    sibling = gemm_operation(PADDED).procedural_name()
    assert sibling == PINGPONG.name
    assert (
        f"entry<gemmsmith::PaddedGemm<gemmsmith::Gemm3x<{sibling}, "
        "gemmsmith::Traits<true, false, 8, 8, 8>, false>, "
        f'gemmsmith::Traits<true, false, 1, 1, 8>>>("{PADDED.name}")'
    ) in unit_source([PADDED])


def test_padded_kernel_and_its_sibling_share_one_definition() -> None:
    source = unit_source([PADDED, PINGPONG])
    assert source.count(f"struct {PINGPONG.name} :") == 1
    assert f'("{PADDED.name}")' in source
    assert f'("{PINGPONG.name}")' in source
    assert "kernel_table_size = 2;" in source


@pytest.mark.parametrize(
    ("dtype", "layout"), [(DType.BF16, Layout.NN), (DType.FP8_E4M3, Layout.TN)]
)
def test_one_unit_could_hold_every_core_kernel_of_a_family(dtype: DType, layout: Layout) -> None:
    """No two different definitions have one name, whatever kernels share a unit."""
    members: dict[str, Kernel] = {}
    for m, n, k in ((4096,) * 3, (4096, 4095, 4096), (4092,) * 3, (4095,) * 3):
        for each in legal_kernels(Problem(m=m, n=n, k=k, dtype=dtype, layout=layout)):
            members[each.name] = each
    source = unit_source(list(members.values()))
    defined = Counter(re.findall(r"^(?:struct|using) (\w+) [:=]", source, re.MULTILINE))
    assert set(defined.values()) == {1}
    table = source[source.index("kernel_table[]") :]
    assert set(re.findall(r'\("(\w+)"\)', table)) == set(members)
    used = set(re.findall(r"(?:Gemm3x|Gemm2x|SplitKGemm)<(?!gemmsmith::)(\w+)", table))
    assert used <= set(defined)


def test_stream_k_units_name_our_scheduler() -> None:
    """CUTLASS's own does not compile with programmatic dependent launch."""
    source = unit_source([STREAM_K])
    assert "gemmsmith::StreamKScheduler>" in source
    assert "cutlass::gemm::StreamKScheduler" not in source
    assert '#include "gemmsmith/stream_k.hpp"' in source
    assert "StreamKScheduler" not in unit_source([PINGPONG, SPLIT_K, PADDED, CLUSTER_SPLIT_K])


@pytest.mark.parametrize(
    ("member", "header"),
    [
        (PINGPONG, "gemm3x"),
        (SWAPPED, "gemm3x"),
        (STREAM_K, "stream_k"),
        (SPLIT_K, "split_k"),
        (CLUSTER_SPLIT_K, "cluster_split_k"),
        (PADDED, "padded"),
        (ALIGN_1, "gemm2x"),
    ],
)
def test_a_unit_includes_the_header_that_its_adapter_needs_and_no_other(
    member: Kernel, header: str
) -> None:
    assert (HEADERS / "gemmsmith" / f"{header}.hpp").is_file()
    included = re.findall(r'#include "gemmsmith/(\w+)\.hpp"', unit_source([member]))
    assert included == [header, "table"]


def test_headers_are_included_once_each() -> None:
    everything = [PINGPONG, STREAM_K, SPLIT_K, CLUSTER_SPLIT_K, PADDED, SWAPPED]
    included = re.findall(r'#include "gemmsmith/(\w+)\.hpp"', unit_source(everything))
    assert included == ["cluster_split_k", "gemm3x", "padded", "split_k", "stream_k", "table"]
    assert CLUSTER_SPLIT_K.backend is Backend.CUTE


@pytest.mark.parametrize("kernels", [[], [PINGPONG, STREAM_K, PINGPONG]])
def test_a_unit_needs_kernels_of_different_names(kernels: list[Kernel]) -> None:
    with pytest.raises(ValueError, match="kernel"):
        unit_source(kernels)


def test_digest_covers_what_the_kernel_compiles_from() -> None:
    assert kernel_digest(PINGPONG) == kernel_digest(replace(PINGPONG))
    variants = [
        PINGPONG,
        PADDED,
        STREAM_K,
        SPLIT_K,
        CLUSTER_SPLIT_K,
        SWAPPED,
        ALIGN_1,
        replace(PINGPONG, alignment_d=16),
    ]
    assert len({kernel_digest(variant) for variant in variants}) == len(variants)


def test_headers_bring_no_names_of_cute_into_file_scope() -> None:
    """Inside functions they may: nothing at file or namespace scope is indented there."""
    for header in HEADERS.rglob("*.h*"):
        for line in header.read_text(encoding="utf-8").splitlines():
            assert not line.startswith("using namespace"), header


def test_a_header_that_a_kernel_never_sees_makes_no_other_pack(tmp_path: Path) -> None:
    ours = tmp_path / "gemmsmith"
    ours.mkdir()
    (ours / "table.hpp").write_text("")
    (ours / "kernel.hpp").write_text('#include "cutlass/gemm/gemm.h"\n#include "gemmsmith/abi.h"\n')
    (ours / "abi.h").write_text("int before;\n")
    (ours / "other.hpp").write_text("int before;\n")

    def digest() -> str:
        headers_digest.cache_clear()
        return headers_digest("gemmsmith/kernel.hpp", tmp_path)

    first = digest()
    (ours / "other.hpp").write_text("int after;\n")
    assert digest() == first
    (ours / "abi.h").write_text("int after;\n")
    assert digest() != first
