"""Each rule against the compiler: what it refuses indeed fails, what it passes indeed compiles.

Instantiating a kernel's types is enough for most rules and takes under a second each, headers
apart; so all violations share one translation unit, told apart by `#line` directives. Rules that a
compiler alone cannot show (a cluster that no GPC holds, D's grid limits) are not here.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from cutlass_library.gemm_operation import (
    EmitGemmUniversal3xInstance,
    EmitGemmUniversalInstance,
)
from cutlass_library.library import DataTypeTag

from gemmsmith.core import legality
from gemmsmith.core.kernel import (
    Backend,
    EpilogueSchedule,
    Kernel,
    MainloopSchedule,
    TileScheduler,
)
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import DType, Layout, Problem
from tests.support.present import present
from tests.support.replacing import replace
from tuner.arch import SM90
from tuner.backends import BACKENDS, kernels, refusal
from tuner.backends.cutlass import footprint, wgmma
from tuner.backends.cutlass.operation import DATA_TYPES, gemm_operation, kernel, named
from tuner.backends.cutlass.rules import KernelRule
from tuner.backends.cutlass.slim import write_slim_headers
from tuner.backends.cutlass3x.rules import promotion_interval_divides
from tuner.backends.unit import unit_source
from tuner.compile.toolchain import Toolchain, find_toolchain

pytestmark = pytest.mark.compiles

HEADERS = """
#include "cutlass/cutlass.h"
#include "cutlass/gemm/gemm.h"
#include "cutlass/numeric_types.h"
#include "cutlass/device_kernel.h"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/gemm/kernel/default_gemm_universal.h"
#include "cutlass/gemm/kernel/tile_scheduler.hpp"
"""
PINGPONG = MainloopSchedule.PINGPONG
COOPERATIVE = MainloopSchedule.COOPERATIVE
PLAIN = MainloopSchedule.WARP_SPECIALIZED
CPASYNC = MainloopSchedule.CPASYNC_WARP_SPECIALIZED
MULTISTAGE = MainloopSchedule.MULTISTAGE
GRID = TileScheduler.GRID
PERSISTENT = TileScheduler.PERSISTENT
STREAM_K = TileScheduler.STREAM_K
SPLIT_K = TileScheduler.SPLIT_K
CLUSTER_SPLIT_K = TileScheduler.CLUSTER_SPLIT_K


def variant(
    mainloop: MainloopSchedule = PINGPONG,
    tile: tuple[int, int, int] = (64, 64, 64),
    *,
    scheduler: TileScheduler = PERSISTENT,
    dtype: DType = DType.BF16,
    layout: Layout = Layout.TN,
    stages: int = 0,
    alignment: int | None = None,
    fast_accumulation: bool = False,
) -> Kernel:
    epilogue = {CPASYNC: EpilogueSchedule.NO_SMEM, MULTISTAGE: EpilogueSchedule.THREADBLOCK}
    return kernel(
        operation=Operation.of(dtype, layout),
        tile=tile,
        stages=stages,
        mainloop=mainloop,
        epilogue=epilogue.get(mainloop, EpilogueSchedule.TMA),
        scheduler=scheduler,
        alignment=alignment or 128 // Operation.of(dtype).a.bits,
        fast_accumulation=fast_accumulation,
    )


VIOLATIONS: list[tuple[str, Kernel]] = [
    ("fast_accumulation_is_fp8", variant(fast_accumulation=True)),
    ("scheduler_matches_mainloop", variant(PINGPONG, scheduler=STREAM_K)),
    ("scheduler_matches_mainloop", variant(PLAIN, scheduler=STREAM_K)),
    ("tile_m_is_whole_warpgroups", variant(PINGPONG, (96, 64, 64))),
    ("tile_m_is_whole_warpgroups", variant(COOPERATIVE, (64, 64, 64))),
    ("tile_n_fits_instruction", variant(PINGPONG, (64, 12, 64))),
    ("tile_k_fits_swizzle", variant(PINGPONG, (64, 64, 24))),
    ("pipeline_is_deep_enough", variant(PINGPONG, stages=1)),
    (
        "pipeline_is_double_buffered",
        variant(MULTISTAGE, (64, 64, 32), stages=3, scheduler=GRID, alignment=1),
    ),
    ("shared_memory_suffices", variant(PINGPONG, (64, 256, 128), stages=4)),
    ("k_major_b_fills_swizzle_atoms", variant(PINGPONG, (64, 24, 64))),
    ("k_major_b_fills_swizzle_atoms", variant(PINGPONG, (64, 40, 128))),
    ("k_major_b_fills_swizzle_atoms", variant(COOPERATIVE, (128, 8, 64))),
    ("alignment_suits_mainloop", variant(PINGPONG, alignment=4)),
    ("alignment_suits_mainloop", variant(CPASYNC, scheduler=GRID, alignment=1)),
    (
        "cpasync_threads_cover_tile",
        variant(CPASYNC, (64, 48, 64), scheduler=GRID, layout=Layout.NT, alignment=2),
    ),
]
"""A kernel that only the named rule refuses, and that the compiler must refuse as well."""


@pytest.fixture(scope="module")
def toolchain(tmp_path_factory: pytest.TempPathFactory) -> Toolchain:
    """With the slim headers that units are compiled with: half of the time would go into others."""
    chosen = find_toolchain()
    include = tmp_path_factory.mktemp("include")
    write_slim_headers(include)
    return replace(chosen, search=(f"-I{include}", *chosen.search))


def run_nvcc(
    toolchain: Toolchain, source: str, output: Path, *options: str
) -> subprocess.CompletedProcess[str]:
    path = output.with_suffix(".cu")
    path.write_text(source)
    return subprocess.run(
        [
            str(toolchain.nvcc),
            "-std=c++17",
            "--expt-relaxed-constexpr",
            "-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED",
            "-w",
            *options,
            *toolchain.search,
            "-o",
            str(output),
            str(path),
        ],
        capture_output=True,
        text=True,
        check=False,
    )


def emitted(subject: Kernel) -> str:
    if subject.backend is Backend.CUTLASS2X:
        return str(EmitGemmUniversalInstance().emit(gemm_operation(subject)))
    return str(EmitGemmUniversal3xInstance().emit(gemm_operation(subject)))


def struct_of(subject: Kernel) -> str:
    """CUTLASS's name of what was emitted: parts of ours around it are in the kernel's name only."""
    return str(gemm_operation(subject).procedural_name())


def types_of(subject: Kernel) -> str:
    """Statements that make the compiler work out everything about a kernel but its code."""
    struct = struct_of(subject)
    if subject.backend is Backend.CUTLASS2X:
        return f"static_assert(sizeof({struct}::SharedStorage) > 0);"
    return (
        f"static_assert({struct}::SharedStorageSize <= {SM90.shared_bytes}); "
        f"static_assert(sizeof(typename {struct}::Params) > 0);"
    )


def our_kernel(subject: Kernel) -> tuple[str, str]:
    """The definition of a `cute` kernel's mainloop as a unit has it, and the kernel's type."""
    unit = unit_source([subject])
    definition = unit[unit.index(f"using {subject.name} =") : unit.index("namespace gemmsmith {")]
    swapped = "true" if subject.swapped else "false"
    element = DataTypeTag[DATA_TYPES[subject.operation.d]]
    types = f"{subject.name}, {element}, {swapped}, false"
    return definition, f"gemmsmith::ClusterSplitKKernel<{types}>"


def code_of(subject: Kernel) -> str:
    """A function that makes the compiler generate a kernel's code."""
    entry = "Kernel2" if subject.backend is Backend.CUTLASS2X else "device_kernel"
    struct = struct_of(subject)
    return f"void const* code_{struct}() {{ return (void const*)&cutlass::{entry}<{struct}>; }}\n"


@pytest.mark.long
def test_no_violation_compiles(toolchain: Toolchain, tmp_path: Path) -> None:
    """All together, in half a minute; what the compiler complains of names each."""
    source = HEADERS
    for place, (_, subject) in enumerate(VIOLATIONS):
        # Each kernel on one line of a file of its own, so that errors name it.
        text = " ".join(line.split("//")[0] for line in emitted(subject).splitlines())
        body = f"{text} {types_of(subject)}"
        if subject.mainloop in (COOPERATIVE, MULTISTAGE):
            body += " " + code_of(subject)  # asserted inside the kernel's code
        source += f'#line 1 "VIOLATION_{place}_"\n{body}\n'
    done = run_nvcc(toolchain, source, tmp_path / "all.ptx", "-arch=sm_90a", "-ptx")
    assert done.returncode != 0
    complaints = done.stdout + done.stderr
    compiled = [
        f"{place}-{rule}"
        for place, (rule, subject) in enumerate(VIOLATIONS)
        if f"VIOLATION_{place}_" not in complaints and subject.name not in complaints
    ]
    assert compiled == []
    assert all(rules(subject)[rule](subject) is not None for rule, subject in VIOLATIONS)


def rules(kernel: Kernel) -> Mapping[str, KernelRule]:
    """Those of the kernel's backend."""
    return BACKENDS[kernel.backend].rules


def sample() -> list[Kernel]:
    """A cross-section of the curated kernels, and the edges that the rules leave standing."""
    found: list[Kernel] = [
        variant(PINGPONG, (64, 8, 64)),
        variant(PINGPONG, (64, 24, 64), layout=Layout.TT),
        variant(PINGPONG, (64, 24, 128), dtype=DType.FP8_E5M2),
        variant(PLAIN, (64, 64, 64), scheduler=GRID, stages=3),
        variant(PLAIN, (64, 64, 128), scheduler=SPLIT_K),
        variant(PINGPONG, (64, 64, 64), scheduler=SPLIT_K),
        variant(PINGPONG, (64, 192, 64), scheduler=SPLIT_K, layout=Layout.NT),
        variant(COOPERATIVE, (256, 128, 64), scheduler=SPLIT_K),
        variant(COOPERATIVE, (128, 128, 128), scheduler=SPLIT_K, dtype=DType.FP8_E4M3),
        variant(PINGPONG, (128, 112, 64), alignment=1),
        variant(CPASYNC, (128, 64, 64), scheduler=GRID, alignment=2),
        variant(MULTISTAGE, (128, 64, 32), stages=2, scheduler=GRID, alignment=1),
        variant(
            MULTISTAGE, (64, 64, 64), stages=2, scheduler=GRID, alignment=1, dtype=DType.FP8_E5M2
        ),
    ]
    for dtype, layout, offset in (
        (DType.BF16, Layout.TN, 0),
        (DType.FP16, Layout.NT, 5),
        (DType.FP8_E4M3, Layout.TN, 10),
    ):
        found += kernels(Problem(m=4096, n=4096, k=4096, dtype=dtype, layout=layout))[offset::30]
    found = [each for each in found if each.backend is not Backend.CUTE]
    assert all(refusal(each) is None for each in found)
    return list({struct_of(each): each for each in found}.values())


def sample_of_ours() -> list[Kernel]:
    """Kernels that add up in a cluster: deep and shallow, both orientations, all layouts."""
    found = [
        named(
            replace(
                variant(PLAIN, tile, scheduler=CLUSTER_SPLIT_K, layout=layout, stages=stages),
                epilogue=EpilogueSchedule.NO_SMEM,
                alignment_d=1,
                swapped=swapped,
            )
        )
        for tile, layout, stages, swapped in (
            ((64, 8, 128), Layout.TN, 0, True),
            ((64, 32, 128), Layout.NN, 4, True),
            ((64, 96, 128), Layout.NT, 0, False),
            ((128, 128, 64), Layout.TT, 2, False),  # the sums need more room than the operands
        )
    ]
    fp8 = Problem(m=4096, n=4096, k=4096, dtype=DType.FP8_E5M2)
    found += [each for each in kernels(fp8) if each.backend is Backend.CUTE][::6]
    assert all(refusal(each) is None for each in found)
    return found


@pytest.mark.long
def test_legal_kernels_compile_to_the_footprint_we_say(
    toolchain: Toolchain, tmp_path: Path
) -> None:
    subjects = sample()
    modern = [each for each in subjects if each.backend is Backend.CUTLASS3X]
    facts = [
        f"int({struct_of(each)}::SharedStorageSize), "
        f"int({struct_of(each)}::CollectiveMainloop::DispatchPolicy::Stages)"
        for each in modern
    ]
    source = HEADERS + "".join(emitted(each) + types_of(each) + "\n" for each in subjects)
    source += '#include "gemmsmith/cluster_split_k.hpp"\n'
    ours = sample_of_ours()
    for each in ours:
        definition, ours_is = our_kernel(each)
        source += definition
        facts.append(f"int({ours_is}::SharedStorageSize), int({ours_is}::kStages)")
    source += f'extern "C" __device__ int facts[] = {{{", ".join(facts)}}};\n'
    output = tmp_path / "sample.ptx"
    done = run_nvcc(toolchain, source, output, "-arch=sm_90a", "-ptx")
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    told = numbers(output.read_text(), 2 * len(facts))
    for subject, shared, stages in zip([*modern, *ours], told[::2], told[1::2], strict=True):
        assert footprint.stages(subject) == stages, subject.name
        spare = footprint.shared_bytes(subject) - shared
        assert 0 <= spare <= (0 if subject in ours else 384), subject.name


def numbers(ptx: str, count: int) -> Sequence[int]:
    """The 32-bit integers of the array `facts`, which PTX spells in bytes."""
    match = present(re.search(r"facts\[\d+\] = \{([^}]*)\}", ptx))
    data = bytes(int(each) for each in match[1].split(",")).ljust(4 * count, b"\0")
    return [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)]


CAN_IMPLEMENT = """
#include <cstdio>
template <class K> void mainloop(int m, int n, int k) {
  cute::Shape<int, int, int, int> shape{m, n, k, 1};
  typename K::CollectiveMainloop::Arguments arguments{};
  std::printf("%d\\n", int(K::CollectiveMainloop::can_implement(shape, arguments)));
}
template <class K> void epilogue(int m, int n, int k) {
  cute::Shape<int, int, int, int> shape{m, n, k, 1};
  typename K::CollectiveEpilogue::Arguments arguments{};
  std::printf("%d\\n", int(K::CollectiveEpilogue::can_implement(shape, arguments)));
}
"""


@pytest.mark.long
def test_can_implement_refuses_what_the_problem_rules_refuse(
    toolchain: Toolchain, tmp_path: Path
) -> None:
    """On the host, without a GPU: alignment of every operand, and FP8's promotion interval."""
    tma = variant()
    wide = variant(PINGPONG, (64, 64, 64), layout=Layout.NT)
    cpasync = variant(CPASYNC, (64, 64, 64), scheduler=GRID, alignment=2)
    precise = variant(PINGPONG, (64, 64, 256), dtype=DType.FP8_E4M3)
    shallow = variant(PINGPONG, (64, 64, 128), dtype=DType.FP8_E4M3)
    asked: list[tuple[str, Kernel, tuple[int, int, int], bool]] = [
        ("mainloop", tma, (7, 8, 64), True),
        ("mainloop", tma, (64, 64, 60), False),
        ("epilogue", tma, (64, 60, 64), False),
        ("epilogue", tma, (7, 64, 64), True),
        ("mainloop", wide, (64, 64, 7), True),
        ("mainloop", wide, (60, 64, 64), False),
        ("mainloop", wide, (64, 60, 64), False),
        ("mainloop", cpasync, (64, 64, 62), True),
        ("mainloop", cpasync, (64, 64, 63), False),
        ("mainloop", precise, (64, 64, 256), False),
        ("mainloop", shallow, (64, 64, 256), True),
    ]
    source = HEADERS + CAN_IMPLEMENT
    source += "".join(emitted(each) for each in (tma, wide, cpasync, precise, shallow))
    calls = "".join(f"  {part}<{each.name}>{mnk};\n" for part, each, mnk, _ in asked)
    source += f"int main() {{\n{calls}}}\n"
    program = tmp_path / "can_implement"
    # No device code to speak of: the kernels themselves are never instantiated. Linked for one
    # architecture: with -arch=sm_90a nvcc compiles everything for compute_90 as well.
    options = ("-gencode=arch=compute_90a,code=sm_90a", "-cudart=static")
    done = run_nvcc(toolchain, source, program, *options)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    said = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.split()
    assert said == [str(int(answer)) for *_, answer in asked]
    for part, subject, (m, n, k), answer in asked:
        problem = Problem(m=m, n=n, k=k, dtype=subject.dtype, layout=subject.layout)
        if subject is precise:
            assert promotion_interval_divides(subject) is not None
        elif part == "mainloop" and problem.n % subject.alignment_d == 0:
            assert (legality.rows_are_aligned(subject, problem) is None) is answer
        elif not answer:
            assert legality.rows_are_aligned(subject, problem) is not None


@pytest.mark.long
def test_too_many_accumulators_spill(toolchain: Toolchain, tmp_path: Path) -> None:
    """The register rule is ptxas's: 256 accumulators a thread spill kilobytes.

    They do with either epilogue; the one without shared memory takes half as long to compile.
    """
    subject = named(
        replace(variant(PINGPONG, (128, 256, 64)), epilogue=EpilogueSchedule.NO_SMEM, alignment_d=1)
    )
    assert wgmma.registers_suffice(subject) is not None
    source = HEADERS + emitted(subject) + code_of(subject)
    done = run_nvcc(
        toolchain, source, tmp_path / "spill.cubin", "-arch=sm_90a", "-cubin", "-Xptxas=-v"
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    spilled = present(re.search(r"(\d+) bytes spill stores", done.stdout + done.stderr))
    assert int(spilled[1]) > 1000
