"""Programs that use many features of torch, and notice if something observes or changes them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as checkpoints
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

BF16 = torch.bfloat16
Program = Callable[[], Any]


def operand(*size: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    count = torch.Size(size).numel()
    return (torch.arange(count, dtype=torch.float32).sin() / 4).view(size).to(dtype)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)).to(BF16)


def step(model: nn.Module, x: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Losses and gradients."""
    x = operand(4, 16) if x is None else x
    x = x.detach().requires_grad_()
    out = model(x)
    out.float().square().sum().backward()
    tensors = [out.detach(), x.grad, *(p.grad for p in model.parameters())]
    model.zero_grad()
    return [one for one in tensors if one is not None]


def product(a: torch.Tensor) -> torch.Tensor:
    return a @ a.mT @ a


def compiled(run: Callable[..., Any], **how: Any) -> Program:
    def program() -> Any:
        torch._dynamo.reset()
        return torch.compile(run, **({"backend": "aot_eager"} | how))()

    return program


# Higher-order operators.


def cond() -> Any:
    a = operand(8, 8)
    return torch.cond(a.sum() > 0, lambda a: a @ a, lambda a: a + 1, (a,))


def while_loop() -> Any:
    from torch._higher_order_ops import while_loop as loop

    start = (torch.tensor(0), operand(8, 8))
    return loop(lambda i, _: i < 3, lambda i, a: (i + 1, product(a)), start)


def scan() -> Any:
    from torch._higher_order_ops.scan import scan as run

    return run(lambda a, x: (a @ x, (a @ x).clone()), operand(8, 8), operand(3, 8, 8))


def associative_scan() -> Any:
    from torch._higher_order_ops.associative_scan import associative_scan as run

    return run(torch.matmul, operand(4, 8, 8), dim=0, combine_mode="generic")


def mapped() -> Any:
    from torch._higher_order_ops.map import map as run

    return run(lambda a, b: a @ b, operand(3, 4, 8), operand(8, 4))


def flex() -> Any:
    q = operand(1, 2, 32, 16, dtype=torch.float32)  # no gradients on the CPU
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 32, 32, device="cpu")
    return flex_attention(q, q, q, block_mask=mask)


def attention_within_a_model() -> Any:
    q = operand(1, 2, 32, 16, dtype=torch.float32)
    return flex_attention(q @ q.mT @ q, q, q)


def hints() -> Any:
    from torch._higher_order_ops.invoke_subgraph import mark_compile_region  # type: ignore

    return mark_compile_region(product)(operand(8, 8))


# Tensor subclasses.


class Wrapper(torch.Tensor):
    """A subclass with its own dispatch, which counts calls."""

    seen: list[str] = []  # noqa: RUF012

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(str(func))
        unwrap = partial(tree_map, lambda x: x.inner if isinstance(x, cls) else x)
        out = func(*unwrap(args), **unwrap(kwargs or {}))
        return tree_map(lambda x: cls(x) if isinstance(x, torch.Tensor) else x, out)


class Jealous(torch.Tensor):
    """A subclass that intercepts every function of torch, and supports few."""

    seen: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        cls.seen.append(name)
        if name not in ("matmul", "__matmul__", "as_subclass", "__get__", "detach", "clone"):
            raise TypeError(f"{name} is not supported")
        return super().__torch_function__(func, types, args, kwargs or {})


def wrapped() -> Any:
    Wrapper.seen.clear()
    out: Any = Wrapper(operand(4, 8)) @ Wrapper(operand(8, 4))
    return out.inner, Wrapper.seen.copy()


def jealous() -> Any:
    a = operand(4, 8).as_subclass(Jealous)
    b = operand(8, 4).as_subclass(Jealous)
    Jealous.seen.clear()
    out = a @ b
    return out.as_subclass(torch.Tensor), Jealous.seen.copy()


def dispatch_mode() -> Any:
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Mode():
        return step(net()), seen


def function_mode() -> Any:
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    with Mode():
        return step(net()), seen


def flops() -> Any:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        step(net())
    return counter.get_total_flops()


def profiled() -> Any:
    model = net()
    step(model)
    with torch.profiler.profile(record_shapes=True) as profile:
        step(model)
    return sorted((one.name, str(one.input_shapes)) for one in profile.events() or [])


# Transforms.


def functorch() -> Any:
    a, b = operand(3, 4, 8), operand(8, 4)
    model = net()
    weights = dict(model.named_parameters())

    def loss(weights: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, x).float().square().sum()

    f32 = operand(4, 4, dtype=torch.float32)
    return (
        torch.vmap(lambda one: one @ b)(a),
        torch.vmap(torch.vmap(torch.dot, (None, 0)), (0, None))(f32, f32),
        torch.func.grad(loss)(weights, operand(4, 16)),
        torch.vmap(torch.func.grad(loss), (None, 0))(weights, operand(3, 4, 16)),
        torch.func.jvp(product, (f32,), (f32,)),
        torch.func.jacrev(product)(f32),
        torch.func.hessian(lambda x: product(x).sum())(f32),
        torch.func.linearize(product, f32)[1](f32),
    )


def forward_mode() -> Any:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(operand(4, 4), operand(4, 4))
        return tuple(forward_ad.unpack_dual(product(dual)))


def double_backward() -> Any:
    x = operand(4, 4, dtype=torch.float32).requires_grad_()
    (g,) = torch.autograd.grad(product(x).sum(), x, create_graph=True)
    return torch.autograd.grad(g.square().sum(), x)


def traced() -> Any:
    x = operand(8, 8)
    graphs = [make_fx(product, tracing_mode=how)(x) for how in ("real", "fake", "symbolic")]
    return [graph(x) for graph in graphs], [str(graph.graph) for graph in graphs]


def exported() -> Any:
    rows = torch.export.Dim("rows", min=2, max=64)
    programs = [
        torch.export.export(net(), (operand(4, 16),), strict=strict, dynamic_shapes=({0: rows},))
        for strict in (False, True)
    ]
    return [one.module()(operand(5, 16)) for one in programs], [str(one.graph) for one in programs]


def jit() -> Any:
    x = operand(8, 8)

    def forked(x: torch.Tensor) -> torch.Tensor:
        future = torch.jit.fork(product, x)
        return torch.jit.wait(future) @ x

    traced, scripted = torch.jit.trace(product, x), torch.jit.script(product)
    return traced(x), scripted(x), str(traced.graph), torch.jit.trace(forked, x)(x)


def symbolic_fx() -> Any:
    graph = torch.fx.symbolic_trace(net())
    return graph(operand(4, 16)), str(graph.graph)


# Autograd.


def checkpointed(**how: Any) -> Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoints.checkpoint(self.inner, x, **how)

    return lambda: step(Model())


def selective() -> Any:
    save = [torch.ops.aten.addmm.default]
    return partial(checkpoints.create_selective_checkpoint_contexts, save)


def saved_hooks() -> Any:
    packed = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tuple(tensor.shape))
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return step(net()), packed


def compiled_autograd() -> Any:
    torch._dynamo.reset()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        return step(net())


def anomalies() -> Any:
    with torch.autograd.detect_anomaly():
        return step(net())


# Unusual operands and states.


def sparse() -> Any:
    a = operand(8, 8, dtype=torch.float32)
    kept = a * (a > 0.1)
    ways = [kept.to_sparse(), kept.to_sparse_csr()]
    return [torch.sparse.mm(one, a) for one in ways], [torch.addmm(a, one, a) for one in ways]


def nested() -> Any:
    parts = [operand(3, 8), operand(5, 8)]
    w = operand(8, 4)
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    strided = torch.nested.nested_tensor(parts)
    return (
        torch.nn.functional.linear(jagged, w.t()).values(),
        torch.bmm(strided, torch.nested.nested_tensor([w, w])).to_padded_tensor(0.0),
    )


def lazy_bits() -> Any:
    a = torch.complex(operand(4, 4, dtype=torch.float32), operand(4, 4, dtype=torch.float32))
    return a.conj() @ a.mH, a.conj().imag @ a.real, torch._efficientzerotensor((4, 4)) @ a.real


def other_layouts() -> Any:
    a = operand(4, 8, dtype=torch.float32)
    products = a[:, 1:] @ a[:, :7].t(), a.expand(3, 4, 8) @ a.t(), a[::2] @ a.t()
    return products, torch.einsum("ij,kj,kl->il", a, a, a), torch.linalg.multi_dot([a, a.t(), a])


def into_outputs() -> Any:
    a, out = operand(8, 8), torch.empty(8, 8, dtype=BF16)
    returned = torch.mm(a, a, out=out)
    assert returned is out
    added = operand(8, 8)
    assert added.addmm_(a, a, beta=0.5) is added
    assert torch.addmm(added, a, a, alpha=2, out=out) is out
    return out, added, torch.baddbmm(operand(2, 8, 8), operand(2, 8, 8), operand(2, 8, 8))


def errors() -> Any:
    raised = []
    for a, b in ((operand(4, 8), operand(4, 8)), (operand(4, 8), operand(8, 4).float())):
        try:
            a @ b
        except Exception as error:  # noqa: BLE001
            raised.append((type(error), str(error)))
    return raised


def states() -> Any:
    results = []
    for state in (
        torch.no_grad(),
        torch.inference_mode(),
        torch.autocast("cpu", dtype=BF16),
        torch.device("cpu"),
        torch.random.fork_rng(),
    ):
        with state:
            results.append(net().float()(operand(4, 16, dtype=torch.float32)))
    return results


def recurrent() -> Any:
    torch.manual_seed(0)
    model = nn.LSTM(8, 8, 2, bidirectional=True)
    transformer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    with torch.no_grad():
        return model(operand(5, 2, 8, dtype=torch.float32)), transformer(operand(2, 5, 16).float())


def meta() -> Any:
    a = torch.empty(4, 8, device="meta")
    return (a @ a.t()).shape


def threads() -> Any:
    models = [net() for _ in range(8)]
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(step, models))


def loader() -> Any:
    data = [operand(8, 8) for _ in range(8)]
    collate = lambda rows: torch.stack([product(one) for one in rows])  # noqa: E731
    return list(torch.utils.data.DataLoader(data, 4, num_workers=2, collate_fn=collate))


def builds_modules() -> Any:
    def run() -> torch.Tensor:
        return nn.Sequential(nn.Identity(), nn.ReLU())(product(operand(8, 8)))

    return compiled(run, fullgraph=True)()


def compiled_step(**how: Any) -> Program:
    def program() -> Any:
        torch._dynamo.reset()
        model = torch.compile(net(), **how)
        return [step(model, operand(rows, 16)) for rows in (4, 5, 6)]

    return program


def compiled_optimizer() -> Any:
    torch._dynamo.reset()
    model = net().float()
    optimizer = torch.optim.AdamW(model.parameters())
    advance = torch.compile(optimizer.step, backend="aot_eager")
    for _ in range(3):
        model(operand(4, 16).float()).square().sum().backward()
        advance()
        optimizer.zero_grad()
    return [one.detach() for one in model.parameters()]


PROGRAMS: dict[str, Program] = {
    "cond": cond,
    "cond, compiled": compiled(cond, fullgraph=True),
    "while_loop": while_loop,
    "while_loop, compiled": compiled(while_loop, fullgraph=True),
    "scan": scan,
    "scan, compiled": compiled(scan, fullgraph=True),
    "associative_scan": associative_scan,
    "map": mapped,
    "map, compiled": compiled(mapped, fullgraph=True),
    "flex_attention": flex,
    "flex_attention, compiled": compiled(attention_within_a_model, fullgraph=True),
    "a region": hints,
    "a wrapper": wrapped,
    "a subclass of functions": jealous,
    "a dispatch mode": dispatch_mode,
    "a function mode": function_mode,
    "flops": flops,
    "profiled": profiled,
    "functorch": functorch,
    "forward mode": forward_mode,
    "double backward": double_backward,
    "make_fx": traced,
    "exported": exported,
    "jit": jit,
    "fx": symbolic_fx,
    "checkpoint, reentrant": checkpointed(use_reentrant=True),
    "checkpoint": checkpointed(use_reentrant=False),
    "checkpoint, selective": checkpointed(use_reentrant=False, context_fn=selective()),
    "saved tensors": saved_hooks,
    "compiled autograd": compiled_autograd,
    "anomalies": anomalies,
    "sparse": sparse,
    "nested": nested,
    "lazy bits": lazy_bits,
    "layouts": other_layouts,
    "out=": into_outputs,
    "errors": errors,
    "states": states,
    "recurrent": recurrent,
    "meta": meta,
    "threads": threads,
    "loader": loader,
    "modules built in compiled code": builds_modules,
    "compiled": compiled_step(backend="aot_eager", fullgraph=True),
    "compiled, dynamic": compiled_step(backend="aot_eager", fullgraph=True, dynamic=True),
    "compiled, in parts": compiled_step(backend="eager"),
    "compiled optimizer": compiled_optimizer,
}
