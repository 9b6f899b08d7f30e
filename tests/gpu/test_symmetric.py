"""Kernels of symmetric products, and programs that run them, against FP64.

With alpha, beta, batches, pitches, in graphs, symmetric to the bit. `test_kernels` has more sizes,
with one matrix and without C.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import gemmsmith
from gemmsmith import runtime
from gemmsmith.core.config import Config
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import Kernel
from gemmsmith.core.launch import Launch
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import Problem
from gemmsmith.errors import LaunchFailed
from tests.gpu import selection
from tests.gpu.support.choosing import Ground, tuned
from tests.gpu.support.families import SYMMETRIC
from tests.gpu.support.layers import near
from tests.unit.ops.test_newton_schulz import no_farther

SENTINEL = 7.0
BOUNDS = {torch.bfloat16: 5e-3, torch.float16: 1e-3}
FACTORS = ((1.0, 0.0), (0.5, -2.0), (2.0315, -4.775))
SIZES = ((1, 8, 8), (3, 136, 200), (5, 264, 1032), (1, 1024, 1024), (2, 2056, 520), (1, 4096, 256))
"""Batch, n and k."""

KERNELS = [kernel for operation in SYMMETRIC.operations for kernel in SYMMETRIC.chosen(operation)]


@pytest.fixture(scope="module")
def built() -> dict[str, Path]:
    return SYMMETRIC.built()


def kind(operation: Operation) -> torch.dtype:
    return torch.bfloat16 if operation.types == "bf16" else torch.float16


def laid(a: torch.Tensor, operation: Operation) -> torch.Tensor:
    """The matrices, contiguous along K or along N."""
    return a.contiguous() if operation.layout.a_row_major else a.mT.contiguous().mT


def drawn(batch: int, n: int, k: int, operation: Operation) -> torch.Tensor:
    """[batch, n, k]; A·Aᵀ has a standard deviation of 1 off the diagonal."""
    a = torch.randn(batch, n, k, device="cuda") * k**-0.25
    return laid(a.to(kind(operation)), operation)


def symmetric(batch: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    lower = torch.randn(batch, n, n, device="cuda").tril()
    return (lower + lower.tril(-1).mT).to(dtype)


def is_symmetric(d: torch.Tensor) -> bool:
    bits = d.view(torch.int16)
    return torch.equal(bits, bits.mT)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name.split("tensorop_")[1])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_launch_and_factor(
    kernel: Kernel, size: tuple[int, int, int], built: dict[str, Path], model: DeviceModel
) -> None:
    """Between sentinels: nothing outside D is written."""
    torch.manual_seed(20261127)
    batch, n, k = size
    dtype = kind(kernel.operation)
    a, c = drawn(batch, n, k, kernel.operation), symmetric(batch, n, dtype)
    product = a.double() @ a.double().mT
    problem = Problem.of(kernel.operation, n, n, k, batch)
    for launch in selection.launches_of(kernel, problem, model):
        for alpha, beta in FACTORS:
            store = torch.full((batch, n + 2, n + 16), SENTINEL, device="cuda", dtype=dtype)
            out = store[:, 1:-1, 8:-8]
            config = Config(kernel=kernel, launch=launch)
            runtime.run(
                config, a, a.mT, pack_path=built[kernel.name], c=c, out=out, alpha=alpha, beta=beta
            )
            wanted = alpha * product + (beta * c.double() if beta else 0.0)
            d = out.contiguous()
            assert near(d, wanted, BOUNDS[dtype]), (launch, alpha, beta)
            assert is_symmetric(d), (launch, alpha, beta)
            store[:, 1:-1, 8:-8] = SENTINEL
            assert (store == SENTINEL).all(), (launch, alpha, beta)


@pytest.mark.parametrize("operation", SYMMETRIC.operations, ids=lambda operation: operation.key)
def test_a_square_of_a_symmetric_matrix_to_which_it_is_added(
    operation: Operation, built: dict[str, Path]
) -> None:
    """A is C as well, as in the polynomial of Newton and Schulz."""
    torch.manual_seed(20261127)
    a = laid(symmetric(2, 1032, kind(operation)) / 1032**0.25, operation)
    wanted = -4.775 * a.double() + 2.0315 * (a.double() @ a.double())
    for kernel in SYMMETRIC.chosen(operation):
        config = Config(kernel=kernel, launch=Launch())
        d = runtime.run(
            *(config, a, a.mT),
            pack_path=built[kernel.name],
            c=a.mT if operation.layout == "nt" else a,
            alpha=2.0315,
            beta=-4.775,
        )
        assert near(d, wanted, BOUNDS[a.dtype]), kernel.name
        assert is_symmetric(d), kernel.name


@pytest.mark.parametrize("operation", SYMMETRIC.operations, ids=lambda operation: operation.key)
def test_equal_bits_in_a_row_and_in_graphs(operation: Operation, built: dict[str, Path]) -> None:
    torch.manual_seed(20261127)
    inputs = [drawn(1, 1048, 520, operation)[0] for _ in range(8)]
    for kernel in SYMMETRIC.chosen(operation):
        config = Config(kernel=kernel, launch=Launch())

        def run(a: torch.Tensor, out: torch.Tensor, config: Config = config) -> None:
            runtime.run(config, a, a.mT, pack_path=built[config.kernel.name], out=out)

        outputs = [torch.empty(1048, 1048, dtype=a.dtype, device="cuda") for a in inputs]
        for a, out in zip(inputs, outputs, strict=True):
            run(a, out)
        expected = [out.clone() for out in outputs]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for a, out in zip(inputs, outputs, strict=True):
                run(a, out)
        for _ in range(3):
            for out in outputs:
                out.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            for out, wanted in zip(outputs, expected, strict=True):
                assert torch.equal(out.view(torch.int16), wanted.view(torch.int16)), kernel.name


def test_what_would_be_read_after_it_is_written_is_refused(built: dict[str, Path]) -> None:
    """A new D alone: tiles are written in any order, each in two places."""
    (operation, *_) = SYMMETRIC.operations
    kernel, *_ = SYMMETRIC.chosen(operation)
    config, pack = Config(kernel=kernel, launch=Launch()), built[kernel.name]
    a, other = drawn(1, 64, 64, operation)[0], drawn(1, 64, 64, operation)[0]
    with pytest.raises(LaunchFailed):
        runtime.run(config, a, a.mT, pack_path=pack, out=a)
    with pytest.raises(LaunchFailed):
        runtime.run(config, a, a.mT, pack_path=pack, c=other, out=other, beta=1.0)
    with pytest.raises(LaunchFailed):
        runtime.run(config, a, other.mT, pack_path=pack)


@pytest.fixture(scope="module")
def ground(model: DeviceModel, built: dict[str, Path]) -> Ground:
    return Ground.of(model, KERNELS)


def test_newton_schulz_runs_both(ground: Ground) -> None:
    torch.manual_seed(20261127)
    equal = [torch.randn(512, 1536, device="cuda") for _ in range(4)]
    for matrices in (equal, [torch.randn(1032, 520, device="cuda").mT]):
        with tuned(ground) as launched:
            no_farther(matrices)
            assert launched() == 10


@pytest.mark.parametrize("size", [(1032, 520), (3, 264, 1032), (8, 8)], ids=str)
def test_a_matrix_times_its_transposed_view(ground: Ground, size: tuple[int, ...]) -> None:
    """Below torch's own products, without gradients and with them; odd sizes are torch's."""
    torch.manual_seed(20261127)
    a = torch.randn(size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    outward = torch.randn(*size[:-1], size[-2], device="cuda", dtype=torch.bfloat16)
    wide = a.detach().double().requires_grad_()
    (wide @ wide.mT).backward(outward.double())
    assert wide.grad is not None
    with tuned(ground), gemmsmith.patch():
        d = a @ a.mT
        d.backward(outward)
        odd = a.detach()[..., 1:, 1:].contiguous()
        assert near(odd @ odd.mT, odd.double() @ odd.double().mT)
    assert near(d, wide.detach() @ wide.detach().mT)
    assert is_symmetric(d.detach())
    assert a.grad is not None
    assert near(a.grad, wide.grad, 1e-2)
