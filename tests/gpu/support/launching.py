"""Operands of the checks, launches through the C ABI, and how far off an output is."""

from __future__ import annotations

import torch

from gemmsmith.core.kernel import Kernel
from gemmsmith.core.problem import Element, Problem
from gemmsmith.runtime.abi import Arguments
from gemmsmith.runtime.launch import torch_dtype
from gemmsmith.runtime.pack import LoadedPack
from tests.gpu.support.jobs import Job
from tests.support.arguments import packed_arguments
from tuner.workloads.reference import tolerance


class Launcher:
    """A kernel launched through the C ABI, its launches taken in turn, workspace given."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.kernel = LoadedPack.open(job.pack).kernel(job.kernel.name)
        self.sm_count = torch.cuda.get_device_properties(0).multi_processor_count

    def arguments(self, i: int, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> Arguments:
        made = packed_arguments(self.job.problem, a=a.data_ptr(), b=b.data_ptr(), d=d.data_ptr())
        made.set_launch(self.job.launches[i % len(self.job.launches)], sm_count=self.sm_count)
        return made

    def workspace(self, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        """One workspace, large enough for every launch; not zeroed: kernels may not rely on it."""
        sizes = []
        for i in range(len(self.job.launches)):
            arguments = self.arguments(i, a, b, d)
            status = self.kernel.can_implement(arguments)
            assert status == 0, f"{self.job.launches[i].key} is refused with status {status}"
            sizes.append(self.kernel.workspace_bytes(arguments))
        return torch.full((max(sizes),), 0xA5, dtype=torch.uint8, device="cuda")

    def launch(
        self,
        i: int,
        a: torch.Tensor,
        b: torch.Tensor,
        d: torch.Tensor,
        workspace: torch.Tensor,
        stream: torch.cuda.Stream,
    ) -> None:
        self.kernel.run(self.arguments(i, a, b, d), workspace.data_ptr(), stream.cuda_stream)


def operand_a(problem: Problem) -> torch.Tensor:
    return _matrix(problem.operation.a, problem.m, problem.k, 1.0)


def operand_b(problem: Problem) -> torch.Tensor:
    """[K, N], contiguous along K, scaled so that a product is as large as its A."""
    return _matrix(problem.operation.b, problem.n, problem.k, problem.k**-0.5).t()


def _matrix(element: Element, rows: int, columns: int, sigma: float) -> torch.Tensor:
    values = torch.randn(rows, columns, device="cuda")
    if element.bits == 8:
        return (values * 16).clamp(-400, 400).to(torch_dtype(element))
    return (values * sigma).to(torch_dtype(element))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


def share_of_bound(
    kernel: Kernel, problem: Problem, output: torch.Tensor, wanted: torch.Tensor
) -> float:
    """The error (Frobenius or largest, whichever is worse) over its bound; NaN counts as worse."""
    bound = tolerance(problem, fast_accumulation=kernel.keeps_short_sums)
    difference = output.double() - wanted
    norm = torch.linalg.vector_norm(wanted).clamp_min(1e-30)
    peak = wanted.abs().max().clamp_min(1e-30)
    error = float(torch.linalg.vector_norm(difference) / norm)
    largest = float(difference.abs().max() / peak)
    shares = (error / bound.error, largest / bound.max_error)
    return max(shares) if all(share == share for share in shares) else float("nan")
