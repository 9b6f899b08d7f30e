"""Kernels with an FP8 output, one of each kind, as the measuring child verifies them: D and its
largest value, on sizes that no tile divides; what saturates, against FP64; the library's operators;
and every way that torch programs have of computing them.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from gemmsmith.core.config import Config
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import CutlassKernel, cutlass
from gemmsmith.core.launch import Launch
from gemmsmith.core.problem import Problem
from gemmsmith.ops.engine.forms import Form, Spec, shapes
from gemmsmith.ops.engine.operands import present
from gemmsmith.ops.engine.plan import Plan
from gemmsmith.ops.engine.platform import Cuda
from gemmsmith.runtime.pack import LoadedPack
from tests.gpu.support.building import build
from tests.gpu.test_operations import check
from tuner.backends import kernels, refusal
from tuner.compile import find_toolchain
from tuner.devices.cuda import CudaDevice
from tuner.workloads import ways
from tuner.workloads.operands import Operands
from tuner.workloads.registry import workload_of
from tuner.workloads.workload import Block, drawn_with

FP8 = torch.float8_e4m3fn
FAMILIES = (
    "bias",
    "bias_gelu_tanh",
    "bias_gelu",
    "bias_silu",
    "bias_relu2",
    "silu_gate",
    "gelu_tanh_gate",
    "gelu_gate",
)
ACTIVATIONS: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    None: lambda x: x,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu": functional.gelu,
    "silu": functional.silu,
    "relu2": lambda x: functional.relu(x).square(),
}


def problem(epilogue: str, m: int = 528, n: int = 1568, k: int = 2080) -> Problem:
    """No extent is a multiple of a tile, nor is half of N, but rows are of 16 bytes."""
    return Problem(m=m, n=n, k=k, dtype=f"fp8_e4m3.out_e4m3.then_{epilogue}")


@cache
def chosen(epilogue: str) -> tuple[CutlassKernel, ...]:
    """The first kernel of each mainloop, orientation and accumulation; of two epilogues one of each
    width of D's parts as well.
    """
    found: dict[tuple[object, ...], CutlassKernel] = {}
    for kernel in map(cutlass, kernels(problem(epilogue))):
        kind = (kernel.mainloop, kernel.swapped, kernel.fast_accumulation)
        found.setdefault(kind, kernel)
        if epilogue in ("bias_gelu", "silu_gate") and kernel.fast_accumulation:
            found.setdefault((*kind, kernel.tile[1] & -kernel.tile[1]), kernel)
    return tuple({kernel.name: kernel for kernel in found.values()}.values())


@pytest.fixture(scope="module")
def built() -> dict[str, Path]:
    """The packs of all kernels, by kernel."""
    wanted = [kernel for epilogue in FAMILIES for kernel in chosen(epilogue)]
    return build(wanted)[1]


def test_boxes_and_descriptors_are_as_the_kernel_takes_them(tmp_path: Path) -> None:
    """As of gated kernels with a 16-bit output: a host program goes through every element of a box,
    and prints what TMA is told. It needs no GPU, but minutes of nvcc.
    """
    toolchain = find_toolchain()
    program = tmp_path / "layouts"
    source = Path(__file__).with_name("gated_fp8_layouts.cu")
    subprocess.run(
        [
            str(toolchain.nvcc),
            "-std=c++17",
            "-arch=sm_90a",
            "--expt-relaxed-constexpr",
            "-O0",
            "-DNDEBUG",
            "-DCUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL=1",
            *toolchain.search,
            str(source),
            "-o",
            str(program),
        ],
        check=True,
        capture_output=True,
    )
    said = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    # address, then extent/bytes to the next/box, innermost first
    assert said.splitlines() == [
        f"map 40000 swizzle {swizzle} 512/1/{columns} 1000/528/64"
        for swizzle, columns in ((3, 128), (2, 64), (1, 32), (0, 16))
    ]


@pytest.mark.parametrize(
    "extents", [(528, 1568, 2080), (4096, 4128, 512), (16, 1568, 2080), (1, 32, 16)], ids=str
)
@pytest.mark.parametrize("epilogue", FAMILIES)
def test_every_kind_is_right(
    epilogue: str,
    extents: tuple[int, int, int],
    built: dict[str, Path],
    device: CudaDevice,
    model: DeviceModel,
) -> None:
    asked = problem(epilogue, *extents)
    members = [kernel for kernel in chosen(epilogue) if refusal(kernel, asked) is None]
    assert members
    check(asked, members, built, device, model)


@pytest.mark.parametrize("epilogue", FAMILIES)
@pytest.mark.parametrize("extents", [(528, 1568, 2080), (5, 96, 64)], ids=str)
def test_results_saturate_and_the_largest_value_runs(
    epilogue: str, extents: tuple[int, int, int], built: dict[str, Path]
) -> None:
    """Against FP64. The last column's product cancels its bias, which is alone in rows beyond M:
    whoever looks there finds a larger value.
    """
    torch.manual_seed(20261125)
    m, n, k = extents
    asked = problem(epilogue, m, n, k)
    what = asked.operation.epilogue
    x, weight = ((torch.randn(rows, k, device="cuda") * 16).to(FP8) for rows in (m, n))
    one = torch.tensor([1 / 16], device="cuda")
    other = torch.tensor([k**-0.5 / 16], device="cuda")
    bias = None
    if what.has_bias:
        bias = torch.linspace(-2.0, 2.0, n, device="cuda").bfloat16()
        bias[-1] = 28.0
        x[:, :64] = 16.0
        weight[-1] = 0.0
        weight[-1, :64] = -28.0 / 64 / float(other)
    linear = functional.linear(x.double(), weight.double()) * (one * other).double()
    activate = ACTIVATIONS[what.activation]
    if bias is not None:
        value = activate(linear + bias.double())
    else:
        gate, up = linear.chunk(2, -1)
        value = activate(gate) * up
    first, second = (weight, None) if bias is not None else weight.chunk(2)
    right = first.t()
    (shape, *_) = shapes(Form.SCALED, Spec.of(x), Spec.of(right), FP8, epilogue=what)
    assert shape.problem == asked
    platform, largest = Cuda(), float(value.abs().max())
    for kernel in chosen(epilogue):
        if refusal(kernel, asked) is not None:
            continue
        config = Config(kernel=kernel, launch=Launch(), pack="a" * 64)
        loaded = LoadedPack.open(built[kernel.name]).kernel(kernel.name)
        plan = Plan(config, shape, loaded, platform, x.device, 0)
        up_t = None if second is None else second.t()
        for scale in (None, 0.5, 4096.0):
            scale_d = None if scale is None else torch.tensor([scale], device="cuda")
            for before in (None, 0.0, 2 * largest):
                amax = None if before is None else torch.tensor([before], device="cuda")
                operands = present(bias=bias, up=up_t, scale_d=scale_d, amax=amax)
                found = plan(x, right, {**operands, "scale_a": one, "scale_b": other})
                assert found is not None
                assert found.dtype is FP8
                expected = (value * (scale or 1.0)).clamp(-448, 448)
                bound = 0.07 * expected.abs() + 0.02 * (1 + (scale or 1.0))
                close = (found.double() - expected).abs() <= bound
                assert bool(close.all()), (kernel.name, scale)
                if amax is not None and before is not None:
                    wanted = max(before, largest)
                    assert float(amax) == pytest.approx(wanted, rel=1e-2), kernel.name


@pytest.mark.parametrize("epilogue", FAMILIES)
def test_every_way_of_torchs_computes_the_same(epilogue: str, model: DeviceModel) -> None:
    """The default, compiled code and the library's own FP8 output, against FP32."""
    asked = problem(epilogue)
    operands = Operands(asked, model, 0, seed=20261125)
    workload = workload_of(asked.operation)
    first = operands.sets[0]
    everything = Block(batches=slice(0, 1), rows=slice(0, asked.m), columns=slice(0, asked.columns))
    wanted = workload.product(asked, first, everything).double()[0]
    name, _ = ways.first_that_runs(workload.defaults(asked), asked, operands.sets, operands.room)
    default = next(way for way in workload.defaults(asked) if way.name == name)
    assert name == workload.defaults(asked)[0].name
    for way in (default, *workload.alternatives(asked)):
        operands.restart(first)
        first.d.view(torch.int8).zero_()
        found = way.launches(asked, operands.sets, operands.room)[0]().double()
        assert float((found - wanted).norm() / wanted.norm()) < 4e-2, way.name
        if way is default:
            scale = first.scale_d
            assert scale is not None
            largest = float(wanted.abs().max() / scale)
            assert float(drawn_with(first.amax)) == pytest.approx(largest, rel=1e-2)
