"""Norms whose backward pass is our Triton kernel, against FP64 and torch's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap

import gemmsmith
from gemmsmith.ops.products import norms

EPSILON = 1e-6
BOUNDS = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-6}
"""Relative error in the Frobenius norm: rounding of a result."""

SIZES = [(norms.LEAST // width + 3, width) for width in (64, 128, 768, 1000, 1024, 4096, 8192)]


def run(x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor) -> list[torch.Tensor]:
    out = norms.rms_norm(x, weight, EPSILON)
    assert type(out.grad_fn).__name__ == "RMSNormBackward"
    return [out.detach(), *torch.autograd.grad(out, [x, weight], gradient)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_both_gradients(size: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x = (3 * torch.randn(size, device="cuda")).to(dtype).requires_grad_()
    weight = torch.randn(size[1], device="cuda").to(dtype).requires_grad_()
    gradient = torch.randn(size, device="cuda").to(dtype)
    found = run(x, weight, gradient)
    exact = [one.detach().double().requires_grad_() for one in (x, weight)]
    out = nn.functional.rms_norm(exact[0], weight.shape, exact[1], EPSILON)
    wanted = [out, *torch.autograd.grad(out, exact, gradient.double())]
    for one, other in zip(found, wanted, strict=True):
        assert (one.double() - other).norm() <= BOUNDS[dtype] * other.norm()
    for one, again in zip(found, run(x, weight, gradient), strict=True):
        assert torch.equal(one, again)


def test_a_gradient_that_does_not_lie_together() -> None:
    x = torch.randn(8192, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(1, 2048, device="cuda", dtype=torch.bfloat16).expand(8192, -1)
    together = run(x, weight, gradient.contiguous())
    for one, other in zip(run(x, weight, gradient), together, strict=True):
        assert torch.equal(one, other)


SIZE = (8192, 2048)


def some(*size: int) -> torch.Tensor:
    return torch.randn(size, device="cuda", dtype=torch.bfloat16)


def close(found: torch.Tensor, wanted: torch.Tensor, bound: float = 4e-3) -> None:
    assert found.shape == wanted.shape
    assert (found.double() - wanted.double()).norm() <= bound * wanted.double().norm() + 1e-30


GRADIENTS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: some(*SIZE),
    "in columns": lambda: some(*SIZE[::-1]).t(),
    "expanded": lambda: some(1, 1).expand(SIZE),
    "negated": lambda: torch._neg_view(some(*SIZE)),
    "not on 16 bytes": lambda: some(SIZE[0] * SIZE[1] + 1)[1:].view(SIZE),
}
WEIGHTS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: some(SIZE[1]),
    "of stride 2": lambda: some(2 * SIZE[1])[::2],
    "expanded": lambda: some(1).expand(SIZE[1]),
    "not on 16 bytes": lambda: some(SIZE[1] + 1)[1:],
}


@pytest.mark.parametrize("of_gradient", GRADIENTS)
@pytest.mark.parametrize("of_weight", WEIGHTS)
@pytest.mark.parametrize("needs", [(True, False), (False, True), (True, True)], ids=str)
def test_operands_anywhere_in_memory(
    of_gradient: str, of_weight: str, needs: tuple[bool, bool]
) -> None:
    torch.manual_seed(1)
    gradient = GRADIENTS[of_gradient]()
    for x in (some(*SIZE), some(SIZE[0] * SIZE[1] + 1)[1:].view(SIZE)):
        leaves = [
            one.detach().requires_grad_(need)
            for one, need in zip((x, WEIGHTS[of_weight]()), needs, strict=True)
        ]
        exact = [one.detach().double().requires_grad_(one.requires_grad) for one in leaves]
        out = norms.rms_norm(*leaves, EPSILON)
        assert type(out.grad_fn).__name__ == "RMSNormBackward"
        wanted = nn.functional.rms_norm(exact[0], exact[1].shape, exact[1], EPSILON)
        close(out, wanted)
        found = torch.autograd.grad(out, [one for one in leaves if one.requires_grad], gradient)
        gradients = torch.autograd.grad(
            wanted, [one for one in exact if one.requires_grad], gradient.double()
        )
        for mine, exactly in zip(found, gradients, strict=True):
            close(mine, exactly)


def test_the_gradient_of_a_frozen_weight_takes_no_memory() -> None:
    x, weight, gradient = some(*SIZE).requires_grad_(), some(SIZE[1]), some(*SIZE)
    out = norms.rms_norm(x, weight, EPSILON)
    torch.autograd.grad(out, x, gradient, retain_graph=True)  # compiles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    of_x = torch.autograd.grad(out, x, gradient)
    assert torch.cuda.max_memory_allocated() - before <= 1.1 * of_x[0].nbytes


def written_out(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * weight


def test_gradients_of_gradients() -> None:
    torch.manual_seed(1)
    operands = [some(*SIZE), some(SIZE[1])]
    pushes = [some(*SIZE), some(*SIZE), some(SIZE[1])]

    def twice(
        norm: Callable[..., torch.Tensor], dtype: torch.dtype, needs: tuple[bool, bool]
    ) -> list[torch.Tensor]:
        leaves = [
            one.to(dtype).requires_grad_(need) for one, need in zip(operands, needs, strict=True)
        ]
        wanted = [one for one in leaves if one.requires_grad]
        gradient, *of = (one.to(dtype) for one in pushes)
        gradient.requires_grad_()
        first = torch.autograd.grad(norm(*leaves), wanted, gradient, create_graph=True)
        total = sum((one * of[one.dim() == 1]).double().sum() for one in first)
        second = torch.autograd.grad(total, [*wanted, gradient])
        return [*(one.detach() for one in first), *second]

    # Of a weight alone the gradient does not depend on it: it has no second one.
    for needs in ((True, True), (True, False)):
        ours = twice(lambda x, w: norms.rms_norm(x, w, EPSILON), torch.bfloat16, needs)
        exact = twice(written_out, torch.float64, needs)
        for mine, exactly in zip(ours, exact, strict=True):
            close(mine, exactly, 2e-2)


def test_a_graph_that_is_captured_before_a_kernel_was_compiled() -> None:
    """Its gradients are torch's; a graph that is captured later holds the kernel."""
    width = 1976  # of no other test
    x, weight = some(16384, width), some(width)
    gradient = some(16384, width)

    def step() -> tuple[torch.Tensor, ...]:
        # Leaves of each step's own: what autograd keeps of a leaf belongs to one stream.
        leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
        return torch.autograd.grad(norms.rms_norm(*leaves, EPSILON), leaves, gradient)

    leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
    out = nn.functional.rms_norm(leaves[0], weight.shape, leaves[1], EPSILON)
    torch.autograd.grad(out, leaves, gradient)  # torch's kernels are loaded
    torch.cuda.synchronize()
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        graph.replay()
        for mine, exactly in zip(captured, step(), strict=True):
            close(mine, exactly)


def kinds(width: int) -> list[nn.Module]:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    made = [kind(width).cuda().bfloat16() for kind in (LlamaRMSNorm, GemmaRMSNorm, nn.RMSNorm)]
    for one in made:
        nn.init.normal_(one.weight, 0.0 if isinstance(one, GemmaRMSNorm) else 1.0, 0.1)
    return [nn.Sequential(one, nn.Identity()) for one in made]


def outcome(act: Callable[[nn.Module], torch.Tensor], model: nn.Module) -> torch.Tensor | Exception:
    """What `act` gives, or why it cannot: not every torch has every transform of its norm."""
    try:
        return act(model).detach()
    except Exception as error:  # noqa: BLE001 - compared
        return error


@pytest.mark.usefixtures("in_use")
@pytest.mark.parametrize("size", [(64, 512), SIZE], ids=str)
def test_patched_norms_under_transforms(size: tuple[int, int]) -> None:
    x = some(*size)

    def dual(model: nn.Module) -> torch.Tensor:
        with forward_ad.dual_level():
            out = model(forward_ad.make_dual(x, torch.ones_like(x)))
            found: torch.Tensor = forward_ad.unpack_dual(out).tangent
            return found

    def of_weights(model: nn.Module) -> torch.Tensor:
        def loss(weights: dict[str, torch.Tensor]) -> torch.Tensor:
            out: torch.Tensor = functional_call(model, weights, (x,))
            return out.float().square().mean()

        given = {name: one.detach() for name, one in model.named_parameters()}
        (found,) = grad(loss)(given).values()
        return found

    def of_operand(model: nn.Module) -> torch.Tensor:
        leaf = torch._neg_view(x).requires_grad_()
        (found,) = torch.autograd.grad(model(leaf).float().square().mean(), leaf)
        return found

    acts: list[Callable[[nn.Module], torch.Tensor]] = [
        dual,
        lambda model: jvp(model, (x,), (torch.ones_like(x),))[1],
        lambda model: vmap(model)(x[:16]),
        of_weights,
        of_operand,
    ]
    for model in kinds(size[1]):
        for frozen in (False, True):
            model.requires_grad_(not frozen)
            for act in acts:
                wanted = outcome(act, model)
                with gemmsmith.patch(model):
                    found = outcome(act, model)
                if isinstance(wanted, Exception):
                    assert type(found) is type(wanted)
                else:
                    assert isinstance(found, torch.Tensor), found
                    close(found, wanted, 2e-2)


@pytest.mark.usefixtures("in_use")
def test_patched_norms_of_more_elements_than_32_bits_count() -> None:
    """By torch's kernel up to there, then as the module computes them: 8.6 GB an operand."""
    width = 4096
    model = kinds(width)[0].requires_grad_(False)
    for rows in (2**19 + 70, 2**20 + 70):
        x = some(rows, width)
        with torch.no_grad(), gemmsmith.patch(model):
            out = model(x)
        for first in (0, rows // 2, rows - 70):
            part = slice(first, first + 70)
            close(out[part], model(x[part]))
        del x, out


def test_gradients_of_more_elements_than_31_bits_count() -> None:
    rows, width = 2**19 + 70, 4096
    x, weight = some(rows, width).requires_grad_(), some(width).requires_grad_()
    gradient = some(rows, width)
    out = norms.rms_norm(x, weight, EPSILON)
    of_x, of_weight = torch.autograd.grad(out, (x, weight), gradient)
    del out
    total = torch.zeros(width, device="cuda", dtype=torch.float64)
    for first in range(0, rows, 2**15):
        part = slice(first, first + 2**15)
        leaves = [x.detach()[part].double().requires_grad_(), weight.detach().double()]
        leaves[1].requires_grad_()
        wanted = nn.functional.rms_norm(leaves[0], leaves[1].shape, leaves[1], EPSILON)
        dx, dweight = torch.autograd.grad(wanted, leaves, gradient[part].double())
        close(of_x[part], dx)
        total += dweight
    close(of_weight, total)


def test_the_kernels_run() -> None:
    triton = pytest.importorskip("triton")
    leaves = [some(*SIZE).requires_grad_(), some(SIZE[1]).requires_grad_()]
    out = norms.rms_norm(*leaves, EPSILON)
    seen: list[object] = []
    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(seen.append)
    try:
        torch.autograd.grad(out, leaves, torch.ones_like(out))
    finally:
        hook.remove(seen.append)
    assert len(seen) == 2
