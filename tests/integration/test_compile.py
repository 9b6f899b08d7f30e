"""Real sm_90a packs: compiled by the wheels' nvcc, loaded and asked on a machine without a GPU."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from gemmsmith.core.config import Config
from gemmsmith.core.kernel import Backend, EpilogueSchedule, Kernel, TileScheduler
from gemmsmith.core.launch import Decomposition, Launch
from gemmsmith.core.problem import DType
from gemmsmith.ops.engine.forms import Form, Spec, shapes
from gemmsmith.ops.engine.plan import Plan
from gemmsmith.runtime.abi import ABI_VERSION, KernelInfo
from gemmsmith.runtime.pack import LoadedPack
from tests.support.compiled import (
    ALIGN_1,
    CLUSTER_SPLIT_K,
    COMPILING,
    FP8_FAST,
    FP8_NO_SMEM,
    IMPOSSIBLE,
    INVALID_LAYOUT,
    INVALID_PROBLEM,
    KERNELS,
    MISALIGNED,
    NOT_SUPPORTED,
    PADDED,
    PINGPONG,
    SPLIT_K,
    STREAM_K,
    SWAPPED,
    CompiledPacks,
    Loaded,
    arguments_of,
    build,
    members,
    sass,
)
from tests.support.stand_in import Host
from tuner.backends.cutlass import footprint
from tuner.backends.cutlass.operation import gemm_operation
from tuner.compile import ArtifactStore, Builder
from tuner.explain.resources import resources
from tuner.trial import FailureKind

pytestmark = COMPILING

SINGLE = (SPLIT_K, CLUSTER_SPLIT_K)  # slices of K take the place of batches
ANY_ALIGNMENT = (ALIGN_1, PADDED)
HERE = torch.device("cpu")
REFUSED = 11
BAD_INDEX, BAD_ABI = -1, -2


@pytest.fixture(params=members(KERNELS))
def member(request: pytest.FixtureRequest) -> Kernel:
    chosen: Kernel = request.param
    return chosen


def test_packs_come_from_the_wheels_with_the_system_s_cuda_hidden(
    compiled_packs: CompiledPacks,
) -> None:
    assert compiled_packs.toolchain.origin == "wheels"
    assert shutil.which("nvcc", path=compiled_packs.path) is None
    assert all(
        compiled_packs.pack(each).path.stat().st_size < 4 << 20 for each in compiled_packs.built
    )


def test_pack_names_its_kernels_in_the_order_of_its_manifest(
    compiled_packs: CompiledPacks, member: Kernel
) -> None:
    pack = compiled_packs.pack(member)
    library = Loaded(compiled_packs, member).library
    assert library.gs_abi_version() == ABI_VERSION
    names = [library.gs_kernel_name(i).decode() for i in range(library.gs_kernel_count())]
    assert tuple(names) == pack.kernels
    assert library.gs_kernel_name(len(names)) is None
    assert library.gs_kernel_name(-1) is None


@pytest.mark.long
def test_kernels_of_one_family_share_a_pack(compiled_packs: CompiledPacks) -> None:
    assert compiled_packs.pack(FP8_FAST) == compiled_packs.pack(FP8_NO_SMEM)
    assert compiled_packs.pack(PINGPONG) != compiled_packs.pack(ALIGN_1)


def test_description_needs_no_device(compiled_packs: CompiledPacks, member: Kernel) -> None:
    info = Loaded(compiled_packs, member).describe()
    threads = {Backend.CUTLASS3X: 384, Backend.CUTE: 160, Backend.CUTLASS2X: 128}
    assert info.threads == threads[member.backend]
    assert 0 < info.shared_bytes <= 227 * 1024
    assert info.stages == footprint.stages(member)
    if member.epilogue is EpilogueSchedule.TMA or member.backend is Backend.CUTE:
        assert info.shared_bytes == footprint.shared_bytes(member)
    elif member.backend is Backend.CUTLASS3X:
        assert 0 <= footprint.shared_bytes(member) - info.shared_bytes <= 256
    assert (info.registers, info.local_bytes) == (-1, -1)
    explained = resources(member, compiled_packs.pack(member).path)
    assert explained is not None
    assert (explained.threads, explained.stages) == (info.threads, info.stages)
    assert explained.blocks_per_sm >= 1
    if explained.registers is not None:  # split-K's kernel is one of several in its pack
        assert explained.registers <= 65536 // info.threads
        assert explained.spilled_bytes == 0


def test_misuse_is_told_apart(compiled_packs: CompiledPacks) -> None:
    library = Loaded(compiled_packs, PINGPONG).library
    arguments = arguments_of(PINGPONG)
    assert library.gs_can_implement(99, ctypes.byref(arguments)) == BAD_INDEX
    assert library.gs_run(-1, ctypes.byref(arguments), None, None) == BAD_INDEX
    arguments.abi = ABI_VERSION + 1
    assert library.gs_can_implement(0, ctypes.byref(arguments)) == BAD_ABI
    assert library.gs_workspace_bytes(0, ctypes.byref(arguments)) == BAD_ABI
    assert library.gs_kernel_describe(0, ctypes.byref(KernelInfo(abi=99))) == BAD_ABI
    assert library.gs_kernel_describe(0, None) == BAD_ABI


@pytest.mark.parametrize("batch", [1, 3])
def test_aligned_problems_are_taken(
    compiled_packs: CompiledPacks, member: Kernel, batch: int
) -> None:
    loaded = Loaded(compiled_packs, member)
    arguments = arguments_of(member, batch=batch)
    if member in SINGLE and batch > 1:
        assert loaded.can_implement(arguments) == NOT_SUPPORTED
        assert loaded.workspace_bytes(arguments) == -NOT_SUPPORTED
        return
    assert loaded.can_implement(arguments) == 0
    partials = 2 * 256 * 512 * 4 if member is SPLIT_K else 0
    assert loaded.workspace_bytes(arguments) == partials


def test_padded_rows_are_taken_and_short_ones_refused(
    compiled_packs: CompiledPacks, member: Kernel
) -> None:
    loaded = Loaded(compiled_packs, member)
    arguments = arguments_of(member)
    arguments.lda += 64
    arguments.ldb += 32
    arguments.ldd += 16
    assert loaded.can_implement(arguments) == 0
    arguments.lda = 1024 - 64
    assert loaded.can_implement(arguments) == INVALID_LAYOUT
    arguments.m, arguments.lda = 1, 5  # a single row has no stride to speak of
    assert loaded.can_implement(arguments) == 0


def test_misaligned_k_needs_a_kernel_of_any_alignment(
    compiled_packs: CompiledPacks, member: Kernel
) -> None:
    arguments = arguments_of(member, k=1002)
    expected = 0 if member in ANY_ALIGNMENT else MISALIGNED
    assert Loaded(compiled_packs, member).can_implement(arguments) == expected


@pytest.mark.parametrize("member", members([of for of in KERNELS if of.dtype == "bf16"]))
@pytest.mark.parametrize("k", [1024, 1001])
def test_a_plan_has_the_workspace_of_every_address_that_it_takes(
    compiled_packs: CompiledPacks, member: Kernel, k: int
) -> None:
    """A kernel of any alignment copies what is not aligned, rows or addresses, into it."""
    if k % member.alignment_a:
        pytest.skip("no kernel of this alignment takes it")
    lying = [Spec(torch.bfloat16, HERE, torch.Size((rows, k)), (k, 1)) for rows in (256, 512)]
    (shape, *_) = shapes(Form.LINEAR, *lying)
    splits = arguments_of(member).splits
    cut = Decomposition.SPLIT_K if member is SPLIT_K else Decomposition.HEURISTIC
    pack = compiled_packs.pack(member)
    loaded = LoadedPack.open(pack.path).kernel(member.name)
    config = Config(kernel=member, launch=Launch(decomposition=cut, splits=splits), pack=pack.hash)
    plan = Plan(config, shape, loaded, Host(), HERE, 3)
    memory = [torch.empty(of.size.numel() + 16, dtype=of.dtype) for of in lying]
    launched = []

    def run(index: int, arguments: Any, workspace: int, stream: int) -> int:
        launched.append(Loaded(compiled_packs, member).workspace_bytes(arguments._obj))
        return 0

    plan._run = run
    for shifts in itertools.product(range(9), repeat=2):
        moved = [
            of.as_strided(spec.size, spec.stride, shift)
            for of, spec, shift in zip(memory, lying, shifts, strict=True)
        ]
        plan(*moved)
    assert launched
    assert set(launched) == {plan._workspace}


@pytest.mark.long
@pytest.mark.parametrize(
    ("field", "value"),
    [("lda", 1025), ("ldb", 1027), ("batch_stride_a", 256 * 1024 + 1), ("a", 0x1002), ("b", 0x8)],
)
def test_addresses_and_strides_that_tma_cannot_encode_are_refused(
    compiled_packs: CompiledPacks, field: str, value: int
) -> None:
    arguments = arguments_of(STREAM_K, batch=2)
    setattr(arguments, field, value)
    assert Loaded(compiled_packs, STREAM_K).can_implement(arguments) == MISALIGNED
    for member in ANY_ALIGNMENT:
        assert Loaded(compiled_packs, member).can_implement(arguments) == 0
    assert Loaded(compiled_packs, STREAM_K).run(arguments) == MISALIGNED


@pytest.mark.long
def test_unaligned_n_needs_an_epilogue_without_tma(compiled_packs: CompiledPacks) -> None:
    for member, expected in [(FP8_FAST, MISALIGNED), (FP8_NO_SMEM, 0), (CLUSTER_SPLIT_K, 0)]:
        arguments = arguments_of(member, n=513)
        assert Loaded(compiled_packs, member).can_implement(arguments) == expected


def test_c_counts_only_where_beta_does(compiled_packs: CompiledPacks, member: Kernel) -> None:
    loaded = Loaded(compiled_packs, member)
    arguments = arguments_of(member)
    arguments.ldc, arguments.c = 3, 0x1001
    assert loaded.can_implement(arguments) == 0
    arguments.beta = 0.5
    assert loaded.can_implement(arguments) == INVALID_LAYOUT
    arguments.ldc, arguments.c = 512, None
    assert loaded.can_implement(arguments) == INVALID_PROBLEM
    arguments.c = 0x1000
    assert loaded.can_implement(arguments) == 0


def test_scales_belong_to_fp8(compiled_packs: CompiledPacks, member: Kernel) -> None:
    arguments = arguments_of(member)
    arguments.scale_a = arguments.scale_b = 0x1000
    expected = 0 if member.dtype == DType.FP8_E4M3 else NOT_SUPPORTED
    assert Loaded(compiled_packs, member).can_implement(arguments) == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("m", 0),
        ("n", -1),
        ("k", 0),
        ("batch", 0),
        ("sm_count", 0),
        ("splits", 0),
        ("swizzle", 0),
        ("raster_order", 3),
        ("decomposition", 4),
        ("decomposition", -1),
    ],
)
def test_nonsense_is_refused(
    compiled_packs: CompiledPacks, member: Kernel, field: str, value: int
) -> None:
    arguments = arguments_of(member)
    setattr(arguments, field, value)
    loaded = Loaded(compiled_packs, member)
    assert loaded.can_implement(arguments) == INVALID_PROBLEM
    assert loaded.workspace_bytes(arguments) == -INVALID_PROBLEM
    assert loaded.run(arguments) == INVALID_PROBLEM


@pytest.mark.long
def test_only_schedulers_that_split_take_splits(compiled_packs: CompiledPacks) -> None:
    stream_k = Loaded(compiled_packs, STREAM_K)
    arguments = arguments_of(STREAM_K, m=128, n=128, k=16384, splits=8)
    assert stream_k.can_implement(arguments) == 0
    assert stream_k.workspace_bytes(arguments) > 7 * 128 * 128
    for member in (PINGPONG, SWAPPED, PADDED):
        persistent = Loaded(compiled_packs, member)
        assert persistent.can_implement(arguments) == NOT_SUPPORTED
        assert persistent.workspace_bytes(arguments) == -NOT_SUPPORTED
    arguments.decomposition, arguments.splits = 2, 1
    assert stream_k.workspace_bytes(arguments) > 0
    arguments.decomposition, arguments.splits = 0, 2
    assert stream_k.can_implement(arguments) == REFUSED


def test_split_k_of_the_low_alignment_kernel_needs_semaphores(
    compiled_packs: CompiledPacks,
) -> None:
    loaded = Loaded(compiled_packs, ALIGN_1)
    arguments = arguments_of(ALIGN_1, k=4097, splits=4)
    assert loaded.can_implement(arguments) == 0
    assert loaded.workspace_bytes(arguments) > 0
    arguments.batch = 2
    assert loaded.can_implement(arguments) == NOT_SUPPORTED


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="there is a GPU")
def test_run_without_a_gpu_is_an_error_of_cuda(
    compiled_packs: CompiledPacks, member: Kernel
) -> None:
    assert Loaded(compiled_packs, member).run(arguments_of(member), workspace=0x1000) > 1000


@pytest.mark.parametrize(
    ("member", "instruction"),
    [
        (PINGPONG, "HGMMA"),
        (CLUSTER_SPLIT_K, "HGMMA"),
        pytest.param(FP8_FAST, "QGMMA", marks=pytest.mark.long),
        (ALIGN_1, "HMMA"),
    ],
)
def test_machine_code_uses_the_tensor_cores(
    compiled_packs: CompiledPacks, member: Kernel, instruction: str
) -> None:
    pack = compiled_packs.pack(member)
    code = sass(pack.path)
    assert instruction in code
    assert "sm_90a" in code
    together = [each for each in KERNELS if each.name in pack.kernels]
    # Siblings share theirs.
    functions = {gemm_operation(each).procedural_name() for each in together}
    ours = any(each.scheduler is TileScheduler.SPLIT_K for each in together) + (PADDED in together)
    assert code.count("Function :") == len(functions) + ours


def test_pack_exports_the_interface_and_little_else(
    compiled_packs: CompiledPacks, member: Kernel
) -> None:
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", str(compiled_packs.pack(member).path)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    exported = {line.split()[-1] for line in listing.splitlines()}
    assert {name for name in exported if name.startswith("gs_")} == {
        "gs_abi_oldest",
        "gs_abi_version",
        "gs_arguments_bytes",
        "gs_can_implement",
        "gs_kernel_count",
        "gs_kernel_describe",
        "gs_kernel_name",
        "gs_run",
        "gs_workspace_bytes",
    }
    # The standard library's own weak symbols are the same in every pack.
    assert all(name.startswith(("gs_", "_ZNSt", "_ZNKSt", "_ZSt")) for name in exported)


@pytest.mark.long
def test_kernel_that_cannot_compile_fails_alone(tmp_path: Path) -> None:
    packs = build(tmp_path, [ALIGN_1, IMPOSSIBLE])  # of one unit
    outcome = packs.built[IMPOSSIBLE]
    assert outcome.pack is None
    assert outcome.failure is not None
    assert outcome.failure.kind is FailureKind.COMPILE
    assert "error" in outcome.failure.message
    assert IMPOSSIBLE.name not in packs.pack(ALIGN_1).kernels


def test_what_is_built_is_found_again(compiled_packs: CompiledPacks) -> None:
    fresh = ArtifactStore(compiled_packs.store.root)
    again = list(Builder(fresh, compiled_packs.toolchain).build(list(compiled_packs.built)))
    assert all(item.cached for item in again)
    assert {item.kernel.name: item.pack for item in again} == {
        each.name: compiled_packs.pack(each) for each in compiled_packs.built
    }
