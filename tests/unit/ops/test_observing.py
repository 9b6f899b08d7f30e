"""What `gemmsmith advise` observes of a step, and that a program does not notice it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from gemmsmith.program.observed import ObservedStep
from gemmsmith.startup.observing import _Watch
from tests.support import unchanged
from tests.support.docs import ROOT

PLAIN = (ROOT / "examples" / "plain_gpt.py").read_text(encoding="utf-8")
NUMBERS = (2, 0.3, True, 1j, torch.tensor(2), torch.tensor(0.3), torch.tensor(0.3).bfloat16())
OF_TWO: tuple[Callable[[Any, Any], Any], ...] = (
    lambda x, y: x * y,
    lambda x, y: y * x,
    lambda x, y: y - x,
    lambda x, y: x / y,
    lambda x, y: y / x,
    lambda x, y: x**y,
    lambda x, y: y**x,
    lambda x, y: torch.add(x, y, alpha=2),
    lambda x, y: torch.div(x, y, rounding_mode="floor"),
    lambda x, y: x.masked_fill(x == x, y),
    lambda x, y: torch.mul(x, y, out=torch.empty(0, dtype=x.dtype)),
    lambda x, y: x.clone().mul_(y),
)
OF_ONE: tuple[Callable[[Any], Any], ...] = (
    torch.tanh,
    torch.erf,
    torch.exp,
    lambda x: x.softmax(-1),
    lambda x: x.log_softmax(-1, dtype=torch.float32),
    lambda x: functional.gelu(x) @ x.t(),
)


class Named(TorchDispatchMode):  # type: ignore[misc]
    """A mode of the program's own, which writes down what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def results() -> Iterator[Any]:
    """Results of operators in every surrounding that a program may give them."""
    numbers = torch.Generator().manual_seed(1)
    types = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64)
    for dtype in types:
        for size in ((), (1,), (5, 7), (0, 3)):
            x = torch.randn(size, generator=numbers).mul(3).to(dtype)
            yield from (attempt(f, x, y) for f in OF_TWO for y in NUMBERS)
            yield from (attempt(f, x) for f in OF_ONE)
    x = torch.randn(4, 5, generator=numbers, requires_grad=True)
    for within in (torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")):
        with within():
            yield (x * 2 + 1) @ x.t() / 3
    (x.mul(2).tanh() * x / 3).exp().sum().backward()
    yield x.grad
    x = x.detach()
    yield torch.func.vmap(torch.func.grad(lambda row: (2 * row / 3).tanh().sum()))(x)
    yield torch.func.jvp(lambda y: (y * 2 / 3).tanh(), (x,), (x,))[1]
    yield torch.func.functionalize(lambda y: y * 2)(x)
    yield make_fx(lambda y: (y * 2).tanh(), tracing_mode="symbolic")(x).code
    yield (x.to_sparse() * 2).to_dense()
    yield (torch.ones(3, device="meta") * 2).shape
    with Named() as mode:
        yield 2 * x / 3
    yield mode.names


def attempt(run: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return run(*arguments)
    except (RuntimeError, TypeError, IndexError) as error:
        return type(error), str(error)


def kept(result: Any) -> Any:
    """All that a program could notice of a result."""
    if not isinstance(result, torch.Tensor):
        return result
    flat = result.detach().contiguous().reshape(-1)
    bits = flat.view(torch.uint8).tolist() if flat.numel() else []
    return bits, result.dtype, result.shape, result.stride(), result.requires_grad


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_a_program_may_begin_to_compile_while_a_step_is_observed() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).tanh() / 3

    x = torch.randn(1, 2, 16, 8)
    attended = flex_attention(x, x, x)  # compiles parts of itself
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    watch = _Watch()
    watch.begin()
    try:
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)(x)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        again = flex_attention(x, x, x)
    finally:
        watch.end()
    assert graphs == 1
    assert kept(compiled) == kept(function(x))
    assert kept(attended) == kept(again)


def test_no_bit_changes_while_a_step_is_observed() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = [kept(result) for result in results()]
        watch = _Watch()
        torch._dynamo.utils.counters.clear()  # tests before this one compile
        watch.begin()
        during = [kept(result) for result in results()]
        watch.end()
    assert before == during
    operators = {call.packet for function in watch.functions for call in function.calls}
    assert {"mul", "div", "tanh", "_softmax", "mm"} <= operators


@pytest.mark.parametrize("why", ["a mode of its own", "torch.compile", "fullgraph"])
def test_operators_are_left_alone_where_the_program_would_notice(why: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    x = torch.ones(3)
    watch = _Watch()
    if why != "a mode of its own":
        is_whole = why == "fullgraph"
        torch.compile(lambda y: y + 1, backend="eager", fullgraph=is_whole)(x)
        watch.begin()
        x * 2
    else:
        with Named():
            watch.begin()
            x * 2
    assert torch._C._len_torch_dispatch_stack() == 0
    watch.end()
    assert watch.functions == []


def observed(
    folder: Path, program: str, *, steps: int = 4, stop: bool = True
) -> tuple[list[ObservedStep], list[str]]:
    """The steps that the processes of a program leave, and what it prints."""
    (folder / "train.py").write_text(program)
    captures = folder / "captures"
    environment = unchanged.environment(
        folder / "site",
        GEMMSMITH_CAPTURE=str(captures),
        GEMMSMITH_CAPTURE_ADVISE="1",
        GEMMSMITH_CAPTURE_STEPS=str(steps),
        GEMMSMITH_CAPTURE_STOP=str(int(stop)),
        OMP_NUM_THREADS="1",
    )
    done = unchanged.run(["python", "train.py"], folder, environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    files = captures.glob("*.step.json")
    return [ObservedStep.parse(file.read_bytes()) for file in files], done.stdout.splitlines()


SIX_STEPS = PLAIN.replace("default=100", "default=6")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the program prints if it is not observed."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "train.py").write_text(SIX_STEPS)
    environment = unchanged.environment(folder / "site", OMP_NUM_THREADS="1")
    return unchanged.run(["python", "train.py"], folder, environment).stdout.splitlines()


@pytest.mark.parametrize("stop", [True, False])
def test_a_program_computes_what_it_computes_alone(
    tmp_path: Path, stop: bool, alone: list[str]
) -> None:
    (step,), printed = observed(tmp_path, SIX_STEPS, stop=stop)
    assert len(alone) == 6
    assert printed == (alone[:3] if stop else alone)
    assert len(step.milliseconds) == 2
    assert (step.device, step.threads, step.is_compiled) == ("cpu", 1, False)
    (optimizer,) = step.optimizers
    assert (optimizer.kind, len(optimizer.groups), len(optimizer.groups[0])) == ("AdamW", 1, 18)
    assert ("bfloat16", (1027, 64)) in optimizer.groups[0]
    counts = {function.function: function.count for function in step.functions}
    assert counts["NewGELU.forward"] == counts["Block.attend"] == 2
    assert {function.file for function in step.functions} == {"train.py"}


SEVERAL = """
import torch
layers = [torch.nn.Linear(8, 8) for _ in range(2)]
first = torch.optim.SGD([{"params": [layers[0].weight]}, {"params": [layers[0].bias]}])
second = torch.optim.Adam(layers[1].parameters(), betas=(0.8, 0.9))
layers[1].bias.requires_grad_(False)
for step in range(5):
    for micro in range(3):
        layers[1](layers[0](torch.ones(4, 8)).tanh()).sum().backward()
    first.step()
    second.step()
"""


def test_a_step_has_all_optimizers_and_all_micro_batches(tmp_path: Path) -> None:
    (step,), _ = observed(tmp_path, SEVERAL)
    kinds = {optimizer.kind: optimizer for optimizer in step.optimizers}
    assert sorted(kinds) == ["Adam", "SGD"]
    assert kinds["SGD"].groups == [[("float32", (8, 8))], [("float32", (8,))]]
    assert kinds["Adam"].groups == [[("float32", (8, 8))]]
    assert kinds["Adam"].options["betas"] == (0.8, 0.9)
    tanhs = [
        function.count
        for function in step.functions
        for call in function.calls
        if call.packet == "tanh"
    ]
    assert sum(tanhs) == 3
    assert not any(call.packet == "mul" for f in step.functions for call in f.calls)  # Adam's


COMPILED = """
import torch
layer = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(layer.parameters())
net = torch.compile(layer, backend="eager")
for step in range(5):
    net(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    print(torch._dynamo.utils.counters["frames"]["total"])
"""


def test_a_compiled_program_is_compiled_as_without_us(tmp_path: Path) -> None:
    (step,), printed = observed(tmp_path, COMPILED, stop=False)
    assert printed == ["1"] * 5
    assert step.is_compiled
    assert step.functions == []
    assert len(step.optimizers) == 1


REPLACED = """
import gc, torch
weight = torch.ones(4, requires_grad=True)
def train(steps):
    optimizer = torch.optim.SGD([weight])
    for _ in range(steps):
        weight.mul(2).sum().backward()
        optimizer.step()
train(1)
gc.collect()
train(4)
"""


def test_an_optimizer_that_is_gone_does_not_count(tmp_path: Path) -> None:
    (step,), _ = observed(tmp_path, REPLACED)
    assert len(step.milliseconds) == 2
    assert len(step.optimizers) == 1


def test_a_forked_process_begins_anew(tmp_path: Path) -> None:
    program = """
import os, torch
weight = torch.ones(4, requires_grad=True)
optimizer = torch.optim.SGD([weight])
def train(steps):
    for _ in range(steps):
        weight.mul(2).sum().backward()
        optimizer.step()
train(1)
if os.fork() == 0:
    train(1)
    os._exit(0)
os.wait()
train(3)
"""
    steps, _ = observed(tmp_path, program, steps=3, stop=False)
    assert [len(step.milliseconds) for step in steps] == [1]
