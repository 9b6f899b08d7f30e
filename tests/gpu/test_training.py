"""Training code on winners: what the operators, the patch, the compiler and graphs compute.

The reference is FP64 on the same inputs. What needs no CUDA runs on the host as well, with
stand-in kernels: tests/unit/ops/test_training.py.
"""

from __future__ import annotations

import copy
import logging
import math
import random
import runpy
import shutil
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import gemmsmith
from gemmsmith import Bundle, Client, Lookup, Packs
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.operation import Epilogue, Operation
from gemmsmith.core.problem import DType, Layout
from gemmsmith.ops.below.dispatch import Dispatch
from gemmsmith.ops.engine import fallback
from gemmsmith.runtime.launch import torch_dtype
from gemmsmith.winners.bundle import write_bundle
from tests.gpu.conftest import Packs as BuiltPacks
from tests.gpu.support import choosing
from tests.gpu.support.choosing import Ground, tuned
from tests.gpu.support.layers import warm_up
from tests.support.patched import is_patched
from tests.support.processes import until
from tests.support.replacing import replace
from tests.support.serving import own_signer
from tests.support.types import FLOATS
from tuner.compile import ArtifactStore

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CASES = 500
STEPS = 8
BOUND = {DType.BF16: 1e-2, DType.FP16: 2e-3, DType.FP8_E4M3: 1.5e-2, DType.FP8_E5M2: 1.5e-2}
"""Relative error in the Frobenius norm: rounding of the result, and of FP8's fast accumulation."""


@pytest.fixture(scope="module")
def ground(
    packs: BuiltPacks, model: DeviceModel, tmp_path_factory: pytest.TempPathFactory
) -> Ground:
    # The packs stay unsigned where they are kept: this process's key ends with it.
    folder = tmp_path_factory.mktemp("signed")
    for path in set(packs.paths.values()):
        for file in (path, path.with_suffix(".json")):
            shutil.copy2(file, folder)
    store = ArtifactStore(folder)
    store.sign(own_signer())
    return Ground(
        device=torch.device("cuda:0"),
        model=model,
        types=FLOATS,
        sizes=(528, 784, 1056),
        largest=4096,
        kernels=choosing.gpu_kernels(packs.failures),
        store=store,
        compilers=({"mode": "default"}, {"mode": "reduce-overhead"}),
    )


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(20261122)


def close(
    ours: torch.Tensor | None, reference: torch.Tensor | None, bound: float, size: float = 0.0
) -> None:
    """`size` is the least norm to judge by: sums may cancel, their errors do not."""
    assert ours is not None
    assert reference is not None
    assert ours.shape == reference.shape
    wanted = reference.detach().double()
    difference = torch.linalg.vector_norm(ours.detach().double() - wanted).item()
    assert difference <= bound * max(size, torch.linalg.vector_norm(wanted).item())


def stored(ground: Ground, dtype: DType, *size: int, row_major: bool = True) -> torch.Tensor:
    """A random leaf whose last dimension, or the one before, is contiguous."""
    shape = size if row_major else (*size[:-2], size[-1], size[-2])
    values = torch.randn(shape, device=ground.device).to(torch_dtype(Operation.of(dtype).d))
    return (values if row_major else values.mT).requires_grad_()


def eight_bits(ground: Ground, dtype: torch.dtype, rows: int, columns: int) -> torch.Tensor:
    return (torch.randn(rows, columns, device=ground.device) * 16).clamp(-400, 400).to(dtype)


def checked(
    function: Callable[..., torch.Tensor],
    reference: Callable[..., torch.Tensor],
    bound: float,
    *operands: torch.Tensor,
) -> None:
    """Output and every gradient against the same in FP64."""
    out = function(*operands)
    wide = [operand.detach().double().requires_grad_() for operand in operands]
    expected = reference(*wide)
    close(out, expected, bound)
    gradient = torch.randn_like(out)
    out.backward(gradient)
    expected.backward(gradient.double())
    for ours, theirs in zip(operands, wide, strict=True):
        close(ours.grad, theirs.grad, bound)


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("operator", ["linear", "linear_bias", "linear_3d", "matmul", "bmm"])
def test_gradients_of_every_operator_in_every_layout(
    ground: Ground, operator: str, layout: Layout
) -> None:
    m, n, k = ground.sizes
    rows, columns = layout.a_row_major, layout.b_row_major
    function, reference = gemmsmith.linear, functional.linear
    if operator in ("matmul", "bmm"):
        function, reference = gemmsmith.matmul, torch.matmul
    with tuned(ground) as launched:
        for dtype in (dtype for dtype in ground.types if not Operation.of(dtype).is_narrow_float):
            operands = [
                stored(ground, dtype, m, k, row_major=rows),
                stored(ground, dtype, n, k, row_major=not columns),
            ]
            if operator == "linear_bias":
                operands.append(stored(ground, dtype, n))
            elif operator == "linear_3d":
                operands[0] = stored(ground, dtype, 2, m // 2, k)
            elif operator == "matmul":
                operands[1] = stored(ground, dtype, k, n, row_major=columns)
            elif operator == "bmm":
                operands = [
                    stored(ground, dtype, 3, m, k, row_major=rows),
                    stored(ground, dtype, 3, k, n, row_major=columns),
                ]
            checked(function, reference, BOUND[dtype], *operands)
            assert launched() == 3, dtype


@pytest.mark.parametrize("accumulator", [torch.float32, torch.bfloat16])
def test_main_grad(ground: Ground, accumulator: torch.dtype) -> None:
    m, n, k = ground.sizes
    x, weight = stored(ground, DType.BF16, m, k), stored(ground, DType.BF16, n, k)
    total = torch.ones(n, k, dtype=accumulator, device=ground.device)
    expected = total.double()
    with tuned(ground) as launched:
        for _ in range(3):
            out = gemmsmith.linear(x, weight, main_grad=total)
            gradient = torch.randn_like(out)
            out.backward(gradient)
            expected += gradient.double().t() @ x.detach().double()
        assert launched() == 6  # forward and the input's gradient: torch adds the weight's
    assert weight.grad is None
    # With FP32 no product is rounded on the way.
    close(total, expected, 1e-5 if accumulator is torch.float32 else BOUND[DType.BF16])


def test_scaled_products(ground: Ground) -> None:
    m, n, k = ground.sizes
    scales = torch.tensor([0.25], device=ground.device), torch.tensor(3.0, device=ground.device)
    with tuned(ground) as launched:
        for dtype in (dtype for dtype in ground.types if Operation.of(dtype).is_narrow_float):
            a = eight_bits(ground, torch_dtype(Operation.of(dtype).a), m, k)
            b = eight_bits(ground, torch_dtype(Operation.of(dtype).b), n, k)
            expected = 0.75 * (a.double() @ b.double().t())
            fast = gemmsmith.scaled_mm(a, b.t(), *scales, use_fast_accum=True)
            close(fast, expected, BOUND[dtype])
            assert launched() == 1, dtype
            # Whoever does not ask for fast accumulation does not get it.
            close(gemmsmith.scaled_mm(a, b.t(), *scales), expected, BOUND[dtype])
            winner = ground.config(gemmsmith.Problem(m=m, n=n, k=k, dtype=dtype))
            assert winner is not None
            assert launched() == (not winner.kernel.fast_accumulation), dtype


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # inductor's own
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's
def test_an_fp8_layer_eager_and_compiled(ground: Ground) -> None:
    """The example's: E4M3 forwards, E5M2 backwards, both sides round to FP8 alike."""
    layer = runpy.run_path(str(EXAMPLES / "models.py"))["Fp8Linear"]
    m, n, k = ground.sizes
    weight = torch.randn(n, k, device=ground.device).bfloat16()
    x, dy = (torch.randn(m, size, device=ground.device).bfloat16() for size in (k, n))

    def results(multiply: Any, compiler: dict[str, str] | None) -> list[torch.Tensor]:
        made = layer(k, n, multiply=multiply).to(ground.device, torch.bfloat16)
        made.weight.data.copy_(weight)
        inputs = x.clone().requires_grad_()
        call = made
        if compiler is not None:
            call = torch.compile(made, fullgraph=True, dynamic=False, **compiler)
        out = call(inputs)
        out.backward(dy)
        # Copies: a later run of a graph that the compiler replays writes over what it gave.
        return [each.detach().clone() for each in (out, inputs.grad, made.weight.grad)]

    for compiler in (None, *ground.compilers):
        # Compiled, `x / scale` is not rounded to bf16 before FP8, so one in thirty values differs.
        expected = results(torch._scaled_mm, compiler)
        with tuned(ground) as launched:
            for ours, theirs in zip(results(gemmsmith.scaled_mm, compiler), expected, strict=True):
                close(ours, theirs, BOUND[DType.FP8_E4M3])
            assert launched() >= (3 if DType.FP8_E5M2 in ground.types else 1)


def test_500_random_sizes_against_torch(
    ground: Ground, record_property: Callable[[str, object], None]
) -> None:
    """Forwards and backwards, in every type and layout, aligned or not: whoever takes it."""
    chance = random.Random(20261122)

    def extent() -> int:
        size = round(ground.largest ** chance.random())
        return -(-size // 16) * 16 if chance.random() < 0.5 else size

    products = 0
    with tuned(ground) as launched:
        for _ in range(CASES):
            dtype = chance.choice(ground.types)
            m, n, k = extent(), extent(), extent()
            layout = chance.choice(list(Layout))
            bound = BOUND[dtype]
            if Operation.of(dtype).is_narrow_float:
                a = eight_bits(ground, torch_dtype(Operation.of(dtype).a), m, k)
                b = eight_bits(ground, torch_dtype(Operation.of(dtype).b), n, k).t()
                one = torch.ones((), device=ground.device)
                ours = gemmsmith.scaled_mm(a, b, one, one, use_fast_accum=True)
                exact = a.double() @ b.double()
                torchs = fallback.scaled(a, b, one, one, None, torch.bfloat16, use_fast_accum=True)
                found = [(ours, torchs, exact)]
            else:
                a = stored(ground, dtype, m, k, row_major=layout.a_row_major)
                b = stored(ground, dtype, k, n, row_major=layout.b_row_major)
                ours, torchs = gemmsmith.matmul(a, b), torch.matmul(a, b)
                gradient = torch.randn_like(ours)
                exact = a.double() @ b.double()
                found = [
                    (ours, torchs, exact),
                    *zip(
                        torch.autograd.grad(ours, (a, b), gradient),
                        torch.autograd.grad(torchs, (a, b), gradient),
                        torch.autograd.grad(exact, (a, b), gradient.double()),
                        strict=True,
                    ),
                ]
            products += len(found)
            # What all three products of normal values come to, of 16 where they are FP8.
            size = math.sqrt(m * n * k) * (256 if Operation.of(dtype).is_narrow_float else 1)
            for mine, theirs, wanted in found:
                close(mine, wanted, bound, size)
                close(mine, theirs, 2 * bound, size)
        tuned_ones = launched()
    record_property("products", products)
    record_property("by_tuned_kernels", tuned_ones)
    assert tuned_ones > products / 3


def network(ground: Ground) -> nn.Sequential:
    """Two linear layers and a smooth step between them: the same at every call."""
    _, n, k = ground.sizes
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        made = nn.Sequential(nn.Linear(k, n, bias=False), nn.Tanh(), nn.Linear(n, k))
    return made.to(ground.device, torch.bfloat16)


class Training:
    """A network learning to give back what it gets, step by step."""

    def __init__(self, ground: Ground, **compiler: str) -> None:
        self.model = network(ground)
        self._ground = ground
        self._forward: Any = torch.compile(self.model, fullgraph=True, dynamic=False, **compiler)
        if not compiler:
            self._forward = self.model
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=2.0)
        self._generator = torch.Generator().manual_seed(2)

    def batch(self) -> torch.Tensor:
        m, _, k = self._ground.sizes
        values = torch.randn(m, k, generator=self._generator)
        return values.to(self._ground.device, torch.bfloat16)

    def step(self) -> float:
        x = self.batch()
        loss = functional.mse_loss(self._forward(x).float(), x.float())
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()


PRODUCTS = 5
"""Of a step: the first layer's input needs no gradient."""
OF_THE_BIASED = 3
"""Those of the layer with a bias, which changes class with the binding too."""


@contextmanager
def by_class(model: nn.Module) -> Iterator[None]:
    """`gemmsmith.patch(model)` as where the binding cannot be had.

    Then all its kernels are launched from Python, where they can be counted.
    """
    with pytest.MonkeyPatch.context() as without:
        without.setattr(Dispatch, "of", lambda kind: None)
        with gemmsmith.patch(model):
            yield


def stock(ground: Ground) -> list[float]:
    """Losses of torch alone."""
    training = Training(ground)
    return [training.step() for _ in range(STEPS)]


def alike(losses: list[float], expected: list[float]) -> None:
    assert losses == pytest.approx(expected, rel=2e-3)
    assert losses[-1] < losses[0]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # inductor's own
def test_compiled_training(ground: Ground) -> None:
    expected = stock(ground)
    for compiler in ground.compilers:
        for patched, least in ((by_class, PRODUCTS), (gemmsmith.patch, OF_THE_BIASED)):
            with tuned(ground) as launched:
                training = Training(ground, **compiler)
                with patched(training.model):
                    alike([training.step() for _ in range(STEPS)], expected)
                # Graphs that the compiler replays launch without Python, and so does the binding.
                assert launched() >= least, compiler


def test_only_deterministic_kernels_give_the_same_bits(ground: Ground) -> None:
    ends = []
    with tuned(ground, deterministic=True):
        for _ in range(2):
            training = Training(ground)
            with gemmsmith.patch(training.model):
                for _ in range(STEPS):
                    training.step()
            ends.append([parameter.detach().clone() for parameter in training.model.parameters()])
    for one, other in zip(*ends, strict=True):
        assert torch.equal(one, other)


def problems_of(ground: Ground) -> list[gemmsmith.Problem]:
    """What a training step multiplies; where no kernel adds a bias, the product before it."""
    with gemmsmith.capture() as shapes:
        Training(ground).step()
    return [
        problem
        if ground.config(problem) is not None
        else replace(problem, dtype=replace(problem.operation, epilogue=Epilogue.NONE).dtype)
        for problem in shapes.problems
    ]


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Without the first sizes of a process that have no winner."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "gemmsmith" and record.levelno >= logging.WARNING
        if not record.getMessage().startswith("no winner for")
    ]


@pytest.mark.parametrize("when", ["mid-way", "before the first product"])
def test_training_goes_on_when_the_service_is_killed(
    ground: Ground, tmp_path: Path, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    last = STEPS // 2 if when == "mid-way" else 0
    losses: list[float] = []
    with (
        ground.serving(tmp_path, problems_of(ground)) as (process, url),
        Client(url, cache_dir=tmp_path / "cache", retries=0, timeout=5) as client,
        caplog.at_level(logging.WARNING, "gemmsmith"),
        ExitStack() as stack,
    ):
        lookup = stack.enter_context(closing(Lookup.of(client, ground.model.slug, interval=0.05)))
        training = Training(ground)
        source = (lookup, Packs.of(client, signed=lambda: lookup.snapshot))
        with tuned(ground, source) as launched, by_class(training.model):
            for at in range(STEPS):
                if at == last:
                    process.kill()
                    process.wait()
                    until(lambda: bool(warnings_in(caplog)), "the outage is not noticed")
                losses.append(training.step())
                # Packs that were never fetched cannot be had any more: torch computes.
                assert launched() == (PRODUCTS if when == "mid-way" else 0)
    alike(losses, stock(ground))
    said = warnings_in(caplog)
    assert said[0].startswith("winners stay at snapshot")
    packs = {row.config.pack for row in ground.snapshot(problems_of(ground)).rows if row.config}
    assert len(said) == (1 if when == "mid-way" else 1 + len(packs))


# Where the signature is refused nothing is in use, which `patch` says once in a process.
@pytest.mark.filterwarnings("ignore:gemmsmith.patch.. replaces nothing")
@pytest.mark.parametrize("how", ["tampered", "signed by a stranger", "damaged cache"])
def test_a_pack_that_is_not_what_it_should_be_is_refused(
    ground: Ground,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    snapshot = ground.snapshot(problems_of(ground))
    files = {name: choosing.Files(ground.store).path(name) for name in snapshot.packs()}
    baked, cache = tmp_path / "winners.gspack", tmp_path / "cache"
    write_bundle(baked, snapshot, files)
    if how == "tampered":
        with zipfile.ZipFile(baked) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(baked, "w") as archive:
            for name, content in members.items():
                changed = content.replace(b"gs_run", b"gs_ruN") if "packs/" in name else content
                assert changed != content or "packs/" not in name
                archive.writestr(name, changed)
    elif how == "signed by a stranger":
        monkeypatch.setenv("GEMMSMITH_TRUSTED", str(tmp_path / "nobody"))
        monkeypatch.delenv("GEMMSMITH_UNSIGNED", raising=False)
    else:
        (cache / "packs").mkdir(parents=True)
        for name, file in files.items():
            whole = file.read_bytes()
            (cache / "packs" / f"{name}.so").write_bytes(whole[: len(whole) // 2])
    bundle = Bundle.open(baked, folder=cache)
    training = Training(ground)
    with (
        caplog.at_level(logging.WARNING, "gemmsmith"),
        tuned(ground, bundle) as launched,
        by_class(training.model),
    ):
        losses = [training.step() for _ in range(STEPS)]
        # A damaged file in the cache is replaced by the whole one of the bundle.
        assert launched() == (STEPS * PRODUCTS if how == "damaged cache" else 0)
    alike(losses, stock(ground))
    said = warnings_in(caplog)
    assert len(said) == {"damaged cache": 0, "signed by a stranger": 1, "tampered": len(files)}[how]
    for line in said:
        assert line.startswith(
            "torch's own operators run: "
            if how == "signed by a stranger"
            else "torch's own operators run instead of kernel pack"
        )


# What only CUDA has.


def test_a_training_step_in_a_graph(ground: Ground) -> None:
    training = Training(ground)
    model = training.model
    static = training.batch()
    with tuned(ground) as launched, by_class(model):

        def step() -> torch.Tensor:
            model.zero_grad(set_to_none=False)
            loss = functional.mse_loss(model(static).float(), static.float())
            loss.backward()
            return loss.detach()

        warm_up(step)
        assert launched() == PRODUCTS
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = step()
        assert launched() == PRODUCTS
        for _ in range(4):
            static.copy_(training.batch())
            graph.replay()
            torch.cuda.synchronize()
            captured = [loss.clone(), *(p.grad.clone() for p in model.parameters())]  # type: ignore[union-attr]
            for ours, eager in zip(
                captured, [step(), *(p.grad for p in model.parameters())], strict=True
            ):
                close(ours, eager, BOUND[DType.BF16])
        assert launched() == 4 * PRODUCTS  # of the eager steps: a replay runs no Python


def test_a_product_first_seen_in_a_capture_is_torchs(ground: Ground) -> None:
    x = stored(ground, DType.BF16, *ground.sizes[:2]).detach()
    w = stored(ground, DType.BF16, ground.sizes[2], ground.sizes[1]).detach()
    functional.linear(x, w)  # cuBLAS makes its workspace outside captures
    with tuned(ground) as launched:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = gemmsmith.linear(x, w)
        graph.replay()
        torch.cuda.synchronize()
        assert launched() == 0
        close(captured, x.double() @ w.double().t(), BOUND[DType.BF16])
        gemmsmith.linear(x, w)
        assert launched() == 1


def test_steps_on_another_stream(ground: Ground) -> None:
    """Operands are ready only there, and memory that is freed goes to its own stream again."""
    stream = torch.cuda.Stream()
    m, n, k = ground.sizes
    with tuned(ground) as launched, torch.cuda.stream(stream):
        for _ in range(20):
            torch.cuda._sleep(2_000_000)
            x, w = stored(ground, DType.BF16, m, k), stored(ground, DType.BF16, n, k)
            checked(gemmsmith.linear, functional.linear, BOUND[DType.BF16], x, w)
        assert launched() == 60


def kernels(step: Callable[[], object]) -> Counter[str]:
    """What the GPU runs in a step, whoever launches it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    return Counter({event.key: event.count for event in seen.key_averages()})


def cutlass(found: Counter[str]) -> int:
    """How many of these are ours, if torch's are left out."""
    return sum(count for name, count in found.items() if "cutlass" in name.lower())


def test_unchanged_code_under_patch(ground: Ground) -> None:
    """By the compiled binding, below autograd; in its own threads and on their streams too."""
    binding = Dispatch.of("cuda")
    assert binding is not None, "the binding does not load with this torch; see its log line"
    m, n, k = ground.sizes
    x, w = stored(ground, DType.BF16, m, k), stored(ground, DType.BF16, n, k)

    def step() -> None:
        x.grad = w.grad = None
        checked(functional.linear, functional.linear, BOUND[DType.BF16], x, w)

    step()
    plain = kernels(step)
    with tuned(ground), gemmsmith.patch():
        step()  # decides
        ours = kernels(step) - plain
    assert cutlass(ours) >= 3, (ours, plain)
    training, expected = Training(ground), stock(ground)
    with tuned(ground), gemmsmith.patch():
        alike([training.step() for _ in range(STEPS)], expected)


def test_too_little_memory_is_torchs_own_error(ground: Ground) -> None:
    """Programs catch it, and try again with a smaller batch."""
    x = torch.empty(1, 64, device="cuda", dtype=torch.bfloat16).expand(1 << 20, 64)
    w = torch.empty(64, 1, device="cuda", dtype=torch.bfloat16).expand(64, 1 << 20)
    with tuned(ground), gemmsmith.patch(), pytest.raises(torch.OutOfMemoryError) as raised:
        torch.mm(x, w)
    assert "CUDA out of memory. Tried to allocate 2048.00 GiB" in str(raised.value)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("compiled", [False, True])
def test_a_patched_model_by_the_binding(ground: Ground, compiled: bool) -> None:
    """Its layers' products and no others, in a graph that was compiled before."""
    assert Dispatch.of("cuda") is not None
    m, n, k = ground.sizes

    def steps(*widths: int) -> tuple[nn.Module, Callable[[], None]]:
        made = [nn.Linear(k, n, bias=False) for k, n in pairwise(widths)]
        model = nn.Sequential(*made).to(ground.device, torch.bfloat16)
        call = torch.compile(model, fullgraph=True, dynamic=False) if compiled else model

        def step() -> None:
            x = stored(ground, DType.BF16, m, widths[0])
            wide, wide_x = copy.deepcopy(model).double(), x.detach().double().requires_grad_()
            model.zero_grad()
            wide.zero_grad()
            out, expected = call(x), wide(wide_x)
            gradient = torch.randn_like(out)
            out.backward(gradient)
            expected.backward(gradient.double())
            close(out, expected, BOUND[DType.BF16])
            ours, theirs = (x, *model.parameters()), (wide_x, *wide.parameters())
            for mine, wanted in zip(ours, theirs, strict=True):
                close(mine.grad, wanted.grad, BOUND[DType.BF16])

        step()
        return model, step

    with tuned(ground):
        model, step = steps(k, n, k)
        _, another = steps(k + 128, n + 128)
        plain, others = kernels(step), kernels(another)
        with gemmsmith.patch(model):
            assert not any(map(is_patched, model.modules()))
            step()  # decides
            another()
            ours = kernels(step) - plain
            assert cutlass(ours) >= 6, (ours, plain)
            assert cutlass(kernels(another) - others) == 0
        assert cutlass(kernels(step) - plain) == 0
