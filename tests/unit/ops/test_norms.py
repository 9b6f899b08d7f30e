"""RMS norms of a patched model: recognized by their source, and torch's kernel where it may run.

On the CPU torch has no fused kernel, and `F.rms_norm` computes what that would, rounded once.
"""

from __future__ import annotations

import copy
import importlib
import io
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gemmsmith
from gemmsmith.answers.snapshot import Snapshot
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.models import norms as recipes
from gemmsmith.ops.models.automatic import every_model, every_norm
from gemmsmith.ops.models.layers import recognized
from gemmsmith.ops.models.norms import norm_recipe
from gemmsmith.program import built
from gemmsmith.program.built import remember
from tests.support.patched import is_patched
from tests.support.stand_in import Chooser, Host
from tests.support.tiny_models import MODELS

BF16 = torch.bfloat16
WIDTH = 48
THEIRS = {
    "LlamaRMSNorm": "variance_epsilon",
    "Qwen3RMSNorm": "variance_epsilon",
    "GptOssRMSNorm": "variance_epsilon",
    "Olmo2RMSNorm": "variance_epsilon",
    "HeliumRMSNorm": "variance_epsilon",
    "MoshiRMSNorm": "eps",
    "Llama4TextRMSNorm": "eps",
    "Gemma4RMSNorm": "eps",
    "Gemma3nRMSNorm": "eps",
    "GemmaRMSNorm": "eps",
    "Gemma3RMSNorm": "eps",
}
"""Classes of transformers, and where they keep epsilon."""
ADDS_ONE = ("GemmaRMSNorm", "Gemma3RMSNorm")
OTHERS = ("BambaRMSNormGated", "MT5LayerNorm", "CohereLayerNorm")


def of_transformers(name: str) -> Any:
    folder = {"GptOss": "gpt_oss", "Llama4Text": "llama4"}
    stem = name.partition("RMSNorm")[0].partition("LayerNorm")[0]
    folder_name = folder.get(stem, stem.lower())
    return getattr(
        importlib.import_module(f"transformers.models.{folder_name}.modeling_{folder_name}"), name
    )


def made(name: str = "LlamaRMSNorm", dtype: torch.dtype = BF16) -> nn.Module:
    torch.manual_seed(3)
    norm: nn.Module = of_transformers(name)(WIDTH, eps=1e-3)
    nn.init.normal_(norm.weight, 1.0, 0.3)
    return norm.to(dtype)


class Copied(nn.Module):
    """As Llama's, with other names."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.tiny = 1e-5

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        kind = states.dtype
        states = states.to(torch.float32)
        squares = states.pow(2).mean(-1, keepdim=True)
        states = states * torch.rsqrt(squares + self.tiny)
        return self.weight * states.to(kind)


class Kept(Copied):
    pass


class First(Copied):
    """As Meta's own Llama."""

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.tiny)

    def forward(self, x):
        output = self._norm(x.float()).type_as(x)
        return output * self.weight


class Called(Copied):
    def forward(self, x):
        return super().forward(x) * 2


class Parent(Copied):
    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Identity()


def of_others_torch() -> type[Copied]:
    """A class in whose module `torch` is something else."""

    class torch:  # noqa: N801 - the point
        float32 = None
        rsqrt = None

    class Other(Copied):
        def forward(self, x):
            dtype = x.dtype
            x = x.to(torch.float32)
            variance = x.pow(2).mean(-1, keepdim=True)
            x = x * torch.rsqrt(variance + self.tiny)
            return self.weight * x.to(dtype)

    return Other


@pytest.fixture
def calls(
    engine: Engine, without_binding: None, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], int]:
    """How many norms torch's own function computed since this was last called."""
    count, own = [0], functional.rms_norm

    def counted(*given: Any, **named: Any) -> torch.Tensor:
        count[0] += 1
        return own(*given, **named)

    monkeypatch.setattr(functional, "rms_norm", counted)

    def since() -> int:
        found, count[0] = count[0], 0
        return found

    return since


def given(dtype: torch.dtype = BF16) -> torch.Tensor:
    torch.manual_seed(4)
    return (torch.randn(2, 5, WIDTH) * 3).to(dtype).requires_grad_()


def step(net: Any, x: torch.Tensor | None = None) -> list[torch.Tensor]:
    """The output, and the gradients of the operand and the weight."""
    x = given(next(net.parameters()).dtype) if x is None else x
    out = net(x)
    torch.manual_seed(5)
    grad = torch.randn(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, [x, *net.parameters()], grad)]


def equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", THEIRS)
def test_norms_of_transformers(name: str) -> None:
    (found,) = recognized(made(name))
    assert str(found) == f"{name} (rms norm)"
    assert getattr(found.recipe, "epsilon", None) == THEIRS[name]


@pytest.mark.parametrize("kind", [Copied, Kept, First])
def test_copies(kind: type[nn.Module]) -> None:
    (found,) = recognized(nn.Sequential(kind()))
    assert str(found.recipe) == "rms norm"


@pytest.mark.parametrize("kind", [Called, Parent, of_others_torch()])
def test_what_only_looks_like_one(kind: type[nn.Module]) -> None:
    assert list(recognized(kind())) == []


LLAMA = """
    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.tiny)
        return self.weight * x.to(dtype)
"""
META = """
    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.tiny)

    def forward(self, x):
        output = self._norm(x.float()).type_as(x)
        return output * self.weight
"""
CHANGES: dict[str, tuple[str, dict[str, str]]] = {
    "another dimension": (LLAMA, {"mean(-1": "mean(-2"}),
    "no epsilon": (LLAMA, {" + self.tiny": ""}),
    "a root": (LLAMA, {"torch.rsqrt": "torch.sqrt"}),
    "two variables change places": (
        LLAMA,
        {"x = x.to(torch": "variance = x.to(torch", "variance = x.pow": "x = variance.pow"},
    ),
    "two epsilons": (META, {"self.tiny": "self.tiny + self.eps"}),
    "another norm": (META, {"x * torch.rsqrt(": "x / torch.sqrt("}),
    "a gate": (LLAMA, {"self, x": "self, x, gate=None"}),
    "a decorator": (LLAMA, {"    def": "    @torch.no_grad()\n    def"}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_source_is_noticed(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, replaced = CHANGES[change]
    head = "import torch\nfrom tests.unit.ops.test_norms import Copied\n"
    whole = f"{head}class Known(Copied):{source}class Changed(Copied):"
    for old, new in replaced.items():
        assert old in source
        source = source.replace(old, new)
    (tmp_path / "written.py").write_text(whole + source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "written", raising=False)
    written = importlib.import_module("written")
    assert len(list(recognized(written.Known()))) == 1
    assert list(recognized(written.Changed())) == []


@pytest.mark.parametrize("name", OTHERS)
def test_other_norms_of_transformers(name: str) -> None:
    assert norm_recipe(of_transformers(name)(WIDTH)) is None


def test_modules_that_are_not_as_their_class() -> None:
    own, inner, scalar, bare, parametrized = Copied(), First(), Copied(), Copied(), Copied()
    own.forward = nn.Identity()
    inner._norm = lambda x: x
    scalar.weight = nn.Parameter(torch.ones(1, WIDTH))
    bare.weight = None
    nn.utils.parametrize.register_parametrization(parametrized, "weight", nn.Identity())
    for net in (own, inner, scalar, bare, parametrized):
        assert list(recognized(net)) == []


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", THEIRS)
def test_numbers(name: str, dtype: torch.dtype, calls: Callable[[], int]) -> None:
    """Within a step of the exact values; outputs in bf16 within half of one, as rounded once."""
    net = made(name, dtype)
    own = step(net)
    with gemmsmith.patch(net):
        found = step(net)
    assert calls() == 1
    eps = 2 * torch.finfo(dtype).eps
    for ours, theirs, exactly in zip(found, own, exact(net), strict=True):
        assert (ours.dtype, ours.shape, ours.stride()) == (dtype, theirs.shape, theirs.stride())
        limit = eps * float(exactly.abs().max())
        assert float((ours.double() - exactly).abs().max()) <= limit
        assert float((ours.double() - theirs.double()).abs().max()) <= 2 * limit
    if dtype is BF16:
        ours, exactly = found[0].double(), exact(net)[0]
        assert bool(((ours - exactly).abs() <= 2**-8 * exactly.abs()).all())


def exact(net: nn.Module) -> list[torch.Tensor]:
    """As `step`, in FP64."""
    weight: Any = net.weight
    x, w = given(weight.dtype).detach().double(), weight.detach().double()
    x.requires_grad_()
    w.requires_grad_()
    scale = 1 + w if type(net).__name__ in ADDS_ONE else w
    out = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * scale
    torch.manual_seed(5)
    grad = torch.randn(out.shape).to(weight.dtype).double()
    return [out.detach(), *torch.autograd.grad(out, [x, w], grad)]


def test_sizes_that_torchs_kernel_may_not_count_are_the_modules_own(
    calls: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = made()
    with gemmsmith.patch(net):
        for most, expected in ((2 * 5 * WIDTH + 1, 1), (2 * 5 * WIDTH, 0)):
            monkeypatch.setattr(recipes, "MOST", most)
            net(given())
            assert calls() == expected


def test_only_while_patched(calls: Callable[[], int]) -> None:
    net = made()
    keys, kind, expected = list(net.state_dict()), type(net), step(net)
    with gemmsmith.patch(net):
        assert is_patched(net)
        assert type(net) is kind
        assert list(net.state_dict()) == keys
        step(net)
        assert calls() == 1
    assert not is_patched(net)
    assert equal(step(net), expected)
    assert calls() == 0


def test_epsilon_is_that_of_the_call(calls: Callable[[], int]) -> None:
    net = made()
    with gemmsmith.patch(net):
        first = step(net)
        net.variance_epsilon = 100.0
        assert not equal(step(net), first)
        assert calls() == 2
    net.variance_epsilon = 7
    with gemmsmith.patch(net):
        step(net)
    assert calls() == 0


def test_scales_are_those_of_the_call(calls: Callable[[], int]) -> None:
    net = made("Gemma4RMSNorm")
    with gemmsmith.patch(net):
        net.with_scale = False
        found = net(given())
    assert calls() == 0
    assert torch.equal(found, net(given()))


def test_the_same_bits_without_winners(
    calls: Callable[[], int], engine: Engine, chooser: Chooser, host: Host
) -> None:
    net = made()
    expected = step(net)
    engine._chooser.snapshot = Snapshot.of("h200", [])  # type: ignore[attr-defined]
    with gemmsmith.patch(net):
        assert equal(step(net), expected)
        del engine._chooser.snapshot  # type: ignore[attr-defined]
        host.kind = "cuda"
        assert equal(step(net), expected)
    gemmsmith.use(None)
    with gemmsmith.patch(net, report=True, file=io.StringIO()):
        assert equal(step(net), expected)
    assert calls() == 0


def test_operands_that_are_the_modules_own_affair(calls: Callable[[], int]) -> None:
    class Their(torch.Tensor):
        pass

    net, x = made(), given().detach()
    others: dict[str, Callable[[], torch.Tensor]] = {
        "another type": lambda: net(x.float()),
        "by name": lambda: net(hidden_states=x),
        "a subclass": lambda: net(x.as_subclass(Their)),
        "strides": lambda: net(x.transpose(0, 1)),
        "no rows": lambda: net(x[:0]),
        "one for all": lambda: net(x[..., :1].contiguous()),
        "a transform": lambda: torch.func.vmap(net)(x),
        "without data": lambda: copy.deepcopy(net).to("meta")(x.to("meta")),
    }
    for what, compute in others.items():
        expected = compute()
        with gemmsmith.patch(net):
            found = compute()
        assert type(found) is type(expected), what
        assert (found.dtype, found.stride()) == (expected.dtype, expected.stride()), what
        assert found.is_meta or torch.equal(found, expected), what
    with gemmsmith.patch(net), pytest.raises(TypeError):
        net()
    net.double()
    with gemmsmith.patch(net):
        step(net)
    assert calls() == 0


def test_under_autocast(calls: Callable[[], int]) -> None:
    net = made(dtype=torch.float32)
    with torch.autocast("cpu", BF16):
        expected = step(net)
        with gemmsmith.patch(net):
            assert equal(step(net), expected)
    assert calls() == 0


def test_compiled_as_one_graph(calls: Callable[[], int]) -> None:
    net = made()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    expected = step(compiled)
    with gemmsmith.patch(net):
        assert equal(step(compiled), expected)
    assert calls() == 0


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_written_down_for_others(calls: Callable[[], int]) -> None:
    net, x = made(), given().detach()
    with gemmsmith.patch(net):
        exported = torch.export.export(net, (x,))
        traced = torch.jit.trace(net, (x,), check_trace=False)
    for text in (str(exported.graph), str(traced.inlined_graph)):
        assert "rsqrt" in text
        assert "rms_norm" not in text
    assert calls() == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_activation_checkpointing(calls: Callable[[], int], reentrant: bool) -> None:
    net, x = made(), given()
    with gemmsmith.patch(net):
        expected = step(net, x)
        net.zero_grad()
        out = checkpoint(net, x, use_reentrant=reentrant)
        torch.manual_seed(5)
        out.backward(torch.randn(out.shape).to(BF16))
    assert calls() == 3  # forwards again for the backward pass
    assert net.weight.grad is not None
    assert equal([out, x.grad, net.weight.grad], expected)


def test_hooks_are_called(calls: Callable[[], int]) -> None:
    net, called = made(), list[str]()
    net.register_forward_hook(lambda *_: called.append("hook"))
    with gemmsmith.patch(net):
        step(net)
    assert (called, calls()) == (["hook"], 1)


def test_copies_and_pickles_are_not_patched(calls: Callable[[], int]) -> None:
    net = made()
    expected, kind = step(net), type(net)
    with gemmsmith.patch(net):
        others = [copy.deepcopy(net), copy.copy(net), pickle.loads(pickle.dumps(net))]
        assert [type(one) for one in others] == [kind] * 3
        for other in others:
            assert equal(step(other), expected)
    assert calls() == 0


def test_a_norm_that_was_wrapped_while_patched(calls: Callable[[], int]) -> None:
    net = made()
    expected = step(net)
    gemmsmith.patch(net)
    net.__class__ = type("Sharded", (net.__class__,), {})
    step(net)
    assert calls() == 1
    gemmsmith.unpatch(net)
    assert equal(step(net), expected)
    assert calls() == 0


@pytest.mark.filterwarnings("ignore")  # torch's own
@pytest.mark.parametrize("first", ["patch", "shard"])
def test_under_fsdp2(calls: Callable[[], int], mesh: Any, first: str) -> None:
    net = made()
    if first == "patch":
        gemmsmith.patch(net)
    fully_shard(net, mesh=mesh)
    if first == "shard":
        gemmsmith.patch(net)
    net(given()).float().sum().backward()
    assert calls() == 1
    assert net.weight.grad is not None
    gemmsmith.unpatch(net)
    net(given())
    assert calls() == 0


def test_a_capture_of_products_has_no_norms(calls: Callable[[], int]) -> None:
    net = made()
    with gemmsmith.capture() as shapes, gemmsmith.patch(net):
        step(net)
    assert shapes.problems == {}


def test_a_step_of_a_model(calls: Callable[[], int], chooser: Chooser) -> None:
    """Each of its norms, whatever becomes of its products."""
    chooser.answers = lambda problem: False
    tiny = next(one for one in MODELS if one.name == "Qwen3")
    model = tiny.model()
    expected = tiny.step(model)
    with gemmsmith.patch(model):
        found = tiny.step(model)
    assert calls() == 9
    for name, one in expected.items():
        bound = 0.06 * max(float(one.abs().max()), 1e-2)
        torch.testing.assert_close(found[name], one, rtol=0, atol=bound, msg=name)


def test_norms_of_all_models(calls: Callable[[], int]) -> None:
    """Also where nothing else is to be swapped."""
    remember()
    model = MODELS[0].model()
    norms, rest = 5, 2

    def swapped() -> int:
        return sum(map(is_patched, model.modules()))

    with every_norm():
        assert swapped() == norms
        MODELS[0].run(model)
        assert calls() == norms
        with every_model():
            assert swapped() == norms + rest
        assert swapped() == norms
    assert swapped() == 0
    assert built._Built.listeners == []
