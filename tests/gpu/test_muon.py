"""Many Newton–Schulz steps at once on a GPU, and torch's Muon by them: errors, graphs, time."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import Muon

import gemmsmith
from benchmarks.muon import MODELS
from gemmsmith.ops.models import optimizers
from tests.unit.ops.test_newton_schulz import MATRICES, no_farther
from tests.unit.ops.test_optimizers import losses


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch, in_use: None) -> list[int]:
    """Winners are in use, though none of a product here. The sizes of batches so far."""
    seen: list[int] = []
    own = optimizers.newton_schulz
    monkeypatch.setattr(
        optimizers,
        "newton_schulz",
        lambda matrices, *options: [seen.append(len(matrices)), own(matrices, *options)][1],
    )
    return seen


@pytest.mark.parametrize("name", MATRICES)
def test_against_fp64(name: str) -> None:
    torch.manual_seed(1)
    no_farther([matrix.cuda() for matrix in MATRICES[name]()])


@pytest.mark.parametrize("size", [(1, 1), (63, 65), (1024, 1024), (4096, 1024), (1000, 3000)])
def test_sizes_of_models(size: tuple[int, int]) -> None:
    torch.manual_seed(1)
    no_farther([torch.randn(size, device="cuda") for _ in range(5)])


def test_a_graph_holds_the_steps() -> None:
    matrices = [torch.randn(256, 512, device="cuda") for _ in range(3)]
    matrices.append(torch.randn(512, 256, device="cuda"))
    gemmsmith.newton_schulz(matrices)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gemmsmith.newton_schulz(matrices)
    for matrix in matrices:
        matrix.normal_()
    graph.replay()
    assert all(map(torch.equal, captured, gemmsmith.newton_schulz(matrices)))


def test_100_steps_within_the_spread_of_rounding(batches: list[int]) -> None:
    with torch.device("cuda"):
        theirs = losses()
        spread = max((losses(change) - theirs).abs().max() for change in (2**-8, -(2**-8)))
        with gemmsmith.patch():
            ours = losses()
    assert (ours - theirs).abs().max() <= spread
    assert batches == [4, 1] * 100


def milliseconds(optimizer: Muon) -> tuple[float, int]:
    """The least time of ten steps, the host included, and the bytes that a step needs."""
    optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, times = torch.cuda.memory_allocated(), []
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        optimizer.step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return min(times), torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_the_time_of_a_step(batches: list[int], name: str, dtype: torch.dtype) -> None:
    """Printed. Memory: a batch in FP32 and bf16 beside what torch needs for one matrix."""
    params = [nn.Parameter(torch.randn(size, device="cuda", dtype=dtype)) for size in MODELS[name]]
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer = Muon(params)
    theirs, their_bytes = milliseconds(optimizer)
    assert not batches
    with gemmsmith.patch():
        ours, our_bytes = milliseconds(optimizer)
    assert batches
    print(
        f"{name}, {dtype}: torch {theirs:.2f} ms, {their_bytes / 1e6:.0f} MB; at once {ours:.2f} "
        f"ms, {our_bytes / 1e6:.0f} MB: {theirs / ours:.3f} ×"
    )
    assert our_bytes <= their_bytes + 2**29
