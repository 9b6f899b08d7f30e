"""Families of kernels that are verified on a GPU: operations, a few kernels of each, and sizes that
no tile divides.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import CutlassKernel, Kernel, MainloopSchedule, TileScheduler, cutlass
from gemmsmith.core.operation import Epilogue, Grouping, Operation
from gemmsmith.core.problem import Problem
from tests.gpu import selection
from tests.gpu.support.building import build
from tests.support import epilogues
from tuner.backends import Level, kernels, refusal
from tuner.devices.base import Contender
from tuner.devices.cuda import CudaDevice
from tuner.measure.policy import Policy

CHECKED = Policy(screen_samples=1, candidate_timeout_s=20.0)
WITHOUT_BATCH = (TileScheduler.SPLIT_K, TileScheduler.CLUSTER_SPLIT_K)
Size = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Family:
    """Operations that are tested alike.

    Attributes:
        sizes: m, n and k; of grouped products tokens and groups. Kernels are chosen for the first.
        choose: some kernels of a problem's space.
        takes: whether a chosen kernel is launched for a problem of another size.
    """

    operations: tuple[Operation, ...]
    sizes: tuple[Size, ...]
    choose: Callable[[Problem], Iterable[Kernel]]
    takes: Callable[[Kernel, Problem], bool] = lambda *_: True

    @cache  # noqa: B019 - families are constants
    def chosen(self, operation: Operation) -> tuple[Kernel, ...]:
        return tuple(self.choose(problem_of(operation, self.sizes[0])))

    @cache  # noqa: B019 - families are constants
    def built(self) -> dict[str, Path]:
        """The packs of all chosen kernels, by kernel."""
        return build(
            [kernel for operation in self.operations for kernel in self.chosen(operation)]
        )[1]


def problem_of(operation: Operation, size: Size) -> Problem:
    """Rows are of 16 bytes, whatever the size."""
    if operation.grouping is Grouping.ROWS:
        return Problem.of(operation, size[0], 784, 1040, size[1])
    if operation.grouping is Grouping.DEPTH:
        return Problem.of(operation, 528, 784, size[0], size[1])
    m, n, k = size
    if not operation.layout.a_row_major:  # rows of A run along M
        m = -(-m // 8) * 8
    return Problem.of(operation, m, n, k)


def check(
    problem: Problem,
    chosen: Iterable[Kernel],
    built: dict[str, Path],
    device: CudaDevice,
    model: DeviceModel,
) -> None:
    """Every launch of these kernels is within the workload's tolerance."""
    contenders = [
        Contender(candidate=Candidate(kernel=kernel, launch=launch), pack=built[kernel.name])
        for kernel in chosen
        for launch in selection.launches_of(kernel, problem, model)
    ]
    assert contenders
    trials = list(device.screen(problem, contenders, CHECKED))
    assert len(trials) == len(contenders)
    wrong = [f"{t.candidate.key}: {t.failure.message}" for t in trials if t.failure is not None]
    assert not wrong, "\n".join(wrong)


def first_of_each(
    offered: Iterable[Kernel], kinds: Callable[[CutlassKernel], Iterable[Hashable]]
) -> list[Kernel]:
    """The first kernel of each kind; a kernel may be of several."""
    first: dict[Hashable, Kernel] = {}
    for kernel in map(cutlass, offered):
        for kind in kinds(kernel):
            first.setdefault(kind, kernel)
    return list(dict.fromkeys(first.values()))


def _operations(*names: str) -> tuple[Operation, ...]:
    """Operations by their dtypes, with a layout other than tn after a space."""
    return tuple(Operation.of(*name.split()) for name in names)


def _not_refused(kernel: Kernel, problem: Problem) -> bool:
    return refusal(kernel, problem) is None


# Products without an epilogue: outputs in FP32, integers, factors per row, TF32.

PLAIN_KINDS = (
    (MainloopSchedule.PINGPONG, TileScheduler.PERSISTENT, False),
    (MainloopSchedule.PINGPONG, TileScheduler.PERSISTENT, True),
    (MainloopSchedule.COOPERATIVE, TileScheduler.PERSISTENT, False),
    (MainloopSchedule.WARP_SPECIALIZED, TileScheduler.GRID, True),
    (MainloopSchedule.PINGPONG, TileScheduler.SPLIT_K, False),
    (MainloopSchedule.WARP_SPECIALIZED, TileScheduler.CLUSTER_SPLIT_K, False),
    (MainloopSchedule.WARP_SPECIALIZED, TileScheduler.CLUSTER_SPLIT_K, True),
)
"""Mainloop, scheduler, and whether operands are swapped."""


def _plain(problem: Problem) -> list[Kernel]:
    """One kernel of each kind, and one that copies operands and stores any D, if there is one."""

    def kind(kernel: CutlassKernel) -> tuple[object, ...]:
        return kernel.mainloop, kernel.scheduler, kernel.swapped

    offered = map(cutlass, kernels(problem))
    chosen = first_of_each(
        (kernel for kernel in offered if kind(kernel) in PLAIN_KINDS), lambda kernel: [kind(kernel)]
    )
    if problem.operation.is_scaled:
        return chosen
    odd = kernels(Problem.of(problem.operation, 527, 783, 1031))
    return chosen + [kernel for kernel in odd if selection.padded(kernel)][:1]


SIZES = ((528, 784, 2080), (16, 784, 2080), (1, 8, 16))
PLAIN = Family(
    operations=_operations(
        "bf16.out_f32 nt",
        "fp16.out_f32",
        "int8",
        "int8.out_bf16",
        "int8.out_bf16.scale_row",
        "fp8_e4m3.scale_row",
        "fp8_e5m2.scale_row",
        "tf32",
    ),
    sizes=SIZES,
    choose=_plain,
    takes=lambda kernel, problem: (
        problem.k > 1024 or cutlass(kernel).scheduler not in WITHOUT_BATCH
    ),
)

# Epilogues: both outputs are poisoned first.

FUSED = Family(
    operations=_operations(
        *(f"bf16.then_{epilogue}" for epilogue in epilogues.FUSED),
        "bf16.then_bias_gelu_tanh_aux tt",
        "fp16.then_bias_gelu_tanh",
        "fp16.then_bias_gelu_aux",
        "fp16.then_bias_silu",
        "fp16.then_bias_residual tt",
        "fp8_e4m3.then_bias_silu_aux",
        "fp8_e4m3.then_bias_residual",
        "bf16.then_bias_scale_residual_aux tt",
        "bf16.then_row_scale_bias tt",
        "fp16.then_scale_residual",
        "fp16.then_bias_scale_residual_aux tt",
        "fp16.then_row_scale",
        "fp16.then_row_scale_bias tt",
        "fp8_e4m3.then_scale_residual",
        "fp8_e4m3.then_bias_scale_residual_aux",
        "fp8_e4m3.then_row_scale",
        "fp8_e4m3.then_row_scale_bias",
    ),
    sizes=SIZES,
    choose=lambda problem: first_of_each(
        kernels(problem), lambda kernel: [(kernel.mainloop, kernel.swapped)]
    ),
)

# Gates: half of N is no multiple of a tile either. D, gate and up are poisoned first.

TILES = ((128, 192), (128, 160), (128, 128), (128, 256), (256, 128), (64, 96))
"""Halves of 96, 80, 64, 128, 64 and 48 columns: boxes of all three widths."""
CLUSTERS = ((1, 1), (2, 1), (1, 2), (4, 2))


def _gated(problem: Problem) -> list[Kernel]:
    """The first kernel of each mainloop; of SwiGLU one of each tile, and of each cluster."""
    is_swiglu = problem.dtype in ("bf16.then_silu_gate", "bf16.then_silu_gate_aux")

    def kinds(kernel: CutlassKernel) -> Iterable[Hashable]:
        yield kernel.mainloop
        if is_swiglu and kernel.tile[:2] in TILES:
            yield kernel.mainloop, kernel.tile
        if is_swiglu and kernel.cluster in CLUSTERS:
            yield kernel.mainloop, kernel.cluster

    return first_of_each(kernels(problem), kinds)


GATED = Family(
    operations=_operations(
        *(f"bf16.then_{epilogue}" for epilogue in epilogues.GATED),
        "fp16.then_silu_gate",
        "fp16.then_silu_gate_aux",
        "fp16.then_gelu_tanh_gate_aux",
        "fp8_e4m3.then_silu_gate",
        "fp8_e4m3.then_silu_gate_aux",
    ),
    sizes=((528, 1552, 2080), (4096, 4112, 512), (16, 1552, 2080), (1, 32, 16)),
    choose=_gated,
    takes=_not_refused,
)

# FP8 outputs: D and its largest value.


def _to_fp8(problem: Problem) -> list[Kernel]:
    """The first kernel of each mainloop, orientation and accumulation; of two epilogues one of each
    width of D's parts as well.
    """
    by_width = problem.operation.epilogue in (Epilogue.BIAS_GELU, Epilogue.SILU_GATE)

    def kinds(kernel: CutlassKernel) -> Iterable[Hashable]:
        kind = (kernel.mainloop, kernel.swapped, kernel.fast_accumulation)
        yield kind
        if by_width and kernel.fast_accumulation:
            yield *kind, kernel.tile[1] & -kernel.tile[1]

    return first_of_each(kernels(problem), kinds)


FP8_OUTPUT = Family(
    operations=_operations(
        "fp8_e4m3.out_e4m3.then_bias",
        "fp8_e4m3.out_e4m3.then_bias_gelu_tanh",
        "fp8_e4m3.out_e4m3.then_bias_gelu",
        "fp8_e4m3.out_e4m3.then_bias_silu",
        "fp8_e4m3.out_e4m3.then_bias_relu2",
        "fp8_e4m3.out_e4m3.then_silu_gate",
        "fp8_e4m3.out_e4m3.then_gelu_tanh_gate",
        "fp8_e4m3.out_e4m3.then_gelu_gate",
    ),
    sizes=((528, 1568, 2080), (4096, 4128, 512), (16, 1568, 2080), (1, 32, 16)),
    choose=_to_fp8,
    takes=_not_refused,
)

# Backward epilogues.

NARROW = ("bf16.then_dgelu_tanh_bgrad.tt", "bf16.then_dsilu_gate_act.tt")
"""Operations whose narrowest kernels are built too."""


def _backward(problem: Problem) -> list[Kernel]:
    """The kernel with the largest tile of each mainloop."""

    def size(kernel: CutlassKernel) -> tuple[int, int]:
        m, n, _ = kernel.tile
        return m * n, n

    by_mainloop: dict[MainloopSchedule, list[CutlassKernel]] = {}
    for kernel in map(cutlass, kernels(problem, level=Level.CORE)):
        by_mainloop.setdefault(kernel.mainloop, []).append(kernel)
    ends = (max, min) if problem.operation.key in NARROW else (max,)
    return [end(some, key=size) for some in by_mainloop.values() for end in ends]


BACKWARD = Family(
    operations=_operations(
        *(f"bf16.then_{epilogue} tt" for epilogue in epilogues.BACKWARD),
        *(f"fp16.then_{epilogue} tt" for epilogue in epilogues.BACKWARD),
        "bf16.then_dgelu_tanh_bgrad",
        "fp16.then_dsilu_gate_act",
    ),
    sizes=SIZES,
    choose=_backward,
)

# Grouped products: every spread of the tokens, empty groups, one token, ends before the last token.

EVERY_TILE = Operation.of("bf16.group_rows.then_silu_gate_aux")
EVERY_BACKWARD_TILE = Operation.of("bf16.group_rows.then_dsilu_gate_act", "tt")
"""Of these two, all kernels are verified that are offered."""


def _grouped(problem: Problem) -> list[Kernel]:
    """The first kernel of each backend, mainloop and orientation."""
    offered = kernels(problem)
    if problem.operation in (EVERY_TILE, EVERY_BACKWARD_TILE):
        return list(offered)
    return first_of_each(
        offered, lambda kernel: [(kernel.backend, kernel.mainloop, kernel.swapped)]
    )


GROUPED = Family(
    operations=_operations(
        "bf16.group_rows",
        "bf16.group_rows tt",
        "fp16.group_rows",
        "fp8_e4m3.scale_row.group_rows",
        "bf16.group_depth nt",
        "bf16.out_f32.group_depth nt",
        "bf16.group_rows.then_silu_gate",
        "bf16.group_rows.then_silu_gate_aux",
        "bf16.group_rows.then_gelu_gate_aux",
        "fp16.group_rows.then_gelu_tanh_gate",
        "bf16.group_rows.then_dsilu_gate_act tt",
        "bf16.group_rows.then_dsilu_gate tt",
        "bf16.group_rows.then_dgelu_gate_act",
        "bf16.group_rows.then_drelu_gate_act tt",
        "bf16.group_rows.then_dsigmoid_gate tt",
        "fp16.group_rows.then_dgelu_tanh_gate_act tt",
    ),
    sizes=((4099, 8), (77, 128), (1, 1), (1, 512), (3000, 1)),
    choose=_grouped,
)
# Symmetric products: one tile, tiles that cross the diagonal or pad a cluster, many waves.


def _symmetric(problem: Problem) -> list[Kernel]:
    """One kernel of each mainloop; in bf16 tn one of each height of a tile with each width of D's
    parts, with the usual widths, and with each cluster as well.
    """

    def kinds(kernel: CutlassKernel) -> Iterable[Hashable]:
        yield kernel.mainloop
        if problem.operation.key == "bf16.symmetric.tn":
            m, n, k = kernel.tile
            yield kernel.mainloop, m, k
            yield kernel.mainloop, m, kernel.cluster, "cluster"
            yield kernel.mainloop, m, n if n in (128, 192, 256) else n & -n

    return first_of_each(kernels(problem), kinds)


SYMMETRIC = Family(
    operations=_operations("bf16.symmetric", "bf16.symmetric nt", "fp16.symmetric"),
    sizes=((1048, 1048, 2080), (8, 8, 8), (136, 136, 8), (520, 520, 64), (8192, 8192, 1024)),
    choose=_symmetric,
)
FAMILIES = (PLAIN, FUSED, GATED, FP8_OUTPUT, BACKWARD, GROUPED, SYMMETRIC)
