"""Newton–Schulz iterations of many matrices, against FP64 and torch's own loop."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import _muon
from torch.utils._python_dispatch import TorchDispatchMode

import gemmsmith
from gemmsmith.core.problem import Problem
from gemmsmith.ops.products import newton_schulz as module
from gemmsmith.ops.products.newton_schulz import COEFFICIENTS, batches, newton_schulz
from tests.support.stand_in import Chooser

BF16 = torch.bfloat16
TYPES = (BF16, torch.float16, torch.float32, torch.float64)
Tensors = Sequence[torch.Tensor]


def exact(matrix: torch.Tensor, steps: int = 5, coefficients: Any = COEFFICIENTS) -> torch.Tensor:
    """In FP64."""
    a, b, c = coefficients
    x = matrix.double()
    x = x.mT if matrix.shape[0] > matrix.shape[1] else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


def by_torch(
    matrix: torch.Tensor, steps: int = 5, coefficients: Any = COEFFICIENTS
) -> torch.Tensor:
    own: Callable[..., torch.Tensor] = _muon._zeropower_via_newtonschulz
    return own(matrix.clone(), coefficients, steps, 1e-7)


def no_farther(matrices: Tensors, *options: Any) -> None:
    """From FP64 than torch's loop, but for a little, and of its sizes and strides."""
    kept = [matrix.clone() for matrix in matrices]
    results = newton_schulz(matrices, *options)
    assert len(results) == len(matrices)
    for matrix, before, result in zip(matrices, kept, results, strict=True):
        assert torch.equal(matrix, before)
        theirs, reference = by_torch(matrix, *options), exact(matrix, *options)
        assert result.dtype is BF16
        assert result.shape == theirs.shape
        assert result.stride() == theirs.stride() or options[:1] == (0,)
        error, bound = (
            (x.double() - reference).norm() / reference.norm().clamp(min=1e-9)
            for x in (result, theirs)
        )
        assert error <= 1.2 * bound + 4e-3


class Counting(TorchDispatchMode):
    """Counts operators of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


MATRICES: dict[str, Callable[[], Tensors]] = {
    "none": list,
    "single": lambda: [torch.randn(32, 48)],
    "equal": lambda: [torch.randn(32, 48) for _ in range(5)],
    "transposed": lambda: [torch.randn(32, 48), torch.randn(48, 32), torch.randn(48, 32).mT],
    "many": lambda: [torch.randn(16 + 8 * (i % 3), 40 - 8 * (i % 4)) for i in range(17)],
    "odd": lambda: [torch.randn(size) for size in ((1, 1), (7, 9), (9, 7), (1, 50), (50, 1))],
    "with gaps": lambda: [torch.randn(64, 96)[::2, ::2], torch.randn(32, 48)],
    "tiny values": lambda: [1e-12 * torch.randn(32, 48) for _ in range(2)],
    "large values": lambda: [1e6 * torch.randn(32, 48) for _ in range(2)],
    "zeros": lambda: [torch.zeros(32, 48), torch.randn(32, 48)],
    "of rank 1": lambda: [torch.randn(32, 1) @ torch.randn(1, 48) for _ in range(3)],
    "the same": lambda: [torch.ones(32, 48)] * 3,
    "parameters": lambda: [torch.nn.Parameter(torch.randn(8, 8), False) for _ in range(2)],
    **{
        str(dtype): lambda dtype=dtype: [torch.randn(24, 32).to(dtype) for _ in range(3)]
        for dtype in TYPES
    },
    "mixed types": lambda: [torch.randn(24, 32).to(dtype) for dtype in TYPES * 2],
}


@pytest.mark.parametrize("name", MATRICES)
def test_against_fp64(computing: str, name: str) -> None:
    no_farther(MATRICES[name]())


@pytest.mark.parametrize("steps", [0, 1, 3, 10])
@pytest.mark.parametrize("coefficients", [COEFFICIENTS, (2.0, -1.5, 0.5), (1.5, -0.5, 0.0)])
def test_options(computing: str, steps: int, coefficients: tuple[float, float, float]) -> None:
    no_farther(MATRICES["transposed"](), steps, coefficients)


def test_empty_matrices_stay_empty() -> None:
    sizes = [(0, 0), (0, 5), (5, 0), (0, 5)]
    results = newton_schulz([torch.empty(size) for size in sizes])
    assert [tuple(result.shape) for result in results] == sizes


def test_a_small_norm_is_not_divided_by() -> None:
    matrix = torch.full((4, 4), 1e-3)
    (result,) = newton_schulz([matrix], steps=0, eps=1.0)
    assert torch.equal(result, matrix.bfloat16())


def test_60_random_lists(computing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(5)
    for _ in range(60):
        monkeypatch.setattr(module, "MOST_BYTES", draw.choice([1, 4000, 20_000, 2**26]))
        sizes = [(draw.randint(1, 40), draw.randint(1, 40)) for _ in range(draw.randint(1, 4))]
        types = draw.sample(TYPES, 2)
        no_farther(
            [
                torch.randn(draw.choice(sizes)).to(draw.choice(types))
                for _ in range(draw.randint(1, 12))
            ]
        )


def test_a_matrix_without_an_equal_has_torchs_bits() -> None:
    for size in ((32, 48), (48, 32), (64, 64), (7, 9)):
        matrix = torch.randn(size)
        assert torch.equal(newton_schulz([matrix])[0], by_torch(matrix))


def test_equal_shapes_take_three_products_a_step(runs: Callable[[], int]) -> None:
    matrices = [torch.randn(32, 48) for _ in range(4)] + [torch.randn(48, 32) for _ in range(3)]
    with Counting() as counting:
        newton_schulz(matrices)
    assert (counting.calls["bmm"], counting.calls["baddbmm"]) == (5, 10)
    assert counting.calls["mm"] == counting.calls["addmm"] == 0
    assert runs() == 0


def test_winners_compute_half_of_both_symmetric_products(
    engine: Any, runs: Callable[[], int]
) -> None:
    matrices = [torch.randn(32, 48) for _ in range(4)]
    no_farther(matrices)
    assert runs() == 10
    no_farther([*matrices, torch.randn(64, 24)])  # as it lies, contiguous along its rows
    assert runs() == 20
    no_farther(matrices, 5, (1.5, -0.5, 0.0))  # without a square
    assert runs() == 5


def test_without_a_winner_of_symmetric_products_others_compute_the_gram_matrices(
    engine: Any, chooser: Chooser, runs: Callable[[], int]
) -> None:
    chooser.answers = lambda problem: not problem.operation.symmetric
    no_farther([torch.randn(32, 48) for _ in range(4)])
    assert runs() == 5


def test_memory_of_a_batch_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 4 * 2 * 32 * 48)
    matrices = [torch.randn(32, 48) for _ in range(10)] + [torch.randn(256, 256)] * 2
    parts = batches(matrices)
    assert sorted(at for part in parts for at in part) == list(range(12))
    assert [len(part) for part in parts] == [4, 4, 2, 1, 1]
    no_farther(matrices)


WRONG: dict[str, tuple[tuple[Any, ...], str]] = {
    "a vector": (([torch.ones(3)],), r"matrices\[0\] must be \[N, K\] .*\(3,\)"),
    "a batch": (([torch.ones(2, 2), torch.ones(2, 2, 2)],), r"matrices\[1\] must be \[N, K\]"),
    "integers": (([torch.ones(2, 2, dtype=torch.int32)],), "of real numbers, got torch.int32"),
    "complex": (([torch.ones(2, 2, dtype=torch.complex64)],), "of real numbers"),
    "sparse": (([torch.eye(2).to_sparse()],), "must be dense, got torch.sparse_coo"),
    "too many steps": (([], 100), "steps must be from 0 to 99, got 100"),
    "negative steps": (([], -1), "steps must be from 0 to 99"),
    "two coefficients": (([], 5, (1.0, 2.0)), "must be three numbers, got 2"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name: str) -> None:
    arguments, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        newton_schulz(*arguments)


def test_sharded_matrices_are_torchs(mesh: dist.DeviceMesh, engine: Any) -> None:
    matrices = [torch.randn(32, 48) for _ in range(3)]
    sharded = [distribute_tensor(matrix, mesh, [Shard(0)]) for matrix in matrices[:2]]
    *results, plain = newton_schulz([*sharded, matrices[2]])
    for matrix, result in zip(matrices, results, strict=False):
        assert isinstance(result, DTensor)
        assert torch.equal(result.full_tensor(), by_torch(matrix))
    assert type(plain) is torch.Tensor


def test_nothing_waits_for_the_device(computing: str) -> None:
    """A tensor without data has no value that the host could read."""
    with FakeTensorMode():
        results = newton_schulz([torch.randn(32, 48), torch.randn(48, 32), torch.randn(8, 8)])
    assert [tuple(result.shape) for result in results] == [(32, 48), (48, 32), (8, 8)]


def test_compiled(computing: str) -> None:
    matrices = [torch.randn(32, 48), torch.randn(48, 32), torch.randn(8, 8)]
    compiled = torch.compile(newton_schulz, fullgraph=True, backend="aot_eager")
    for matrix, result in zip(matrices, compiled(matrices), strict=True):
        reference = exact(matrix)
        assert (result.double() - reference).norm() <= 0.05 * reference.norm()


def test_autocast_changes_nothing(computing: str) -> None:
    matrices = MATRICES["transposed"]()
    with torch.autocast("cpu", dtype=BF16):
        under = newton_schulz(matrices)
    for matrix, result in zip(newton_schulz(matrices), under, strict=True):
        assert torch.equal(matrix, result)


def test_gradients(computing: str) -> None:
    matrices = [torch.randn(16, 24, requires_grad=True) for _ in range(2)]
    outward = torch.randn(16, 24)
    for results in (newton_schulz(matrices, 2), newton_schulz(matrices[:1], 2)):
        ours = torch.autograd.grad(results[0], matrices[0], outward.bfloat16())[0]
        theirs = torch.autograd.grad(exact(matrices[0], 2), matrices[0], outward.double())[0]
        assert (ours - theirs).norm() <= 0.05 * theirs.norm()


def test_capture_sees_products_of_batches() -> None:
    with gemmsmith.capture() as shapes:
        newton_schulz([torch.randn(32, 48) for _ in range(4)])
    sizes = Counter[tuple[int, ...]]()
    for problem, count in shapes.problems.items():
        assert isinstance(problem, Problem)
        sizes[problem.m, problem.n, problem.k, problem.batch] += count
    assert sizes == {(32, 32, 48, 4): 5, (32, 32, 32, 4): 5, (32, 48, 32, 4): 5}
