"""What the pack asks of cuBLASLt: every operation, computed by a library on the host."""

from __future__ import annotations

import ctypes
import subprocess

import pytest
import torch

from gemmsmith.core.operation import Layout, Scaling
from gemmsmith.errors import LaunchFailed
from gemmsmith.runtime import Arguments, LoadedKernel
from gemmsmith.runtime.abi import status_text
from tests.support.products import TYPES, product
from tuner.backends.cublaslt.operations import OPERATIONS, Compute, LibraryOperation
from tuner.backends.cublaslt.proposals import Proposal, propose

from .conftest import Build, Fakes

STREAM = 77
MISALIGNED, BAD_LAYOUT, BAD_PROBLEM, UNSUPPORTED, NO_WORKSPACE = 1, 3, 4, 5, 6
NO_LIBRARY, OTHER_LIBRARY, NO_ALGORITHM = 3000, 3001, 3002
BF16 = LibraryOperation(a="bf16", b="bf16", d="bf16", layout=Layout.TN)
ROW_SCALED = LibraryOperation(a="e4m3", b="e4m3", d="bf16", layout=Layout.TN, scales=Scaling.ROW)
INT8 = LibraryOperation(a="s8", b="s8", d="s32", layout=Layout.TN, compute=Compute.S32)
HOPPER = [each for each in OPERATIONS if each.layout is Layout.TN or each.a not in ("e4m3", "e5m2")]
"""Those that the library on the host has."""


def launch(kernel: LoadedKernel, arguments: Arguments, proposal: Proposal) -> None:
    proposal.launch(arguments)
    size = kernel.workspace_bytes(arguments)
    assert size == proposal.workspace_bytes
    workspace = torch.empty(size, dtype=torch.uint8)
    kernel.run(arguments, workspace.data_ptr() if size else 0, STREAM)


def ready(fakes: Fakes, operation: LibraryOperation = BF16) -> tuple[LoadedKernel, Arguments]:
    """A kernel, and arguments that it takes. Their operands are gone: nothing may be run."""
    kernel = fakes.pack.kernel(operation.name)
    arguments = product(operation, 16, 24, 32).arguments()
    propose(kernel, arguments)[0].launch(arguments)
    assert kernel.can_implement(arguments) == 0
    return kernel, arguments


def test_names_and_table(fakes: Fakes) -> None:
    assert fakes.pack.kernels == tuple(each.name for each in OPERATIONS)
    assert len(set(fakes.pack.kernels)) == len(OPERATIONS)
    kinds = {(each.a, each.b, each.d) for each in OPERATIONS}
    assert kinds == {
        ("bf16", "bf16", "bf16"),
        ("f16", "f16", "f16"),
        ("bf16", "bf16", "f32"),
        ("f16", "f16", "f32"),
        ("f32", "f32", "f32"),
        ("s8", "s8", "s32"),
        ("e4m3", "e4m3", "bf16"),
        ("e5m2", "e4m3", "bf16"),
    }
    assert "cublaslt_e4m3_e4m3_f32_bf16_tn_tensor_fast" in fakes.pack.kernels
    assert all(
        {each.layout for each in OPERATIONS if each.a == a} == set(Layout)
        for a in TYPES
        if a not in ("s8", "s32", "e4m3", "e5m2")  # 8 bits are read K-major only
    )


def test_descriptions_say_what_is_known(fakes: Fakes) -> None:
    occupancy = fakes.pack.kernel(BF16.name).describe()
    assert (occupancy.registers, occupancy.local_bytes, occupancy.threads) == (-1, -1, 0)


@pytest.mark.parametrize("operation", HOPPER, ids=lambda each: each.name)
@pytest.mark.parametrize(("batch", "alpha", "beta"), [(1, 1.0, 0.0), (1, 2.0, -1.0), (3, 1.0, 1.0)])
def test_products(
    fakes: Fakes, operation: LibraryOperation, batch: int, alpha: float, beta: float
) -> None:
    torch.manual_seed(20261123)
    if operation.scales is Scaling.ROW:
        batch = 1  # of more they are refused
    kernel = fakes.pack.kernel(operation.name)
    case = product(operation, 9, 17, 24, batch=batch, alpha=alpha, beta=beta, whole=True)
    arguments = case.arguments()
    proposals = propose(kernel, arguments)
    assert len(proposals) == 3
    for proposal in proposals:
        case.poison()
        launch(kernel, arguments, proposal)
        assert torch.equal(case.d, case.expected().to(case.d.dtype))
        assert case.untouched()
    assert fakes.driver.fake_depth() == 0


@pytest.mark.parametrize("layout", Layout)
def test_a_single_row_has_no_stride(fakes: Fakes, layout: Layout) -> None:
    operation = LibraryOperation(a="f16", b="f16", d="f32", layout=layout)
    kernel = fakes.pack.kernel(operation.name)
    for m, n, k in ((1, 16, 24), (16, 1, 24), (16, 24, 1), (1, 1, 1)):
        case = product(operation, m, n, k, whole=True)
        arguments = case.arguments()
        for name, rows in (
            ("lda", m if layout.a_row_major else k),
            ("ldb", k if layout.b_row_major else n),
            ("ldd", m),
        ):
            if rows == 1:
                setattr(arguments, name, 0)
        launch(kernel, arguments, propose(kernel, arguments)[0])
        assert torch.equal(case.d.double(), case.expected()), (m, n, k)


def test_accumulation_in_place(fakes: Fakes) -> None:
    operation = LibraryOperation(a="bf16", b="bf16", d="f32", layout=Layout.NT)
    kernel = fakes.pack.kernel(operation.name)
    case = product(operation, 16, 24, 32, beta=1.0, whole=True)
    case.store[..., :24] = case.c
    expected = case.expected()
    arguments = case.arguments()
    arguments.c, arguments.ldc, arguments.batch_stride_c = (
        arguments.d,
        arguments.ldd,
        arguments.batch_stride_d,
    )
    launch(kernel, arguments, propose(kernel, arguments)[0])
    assert torch.equal(case.d.double(), expected)


def test_what_is_asked_of_fp8(fakes: Fakes) -> None:
    last = fakes.library.fake_last
    last.restype = ctypes.POINTER(ctypes.c_int32 * 8)
    for scales, mode in ((Scaling.TENSOR, 0), (Scaling.ROW, 3)):
        for fast in (True, False):
            operation = LibraryOperation(
                a="e5m2",
                b="e4m3",
                d="bf16",
                layout=Layout.TN,
                scales=scales,
                fast_accumulation=fast,
            )
            case = product(operation, 16, 16, 32, whole=True)
            arguments = case.arguments(sm_count=100)
            kernel = fakes.pack.kernel(operation.name)
            launch(kernel, arguments, propose(kernel, arguments)[0])
            compute, scale, first, second, asked, target, *modes = last().contents
            assert (compute, scale, first, second) == (68, 0, 1, 0)
            assert (bool(asked), target, modes) == (fast, 100, [mode, mode])


def test_missing_tensor_scales_are_one(fakes: Fakes) -> None:
    operation = LibraryOperation(
        a="e4m3", b="e4m3", d="bf16", layout=Layout.TN, scales=Scaling.TENSOR
    )
    case = product(operation, 16, 16, 32, whole=True)
    case.scale_b = None
    kernel = fakes.pack.kernel(operation.name)
    arguments = case.arguments()
    launch(kernel, arguments, propose(kernel, arguments)[0])
    assert torch.equal(case.d.double(), case.expected())


def test_a_device_of_its_own_has_a_handle_of_its_own(fakes: Fakes) -> None:
    kernel, arguments = ready(fakes)
    before = fakes.library.fake_created()
    for _ in range(3):
        assert kernel.can_implement(arguments) == 0
    assert fakes.library.fake_created() == before
    arguments.device = 1
    for _ in range(3):
        assert kernel.can_implement(arguments) == 0
    assert fakes.library.fake_created() == before + 1
    arguments.device = 2
    assert kernel.can_implement(arguments) == 1101  # CUDA says that there is no such device
    arguments.device = 64
    assert kernel.can_implement(arguments) == BAD_PROBLEM


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"library_version": 130100}, OTHER_LIBRARY),
        ({"library_version": 0}, OTHER_LIBRARY),
        ({"algorithm": (ctypes.c_uint64 * 8)()}, NO_ALGORITHM),
        ({"algorithm": (ctypes.c_uint64 * 8)(66, 99, 0, 0, 1)}, NO_ALGORITHM),
        ({"algorithm": (ctypes.c_uint64 * 8)(66, 22, 0, 0, 2, 2)}, NO_ALGORITHM),  # no workspace
        ({"m": 0}, BAD_PROBLEM),
        ({"workspace_limit": -1}, BAD_PROBLEM),
        ({"beta": 1.0, "c": None}, BAD_PROBLEM),
        ({"a": 4104}, MISALIGNED),
        ({"d": 4098}, MISALIGNED),
        ({"lda": 31}, BAD_LAYOUT),
        ({"ldd": 23}, BAD_LAYOUT),
        ({"batch": 2, "batch_stride_d": 0}, BAD_LAYOUT),
        ({"batch": 2, "batch_stride_a": -1}, BAD_LAYOUT),
        ({"scale_a": 4096}, UNSUPPORTED),
        ({"bias": 4096}, UNSUPPORTED),
        ({"offsets": 4096}, UNSUPPORTED),
        ({"splits": 2}, UNSUPPORTED),
        ({"raster_order": 1}, UNSUPPORTED),
        ({"decomposition": 2}, UNSUPPORTED),
    ],
)
def test_refusals(fakes: Fakes, fields: dict[str, object], status: int) -> None:
    kernel, arguments = ready(fakes)
    for name, value in fields.items():
        setattr(arguments, name, value)
    assert kernel.can_implement(arguments) == status
    with pytest.raises(LaunchFailed):
        kernel.workspace_bytes(arguments)


def test_refusals_of_scales_and_integers(fakes: Fakes) -> None:
    kernel, arguments = ready(fakes, ROW_SCALED)
    for fields, status in (
        ({"scaling": 0}, UNSUPPORTED),
        ({"scaling": 2}, UNSUPPORTED),
        ({"scale_b": None}, BAD_PROBLEM),
        ({"batch": 2}, UNSUPPORTED),
    ):
        changed = Arguments.from_buffer_copy(arguments)
        for name, value in fields.items():
            setattr(changed, name, value)
        assert kernel.can_implement(changed) == status, fields
    kernel, arguments = ready(fakes, INT8)
    arguments.alpha = 0.5
    assert kernel.can_implement(arguments) == UNSUPPORTED


def test_a_run_is_refused_as_its_check_is(fakes: Fakes) -> None:
    kernel, arguments = ready(fakes)
    arguments.library_version += 1
    with pytest.raises(LaunchFailed, match="another version of its library") as caught:
        kernel.run(arguments, 0, STREAM)
    assert caught.value.status == OTHER_LIBRARY
    kernel, arguments = ready(fakes)
    arguments.workspace_limit = 64
    with pytest.raises(LaunchFailed, match="workspace is null"):
        kernel.run(arguments, 0, STREAM)


def test_without_a_library_or_a_driver_the_reason_is_told(fakes: Fakes, build: Build) -> None:
    _, arguments = ready(fakes)
    without = build("libgemmsmith_no_such_library.so.13", "fake_cuda.so").kernel(BF16.name)
    assert without.can_implement(arguments) == NO_LIBRARY
    assert "libcublasLt" in status_text(NO_LIBRARY)
    with pytest.raises(LaunchFailed, match="cannot be loaded; install CUDA's cuBLAS"):
        propose(without, arguments)
    arguments.lda = 1  # what is wrong with the arguments is told first
    assert without.can_implement(arguments) == BAD_LAYOUT
    arguments.lda = 48
    no_driver = build("fake_cublaslt.so", "libgemmsmith_no_such_driver.so").kernel(BF16.name)
    assert no_driver.can_implement(arguments) == 1035
    arguments.library_version = 1
    assert no_driver.can_implement(arguments) == OTHER_LIBRARY


def test_the_pack_exports_its_interface_and_little_else(fakes: Fakes) -> None:
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", str(fakes.pack.path)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    exported = {line.split()[-1] for line in listing.splitlines()}
    assert {"gs_run", "gs_propose", "gs_variants", "gs_abi_oldest"} <= exported
    assert all(name.startswith(("gs_", "_ZNSt", "_ZNKSt", "_ZSt")) for name in exported)
