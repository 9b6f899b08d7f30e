"""The host side of our own kernels, asked without a GPU: split-K, split-K in a cluster, padding."""

from __future__ import annotations

import pytest

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import Kernel
from tests.support.arguments import packed_arguments
from tests.support.compiled import (
    CLUSTER_SPLIT_K,
    COMPILING,
    INVALID_LAYOUT,
    INVALID_PROBLEM,
    MISALIGNED,
    NOT_SUPPORTED,
    PADDED,
    PINGPONG,
    SPLIT_K,
    CompiledPacks,
    Loaded,
    arguments_of,
    members,
    problem_of,
)
from tuner.backends import launches, refusal

pytestmark = [*COMPILING, pytest.mark.long]

WORKSPACE_NULL = 6
SOMEWHERE = 0x1000
H200 = DeviceModel(
    name="NVIDIA H200", arch="sm90", sm_count=132, memory_bytes=150 * 10**9, l2_bytes=50 << 20
)


@pytest.mark.parametrize("splits", [1, 2, 4, 16])
def test_split_k_s_workspace_holds_fp32_partials(
    compiled_packs: CompiledPacks, splits: int
) -> None:
    loaded = Loaded(compiled_packs, SPLIT_K)
    arguments = arguments_of(SPLIT_K, m=200, n=136, k=4096, splits=splits)
    assert loaded.can_implement(arguments) == 0
    assert loaded.workspace_bytes(arguments) == splits * 200 * 136 * 4


@pytest.mark.parametrize(
    ("m", "n", "k", "batch", "splits", "status"),
    [
        (256, 512, 1024, 1, 3, INVALID_PROBLEM),  # no equal slices
        (256, 512, 1040, 1, 4, MISALIGNED),  # slices of 260 elements, 520 bytes
        (256, 512, 1002, 1, 2, MISALIGNED),
        (256, 513, 1024, 1, 2, MISALIGNED),
        (256, 512, 1024, 2, 2, NOT_SUPPORTED),
        (64, 64, 64, 1, 128, INVALID_PROBLEM),  # more slices than K is long
    ],
)
def test_split_k_refuses(
    compiled_packs: CompiledPacks, m: int, n: int, k: int, batch: int, splits: int, status: int
) -> None:
    loaded = Loaded(compiled_packs, SPLIT_K)
    arguments = arguments_of(SPLIT_K, m, n, k, batch, splits)
    assert loaded.can_implement(arguments) == status
    assert loaded.workspace_bytes(arguments) == -status
    assert loaded.run(arguments, SOMEWHERE) == status


@pytest.mark.parametrize("decomposition", [0, 2, 3])
def test_split_k_does_nothing_but_split(compiled_packs: CompiledPacks, decomposition: int) -> None:
    arguments = arguments_of(SPLIT_K)
    arguments.decomposition = decomposition
    assert Loaded(compiled_packs, SPLIT_K).can_implement(arguments) == NOT_SUPPORTED


def test_null_workspace_is_refused_before_cuda_is_asked(compiled_packs: CompiledPacks) -> None:
    """Without a GPU every call of CUDA fails with a code of its own: none was made."""
    assert Loaded(compiled_packs, SPLIT_K).run(arguments_of(SPLIT_K)) == WORKSPACE_NULL
    assert Loaded(compiled_packs, PADDED).run(arguments_of(PADDED, k=1001)) == WORKSPACE_NULL


@pytest.mark.parametrize(
    ("k", "splits", "status"),
    [
        (1024, 1, 0),
        (1024, 3, 0),
        (1024, 8, 0),
        (1024, 9, INVALID_PROBLEM),  # 8 K tiles of 128
        (2048, 16, 0),
        (1928, 16, 0),  # the last K tile is not whole
        (1920, 16, INVALID_PROBLEM),
        (8192, 17, NOT_SUPPORTED),  # no GPU has such clusters
        (1002, 2, MISALIGNED),
    ],
)
def test_clusters_along_k_have_a_k_tile_for_each_block(
    compiled_packs: CompiledPacks, k: int, splits: int, status: int
) -> None:
    loaded = Loaded(compiled_packs, CLUSTER_SPLIT_K)
    arguments = arguments_of(CLUSTER_SPLIT_K, 16, 513, k, splits=splits)
    assert loaded.can_implement(arguments) == status
    assert loaded.workspace_bytes(arguments) == -status  # which is 0 where it is taken
    if status:
        assert loaded.run(arguments) == status


def test_clusters_along_k_refuse_what_the_space_does(compiled_packs: CompiledPacks) -> None:
    loaded = Loaded(compiled_packs, CLUSTER_SPLIT_K)
    arguments = arguments_of(CLUSTER_SPLIT_K, splits=2)
    arguments.decomposition = 0
    assert loaded.can_implement(arguments) == NOT_SUPPORTED
    for m, batch, status in ((16, 2, NOT_SUPPORTED), (16 * 65536, 1, INVALID_PROBLEM)):
        assert refusal(CLUSTER_SPLIT_K, problem_of(CLUSTER_SPLIT_K, m, batch=batch))
        assert loaded.can_implement(arguments_of(CLUSTER_SPLIT_K, m, batch=batch)) == status
    assert loaded.can_implement(arguments_of(CLUSTER_SPLIT_K, 16 * 65535)) == 0


@pytest.mark.parametrize("member", members([SPLIT_K, CLUSTER_SPLIT_K]))
@pytest.mark.parametrize(
    ("m", "n", "k"), [(16, 4096, 4096), (256, 256, 32768), (512, 512, 8192), (64, 136, 13440)]
)
def test_every_launch_of_the_space_is_taken(
    compiled_packs: CompiledPacks, member: Kernel, m: int, n: int, k: int
) -> None:
    loaded = Loaded(compiled_packs, member)
    problem = problem_of(member, m, n, k)
    found = launches(member, problem, H200)
    assert found
    for launch in found:
        arguments = packed_arguments(problem)
        arguments.set_launch(launch, sm_count=H200.sm_count)
        assert loaded.can_implement(arguments) == 0, launch


def _copy_bytes(rows: int, extent: int, batch: int = 1) -> int:
    """Rows of 16-bit elements at a pitch of 16 bytes; each operand takes whole 256 bytes."""
    pitch = -(-extent * 2 // 16) * 16
    return -(-rows * batch * pitch // 256) * 256


@pytest.mark.parametrize(
    ("changes", "copied"),
    [
        ({}, ()),
        ({"lda": 1032, "ldb": 2048}, ()),
        ({"lda": 1025}, ("a",)),
        ({"a": 0x1002}, ("a",)),
        ({"b": 0x1008}, ("b",)),
        ({"ldb": 1028, "a": 0x100A}, ("a", "b")),
    ],
)
def test_only_operands_that_tma_cannot_read_are_copied(
    compiled_packs: CompiledPacks, changes: dict[str, int], copied: tuple[str, ...]
) -> None:
    loaded = Loaded(compiled_packs, PADDED)
    arguments = arguments_of(PADDED)
    for field, value in changes.items():
        setattr(arguments, field, value)
    rows = {"a": 256, "b": 512}
    assert loaded.can_implement(arguments) == 0
    assert loaded.workspace_bytes(arguments) == sum(_copy_bytes(rows[x], 1024) for x in copied)


@pytest.mark.parametrize("k", [1, 7, 1001, 1002, 1004])
@pytest.mark.parametrize("batch", [1, 3])
def test_copies_of_both_operands_fit_the_workspace(
    compiled_packs: CompiledPacks, k: int, batch: int
) -> None:
    loaded = Loaded(compiled_packs, PADDED)
    arguments = arguments_of(PADDED, 130, 520, k, batch)
    assert loaded.can_implement(arguments) == 0
    expected = _copy_bytes(130, k, batch) + _copy_bytes(520, k, batch)
    assert loaded.workspace_bytes(arguments) == expected


def test_batches_that_start_unaligned_are_copied(compiled_packs: CompiledPacks) -> None:
    loaded = Loaded(compiled_packs, PADDED)
    arguments = arguments_of(PADDED, batch=3)
    arguments.batch_stride_a += 1
    assert loaded.workspace_bytes(arguments) == _copy_bytes(256, 1024, 3)


@pytest.mark.parametrize(
    ("field", "value", "status"),
    [("d", 0x1008, MISALIGNED), ("a", 0x1001, MISALIGNED), ("lda", 1023, INVALID_LAYOUT)],
)
def test_padding_does_not_help_everything(
    compiled_packs: CompiledPacks, field: str, value: int, status: int
) -> None:
    """D is stored with TMA, elements lie on their own size, and rows do not overlap."""
    loaded = Loaded(compiled_packs, PADDED)
    arguments = arguments_of(PADDED)
    setattr(arguments, field, value)
    assert loaded.can_implement(arguments) == status
    assert loaded.workspace_bytes(arguments) == -status
    assert loaded.run(arguments, SOMEWHERE) == status


def test_padded_kernel_is_its_sibling(compiled_packs: CompiledPacks) -> None:
    padded, plain = (Loaded(compiled_packs, each).describe() for each in (PADDED, PINGPONG))
    for field in ("threads", "shared_bytes", "stages"):
        assert getattr(padded, field) == getattr(plain, field)
