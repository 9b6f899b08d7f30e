"""The kernel that rotates Q and K, against FP64 and the functions of models."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.cohere import modeling_cohere
from transformers.models.glm import modeling_glm
from transformers.models.llama import modeling_llama
from transformers.models.phi3 import modeling_phi3

import gemmsmith
from gemmsmith.ops.products import rotary as products
from gemmsmith.ops.products.rotary import CONTIGUOUS, Rotation, dense_strides

BF16 = torch.bfloat16
BOUNDS = {BF16: 2**-8, torch.float16: 2**-11, torch.float32: 2e-6}
"""Relative error of an element: rounding of a result."""

ROTATIONS = [
    Rotation(half, *pairs, shares, pairs[0] and not shares, sign)
    for half, pairs, shares, sign in product(
        (3, 32, 64), ((False, False), (True, True), (True, False)), (False, True), (1, -1)
    )
]
WHOLE = {"whole": 0, "partial": 16, "odd": 5}


def some(*size: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(size, device="cuda").to(dtype)


def operands(rotation: Rotation, rest: int, dtype: torch.dtype, layout: str) -> list[torch.Tensor]:
    """Q and K of two batches, 37 tokens, and 4 and 2 heads, with their factors."""
    torch.manual_seed(1)
    width = 2 * rotation.half + rest
    whole = some(2, 37, 6, width, dtype=dtype).transpose(1, 2)
    q, k = whole[:, :4], whole[:, 4:]
    if layout == "contiguous":
        q, k = q.contiguous(), k.contiguous()
    factors = (1 + (rest != 5), 1, 37, rotation.half * (2 - rotation.shares))
    return [q, k, some(*factors, dtype=torch.float32), some(*factors, dtype=torch.float32)]


def step(
    given: list[torch.Tensor], rotation: Rotation, pushes: list[torch.Tensor]
) -> list[torch.Tensor]:
    q, k, cos, sin = given
    leaves = [x.detach().requires_grad_() for x in (q, k)]
    order = dense_strides(q.shape, q.stride()), dense_strides(k.shape, k.stride())
    results: Any = products.rotary(*leaves, cos, sin, rotation, q.dtype, order)
    return [*(x.detach() for x in results), *torch.autograd.grad(results, leaves, pushes)]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("layout", ["one product", "contiguous"])
@pytest.mark.parametrize("rest", WHOLE)
def test_both_passes(dtype: torch.dtype, layout: str, rest: str) -> None:
    for rotation in ROTATIONS:
        given = operands(rotation, WHOLE[rest], dtype, layout)
        pushes = [some(*given[0].shape, dtype=dtype), some(1, dtype=dtype).expand(given[1].shape)]
        results = step(given, rotation, pushes)
        exact = step(
            [x.cpu().double() for x in given], rotation, [x.cpu().double() for x in pushes]
        )
        for mine, exactly in zip(results, exact, strict=True):
            error = (mine.cpu().double() - exactly).abs()
            assert bool((error <= BOUNDS[dtype] * exactly.abs() + 1e-5).all()), rotation
        for mine, again in zip(results, step(given, rotation, pushes), strict=True):
            assert torch.equal(mine, again)


@pytest.mark.usefixtures("in_use")
@pytest.mark.parametrize("module", [modeling_llama, modeling_cohere, modeling_glm, modeling_phi3])
def test_functions_of_models(module: Any) -> None:
    """One launch a pass; as near to FP64 as the function's own, in the order of the operands."""
    triton = pytest.importorskip("triton")
    model = type("Attention", (nn.Module,), {"__module__": module.__name__})()
    width = 128 if module in (modeling_llama, modeling_cohere) else 64
    q, k = (some(2, 512, heads, 128).transpose(1, 2) for heads in (32, 8))
    cos, sin = (torch.rand(2, 512, width, device="cuda").to(BF16) for _ in range(2))
    pushes = [some(*x.shape) for x in (q, k)]

    def both(dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(dtype).detach().requires_grad_() for x in (q, k)]
        results = module.apply_rotary_pos_emb(*leaves, cos.to(dtype), sin.to(dtype))
        gradients = torch.autograd.grad(results, leaves, [x.to(dtype) for x in pushes])
        return [*(x.detach() for x in results), *gradients]

    own, exact = both(BF16), both(torch.float64)
    seen: list[object] = []
    hook = triton.knobs.runtime.launch_enter_hook
    with gemmsmith.patch(model):
        both(BF16)  # compiles
        hook.add(seen.append)
        try:
            results = both(BF16)
        finally:
            hook.remove(seen.append)
    assert len(seen) == 2
    assert [x.stride() for x in results[:2]] == [x.stride() for x in own[:2]]
    # Theirs take the order of the incoming gradient, from which a projection's is a copy.
    assert [x.stride() for x in results[2:]] == [x.stride() for x in (q, k)]
    for mine, theirs, exactly in zip(results, own, exact, strict=True):
        assert mine.dtype is theirs.dtype
        assert (mine - exactly).norm() <= 1.001 * (theirs - exactly).norm()


@pytest.mark.usefixtures("in_use")
def test_a_captured_graph() -> None:
    model = type("Attention", (nn.Module,), {"__module__": modeling_llama.__name__})()
    q, k, cos, sin = operands(ROTATIONS[0]._replace(half=32), 0, BF16, "one product")
    cos, sin = cos[:, 0].to(BF16), sin[:, 0].to(BF16)
    with gemmsmith.patch(model), torch.no_grad():
        modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
        q.copy_(torch.randn_like(q))
        graph.replay()
        for mine, expected in zip(
            captured, modeling_llama.apply_rotary_pos_emb(q, k, cos, sin), strict=True
        ):
            assert torch.equal(mine, expected)


def test_more_elements_than_31_bits_count() -> None:
    rotation = Rotation(64, False, False, False, False, 1)
    q = some(1, 1, 1, 128).expand(1, 2**19 + 3, 33, -1).contiguous().transpose(1, 2)
    cos, sin = (torch.rand(1, 1, 2**19 + 3, 128, device="cuda") for _ in range(2))
    order = dense_strides(q.shape, q.stride()), None
    out, _ = products.rotary(q, None, cos, sin, rotation, BF16, order)
    assert out is not None
    tail = slice(-5, None)
    part, *factors = (x[:, :, tail].cpu().double() for x in (q, cos, sin))
    exact, _ = products.rotary(
        part, None, *factors, rotation, torch.float64, (dense_strides(part.shape, CONTIGUOUS), None)
    )
    assert exact is not None
    error = (out[:, :, tail].cpu().double() - exact).abs()
    assert bool((error <= 2**-8 * exact.abs() + 1e-5).all())
