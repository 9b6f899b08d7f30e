"""Replaces the GPU by the host for the operators: kernels in C that run on CPU tensors.

The pack has the C ABI of real packs, and is loaded and launched like them. It cannot simulate CUDA:
streams, graphs and times. It needs neither tuner nor service.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from gemmsmith.core.config import Config
from gemmsmith.core.kernel import Cutlass3xKernel, EpilogueSchedule, MainloopSchedule, TileScheduler
from gemmsmith.core.launch import Launch
from gemmsmith.core.operation import Epilogue, Operation, Scaling, layouts_of
from gemmsmith.core.problem import DType, Layout, Problem
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.in_use import install

SOURCE = Path(__file__).parents[1] / "unit" / "ops" / "kernels.c"


class Host:
    """The host as a device of ordinal 3."""

    kind: str | None = None

    def __init__(self) -> None:
        self.is_capturing = False
        self.guarded = 0

    def index(self, device: torch.device) -> int | None:
        return 3 if device.type == "cpu" else None

    def arch(self, index: int) -> str:
        return "sm90"

    def sm_count(self, index: int) -> int:
        return 4

    def stream(self, index: int) -> int:
        return 77

    def current(self) -> int:
        return 3

    def guard(self, index: int) -> contextlib.AbstractContextManager[None]:
        self.guarded += 1
        return contextlib.nullcontext()

    def capturing(self) -> bool:
        return self.is_capturing


@contextlib.contextmanager
def installed(engine: Engine | None) -> Iterator[None]:
    """Has the engine in use during the block; None: no engine."""
    before = install(engine)
    try:
        yield
    finally:
        install(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Torch asks for deterministic algorithms during the block."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def kernel(name: str, dtype: str, layout: Layout) -> Cutlass3xKernel:
    """A kernel of the pack, by the name from `name_of` or by the name of its misbehaviour."""
    return Cutlass3xKernel(
        name=name,
        arch="sm90",
        dtype=dtype,
        layout=layout,
        alignment_a=8,
        alignment_b=8,
        alignment_d=1,
        tile=(128, 128, 64),
        cluster=(1, 1),
        stages=0,
        mainloop=MainloopSchedule.PINGPONG,
        epilogue=EpilogueSchedule.NO_SMEM,
        scheduler=TileScheduler.PERSISTENT,
        swapped=Operation.of(dtype, layout).scaling is Scaling.ROW,  # else it has no known order
        fast_accumulation=Operation.of(dtype, layout).is_narrow_float,
    )


_NAMES = {
    "bf16": "{}",
    "fp8_e4m3": "fp8",
    "fp8_e4m3.scale_row": "row_fp8",
    "int8": "int8",
    "int8.out_bf16": "int8_bf16",
    "int8.out_bf16.scale_row": "int8_row",
    "bf16.out_f32": "f32_{}",
    "tf32": "tf32_{}",
    "bf16.symmetric": "symmetric_{}",
    "bf16.group_rows": "rows_{}",
    "bf16.group_depth": "depth_{}",
    "bf16.group_rows.then_silu_gate": "rows_then_silu_gate_{}",
    "bf16.group_rows.then_silu_gate_aux": "rows_then_silu_gate_aux_{}",
    "bf16.group_rows.then_dsilu_gate": "rows_then_dsilu_gate_{}",
    "bf16.group_rows.then_dsilu_gate_act": "rows_then_dsilu_gate_act_{}",
    "fp8_e4m3.scale_row.group_rows": "rows_fp8",
    "fp8_e4m3.scale_row.group_depth": "depth_fp8",
    **{
        f"bf16.then_{epilogue}": f"then_{epilogue}_{{}}"
        for epilogue in Epilogue
        if epilogue is not Epilogue.NONE
    },
    "fp8_e4m3.then_bias": "fp8_then_bias",
    **{
        f"fp8_e4m3.out_e4m3.then_{epilogue}": f"out_fp8_then_{epilogue}"
        for epilogue in ("bias", "bias_gelu_tanh", "bias_silu", "silu_gate")
    },
}


def name_of(operation: Operation) -> str | None:
    """The name of an operation's kernel; None if the pack has no such kernel."""
    name = _NAMES.get(operation.of_kernels.dtype)
    return None if name is None else name.format(operation.layout)


KERNELS = (
    *(kernel(layout.value, DType.BF16, layout) for layout in Layout),
    kernel("fp8", DType.FP8_E4M3, Layout.TN),
    kernel("row_fp8", "fp8_e4m3.scale_row", Layout.TN),
    *(
        kernel(name.format(layout), dtype, Layout(layout))
        for dtype, name in _NAMES.items()
        if any(word in dtype for word in ("group", "then", "symmetric"))
        for layout in layouts_of(dtype)
    ),
)
"""The kernels that compute: bf16 in every layout, E4M3 (also row-scaled), grouped and fused."""


def config(name: str, dtype: str, layout: Layout, *, pack: str | None = "a" * 64) -> Config:
    return Config(kernel=kernel(name, dtype, layout), launch=Launch(), pack=pack)


@dataclass
class Choice:
    config: Config
    deterministic: bool = True
    saving_us: float | None = 1000.0
    time_us: float | None = None


@dataclass
class Chooser:
    """Answers problems for which the pack has a kernel, and remembers all problems."""

    asked: list[Problem] = field(default_factory=list)
    name: str | None = None
    pack: str = "a" * 64
    deterministic: bool = True
    saving_us: float | None = 1000.0
    time_us: Callable[[Problem], float | None] = lambda problem: None
    answers: Callable[[Problem], bool] = lambda problem: True

    def lookup(
        self, dtype: str, layout: Layout, m: int, n: int, k: int, batch: int = 1
    ) -> Choice | None:
        problem = Problem(m=m, n=n, k=k, batch=batch, dtype=dtype, layout=layout)
        self.asked.append(problem)
        operation = problem.operation.of_kernels
        name = name_of(operation)
        if name is None or not self.answers(problem):
            return None
        chosen = config(self.name or name, operation.dtype, layout, pack=self.pack)
        return Choice(chosen, self.deterministic, self.saving_us, self.time_us(problem))


@dataclass
class Packs:
    """Returns the same pack for every hash."""

    file: Path

    def path(self, pack_hash: str) -> Path:
        return self.file


def build(folder: Path) -> Path:
    """Compile the stand-ins into a pack in `folder`."""
    from tests.support.host import INCLUDE  # needs the tuner, which programs do not have

    path = folder / "ops.so"
    command = [
        "gcc",
        "-O2",
        "-shared",
        "-fPIC",
        f"-I{INCLUDE}",
        str(SOURCE),
        "-o",
        str(path),
        "-lm",
    ]
    subprocess.run(command, check=True)
    return path


ENGINE = partial(Engine, platform=Host())
"""Replaces `gemmsmith.ops.engine.source.Engine`, so that `gemmsmith.use` runs on the host."""
