"""Gated kernels as the measuring child verifies them: D, gate and up, poisoned first, on sizes that
no tile divides; every layout of the weight; and every way that torch programs have of computing
them.
"""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from gemmsmith.core.config import Config
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.epilogue import Activation
from gemmsmith.core.kernel import Kernel, cutlass
from gemmsmith.core.launch import Launch
from gemmsmith.core.operation import Epilogue
from gemmsmith.core.problem import Problem
from gemmsmith.ops.engine.forms import Form, Spec, shapes
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
from tuner.workloads.workload import Block

GATED = [epilogue for epilogue in Epilogue if epilogue.is_gated]
FAMILIES = (
    *(f"bf16.then_{epilogue}" for epilogue in GATED),
    "fp16.then_silu_gate",
    "fp16.then_silu_gate_aux",
    "fp16.then_gelu_tanh_gate_aux",
    "fp8_e4m3.then_silu_gate",
    "fp8_e4m3.then_silu_gate_aux",
)
TILES = ((128, 192), (128, 160), (128, 128), (128, 256), (256, 128), (64, 96))
"""Halves of 96, 80, 64, 128, 64 and 48 columns: boxes of all three widths."""
CLUSTERS = ((1, 1), (2, 1), (1, 2), (4, 2))
ACTIVATIONS = {
    Activation.SILU: functional.silu,
    Activation.GELU: functional.gelu,
    Activation.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
}


def problem(dtype: str, m: int = 528, n: int = 1552, k: int = 2080) -> Problem:
    """No extent is a multiple of a tile, nor is half of N, but rows are of 16 bytes."""
    return Problem(m=m, n=n, k=k, dtype=dtype)


@cache
def chosen(dtype: str) -> tuple[Kernel, ...]:
    """The first kernel of each mainloop; of SwiGLU one of each tile, and of each cluster."""
    found: dict[tuple[object, ...], Kernel] = {}
    for kernel in map(cutlass, kernels(problem(dtype))):
        found.setdefault((kernel.mainloop,), kernel)
        if dtype in ("bf16.then_silu_gate", "bf16.then_silu_gate_aux"):
            if kernel.tile[:2] in TILES:
                found.setdefault((kernel.mainloop, kernel.tile), kernel)
            if kernel.cluster in CLUSTERS:
                found.setdefault((kernel.mainloop, kernel.cluster), kernel)
    return tuple({kernel.name: kernel for kernel in found.values()}.values())


@pytest.fixture(scope="module")
def built() -> dict[str, Path]:
    """The packs of all kernels, by kernel."""
    wanted = [kernel for dtype in FAMILIES for kernel in chosen(dtype)]
    return build(wanted)[1]


def test_layouts_and_descriptors_are_as_the_kernel_takes_them(tmp_path: Path) -> None:
    """A host program goes through every element of a tile, and prints what TMA is told. It needs no
    GPU, but minutes of nvcc.
    """
    toolchain = find_toolchain()
    program = tmp_path / "layouts"
    source = Path(__file__).with_name("gated_layouts.cu")
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
    lines = iter(said.splitlines())
    for tile, rows, columns, swizzle in (
        ("tile 128 192 cluster 2", 48, 32, 2),
        ("tile 256 128 cluster 1", 64, 64, 3),
    ):
        assert next(lines) == tile
        m = int(tile.split()[1])
        # address, then extent/bytes to the next/box, innermost first
        assert next(lines) == f"map 10000 swizzle 3 520/2/64 1000/1056/{m} 1/0/1"
        assert next(lines) == f"map 20000 swizzle 3 520/2/64 504/2080/{rows} 1/0/1"
        assert next(lines) == f"map 30000 swizzle 3 520/2/64 504/2080/{rows} 1/0/1"
        assert next(lines) == f"map 40000 swizzle {swizzle} 504/2/{columns} 1000/1024/64"
        assert next(lines) == f"map 50000 swizzle {swizzle} 504/2/{columns} 1000/2032/64"
        assert next(lines) == f"map 503f0 swizzle {swizzle} 504/2/{columns} 1000/2032/64"
    assert next(lines, None) is None


@pytest.mark.parametrize(
    "extents", [(528, 1552, 2080), (4096, 4112, 512), (16, 1552, 2080), (1, 32, 16)], ids=str
)
@pytest.mark.parametrize("dtype", FAMILIES)
def test_every_kind_is_right(
    dtype: str,
    extents: tuple[int, int, int],
    built: dict[str, Path],
    device: CudaDevice,
    model: DeviceModel,
) -> None:
    asked = problem(dtype, *extents)
    members = [kernel for kernel in chosen(dtype) if refusal(kernel, asked) is None]
    assert members
    check(asked, members, built, device, model)


@pytest.mark.parametrize("dtype", [one for one in FAMILIES if "fp8" not in one])
@pytest.mark.parametrize("layout", ["halves", "interleaved", "two", "spaced"])
def test_every_layout_of_the_weight_is_read(
    dtype: str, layout: str, built: dict[str, Path]
) -> None:
    """By its own strides, against FP64; what lies between the weight's rows is NaN."""
    torch.manual_seed(20261123)
    m, n, k = 520, 1040, 328
    kind = torch.bfloat16 if dtype.startswith("bf16") else torch.float16
    x = torch.randn(m, k, device="cuda").to(kind)
    parts = [(torch.randn(n // 2, k, device="cuda") * k**-0.5).to(kind) for _ in range(2)]
    if layout == "halves":
        gate, up = torch.cat(parts).chunk(2)
    elif layout == "interleaved":
        gate, up = torch.stack(parts, 1).view(n, k).unflatten(0, (-1, 2)).unbind(1)
    elif layout == "two":
        gate, up = parts
    else:
        wide = torch.full((2, n // 2, k + 24), torch.nan, dtype=kind, device="cuda")
        wide[:, :, :k] = torch.stack(parts)
        gate, up = wide[:, :, :k].unbind()
    epilogue = problem(dtype).operation.epilogue
    (shape,) = shapes(Form.LINEAR, _spec(x), _spec(gate), epilogue=epilogue)
    first = functional.linear(x.double(), parts[0].double())
    second = functional.linear(x.double(), parts[1].double())
    assert epilogue.activation is not None
    wanted = ACTIVATIONS[epilogue.activation](first) * second
    platform = Cuda()
    for kernel in chosen(dtype):
        if refusal(kernel, shape.problem) is not None:
            continue
        config = Config(kernel=kernel, launch=Launch(), pack="a" * 64)
        loaded = LoadedPack.open(built[kernel.name]).kernel(kernel.name)
        plan = Plan(config, shape, loaded, platform, x.device, 0)
        outputs = plan.outputs()
        aux = outputs["aux"].fill_(torch.nan) if epilogue.stores_aux else None
        out = plan(x, gate, {**outputs, "up": up})
        assert out is not None
        assert _error(out.double(), wanted) < 1e-2, kernel.name
        if aux is not None:
            assert _error(aux.double(), torch.cat([first, second], -1)) < 1e-2, kernel.name


@pytest.mark.parametrize("dtype", FAMILIES)
def test_every_way_of_torchs_computes_the_same(dtype: str, model: DeviceModel) -> None:
    """The default, compiled sequences and two products, against FP32."""
    asked = problem(dtype)
    operands = Operands(asked, model, 0, seed=20261123)
    workload = workload_of(asked.operation)
    (case,) = operands.cases
    first = operands.sets[0]
    outputs = slice(0, len(case.sigmas))
    everything = Block(batches=outputs, rows=slice(0, asked.m), columns=slice(0, asked.columns))
    wanted = workload.product(asked, first, everything).double()
    name, _ = ways.first_that_runs(workload.defaults(asked), asked, operands.sets, operands.room)
    default = next(way for way in workload.defaults(asked) if way.name == name)
    assert name == workload.defaults(asked)[0].name
    for way in (default, *workload.alternatives(asked)):
        first.d.zero_()
        found = way.launches(asked, operands.sets, operands.room)[0]().double()
        assert _error(found, wanted[0]) < 1e-2, way.name
        if way is default and len(wanted) > 1:
            assert _error(first.d[1:].double(), wanted[1:]) < 1e-2


def _spec(tensor: torch.Tensor) -> Spec:
    return Spec(tensor.dtype, tensor.device, tensor.size(), tensor.stride())


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(found - wanted) / torch.linalg.vector_norm(wanted))
