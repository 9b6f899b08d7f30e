"""Rotary position embeddings of a patched model: recognized by source, and computed by one kernel.

On the CPU torch's operators stand in for the kernel: they compute the same, rounded once.
"""

from __future__ import annotations

import copy
import gc
import importlib
import io
import pickle
import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from transformers.models.llama import modeling_llama

import gemmsmith
from gemmsmith.answers.snapshot import Snapshot
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.models import rotary as recipes
from gemmsmith.ops.models.automatic import every_norm
from gemmsmith.ops.models.patching import open_patch
from gemmsmith.ops.models.rotary_forms import rotary_recipe
from gemmsmith.ops.products import rotary as products
from gemmsmith.program.built import remember
from tests.support.stand_in import Chooser, Host
from tests.support.tiny_models import MODELS

BF16 = torch.bfloat16
BATCH, LENGTH, HEADS, GROUPS, WIDTH = 2, 5, 4, 2, 16


@dataclass(frozen=True, kw_only=True)
class Case:
    """A function of transformers, and how its models call it.

    Attributes:
        models: name of the folder.
        name: of the function.
        factors: width of the cosines.
        layout: order of the dimensions of Q and K; `S H` has no batch.
    """

    models: str
    name: str = "apply_rotary_pos_emb"
    factors: int = WIDTH
    layout: str = "B H S"

    @property
    def module(self) -> Any:
        return importlib.import_module(f"transformers.models.{self.models}.modeling_{self.models}")

    @property
    def function(self) -> Any:
        return getattr(self.module, self.name)

    def operands(self, dtype: torch.dtype, of_factors: torch.dtype) -> list[torch.Tensor]:
        """Q, K, cosines and sines. Q and K are parts of one product, as in many models."""
        torch.manual_seed(4)
        whole = 3 * torch.randn(BATCH, LENGTH, (HEADS + GROUPS) * WIDTH)
        parts = whole.to(dtype).split((HEADS * WIDTH, GROUPS * WIDTH), dim=-1)
        q, k = (part.view(BATCH, LENGTH, -1, WIDTH) for part in parts)
        shape = (BATCH, LENGTH, self.factors)
        if self.layout == "B H S":
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        if self.layout == "S H":
            q, k, shape = q[0], k[0], shape[1:]
        # The halves differ, as they may: a model's own are equal.
        return [q, k, *(torch.rand(shape).to(of_factors) for _ in range(2))]

    def __call__(self, q: Any, k: Any, cos: Any, sin: Any) -> list[torch.Tensor]:
        function, named = self.function, {}
        if self.layout == "B S H" and self.name == "apply_rotary_pos_emb":
            named = {} if self.models == "gptj" else {"unsqueeze_dim": 2}
        if self.models in ("gemma3n", "gptj"):
            factors = (sin, cos) if self.models == "gptj" else (cos, sin)
            return [function(x, *factors, **named) for x in (q, k)]
        return [*function(q, k, cos, sin, **named)]


CASES = [
    Case(models="llama"),
    Case(models="granite", layout="B S H"),
    Case(models="nanochat"),
    Case(models="cohere"),
    Case(models="blt"),
    Case(models="olmo2"),
    Case(models="modernbert"),
    Case(models="ernie4_5"),
    Case(models="ernie4_5_vl_moe"),
    Case(models="hunyuan_vl"),
    Case(models="helium"),
    Case(models="gpt_neox", factors=8),
    Case(models="gpt_neox"),
    Case(models="glm", factors=8),
    Case(models="glm4v", factors=8),
    Case(models="phi3", factors=12),
    Case(models="nemotron", factors=8),
    Case(models="deepseek_v3", name="apply_rotary_pos_emb_interleave"),
    Case(models="gptj", factors=8, layout="B S H"),
    Case(models="gpt_oss", factors=8),
    Case(models="openai_privacy_filter", factors=8),
    Case(models="gemma3n", layout="B S H"),
    Case(models="qwen2_5_vl", name="apply_rotary_pos_emb_vision", layout="S H"),
]
LLAMA = CASES[0]
FILES = {"apply_rotary_pos_emb": 159, "apply_rotary_pos_emb_interleave": 9} | {
    "apply_rotary_pos_emb_vision": 22
}
"""Modeling files of transformers whose function of this name is recognized."""
OTHERS = {
    "clvp": "apply_rotary_pos_emb",  # V as well
    "deepseek_v2": "apply_rotary_emb",  # complex numbers
    "deepseek_v4": "apply_rotary_pos_emb",  # the last elements of a head
    "dinov3_vit": "apply_rotary_pos_emb",  # a prefix without positions
    "llama4": "apply_rotary_emb",  # complex numbers
    "pe_audio": "apply_rotary_pos_emb",  # matrices
    "qwen4_exp": "apply_rotary_pos_emb",  # a branch
    "sam3": "apply_rotary_pos_emb_2d",
}


class Layer(nn.Module):
    """A module whose class lies in the Python module of a case."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.inner = type("Attention", (nn.Module,), {"__module__": case.module.__name__})()


@pytest.fixture
def calls(
    engine: Engine, without_binding: None, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], int]:
    """How often the kernel's function ran since this was last called."""
    count, own = [0], recipes.rotary

    def counted(*given: Any, **named: Any) -> Any:
        count[0] += 1
        return own(*given, **named)

    monkeypatch.setattr(recipes, "rotary", counted)

    def since() -> int:
        ran, count[0] = count[0], 0
        return ran

    return since


def step(compute: Callable[..., list[torch.Tensor]], operands: list[Any]) -> list[torch.Tensor]:
    """The results, and the gradients of Q and K."""
    q, k = (x.detach().requires_grad_() for x in operands[:2])
    results = compute(q, k, *operands[2:])
    torch.manual_seed(5)
    pushes = [torch.randn(x.shape).to(BF16).to(x.dtype) for x in results]
    return [*(x.detach() for x in results), *torch.autograd.grad(results, (q, k), pushes)]


def equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(some, others, strict=True))


def test_functions_of_transformers() -> None:
    """All modeling files are imported that may have such a function."""
    root = Path(str(transformers.__file__)).parent / "models"
    count, files = Counter[str](), 0
    for path in sorted(root.glob("*/modeling_*.py")):
        names = re.findall(r"^def (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        if any("rotary" in name or "rope" in name for name in names):
            owner = f"transformers.models.{path.parent.name}.{path.stem}"
            module = importlib.import_module(owner)
            recognized = [name for name in names if rotary_recipe(vars(module)[name])]
            count.update(recognized)
            files += bool(recognized)
    assert (count, files) == (FILES, 166)


@pytest.mark.parametrize("models", OTHERS)
def test_other_functions_of_transformers(models: str) -> None:
    assert rotary_recipe(Case(models=models, name=OTHERS[models]).function) is None


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (torch.float16, torch.float32)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.models}-{case.factors}")
def test_numbers(
    case: Case, dtypes: tuple[torch.dtype, torch.dtype], calls: Callable[[], int]
) -> None:
    """At least as near to the exact values as the function's own, with its types and strides."""
    operands = case.operands(*dtypes)
    own = step(case, operands)
    exact = step(case, [x.double() for x in operands])
    with gemmsmith.patch(Layer(case)):
        results = step(case, operands)
    assert calls() == (2 if case.models in ("gemma3n", "gptj") else 1)
    for mine, theirs, exactly in zip(results, own, exact, strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        assert float((mine - exactly).norm()) <= 1.001 * float((theirs - exactly).norm())
        bound = torch.finfo(mine.dtype).eps * exactly.abs() / 2 + 1e-5
        assert bool(((mine - exactly).abs() <= bound).all())
    for mine, theirs in zip(results[:2], own[:2], strict=True):
        assert mine.stride() == theirs.stride()
    assert equal(step(case, operands), own)
    assert calls() == 0


def test_functions_in_use_are_those_of_open_patches(calls: Callable[[], int]) -> None:
    module, own, operands = LLAMA.module, LLAMA.function, LLAMA.operands(BF16, BF16)
    first, second = Layer(LLAMA), Layer(LLAMA)
    gemmsmith.patch(first)
    stand_in = LLAMA.function
    assert stand_in is not own
    with gemmsmith.patch(second), every_norm():
        gemmsmith.unpatch(first)
        assert LLAMA.function is stand_in
        step(LLAMA, operands)
        assert calls() == 1
        assert pickle.loads(pickle.dumps(stand_in)) is stand_in
    assert module.apply_rotary_pos_emb is own
    stand_in(*operands)  # a program may have kept it
    assert calls() == 0
    with gemmsmith.patch(first):
        assert LLAMA.function is stand_in


def test_a_function_that_the_program_replaces_is_its_own(
    calls: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    operands, layer, first = LLAMA.operands(BF16, BF16), Layer(LLAMA), LLAMA.function
    for name in ("rotate_half", "apply_rotary_pos_emb"):
        with monkeypatch.context() as changed:
            gemmsmith.patch(layer)
            own = LLAMA.function if name != "rotate_half" else LLAMA.module.rotate_half

            def replaced(*given: Any, own: Any = own) -> Any:
                result = own(*given)
                return 2 * result if isinstance(result, torch.Tensor) else result

            changed.setattr(LLAMA.module, name, replaced)
            expected = step(LLAMA, operands)
            assert calls() == int(name != "rotate_half")
            gemmsmith.unpatch(layer)
            assert getattr(LLAMA.module, name) is replaced
            results = step(LLAMA, operands)
            if name == "rotate_half":
                assert equal(results, expected)
        assert calls() == 0
    with gemmsmith.patch(layer):  # the program has put back what it had read during the patch
        step(LLAMA, operands)
    assert calls() == 1
    assert LLAMA.function is first


def test_torchs_functions_must_be_the_originals(
    calls: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    operands, own = LLAMA.operands(BF16, BF16), torch.cat
    with gemmsmith.patch(Layer(LLAMA)):
        monkeypatch.setattr(torch, "cat", lambda *given, **named: 2 * own(*given, **named))
        step(LLAMA, operands)
    assert calls() == 0


def test_only_with_winners(
    calls: Callable[[], int], engine: Engine, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    operands = LLAMA.operands(BF16, BF16)
    expected = step(LLAMA, operands)
    engine._chooser.snapshot = Snapshot.of("h200", [])  # type: ignore[attr-defined]
    with gemmsmith.patch(Layer(LLAMA)):
        assert equal(step(LLAMA, operands), expected)
        del engine._chooser.snapshot  # type: ignore[attr-defined]
        host.kind = "cuda"
        assert equal(step(LLAMA, operands), expected)
    gemmsmith.use(None)
    with gemmsmith.patch(Layer(LLAMA), report=True, file=io.StringIO()):
        assert equal(step(LLAMA, operands), expected)
    assert calls() == 0


def test_functions_of_all_models(calls: Callable[[], int]) -> None:
    """Of those that exist, and of those that are built within the block."""
    remember()
    own, case = LLAMA.function, CASES[3]
    model = nn.Sequential(Layer(LLAMA))
    with every_norm():
        assert LLAMA.function is not own
        assert case.function.__module__ == case.module.__name__
        nn.Sequential(Layer(case))
        step(case, case.operands(BF16, BF16))
        assert calls() == 1
    assert LLAMA.function is own
    assert isinstance(model[0], Layer)


Compute = Callable[..., Any]


class Their(torch.Tensor):
    pass


class Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def left_to_torch() -> dict[str, Callable[[Compute], Any]]:
    """Calls that the function itself computes."""
    q, k, cos, sin = LLAMA.operands(BF16, BF16)

    def by_jvp(apply: Compute) -> Any:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(q, torch.ones_like(q))
            return forward_ad.unpack_dual(apply(dual, k, cos, sin)[0]).tangent

    def under_mode(apply: Compute) -> Any:
        with Mode():
            return apply(q, k, cos, sin)

    def of_cosines(apply: Compute) -> Any:
        leaf = cos.clone().requires_grad_()
        return torch.autograd.grad(apply(q, k, leaf, sin)[0].sum(), leaf)

    return {
        "FP64": lambda apply: apply(q.double(), k.double(), cos, sin),
        "K of another type": lambda apply: apply(q, k.float(), cos, sin),
        "factors of another type": lambda apply: apply(q, k, cos.half(), sin.half()),
        "factors of two types": lambda apply: apply(q, k, cos, sin.float()),
        "strides": lambda apply: apply(q.mT.contiguous().mT, k, cos, sin),
        "an expanded operand": lambda apply: apply(q[:, :1].expand(-1, 3, -1, -1), k, cos, sin),
        "no rows": lambda apply: apply(q[:0], k[:0], cos[:0], sin[:0]),
        "no heads of K": lambda apply: apply(q, k[:, :0], cos, sin),
        "factors that expand Q": lambda apply: apply(q[:1], k, cos, sin),
        "a factor for all": lambda apply: apply(q, k, cos[..., :1], sin[..., :1]),
        "five dimensions": lambda apply: apply(q[None], k[None], cos, sin),
        "a dimension that is last": lambda apply: apply(q, k, cos[0, 0], sin[0, 0], -1),
        "a subclass": lambda apply: apply(q.as_subclass(Their), k, cos, sin),
        "negated": lambda apply: apply(torch._neg_view(q), k, cos, sin),
        "without data": lambda apply: apply(*(x.to("meta") for x in (q, k, cos, sin))),
        "a batch": lambda apply: torch.func.vmap(apply)(q[None], k[None], cos[None], sin[None]),
        "a tangent": by_jvp,
        "a mode": under_mode,
        "the gradient of the factors": of_cosines,
        "a wrong width": lambda apply: apply(q[..., :-2], k, cos, sin),
        "a wrong length": lambda apply: apply(q[:, :, 1:], k, cos, sin),
        "no tensor": lambda apply: apply(q, None, cos, sin),
        "too few": lambda apply: apply(q, k, cos),
        "too many": lambda apply: apply(q, k, cos, sin, 1, 2),
        "twice": lambda apply: apply(q, k, cos, sin, q=q),
        "an unknown name": lambda apply: apply(q, k, cos, sin, axis=1),
        "a dimension that is no number": lambda apply: apply(q, k, cos, sin, None),
        "a list of dimensions": lambda apply: apply(q, k, cos, sin, [1]),
    }


def outcome(act: Callable[[Compute], Any], apply: Compute) -> list[torch.Tensor] | str:
    """What a call gives, or its error."""
    try:
        result = act(apply)
    except Exception as error:  # noqa: BLE001 - compared
        return f"{type(error)} {error}"
    return [result] if isinstance(result, torch.Tensor) else [*result]


@pytest.mark.parametrize("what", left_to_torch())
def test_calls_that_the_function_computes(what: str, calls: Callable[[], int]) -> None:
    act = left_to_torch()[what]
    expected = outcome(act, LLAMA.function)
    with gemmsmith.patch(Layer(LLAMA)):
        result = outcome(act, LLAMA.function)
    assert calls() == 0
    if isinstance(expected, str) or isinstance(result, str):
        assert result == expected
        return
    for mine, theirs in zip(result, expected, strict=True):
        assert (type(mine), mine.dtype, mine.stride()) == (
            *(type(theirs), theirs.dtype),
            theirs.stride(),
        )
        assert mine.is_meta or torch.equal(mine, theirs)


def test_calls_by_name(calls: Callable[[], int]) -> None:
    q, k, cos, sin = LLAMA.operands(BF16, BF16)
    with gemmsmith.patch(Layer(LLAMA)):
        expected = LLAMA.function(q, k, cos, sin)
        turned = LLAMA.function(
            sin=sin, cos=cos, k=k.transpose(1, 2), q=q.transpose(1, 2), unsqueeze_dim=-2
        )
        assert calls() == 2
    assert equal([x.transpose(1, 2) for x in turned], expected)


def test_factors_anywhere_in_memory(calls: Callable[[], int]) -> None:
    q, k, cos, sin = LLAMA.operands(BF16, BF16)
    with gemmsmith.patch(Layer(LLAMA)):
        expected = step(LLAMA, [q, k, cos, sin])
        for of_cos in (cos, cos.mT.contiguous().mT, torch.stack([cos, cos], -1)[..., 0]):
            for of_sin in (sin, sin.mT.contiguous().mT):
                assert equal(step(LLAMA, [q, k, of_cos, of_sin]), expected)
        expected = step(LLAMA, [q, k, cos[:1].contiguous(), sin[:1].contiguous()])
        assert equal(
            step(LLAMA, [q, k, cos[:1].expand(2, -1, -1), sin[:1].expand(2, -1, -1)]), expected
        )
    assert calls() == 9


def test_gradients_of_one_operand(calls: Callable[[], int]) -> None:
    q, k, cos, sin = LLAMA.operands(BF16, BF16)
    with gemmsmith.patch(Layer(LLAMA)):
        both = step(LLAMA, [q, k, cos, sin])
        torch.manual_seed(5)
        push, of_k = (torch.randn(x.shape).to(BF16) for x in both[:2])
        leaf = q.detach().requires_grad_()
        new_q, new_k = LLAMA.function(leaf, k, cos, sin)
        assert new_q.requires_grad
        assert not new_k.requires_grad
        assert torch.equal(torch.autograd.grad(new_q, leaf, push)[0], both[2])
        leaves = q.detach().requires_grad_(), k.detach().requires_grad_()
        new_q, _ = LLAMA.function(*leaves, cos, sin)
        of_both = torch.autograd.grad(new_q, leaves, push, allow_unused=True)
        assert torch.equal(of_both[0], both[2])
        assert of_both[1] is None
        leaf = k.detach().requires_grad_()
        new_q, new_k = LLAMA.function(q, leaf, cos, sin)
        assert new_k.requires_grad
        assert torch.equal(torch.autograd.grad(new_k, leaf, of_k)[0], both[3])
        with torch.no_grad():
            assert not LLAMA.function(q, leaf, cos, sin)[1].requires_grad
        with torch.inference_mode():
            assert equal([*LLAMA.function(q, leaf, cos, sin)], both[:2])
    assert calls() == 6


@pytest.mark.parametrize("pairs", [(False, False), (True, True), (True, False)])
@pytest.mark.parametrize("shares", [False, True])
def test_the_kernels_function_is_differentiated_twice(
    pairs: tuple[bool, bool], shares: bool
) -> None:
    rotation = products.Rotation(3, *pairs, shares, has_pairs=pairs[0], sign=-1)
    q, k = (torch.randn(2, heads, 3, 8).double().requires_grad_() for heads in (2, 1))
    cos, sin = (torch.randn(1, 1, 3, 3 if shares else 6).double() for _ in range(2))

    order = q.stride(), k.stride()

    def once(a: torch.Tensor, b: torch.Tensor) -> Any:
        return products.rotary(a, b, cos, sin, rotation, torch.float64, order)

    assert torch.autograd.gradcheck(once, (q, k))
    assert torch.autograd.gradgradcheck(once, (q, k))


def test_under_autocast(calls: Callable[[], int]) -> None:
    operands = LLAMA.operands(BF16, torch.float32)
    with torch.autocast("cpu", BF16):
        own = step(LLAMA, operands)
        with gemmsmith.patch(Layer(LLAMA)):
            results = step(LLAMA, operands)
    assert calls() == 1
    for mine, theirs in zip(results, own, strict=True):
        assert mine.dtype is theirs.dtype
        assert float((mine - theirs).norm()) <= 4e-3 * float(theirs.norm())


class Attending(nn.Module):
    """A module whose forward calls the function of a Python module."""

    def forward(self, q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_graphs_hold_the_functions_own_operators(calls: Callable[[], int]) -> None:
    operands, net = tuple(LLAMA.operands(BF16, BF16)), Attending()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    expected = step(compiled, [*operands])
    with gemmsmith.patch(Layer(LLAMA)):
        assert equal(step(compiled, [*operands]), expected)
        exported = torch.export.export(net, operands)
        traced = torch.jit.trace(net, operands, check_trace=False)
    for text in (str(exported.graph), str(traced.inlined_graph)):
        assert "cat" in text
        assert "unsqueeze" in text
    assert calls() == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_activation_checkpointing(calls: Callable[[], int], reentrant: bool) -> None:
    operands = LLAMA.operands(BF16, BF16)

    def again(*given: Any) -> Any:
        return checkpoint(Attending(), *given, use_reentrant=reentrant)

    with gemmsmith.patch(Layer(LLAMA)):
        expected = step(LLAMA, operands)
        q, k = (x.detach().requires_grad_() for x in operands[:2])
        results = again(q, k, *operands[2:])
        torch.manual_seed(5)
        pushes = [torch.randn(x.shape).to(BF16) for x in results]
        torch.autograd.backward(results, pushes)
    assert calls() == 3
    assert equal([*results, q.grad, k.grad], expected)


@pytest.mark.parametrize("at_first", [True, False])
def test_a_region_is_recomputed_as_it_was_computed(
    calls: Callable[[], int], at_first: bool
) -> None:
    """Whatever patches are open in the backward pass, as for the norm of the region."""
    q, k, cos, sin = LLAMA.operands(BF16, BF16)
    norm, layer = modeling_llama.LlamaRMSNorm(WIDTH).to(BF16), Layer(CASES[3])

    def region(x: torch.Tensor) -> Any:
        return CASES[3].function(norm(x.contiguous()), k, cos, sin)[0]

    def gradient(*, opens: bool, closes: bool) -> torch.Tensor:
        leaf = q.detach().requires_grad_()
        with gemmsmith.patch(norm):
            if opens:
                gemmsmith.patch(layer)
            out = checkpoint(region, leaf, use_reentrant=False)
            gemmsmith.unpatch(layer)
            if not closes:
                gemmsmith.patch(layer)
            out.float().square().sum().backward()
            gemmsmith.unpatch(layer)
        assert leaf.grad is not None
        return leaf.grad

    expected = gradient(opens=at_first, closes=not at_first)
    assert calls() == 2 * at_first
    assert torch.equal(gradient(opens=at_first, closes=at_first), expected)
    assert calls() == 2 * at_first


def test_a_capture_of_products_runs_the_function(calls: Callable[[], int]) -> None:
    with gemmsmith.capture() as shapes, gemmsmith.patch(Layer(LLAMA)):
        step(LLAMA, LLAMA.operands(BF16, BF16))
    assert shapes.problems == {}
    assert calls() == 0


def test_copies_of_models(calls: Callable[[], int]) -> None:
    layer = Layer(LLAMA)
    with gemmsmith.patch(layer):
        assert type(copy.deepcopy(layer)) is Layer
    assert LLAMA.function.__name__ == "apply_rotary_pos_emb"


RUNS = {"Llama": 2, "Cohere": 2, "GLM": 2, "Phi-3": 2, "Qwen3": 2, "OLMo 2": 2, "gpt-oss": 2}
RUNS |= {"DeepSeek-V3": 2, "ModernBERT": 2, "GPT-NeoX": 2}


@pytest.mark.parametrize("name", RUNS)
def test_a_step_of_a_model(name: str, calls: Callable[[], int], chooser: Chooser) -> None:
    """Each of its layers, whatever becomes of its products."""
    chooser.answers = lambda problem: False
    tiny = next(tiny for tiny in MODELS if tiny.name == name)
    model = tiny.model(torch.float32)
    expected = tiny.step(model)
    with gemmsmith.patch(model):
        results = tiny.step(model)
    assert calls() == RUNS[name]
    for parameter, theirs in expected.items():
        torch.testing.assert_close(
            results[parameter], theirs, rtol=1e-3, atol=1e-5, msg=f"{name} {parameter}"
        )


def test_a_patch_of_a_function_replaces_something(calls: Callable[[], int]) -> None:
    patch = open_patch(Layer(LLAMA))
    assert not patch.why_nothing(runs_kernels=False)
    patch.close()


def test_a_report_names_the_functions(calls: Callable[[], int]) -> None:
    report = io.StringIO()
    tiny = MODELS[0]
    model = tiny.model()
    with gemmsmith.patch(model, report=True, file=report):
        tiny.run(model)
    owner = LLAMA.module.__name__
    assert f"1 × apply_rotary_pos_emb of {owner} (rotary embedding)" in report.getvalue()


SOURCE = """
def rotate(x):
    one = x[..., : x.shape[-1] // 2]
    other = x[..., x.shape[-1] // 2 :]
    return torch.cat((-other, one), dim=-1)


def turned(queries, keys, c, s, axis=1):
    c = c.unsqueeze(axis)
    s = s.unsqueeze(axis)
    a = (queries * c) + (rotate(queries) * s)
    b = (keys * c) + (rotate(keys) * s)
    return a, b
"""
CHANGES: dict[str, tuple[str, str]] = {
    "another sine": ("(keys * c) + (rotate(keys) * s)", "(keys * c) + (rotate(keys) * c)"),
    "a difference": ("(keys * c) +", "(keys * c) -"),
    "K is not rotated": ("rotate(keys)", "keys"),
    "results change places": ("return a, b", "return b, a"),
    "another function for K": ("rotate(keys)", "other(keys)"),
    "another third": ("// 2 :", "// 3 :"),
    "another dimension": ("one), dim=-1", "one), dim=-2"),
    "the same half twice": ("(-other, one)", "(-one, one)"),
    "both signs": ("(-other, one)", "(-other, -one)"),
    "a default that is a call": ("turned(queries", "turned(*, queries"),
    "more arguments": ("axis=1)", "axis=1, *more)"),
    "a decorator that wraps": ("def turned", "@torch.no_grad()\ndef turned"),
    "another torch": ("def rotate", "torch = np\n\n\ndef rotate"),
}


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports a source as a module of the name `written`."""
    monkeypatch.syspath_prepend(tmp_path)

    def made(source: str) -> Any:
        monkeypatch.delitem(sys.modules, "written", raising=False)
        head = "import numpy as np\nimport torch\n\nother = torch.neg\n\n"
        (tmp_path / "written.py").write_text(head + source)
        importlib.invalidate_caches()
        return importlib.import_module("written")

    yield made
    sys.modules.pop("written", None)


def test_a_copy_of_a_function(written: Callable[[str], Any], calls: Callable[[], int]) -> None:
    """Also where another module of the program has imported it."""
    module = written(SOURCE)
    assert rotary_recipe(module.turned) is not None
    kind = type("Attention", (nn.Module,), {"__module__": "written"})
    operands = LLAMA.operands(BF16, BF16)
    with gemmsmith.patch(kind()):
        step(module.turned, operands)
    assert calls() == 1
    assert type(module.turned) is FunctionType


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_the_script_compiler_reads_the_functions_source(
    written: Callable[[str], Any], calls: Callable[[], int]
) -> None:
    module = written(SOURCE.replace("axis=1", "axis: int = 1"))
    operands = LLAMA.operands(BF16, BF16)
    expected = module.turned(*operands)
    with gemmsmith.patch(type("Attention", (nn.Module,), {"__module__": "written"})()):
        module.turned(*operands)
        assert calls() == 1
        assert equal([*torch.jit.script(module.turned)(*operands)], [*expected])
    assert calls() == 0


CALLED = (
    SOURCE
    + """
def layer(func):
    class Func(torch.nn.Module):
        def forward(self, *args, **kwargs):
            return func(*args, **kwargs)

    return Func()


turned = layer(turned)
"""
)


def test_a_function_that_a_module_calls(
    written: Callable[[str], Any], calls: Callable[[], int]
) -> None:
    """As the decorators of the package `kernels` make it."""
    module = written(CALLED)
    own, operands = module.turned, LLAMA.operands(BF16, BF16)
    expected = step(own, operands)
    kind = type("Attention", (nn.Module,), {"__module__": "written"})
    for _ in range(2):
        with gemmsmith.patch(kind()):
            step(module.turned, operands)
            assert calls() == 1
            own.forward = lambda *given: [2 * x for x in given[:2]]  # another kernel
            assert equal([*module.turned(*operands)], [2 * x for x in operands[:2]])
            del own.forward
            hook = own.register_forward_hook(lambda *_: None)
            assert equal(step(module.turned, operands), expected)
            hook.remove()
            assert calls() == 0
            step(module.turned, operands)
            assert calls() == 1
        assert module.turned is own
    module.turned = type(own)()
    module.turned.forward = own.forward
    with gemmsmith.patch(kind()):
        step(module.turned, operands)
    assert calls() == 0


def test_models_of_a_program_are_not_kept_alive(
    written: Callable[[str], Any], calls: Callable[[], int]
) -> None:
    """Nor is anything of a module understood that has no forward in Python."""
    module = written(SOURCE)
    module.model = model = nn.Linear(2, 2)
    module.scripted = type("Odd", (nn.Module,), {"forward": len})()
    module.kind = type("Attention", (nn.Module,), {"__module__": "written"})
    with gemmsmith.patch(module.kind()):
        step(module.turned, LLAMA.operands(BF16, BF16))
    assert calls() == 1
    alive = weakref.ref(model)
    del module.model, model
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("what", ["kwargs)\n", "func(*args"])
def test_a_module_that_does_more(
    what: str, written: Callable[[str], Any], calls: Callable[[], int]
) -> None:
    more = {"kwargs)\n": "kwargs)[::-1]\n", "func(*args": "func(*args[::-1]"}[what]
    assert what in CALLED
    module = written(CALLED.replace(what, more))
    own = module.turned
    with gemmsmith.patch(type("Attention", (nn.Module,), {"__module__": "written"})()):
        assert module.turned is own


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_source_is_noticed(change: str, written: Callable[[str], Any]) -> None:
    old, new = CHANGES[change]
    assert old in SOURCE
    assert rotary_recipe(written(SOURCE.replace(old, new)).turned) is None


def test_strides_of_results() -> None:
    """Those of torch's pointwise operators."""
    for sizes in ((2, 3, 4, 6), (1, 3, 4, 6), (2, 1, 4, 6), (2, 3, 1, 6), (3, 4, 6)):
        whole = torch.randn(*(size + 2 for size in sizes[:-1]), sizes[-1])
        for order in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 0, 1), (2, 1, 0)):
            places = [*order, 3] if len(sizes) == 4 else [*(at for at in order if at < 2), 2]
            x = whole.permute(places)[tuple(slice(1, -1) for _ in places[:-1])]
            expected = (x * 2).stride()
            strides = products.dense_strides(x.shape, x.stride())
            for size, mine, theirs in zip(x.shape, strides, expected, strict=True):
                assert size == 1 or mine == theirs
