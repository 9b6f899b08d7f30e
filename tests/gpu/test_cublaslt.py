"""cuBLASLt's pack on a GPU: its numbers against FP64, its lists, graphs and devices.

Runs in this very process: the library's own kernels are not expected to crash it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gemmsmith.core.launch import Algorithm
from gemmsmith.core.operation import Layout, Scaling
from gemmsmith.errors import LaunchFailed
from gemmsmith.runtime import Arguments, LoadedKernel, LoadedPack
from tests.support.host_pack import build
from tests.support.libraries import library_version
from tests.support.shipped import shipped_files
from tuner.backends.cublaslt.operations import OPERATIONS, Compute, LibraryOperation
from tuner.backends.cublaslt.proposals import Proposal, propose, shape_of, variants
from tuner.backends.cublaslt.renewing import loaded, renewed, version_of
from tuner.exchange import read_winners

torch = pytest.importorskip("torch")
products = pytest.importorskip("tests.support.products")

ROW_SCALES_SINCE = 120900
M, N, K = 272, 528, 1056
LARGE = (4096, 4096, 4096)
REPLAYS = 5
IN_TYPE_OF_D = 4.0
"""How much more error slices of K may have that are added up in the output's type."""
BF16 = LibraryOperation(a="bf16", b="bf16", d="bf16", layout=Layout.TN)


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> LoadedPack:
    torch.zeros(1, device="cuda")  # torch brings its cuBLAS
    path = tmp_path_factory.mktemp("cublaslt") / "pack.so"
    build(path)
    return LoadedPack.open(path)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(20261123)


def _bounds(operation: LibraryOperation) -> tuple[float, float]:
    """Largest error: of the whole, as a share of its norm; of one element, in deviations."""
    if operation.compute is Compute.S32:
        return 0.0, 0.0
    if operation.compute is Compute.TF32:
        return 2e-3, 2e-2
    if operation.d == "f32":
        return 3e-5, 3e-4
    if operation.d == "f16":
        return 1e-3, 1e-2
    return (8e-3, 8e-2) if operation.fast_accumulation else (5e-3, 5e-2)


def _check(case: Any, slack: float = 1.0) -> None:
    expected = case.expected()
    difference = (case.d.double() - expected).abs()
    whole = float(difference.norm() / expected.norm())
    single = float(difference.max() / expected.std())
    of_whole, of_single = _bounds(case.operation)
    assert whole <= slack * of_whole, (whole, single)
    assert single <= slack * of_single, (whole, single)
    assert case.untouched()


def _launcher(kernel: LoadedKernel, arguments: Arguments, proposal: Proposal) -> Callable[[], None]:
    """Launches on torch's current stream, with a workspace of its own."""
    arguments = Arguments.from_buffer_copy(arguments)
    proposal.launch(arguments)
    assert kernel.can_implement(arguments) == 0
    size = kernel.workspace_bytes(arguments)
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda") if size else None

    def launch() -> None:
        place = workspace.data_ptr() if workspace is not None else 0
        kernel.run(arguments, place, torch.cuda.current_stream().cuda_stream)

    return launch


def _expected_to_exist(operation: LibraryOperation) -> bool:
    """Hopper multiplies 8-bit elements K-major only."""
    eight_bits = operation.a in ("e4m3", "e5m2", "s8")
    if operation.scales is Scaling.ROW and (library_version() or 0) < ROW_SCALES_SINCE:
        return False
    return operation.layout is Layout.TN or not eight_bits


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: each.name)
@pytest.mark.parametrize(("batch", "alpha", "beta"), [(1, 1.0, 0.0), (1, 2.0, -1.0), (3, 1.0, 1.0)])
def test_numerics(
    pack: LoadedPack,
    operation: LibraryOperation,
    batch: int,
    alpha: float,
    beta: float,
    record_property: Callable[[str, object], None],
) -> None:
    if operation.scales is Scaling.ROW:
        batch = 1  # of more they are refused
    kernel = pack.kernel(operation.name)
    case = products.product(operation, M, N, K, batch=batch, alpha=alpha, beta=beta, device="cuda")
    arguments = case.arguments()
    found = propose(kernel, arguments)
    record_property("proposals", len(found))
    if not _expected_to_exist(operation):
        if not found:
            pytest.skip("this library does not have it on this GPU")
    else:
        assert found
    for proposal in found:
        case.poison()
        try:
            _launcher(kernel, arguments, proposal)()
        except LaunchFailed:
            # Integers times other factors than 1 are the library's to refuse.
            assert operation.compute is Compute.S32
            assert (alpha, beta) not in ((1.0, 0.0), (1.0, 1.0))
            continue
        _check(case)


@pytest.mark.parametrize(
    "extents", [(1, 512, 1024), (7, 4096, 4096), (1000, 1, 136), (333, 777, 999)]
)
@pytest.mark.parametrize("d", ["bf16", "f32"])
@pytest.mark.parametrize("layout", Layout)
def test_any_size(pack: LoadedPack, layout: Layout, d: str, extents: tuple[int, int, int]) -> None:
    operation = LibraryOperation(a="bf16", b="bf16", d=d, layout=layout)
    kernel = pack.kernel(operation.name)
    case = products.product(operation, *extents, pad=0, device="cuda")
    arguments = case.arguments()
    found = propose(kernel, arguments)
    assert found
    for proposal in found:
        case.poison()
        _launcher(kernel, arguments, proposal)()
        expected = case.expected()
        error = float((case.d.double() - expected).norm() / expected.norm())
        assert error <= _bounds(operation)[0]


def test_accumulation_in_place(pack: LoadedPack) -> None:
    operation = LibraryOperation(a="bf16", b="bf16", d="f32", layout=Layout.NT)
    kernel = pack.kernel(operation.name)
    case = products.product(operation, M, N, K, beta=1.0, device="cuda")
    arguments = case.arguments()
    arguments.c, arguments.ldc = arguments.d, arguments.ldd
    arguments.batch_stride_c = arguments.batch_stride_d
    for proposal in propose(kernel, arguments):
        case.poison()
        case.d.copy_(case.c)
        _launcher(kernel, arguments, proposal)()
        _check(case)


@pytest.mark.parametrize(
    "operation",
    [
        BF16,
        LibraryOperation(
            a="e4m3",
            b="e4m3",
            d="bf16",
            layout=Layout.TN,
            scales=Scaling.TENSOR,
            fast_accumulation=True,
        ),
        LibraryOperation(a="s8", b="s8", d="s32", layout=Layout.TN, compute=Compute.S32),
    ],
    ids=lambda each: each.name,
)
def test_variants_compute_what_proposals_do(
    pack: LoadedPack,
    operation: LibraryOperation,
    record_property: Callable[[str, object], None],
) -> None:
    """All that the library says it would run near its own choice, refused or right."""
    kernel = pack.kernel(operation.name)
    case = products.product(operation, 256, 512, 2048, device="cuda")
    arguments = case.arguments()
    found = variants(kernel, arguments, propose(kernel, arguments)[0].chosen, most=512)
    record_property("variants", len(found))
    record_property("splits", sorted({each.split_k for each in found}))
    record_property("tiles", len({each.tile_id for each in found}))
    record_property("clusters", sorted({each.cluster_id for each in found}))
    record_property("ids", sorted({each.id for each in found}))
    assert found
    refused = 0
    for variant in found:
        case.poison()
        try:
            _launcher(kernel, arguments, variant)()
        except LaunchFailed:
            refused += 1
            continue
        _check(case, IN_TYPE_OF_D if variant.reduction in (1, 4) else 1.0)
    record_property("refused", refused)
    assert refused < len(found)


def test_graphs(pack: LoadedPack) -> None:
    kernel = pack.kernel(BF16.name)
    case = products.product(BF16, M, N, K, device="cuda")
    arguments = case.arguments()
    for proposal in propose(kernel, arguments):
        launch = _launcher(kernel, arguments, proposal)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            launch()  # the driver loads the kernel's code
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            launch()
        for _ in range(REPLAYS):
            case.poison()
            graph.replay()
            torch.cuda.synchronize()
            _check(case)


def test_another_version_s_algorithms_are_refused(pack: LoadedPack) -> None:
    kernel = pack.kernel(BF16.name)
    arguments = products.product(BF16, M, N, K, device="cuda").arguments()
    proposal = propose(kernel, arguments)[0]
    assert proposal.library_version == library_version()
    proposal.launch(arguments)
    arguments.library_version -= 1
    with pytest.raises(LaunchFailed, match="another version"):
        kernel.run(arguments, 0, 0)


def test_a_device_that_is_not_current(pack: LoadedPack) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    kernel = pack.kernel(BF16.name)
    case = products.product(BF16, M, N, K, device="cuda:1")
    arguments = case.arguments(device=1)
    with torch.cuda.device(0):
        proposal = next(each for each in propose(kernel, arguments) if not each.workspace_bytes)
        proposal.launch(arguments)
        kernel.run(arguments, 0, torch.cuda.current_stream(1).cuda_stream)
        assert torch.cuda.current_device() == 0
    torch.cuda.synchronize(1)
    _check(case)


def test_the_best_of_the_list_keeps_up_with_torch(
    pack: LoadedPack, record_property: Callable[[str, object], None]
) -> None:
    """Interleaved, medians: torch runs one of the same list."""
    kernel = pack.kernel(BF16.name)
    case = products.product(BF16, *LARGE, pad=0, device="cuda")
    arguments = case.arguments()
    found = propose(kernel, arguments)
    near = variants(kernel, arguments, found[0].chosen, most=64)
    a, b, out = case.a[0], case.b[0], case.d[0]
    runs: list[Callable[[], object]] = [lambda: torch.mm(a, b, out=out)]
    for proposal in (*found, *near):
        launch = _launcher(kernel, arguments, proposal)
        try:
            launch()
        except LaunchFailed:
            continue
        runs.append(launch)
    times = _medians(runs)
    record_property("over_default", round(times[0] / min(times[1:]), 4))
    record_property("over_default_of_list", round(times[0] / min(times[1 : 1 + len(found)]), 4))
    assert min(times[1:]) <= 1.03 * times[0]


def test_the_host_s_cost(pack: LoadedPack, record_property: Callable[[str, object], None]) -> None:
    kernel = pack.kernel(BF16.name)
    case = products.product(BF16, 16, 16, 64, device="cuda")
    arguments = case.arguments()
    launch = _launcher(kernel, arguments, propose(kernel, arguments)[0])
    launch()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(500):  # fewer than a stream holds: none waits for the GPU
        launch()
    each_us = (time.perf_counter() - begin) / 500 * 1e6
    record_property("host_us", round(each_us, 2))
    assert each_us < 50.0


def _medians(runs: list[Callable[[], object]], rounds: int = 9) -> list[float]:
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for each, run in zip(times, runs, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(200_000)  # the host is done enqueueing before the GPU begins
            begin.record()
            for _ in range(3):
                run()
            end.record()
            end.synchronize()
            each.append(begin.elapsed_time(end))
    return [sorted(each)[rounds // 2] for each in times]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: each.name)
def test_an_algorithm_made_anew_from_its_settings_gives_the_same_bits(
    pack: LoadedPack, operation: LibraryOperation
) -> None:
    library = loaded()
    assert library is not None
    assert version_of(library) == library_version()
    kernel = pack.kernel(operation.name)
    case = products.product(operation, M, N, K, device="cuda")
    arguments = case.arguments()
    for proposal in propose(kernel, arguments)[:3]:
        other = replace(proposal, library_version=proposal.library_version - 1)
        (anew,) = renewed(kernel, arguments, other.chosen, library)
        assert anew.library_version == proposal.library_version
        outputs = []
        for made in (proposal, anew):
            case.poison()
            _launcher(kernel, arguments, made)()
            torch.cuda.synchronize()
            outputs.append(case.d.clone())
        assert torch.equal(*outputs)
        _check(case, IN_TYPE_OF_D if proposal.split_k > 1 else 1.0)


def test_shipped_algorithms_made_anew_run_here(
    pack: LoadedPack, record_property: Callable[[str, object], None]
) -> None:
    """How many do is for the library to say; most should, where only its patch level differs."""
    library = loaded()
    assert library is not None
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    tried = taken = 0
    for winner in (winner for file in shipped_files() for winner in read_winners(file)):
        candidate = winner.candidate
        if candidate is None or not isinstance(candidate.launch.algorithm, Algorithm):
            continue
        arguments = shape_of(winner.problem, 0, sm_count)
        arguments.workspace_limit = 32 << 20
        tried += 1
        kernel = pack.kernel(candidate.kernel.name)
        taken += len(renewed(kernel, arguments, candidate.launch.algorithm, library))
    record_property("shipped algorithms", tried)
    record_property("made anew", taken)
    assert taken > tried / 2
