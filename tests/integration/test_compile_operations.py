"""Packs of each operation beside the plain float ones: what their kernels take, what they need, and
what they are made of.

The tables hold kernels; what a kernel must be passed, may be passed and refuses follows from its
operation, and is asserted once for all of them. No GPU.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any

import pytest

from gemmsmith.core.kernel import EpilogueSchedule, Kernel, MainloopSchedule, TileScheduler, cutlass
from gemmsmith.core.operation import Grouping, Operation, Scaling
from gemmsmith.core.problem import MAX_GROUPS, Layout
from gemmsmith.runtime.abi import Arguments
from tests.support.compiled import (
    COMPILING,
    INVALID_LAYOUT,
    INVALID_PROBLEM,
    MISALIGNED,
    NOT_SUPPORTED,
    CompiledPacks,
    Loaded,
    arguments_of,
    build,
    kept,
    stacks,
)
from tuner.backends import refusal
from tuner.backends.cutlass import footprint
from tuner.backends.cutlass.operation import kernel, tma_alignment

pytestmark = [*COMPILING, pytest.mark.long]

WS, PINGPONG, COOPERATIVE = (
    MainloopSchedule.WARP_SPECIALIZED,
    MainloopSchedule.PINGPONG,
    MainloopSchedule.COOPERATIVE,
)
GRID, SPLIT_K, CLUSTER_SPLIT_K, GROUPS = (
    TileScheduler.GRID,
    TileScheduler.SPLIT_K,
    TileScheduler.CLUSTER_SPLIT_K,
    TileScheduler.GROUPS,
)
SCALE_ROW = "int8.out_bf16.scale_row"
GROUPED_GATE = "bf16.group_rows.then_silu_gate_aux"


def of(
    dtype: str,
    tile: tuple[int, int, int],
    mainloop: MainloopSchedule,
    scheduler: TileScheduler = TileScheduler.PERSISTENT,
    layout: str = "tn",
    **choices: Any,
) -> Kernel:
    operation = Operation.of(dtype, layout)
    in_cluster = scheduler is CLUSTER_SPLIT_K
    return kernel(
        operation=operation,
        tile=tile,
        mainloop=mainloop,
        scheduler=scheduler,
        **{
            "epilogue": EpilogueSchedule.NO_SMEM if in_cluster else EpilogueSchedule.TMA,
            "alignment": tma_alignment(operation),
            **choices,
        },
    )


PLAIN = {
    "out_f32": of("bf16.out_f32", (128, 128, 64), PINGPONG, layout="nt"),
    "out_f32_split_k": of("bf16.out_f32", (64, 128, 64), PINGPONG, SPLIT_K, "nt"),
    "out_f32_cluster_split_k": of("bf16.out_f32", (64, 64, 128), WS, CLUSTER_SPLIT_K, "nt"),
    "int8": of("int8", (128, 128, 128), PINGPONG),
    "int8_out_bf16": of("int8.out_bf16", (64, 32, 256), WS, GRID, swapped=True),
    "int8_any": of(
        "int8.out_bf16", (64, 64, 128), PINGPONG, epilogue=EpilogueSchedule.NO_SMEM, alignment=1
    ),
    "scale_row": of(SCALE_ROW, (128, 128, 128), COOPERATIVE),
    "scale_row_split_k": of(SCALE_ROW, (128, 128, 128), WS, SPLIT_K),
    "scale_row_cluster_split_k": of(SCALE_ROW, (64, 16, 256), WS, CLUSTER_SPLIT_K, swapped=True),
    "scale_row_fp8": of("fp8_e4m3.scale_row", (128, 128, 128), COOPERATIVE),
    "tf32": of("tf32", (128, 128, 32), COOPERATIVE),
}
"""Outputs in FP32, integers, factors per row, TF32."""
FUSED = {
    "gelu_tanh_aux": of("bf16.then_bias_gelu_tanh_aux", (128, 192, 64), PINGPONG, cluster=(2, 1)),
    "gelu_aux_swapped": of("bf16.then_bias_gelu_aux", (128, 192, 64), COOPERATIVE, swapped=True),
    "relu2_fp8": of(
        "fp8_e4m3.then_bias_relu2", (128, 256, 128), COOPERATIVE, fast_accumulation=True
    ),
    "bias_residual": of("bf16.then_bias_residual", (128, 256, 64), COOPERATIVE, layout="tt"),
    "bias_residual_relu": of("bf16.then_bias_residual_relu_aux", (128, 128, 64), COOPERATIVE),
    "bias_residual_swapped": of("fp16.then_bias_residual", (64, 16, 128), PINGPONG, swapped=True),
    "bias_scale_residual_aux": of(
        "bf16.then_bias_scale_residual_aux", (128, 256, 64), COOPERATIVE, cluster=(2, 1)
    ),
    "row_scale_fp8_swapped": of(
        "fp8_e4m3.then_row_scale",
        (128, 32, 128),
        PINGPONG,
        swapped=True,
        fast_accumulation=True,
    ),
}
"""Each part of the headers once, and once of swapped operands; tests/gpu compile every epilogue."""
GATED = {
    "gate_aux": of("bf16.then_silu_gate_aux", (128, 192, 64), PINGPONG, cluster=(2, 1)),
    "gate_fp8": of(
        "fp8_e4m3.then_gelu_gate",
        (128, 256, 128),
        COOPERATIVE,
        cluster=(1, 2),
        fast_accumulation=True,
    ),
}
BACKWARD = {
    "gelu_bgrad": of("fp16.then_dgelu_bgrad", (128, 256, 64), COOPERATIVE, layout="tt"),
    "silu_gate_act": of(
        "bf16.then_dsilu_gate_act", (128, 176, 64), PINGPONG, layout="tt", cluster=(2, 1)
    ),
    "gelu_gate_act": of("bf16.then_dgelu_gate_act", (128, 176, 64), PINGPONG, layout="tt"),
}
"""All that the header has: a further output, sums of rows, gates; both types and mainloops."""
FP8_OUTPUT = {
    "to_fp8_gelu_swapped": of(
        "fp8_e4m3.out_e4m3.then_bias_gelu",
        (64, 64, 128),
        PINGPONG,
        swapped=True,
        fast_accumulation=True,
    ),
    "to_fp8_gate_promoted": of(
        "fp8_e4m3.out_e4m3.then_silu_gate", (128, 128, 128), COOPERATIVE, cluster=(2, 1)
    ),
}
"""Both epilogues; gates whose sums are promoted have a mainloop of their own."""
GROUPED = {
    "rows": of("bf16.group_rows", (128, 32, 64), PINGPONG, swapped=True),
    "depth": of(
        "bf16.out_f32.group_depth", (128, 128, 64), COOPERATIVE, layout="nt", cluster=(2, 1)
    ),
    "walked": of("fp16.group_rows", (128, 16, 64), PINGPONG, GROUPS, swapped=True),
}
GROUPED_GATED = {
    "few": of(GROUPED_GATE, (128, 32, 64), PINGPONG, GROUPS, swapped=True),
    "many": of(GROUPED_GATE, (128, 256, 64), COOPERATIVE, GROUPS),
}
GROUPED_BACKWARD = {
    "few_backward": of(
        "fp16.group_rows.then_dgelu_gate", (128, 32, 64), PINGPONG, GROUPS, "tn", swapped=True
    ),
    "many_backward": of(
        "bf16.group_rows.then_dsilu_gate_act", (128, 256, 64), COOPERATIVE, GROUPS, "tt"
    ),
}
FAMILIES = (PLAIN, FUSED, GATED, BACKWARD, FP8_OUTPUT, GROUPED, GROUPED_GATED, GROUPED_BACKWARD)
KERNELS = {name: member for family in FAMILIES for name, member in family.items()}
EVERY = pytest.mark.parametrize("name", KERNELS)
SOMEWHERE, ELSEWHERE = 0x10000, 0x20000
N = 512
GROUP_COUNT = 4
POINTERS = [
    field
    for field, kind, *_ in Arguments._fields_
    if kind is ctypes.c_void_p and field not in ("a", "b", "c", "d")
]
"""Every operand of the ABI beside A, B, C and D."""


@pytest.fixture(scope="module")
def packs() -> CompiledPacks:
    """All of them, two at once: other processes of a test session have little to compile."""
    return build(kept(), list(KERNELS.values()), workers=2, mixed=True)


def needed(operation: Operation) -> set[str]:
    """The pointers without which the problem is incomplete."""
    epilogue, by_row = operation.epilogue, operation.scaling is Scaling.ROW
    parts = epilogue.backward
    has = {
        "scale_a": by_row,
        "scale_b": by_row,
        "offsets": operation.is_grouped,
        "bias": epilogue.has_bias,
        "residual": epilogue.has_residual,
        "aux": epilogue.stores_aux or parts is not None,
        "activated": parts is not None and parts.activated,
        "bias_gradient": parts is not None and parts.bias_gradient,
        "b_up": epilogue.is_gated,
        "row_scale": epilogue.has_row_scale,
        "column_scale": epilogue.has_column_scale,
    }
    return {field for field in POINTERS if has.get(field)}


def optional(operation: Operation) -> set[str]:
    """The pointers that may be null."""
    factors = operation.scaling is Scaling.TENSOR
    grouped_gate = operation.is_grouped and operation.is_fused
    return {
        *(("scale_a", "scale_b") if factors else ()),
        *(("scale_d", "amax") if operation.stores_fp8 else ()),
        *(("row_scale",) if grouped_gate else ()),
        *(("row_gradient",) if grouped_gate and operation.epilogue.backward else ()),
    }


def widths(operation: Operation, n: int = N) -> dict[str, tuple[str, int]]:
    """Leading dimension and elements of a row of D and of further matrices like it."""
    epilogue, parts = operation.epilogue, operation.epilogue.backward
    halves = parts.halves if parts else 1
    every = {
        "d": ("ldd", n // 2 if epilogue.is_gated else n * halves),
        "residual": ("ld_residual", n),
        "aux": ("ld_aux", n * halves),
        "activated": ("ld_activated", n),
    }
    present = {"d", *needed(operation)}
    return {field: width for field, width in every.items() if field in present}


def arguments(name: str, **extents: int) -> Arguments:
    """Arguments that the kernel takes, with what its operation needs at made-up addresses."""
    member = KERNELS[name]
    operation = member.operation
    if operation.is_grouped:
        extents.setdefault("batch", GROUP_COUNT)
    made = arguments_of(member, **extents)
    made.a = made.b = made.d = SOMEWHERE
    for field in needed(operation):
        setattr(made, field, SOMEWHERE)
    for leading, width in widths(operation, made.n).values():
        setattr(made, leading, width)
    if operation.scaling is Scaling.ROW:
        made.scaling, made.batch_stride_scale_a, made.batch_stride_scale_b = 1, made.m, made.n
    if operation.is_grouped and operation.epilogue.is_gated:  # one descriptor reaches both
        made.b_up = SOMEWHERE + made.n // 2 * made.ldb * 2
    return made


def status(packs: CompiledPacks, name: str, **changes: Any) -> int:
    """What the kernel says to its arguments after these changes."""
    changed = arguments(name)
    for field, value in changes.items():
        setattr(changed, field, value)
    loaded = Loaded(packs, KERNELS[name])
    code = loaded.can_implement(changed)
    if code:
        assert loaded.workspace_bytes(changed) == -code, changes
    return code


def needs_alignment(member: Kernel) -> bool:
    """Whether D is stored with TMA."""
    return cutlass(member).epilogue is EpilogueSchedule.TMA


@EVERY
def test_the_rules_allow_it(name: str) -> None:
    assert refusal(KERNELS[name]) is None


@EVERY
def test_stages_and_shared_memory_are_as_computed(packs: CompiledPacks, name: str) -> None:
    info = Loaded(packs, KERNELS[name]).describe()
    assert info.stages == footprint.stages(KERNELS[name])
    assert info.shared_bytes == footprint.shared_bytes(KERNELS[name])


def test_no_registers_spill(packs: CompiledPacks) -> None:
    for path in {packs.pack(member).path for member in KERNELS.values()}:
        assert stacks(path) == {("0", "0")}, path


@EVERY
def test_operands_are_needed_optional_or_refused(packs: CompiledPacks, name: str) -> None:
    operation = KERNELS[name].operation
    assert status(packs, name) == 0
    for field in POINTERS:
        if field in needed(operation):
            assert status(packs, name, **{field: None}) == INVALID_PROBLEM, field
        else:
            expected = 0 if field in optional(operation) else NOT_SUPPORTED
            assert status(packs, name, **{field: SOMEWHERE}) == expected, field
    other = 0 if operation.scaling is Scaling.ROW else 1
    factors = {"scaling": other, "scale_a": SOMEWHERE, "scale_b": SOMEWHERE}
    assert status(packs, name, **factors) == NOT_SUPPORTED


@EVERY
def test_c_is_added_by_plain_products_and_gradients_of_groups(
    packs: CompiledPacks, name: str
) -> None:
    in_place = {"beta": 1.0, "c": SOMEWHERE, "ldc": arguments(name).ldd}
    adds = name in PLAIN or KERNELS[name].operation.grouping is Grouping.DEPTH
    assert status(packs, name, **in_place) == (0 if adds else NOT_SUPPORTED)
    apart = in_place | {"c": ELSEWHERE}
    assert status(packs, name, **apart) == (0 if name in PLAIN else NOT_SUPPORTED)
    nowhere = in_place | {"c": None}
    assert status(packs, name, **nowhere) == (INVALID_PROBLEM if name in PLAIN else NOT_SUPPORTED)


@EVERY
def test_batches_are_of_plain_products(packs: CompiledPacks, name: str) -> None:
    member = cutlass(KERNELS[name])
    is_single = member.operation.is_fused and not member.operation.is_grouped
    alone = is_single or member.scheduler in (SPLIT_K, CLUSTER_SPLIT_K)
    assert status(packs, name, batch=2) == (NOT_SUPPORTED if alone else 0)


@EVERY
def test_rows_are_aligned_and_of_any_number(packs: CompiledPacks, name: str) -> None:
    member = cutlass(KERNELS[name])
    operation, loaded = member.operation, Loaded(packs, member)
    free = "k" if operation.layout == Layout.NT else "m"
    if member.scheduler is not SPLIT_K:
        for extent in (1, 1001):
            assert loaded.can_implement(arguments(name, **{free: extent})) == 0, extent
    # Rows of D run along N, and those of B where B is not transposed.
    b_element = operation.b.bytes if operation.layout[1] == "t" else 16
    halves = 2 if operation.epilogue.is_gated else 1
    step = 16 // min(operation.d.bytes, b_element) * halves
    needs = needs_alignment(member) or b_element < 16
    misaligned = MISALIGNED if needs else 0
    for n, expected in ((step, 0), (N + step, 0), (2 * N + step, 0), (N + step // 2, misaligned)):
        assert loaded.can_implement(arguments(name, n=n)) == expected, n
    if operation.epilogue.is_gated:
        assert status(packs, name, n=N + 1) == INVALID_PROBLEM


@EVERY
def test_matrices_have_aligned_rows_that_do_not_overlap(packs: CompiledPacks, name: str) -> None:
    operation = KERNELS[name].operation
    per_16_bytes = 16 // operation.d.bytes
    misaligned = MISALIGNED if needs_alignment(KERNELS[name]) else 0
    for field, (leading, width) in widths(operation).items():
        for change, expected in (
            ({field: SOMEWHERE + 8}, misaligned),
            ({leading: width + per_16_bytes // 2}, misaligned),
            ({leading: width - per_16_bytes}, INVALID_LAYOUT),
            ({leading: 2 * width}, 0),
        ):
            assert status(packs, name, **change) == expected, change


@EVERY
def test_vectors_are_read_element_by_element(packs: CompiledPacks, name: str) -> None:
    operation = KERNELS[name].operation
    matrices = {"b_up", *widths(operation)}
    for field in (needed(operation) | optional(operation)) - matrices:
        size = 2 if field in ("bias", "column_scale", "bias_gradient") else 4
        assert status(packs, name, **{field: SOMEWHERE + size}) == 0, field
        if field in ("bias", "column_scale", "bias_gradient", "row_scale", "row_gradient"):
            assert status(packs, name, **{field: SOMEWHERE + size // 2}) == MISALIGNED, field


@EVERY
def test_workspaces_hold_partial_sums_and_descriptors_of_groups(
    packs: CompiledPacks, name: str
) -> None:
    member, loaded = cutlass(KERNELS[name]), Loaded(packs, KERNELS[name])
    m, n = 1000, 1056
    size = loaded.workspace_bytes(arguments(name, m=m, n=n))
    if name in ("rows", "depth"):
        most = loaded.workspace_bytes(arguments(name, m=m, n=n, batch=MAX_GROUPS))
        assert 0 < size < most < 2**20
        return
    expected = 0
    if member.scheduler is SPLIT_K:
        expected = 2 * m * n * 4
    if "bias_gradient" in needed(member.operation):
        tile_m, tile_n, _ = member.tile
        rows, columns = -(-m // tile_m), -(-n // tile_n) * tile_n
        expected = -(-rows * columns * 4 // 256) * 256
    assert size == expected


@pytest.mark.parametrize("name", [*GROUPED, *GROUPED_GATED, *GROUPED_BACKWARD])
def test_groups_are_of_a_largest_number(packs: CompiledPacks, name: str) -> None:
    most = arguments(name, batch=MAX_GROUPS)
    assert Loaded(packs, KERNELS[name]).can_implement(most) == 0
    assert status(packs, name, batch=MAX_GROUPS + 1) == INVALID_PROBLEM
    if name not in ("rows", "depth"):
        assert Loaded(packs, KERNELS[name]).workspace_bytes(most) == 0


def test_integers_take_whole_alpha_and_beta_only(packs: CompiledPacks) -> None:
    assert status(packs, "int8", alpha=-3.0, beta=2.0, c=SOMEWHERE) == 0
    assert status(packs, "int8", alpha=0.5, beta=2.0, c=SOMEWHERE) == NOT_SUPPORTED
    assert status(packs, "int8", alpha=1.0, beta=1e10, c=SOMEWHERE) == NOT_SUPPORTED
    assert status(packs, "int8_out_bf16", alpha=0.5) == 0


def test_an_integer_kernel_takes_any_n_and_k(packs: CompiledPacks) -> None:
    loaded = Loaded(packs, KERNELS["int8_any"])
    assert loaded.can_implement(arguments("int8_any", n=513, k=1001)) == 0


@pytest.mark.parametrize("name", GATED)
def test_up_is_aligned_and_may_alternate_with_gate(packs: CompiledPacks, name: str) -> None:
    assert status(packs, name, b_up=SOMEWHERE + 8) == MISALIGNED
    assert status(packs, name, ldb=2048) == 0  # rows of gate and up in turns


@pytest.mark.parametrize("name", GROUPED_GATED)
def test_gate_and_up_lie_where_one_descriptor_reaches_both(packs: CompiledPacks, name: str) -> None:
    up = arguments(name).b_up
    assert up is not None
    for address, expected in (
        (up + 16, 0),
        (up + 8, MISALIGNED),
        (SOMEWHERE, INVALID_LAYOUT),
        (SOMEWHERE - 16, INVALID_LAYOUT),
    ):
        assert status(packs, name, b_up=address) == expected, hex(address)


@pytest.mark.parametrize(
    ("name", "instructions"),
    [
        ("out_f32", ["HGMMA.64x128x16.F32.BF16"]),
        ("int8", ["IGMMA.64x128x32.S8.S8"]),
        ("scale_row", ["IGMMA.64x128x32.S8.S8"]),
        ("scale_row_cluster_split_k", ["IGMMA.64x16x32.S8.S8"]),
        ("scale_row_fp8", ["QGMMA.64x128x32.F32.E4M3.E4M3"]),
        ("tf32", ["HGMMA.64x128x8.F32.TF32"]),
        *((name, ["HGMMA"]) for name in BACKWARD),
        *((name, ["REDUX", "F2FP.SATFINITE.E4M3"]) for name in FP8_OUTPUT),
        ("rows", ["HGMMA.64x32x16.F32.BF16"]),
        ("depth", ["HGMMA.64x128x16.F32.BF16"]),
        ("walked", ["HGMMA.64x16x16.F32", "UBLKCP.G.S"]),
        # Weights: K, a slab's rows, gate or up, slabs, groups.
        ("few", ["HGMMA.64x32x16.F32.BF16", "UTMALDG.5D"]),
        ("many", ["HGMMA.64x256x16.F32.BF16", "UTMALDG.5D"]),
    ],
)
def test_machine_code_has_the_instructions(
    packs: CompiledPacks, name: str, instructions: list[str]
) -> None:
    """Of the tensor cores and of copies; a warp reduces its largest FP8 value."""
    body = packs.code(KERNELS[name])
    for instruction in instructions:
        assert instruction in body


@pytest.mark.parametrize("name", GATED)
def test_b_comes_in_two_copies_and_outputs_leave_in_boxes(packs: CompiledPacks, name: str) -> None:
    body, member = packs.code(KERNELS[name]), cutlass(KERNELS[name])
    m, n, k = member.tile
    warpgroups = footprint.consumer_warpgroups(member)
    instructions = m // 64 // warpgroups * (k // (256 // member.operation.a.bits))
    assert len(re.findall(r"\bUTMALDG", body)) == 3
    assert len(re.findall(r"\b[HQ]GMMA", body)) % instructions == 0
    boxes = m * n // 2 // (64 * footprint.epilogue_tile(member)[1])
    outputs = 3 if member.operation.epilogue.stores_aux else 1
    assert len(re.findall(r"\bUTMASTG", body)) == boxes * outputs // warpgroups


@pytest.mark.parametrize("name", GROUPED_GATED)
def test_three_matrices_are_stored_by_16_bytes(packs: CompiledPacks, name: str) -> None:
    assert packs.code(KERNELS[name]).count("STG.E.128") >= 3
