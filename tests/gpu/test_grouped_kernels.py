"""Kernels of grouped products, one of each kind, as the measuring child verifies them: every
spread of the tokens, empty groups, one token, ends before the last token.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from gemmsmith.core.config import Config
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import Kernel, cutlass
from gemmsmith.core.launch import Launch
from gemmsmith.core.operation import Grouping, Operation
from gemmsmith.core.problem import Problem
from gemmsmith.ops.engine.forms import Form, Shape, Spec, shapes
from gemmsmith.ops.engine.operands import present
from gemmsmith.ops.engine.plan import Plan
from gemmsmith.ops.engine.platform import Cuda
from gemmsmith.runtime.pack import LoadedPack
from tests.gpu.support.building import build
from tests.gpu.test_operations import check
from tuner.backends import kernels, refusal
from tuner.devices.cuda import CudaDevice

FAMILIES = (
    ("bf16.group_rows", "tn"),
    ("bf16.group_rows", "tt"),
    ("fp16.group_rows", "tn"),
    ("fp8_e4m3.scale_row.group_rows", "tn"),
    ("bf16.group_depth", "nt"),
    ("bf16.out_f32.group_depth", "nt"),
    ("bf16.group_rows.then_silu_gate", "tn"),
    ("bf16.group_rows.then_silu_gate_aux", "tn"),
    ("bf16.group_rows.then_gelu_gate_aux", "tn"),
    ("fp16.group_rows.then_gelu_tanh_gate", "tn"),
)
EVERY_TILE = "bf16.group_rows.then_silu_gate_aux"
"""Of which all kernels are verified that are offered."""


def problem(dtype: str, layout: str, tokens: int, groups: int) -> Problem:
    """No extent is a multiple of a tile, but rows are of 16 bytes."""
    if Operation.of(dtype, layout).grouping is Grouping.ROWS:
        return Problem(m=tokens, n=784, k=1040, batch=groups, dtype=dtype, layout=layout)
    return Problem(m=528, n=784, k=tokens, batch=groups, dtype=dtype, layout=layout)


@cache
def chosen(dtype: str, layout: str) -> tuple[Kernel, ...]:
    """The first kernel of each backend, mainloop and orientation."""
    offered = kernels(problem(dtype, layout, 4096, 8))
    if dtype == EVERY_TILE:
        return tuple(offered)
    found: dict[tuple[object, ...], Kernel] = {}
    for kernel in map(cutlass, offered):
        found.setdefault((kernel.backend, kernel.mainloop, kernel.swapped), kernel)
    return tuple(found.values())


@pytest.fixture(scope="module")
def built() -> dict[str, Path]:
    """The packs of all kernels, by kernel."""
    wanted = [kernel for family in FAMILIES for kernel in chosen(*family)]
    return build(wanted)[1]


@pytest.mark.parametrize(
    ("tokens", "groups"), [(4099, 8), (77, 128), (1, 1), (1, 512), (3000, 1)], ids=str
)
@pytest.mark.parametrize(("dtype", "layout"), FAMILIES)
def test_every_kind_is_right(
    dtype: str,
    layout: str,
    tokens: int,
    groups: int,
    built: dict[str, Path],
    device: CudaDevice,
    model: DeviceModel,
) -> None:
    check(problem(dtype, layout, tokens, groups), chosen(dtype, layout), built, device, model)


def test_gradients_are_added_to(
    built: dict[str, Path], device: CudaDevice, model: DeviceModel
) -> None:
    adding = problem("bf16.out_f32.group_depth.accumulate", "nt", 4099, 8)
    check(adding, chosen("bf16.out_f32.group_depth", "nt"), built, device, model)


@pytest.mark.parametrize("factors", [False, True])
def test_a_gate_has_factors_or_none(built: dict[str, Path], factors: bool) -> None:
    """By a model's strides, with NaN between the rows of its weights, and other ends each time."""
    torch.manual_seed(20261125)
    tokens, inner, k, experts = 333, 392, 136, 5
    wide = torch.full((experts, 2 * inner, k + 8), torch.nan, device="cuda").bfloat16()
    wide[:, :, :k] = (torch.randn(experts, 2 * inner, k) * k**-0.5).bfloat16().cuda()
    gate, up = wide[:, :, :k].mT.chunk(2, dim=-1)
    x = torch.randn(tokens, k, device="cuda").bfloat16()
    rows = torch.rand(tokens, device="cuda") if factors else None
    epilogue = Operation.of(EVERY_TILE).epilogue
    (shape,) = shapes(Form.GROUPED, Spec.of(x), Spec.of(gate), groups=experts, epilogue=epilogue)
    for number, kernel in enumerate(chosen(EVERY_TILE, "tn")):
        if refusal(kernel, shape.problem) is not None:
            continue
        last = tokens - number % 3
        ends = torch.tensor([number % 7, 100, 100, 101, last], device="cuda", dtype=torch.int32)
        plan = plan_of(kernel, shape, built)
        aux = plan.outputs()["aux"].fill_(7.0)
        out = plan(x, gate, present(offsets=ends, aux=aux, up=up, row_scale=rows))
        assert out is not None
        begin = 0
        for group, end in enumerate(ends.tolist()):
            run, begin = slice(begin, end), end
            first, second = (x[run].double() @ one[group].double() for one in (gate, up))
            wanted = functional.silu(first) * second
            wanted = wanted if rows is None else wanted * rows[run, None]
            assert _near(out[run], wanted), kernel.name
            assert _near(aux[run], torch.cat([first, second], -1)), kernel.name
        assert bool((aux[last:] == 7.0).all()), kernel.name


def plan_of(kernel: Kernel, shape: Shape, built: dict[str, Path]) -> Plan:
    """One launch of a kernel as the library makes it."""
    config = Config(kernel=kernel, launch=Launch(), pack="a" * 64)
    loaded = LoadedPack.open(built[kernel.name]).kernel(kernel.name)
    return Plan(config, shape, loaded, Cuda(), torch.device("cuda", 0), 0)


def _near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    difference = torch.linalg.vector_norm(found.double() - wanted)
    return bool(difference <= 1e-2 * torch.linalg.vector_norm(wanted))
