"""`gemmsmith.runtime.run` on torch tensors: what training code calls.

The reference is FP64 on the GPU. These run in this very process, so a kernel that crashed here
would take the rest with it; test_numerics.py has shown before that these kernels do not.
"""

from __future__ import annotations

from typing import Any

import pytest

from gemmsmith import runtime
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import Kernel, MainloopSchedule, TileScheduler
from gemmsmith.core.launch import Decomposition, Launch, RasterOrder
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import DType, Layout, Problem
from gemmsmith.errors import LaunchFailed
from gemmsmith.runtime.launch import torch_dtype
from tests.gpu import selection
from tests.gpu.conftest import Packs
from tuner.backends import refusal

M, N, K = 528, 784, 1056
FAMILIES = [pytest.param(*family, id="-".join(family)) for family in selection.FAMILIES]


@pytest.fixture(scope="module")
def torch() -> Any:
    torch = pytest.importorskip("torch")
    torch.manual_seed(20261121)
    return torch


def _matrix(torch: Any, dtype: Any, *shape: int) -> Any:
    values = torch.randn(*shape, device="cuda", dtype=torch.float32)
    return (values * 16).clamp(-400, 400).to(dtype) if dtype.itemsize == 1 else values.to(dtype)


def _operands(torch: Any, kernel: Kernel, *, batch: int | None = None, pad: int = 0) -> Any:
    """Random a and b in the kernel's layout, rows `pad` elements longer than needed."""
    dtype, layout = kernel.dtype, kernel.layout

    def one(rows: int, columns: int, element: Any, row_major: bool) -> Any:
        shape = (rows, columns) if row_major else (columns, rows)
        lead = () if batch is None else (batch,)
        stored = _matrix(torch, element, *lead, shape[0], shape[1] + pad)[..., : shape[1]]
        return stored if row_major else stored.transpose(-1, -2)

    a = one(M, K, torch_dtype(Operation.of(dtype).a), layout.a_row_major)
    b = one(K, N, torch_dtype(Operation.of(dtype).b), layout.b_row_major)
    return a, b


def _error(torch: Any, out: Any, reference: Any) -> float:
    difference = torch.linalg.vector_norm(out.double() - reference)
    return float(difference / torch.linalg.vector_norm(reference))


def _bound(kernel: Kernel) -> float:
    if kernel.dtype == DType.FP16:
        return 1e-3
    return 8e-3 if kernel.fast_accumulation else 5e-3


def _kernels(dtype: DType, layout: Layout, *, batch: int = 1) -> list[Kernel]:
    """Chosen kernels that take M×N×K: one per mainloop, scheduler, orientation and alignment.

    The first is one of CUTLASS's own that reads aligned operands with TMA.
    """
    problem = Problem(m=M, n=N, k=K, batch=batch, dtype=dtype, layout=layout)
    kinds: dict[object, Kernel] = {}
    for kernel in selection.chosen(dtype, layout):
        if refusal(kernel, problem) is None:
            kind = (kernel.mainloop, kernel.scheduler, kernel.swapped, kernel.alignment_a)
            kinds.setdefault(kind, kernel)
    return list(kinds.values())


def _launch(kernel: Kernel) -> Launch:
    """One that the kernel takes on M×N×K."""
    problem = Problem(m=M, n=N, k=K, dtype=kernel.dtype, layout=kernel.layout)
    return selection.plain_launch(kernel, problem)


def _pad(kernel: Kernel) -> int:
    """Elements between rows: as TMA wants them, but for kernels that copy what it cannot read."""
    return 3 if kernel.alignment_a == 1 else 16


@pytest.mark.parametrize(("dtype", "layout"), FAMILIES)
def test_alpha_beta_and_padded_rows(torch: Any, packs: Packs, dtype: DType, layout: Layout) -> None:
    for kernel in _kernels(dtype, layout):
        config, pack = packs.config(kernel, _launch(kernel))
        a, b = _operands(torch, kernel, pad=_pad(kernel))
        c = _matrix(torch, torch_dtype(Operation.of(dtype).d), M, N + 8)[:, :N]
        store = torch.full(
            (M, N + 24), 7.0, device="cuda", dtype=torch_dtype(Operation.of(dtype).d)
        )
        out = store[:, 8 : 8 + N]
        got = runtime.run(config, a, b, pack_path=pack, c=c, out=out, alpha=0.5, beta=-2.0)
        assert got is out
        reference = 0.5 * (a.double() @ b.double()) - 2.0 * c.double()
        assert _error(torch, out, reference) < _bound(kernel), kernel.name
        assert (store[:, :8] == 7).all(), kernel.name
        assert (store[:, 8 + N :] == 7).all(), kernel.name


@pytest.mark.parametrize(("dtype", "layout"), FAMILIES)
def test_in_place_update_and_plain_call(
    torch: Any, packs: Packs, dtype: DType, layout: Layout
) -> None:
    kernel = _kernels(dtype, layout)[0]
    config, pack = packs.config(kernel)
    a, b = _operands(torch, kernel)
    product = a.double() @ b.double()
    plain = runtime.run(config, a, b, pack_path=pack)
    assert _error(torch, plain, product) < _bound(kernel)
    total = plain.clone()
    expected = product + total.double()
    runtime.run(config, a, b, pack_path=pack, c=total, out=total, beta=1.0)
    assert _error(torch, total, expected) < _bound(kernel)


@pytest.mark.parametrize("dtype", [DType.FP8_E4M3, DType.FP8_E5M2])
def test_fp8_scales(torch: Any, packs: Packs, dtype: DType) -> None:
    for kernel in _kernels(dtype, Layout.TN):
        config, pack = packs.config(kernel, _launch(kernel))
        a, b = _operands(torch, kernel)
        scale_a = torch.tensor([0.25], device="cuda")
        scale_b = torch.tensor(3.0, device="cuda")
        product = a.double() @ b.double()
        for given, factor in (
            ({"scale_a": scale_a, "scale_b": scale_b}, 0.75),
            ({"scale_a": scale_a}, 0.25),
            ({"scale_b": scale_b, "alpha": 0.5}, 1.5),
            ({}, 1.0),
        ):
            out = runtime.run(config, a, b, pack_path=pack, **given)
            assert _error(torch, out, product * factor) < _bound(kernel), (kernel.name, given)


@pytest.mark.parametrize(("dtype", "layout"), FAMILIES)
def test_batches_with_their_own_strides(
    torch: Any, packs: Packs, dtype: DType, layout: Layout
) -> None:
    for kernel in _kernels(dtype, layout, batch=3):
        config, pack = packs.config(kernel)
        a, b = _operands(torch, kernel, batch=6, pad=_pad(kernel))
        a, b = a[::2], b[1::2]
        out = runtime.run(config, a, b, pack_path=pack)
        assert out.shape == (3, M, N)
        assert _error(torch, out, a.double() @ b.double()) < _bound(kernel), kernel.name


def test_launch_choices_change_nothing_but_speed(
    torch: Any, packs: Packs, model: DeviceModel
) -> None:
    for kernel in _kernels(DType.BF16, Layout.TN):
        choices = [
            Launch(raster=raster, swizzle=swizzle) for raster in RasterOrder for swizzle in (1, 8)
        ]
        choices.append(Launch(sm_budget=16))
        if kernel.scheduler is TileScheduler.STREAM_K:
            choices = [
                Launch(decomposition=Decomposition.DATA_PARALLEL),
                Launch(decomposition=Decomposition.STREAM_K),
                Launch(decomposition=Decomposition.HEURISTIC),
                Launch(decomposition=Decomposition.SPLIT_K, splits=2),
                Launch(decomposition=Decomposition.SPLIT_K, splits=5),
            ]
        elif kernel.scheduler in (TileScheduler.SPLIT_K, TileScheduler.CLUSTER_SPLIT_K):
            choices = [
                Launch(raster=raster, decomposition=Decomposition.SPLIT_K, splits=splits)
                for raster in RasterOrder
                for splits in (1, 2, 3, 4)  # slices of K that start on 16 bytes
            ]
        elif kernel.scheduler is TileScheduler.GRID:
            choices = [Launch()]
        a, b = _operands(torch, kernel, pad=_pad(kernel))
        reference = a.double() @ b.double()
        for launch in choices:
            config, pack = packs.config(kernel, launch)
            out = runtime.run(config, a, b, pack_path=pack)
            assert _error(torch, out, reference) < _bound(kernel), (kernel.name, launch)


def test_graph_capture_and_replay(torch: Any, packs: Packs) -> None:
    for dtype in (DType.BF16, DType.FP8_E4M3):
        for kernel in _kernels(dtype, Layout.TN):
            launch = _launch(kernel)
            if kernel.scheduler in (TileScheduler.STREAM_K, TileScheduler.CLUSTER_SPLIT_K):
                launch = Launch(decomposition=Decomposition.SPLIT_K, splits=3)
            config, pack = packs.config(kernel, launch)
            exact = Candidate(kernel=kernel, launch=launch).has_fixed_order
            a, b = _operands(torch, kernel, pad=_pad(kernel))
            out = runtime.run(config, a, b, pack_path=pack)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(3):
                    captured = runtime.run(config, a, b, pack_path=pack)
            for _ in range(4):
                new_a, _ = _operands(torch, kernel)
                a.copy_(new_a)
                captured.fill_(float("nan"))
                graph.replay()
                out = runtime.run(config, a, b, pack_path=pack)
                torch.cuda.synchronize()
                if exact:
                    assert torch.equal(out, captured), kernel.name
                reference = a.double() @ b.double()
                assert _error(torch, captured, reference) < _bound(kernel), kernel.name


def test_another_stream_is_honoured(torch: Any, packs: Packs) -> None:
    kernel = _kernels(DType.BF16, Layout.TN)[0]
    config, pack = packs.config(kernel)
    a, b = _operands(torch, kernel)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = torch.zeros_like(a)
        torch.cuda._sleep(50_000_000)
        late.copy_(a)
        out = runtime.run(config, late, b, pack_path=pack)
    stream.synchronize()
    assert _error(torch, out, a.double() @ b.double()) < _bound(kernel)


def test_operands_that_do_not_suit_are_refused(torch: Any, packs: Packs) -> None:
    kernel = _kernels(DType.BF16, Layout.TN)[0]
    config, pack = packs.config(kernel)
    a, b = _operands(torch, kernel)
    with pytest.raises(LaunchFailed, match="column-major"):
        runtime.run(config, a, b.contiguous(), pack_path=pack)
    with pytest.raises(LaunchFailed, match="takes torch"):
        runtime.run(config, a.half(), b, pack_path=pack)
    with pytest.raises(LaunchFailed, match="not multiply"):
        runtime.run(config, a[:, :-8], b, pack_path=pack)
    with pytest.raises(LaunchFailed, match="not aligned"):
        runtime.run(config, a[:, 1:], b[1:], pack_path=pack)
    with pytest.raises(LaunchFailed, match="c is missing"):
        runtime.run(config, a, b, pack_path=pack, beta=1.0)
    with pytest.raises(LaunchFailed, match="expected"):
        runtime.run(config, a, b, pack_path=pack, out=a)
    torch.cuda.synchronize()


@pytest.mark.parametrize(("dtype", "layout"), FAMILIES)
def test_kernels_report_what_they_occupy(
    torch: Any, packs: Packs, dtype: DType, layout: Layout
) -> None:
    for kernel in _kernels(dtype, layout):
        config, pack = packs.config(kernel, _launch(kernel))
        runtime.run(config, *_operands(torch, kernel), pack_path=pack)  # known once it has run
        occupancy = runtime.LoadedPack.open(pack).kernel(kernel.name).describe()
        assert 0 < occupancy.threads <= 1024, kernel.name
        assert 0 < occupancy.shared_bytes <= 232_448, kernel.name
        assert occupancy.registers > 0, kernel.name
        if kernel.mainloop is not MainloopSchedule.MULTISTAGE:
            assert occupancy.local_bytes == 0, kernel.name
