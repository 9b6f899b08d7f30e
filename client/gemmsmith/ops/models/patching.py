"""`gemmsmith.patch`: tuned kernels in code that calls torch's own operators.

A patch replaces products in three ways.

1. A compiled binding below autograd replaces all products of two matrices in every thread, or with
   a model those with the sizes of its `nn.Linear` modules, if winners may fit any of them. It costs
   a fraction of a microsecond per call (`gemmsmith.ops.below.dispatch`). This includes products
   with FP32 output or added to FP32 sums, INT8 products, and FP32 products while torch may compute
   them in TF32. Experts' grouped products and the FP8 products of `torch._scaled_mm` are replaced
   with or without the binding. `addmm` with a bias is replaced if there are winners that add a
   bias, with a model for the sizes of its layers.
2. Some modules of a model get another forward while the patch is open
   (`gemmsmith.ops.models.forwards`): linear layers with a bias that no winner adds; layers that
   end in an activation, a gate or a residual, which run everything in a single kernel if it won
   (`gemmsmith.ops.models.layers`); and RMS norms, which run torch's fused kernel
   (`gemmsmith.ops.models.norms`). Heads compute no logits where a loss alone reads them
   (`gemmsmith.ops.models.heads`), and a kernel rotates Q and K in place of a function of the
   model's Python module (`gemmsmith.ops.models.rotary`). Without the binding, and
   for a report, all `nn.Linear` modules get such a forward. It costs a call some microseconds,
   about two where nothing wins, and none where no pinned winner fits the layer: such layers are not
   patched.
3. Without the binding and without a model, a torch function mode intercepts the products of this
   thread (`gemmsmith.ops.models.function_mode`).

All three work with autograd and `torch.compile`: graphs have guards on forwards, modes are traced,
and a compiled graph calls torch's operators, which the binding replaces. If a compiler merges a
product and a sum into an `addmm`, as with a residual of two dimensions, it stays torch's.

Without a model, `torch.optim.Muon` computes matrices of equal shape at once
(`gemmsmith.ops.models.optimizers`), and copies of its iteration in other optimizers run our kernels
(`gemmsmith.ops.models.iterations`).

Products without a tuned kernel stay torch's, and so does everything that kernels do not support
(docs/fusing.md).
"""

from __future__ import annotations

import atexit
import sys
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import TextIO

import torch

from gemmsmith.errors import NotInvariant
from gemmsmith.ops.below import compiling, experts, scaling
from gemmsmith.ops.below.blocks import Weights
from gemmsmith.ops.below.dispatch import Dispatch
from gemmsmith.ops.below.prospects import (
    may_add_biases,
    may_group,
    may_replace,
    may_scale,
)
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.in_use import current, demanded, in_use, on_install, why_none
from gemmsmith.ops.engine.recomputing import Again, remember
from gemmsmith.ops.engine.watching import watch
from gemmsmith.ops.models import layers
from gemmsmith.ops.models.forwards import Forwards
from gemmsmith.ops.models.function_mode import Everywhere
from gemmsmith.ops.models.iterations import iterations_in_use
from gemmsmith.ops.models.norms import kind_in_use
from gemmsmith.ops.models.optimizers import muon_in_batches
from gemmsmith.ops.models.recipes import may_be_head
from gemmsmith.ops.models.reporting import ProductsReport
from gemmsmith.ops.models.rotary import Functions
from gemmsmith.ops.products import recording


def patch(
    model: torch.nn.Module | None = None,
    *,
    report: bool = False,
    file: TextIO | None = None,
    numerics: str | None = None,
) -> Patch:
    """Run tuned kernels in `model`, or in the whole process.

    The patch lasts until `unpatch(model)`, or until the end of a `with` block:

        gemmsmith.patch(model)
        with gemmsmith.patch(model): ...

    Patches can be nested; each adds to what the outer ones replace. A block can be opened for every
    step, because decisions are kept for the same winners and model. A CUDA graph keeps the kernels
    that were captured. The winners in use (`gemmsmith.use`) run, also those of a later call. If
    none are in use, a warning is logged once, and torch's own operators run.

    Args:
        model: replace the products of its `nn.Linear` modules (not those of derived classes), the
            grouped and FP8 products with its weights, and the layers that are recognized in it, RMS
            norms among them (docs/fusing.md). Products of the same sizes elsewhere in the process
            are replaced as well. None: replace the products of `F.linear`, `torch.matmul` and `@`,
            `mm`, `bmm` and `_int_mm`, of `addmm` and `baddbmm` with `out_dtype`, of plain `addmm`
            with a bias, of `_scaled_mm`, and grouped ones.
        report: print at the end which kernels ran, how often, what was fused, and the expected
            gain; for a patch that is never undone, at the end of the process.
        file: where to print; None is standard error.
        numerics: "invariant": while the patch is open, a row of a product has the same bits at
            every M. All products that open patches replace run kernels of one order of sums, in
            every thread, or raise NotInvariant (docs/invariance.md).

    Raises:
        ValueError: `numerics` is another word.
        NotInvariant: no winners are in use, or the compiled binding is missing, and `numerics`
            demands them.
    """
    if in_use() is None and not (report or numerics or recording.is_recording()):
        _warn_once()
    return open_patch(model, report=report, file=file, numerics=numerics)


def open_patch(
    model: torch.nn.Module | None = None,
    *,
    report: bool = False,
    file: TextIO | None = None,
    numerics: str | None = None,
) -> Patch:
    """As `patch`, without a warning if no winners are in use."""
    new = Patch(model, file=file, report=report, numerics=numerics)
    with _Patches.lock:
        for forgotten in [active for active in _Patches.open if active._is_forgotten]:
            forgotten.close()
        new._open()
        _Patches.open.append(new)
    return new


def unpatch(model: torch.nn.Module | None = None) -> None:
    """Undo all calls of `patch(model)`; with None, all calls of `patch`.

    `with` blocks end by themselves. Without such a call, nothing happens.
    """
    for active in list(_Patches.open):
        if not active._is_block and (model is None or active._model is model):
            active.close()


def is_patched(model: torch.nn.Module | None) -> bool:
    """Whether an open patch replaces products of `model`, or of any code if it is None."""
    return any(
        model is None or active._reference is None or active._model is model
        for active in list(_Patches.open)
        if not active._is_forgotten
    )


class Patch(AbstractContextManager[None]):
    """An active patch; it lasts until `close`, `unpatch`, or the end of its `with` block."""

    def __init__(
        self,
        model: torch.nn.Module | None,
        *,
        report: bool,
        file: TextIO | None,
        numerics: str | None,
    ) -> None:
        # A weak reference: a patch must not keep a model alive.
        self._reference = None if model is None else weakref.ref(model)
        self._file, self._numerics = file, numerics
        self._report = ProductsReport() if report else None
        self._engine: Engine | None = None
        self._why_none = ""
        self._has_passes = False  # norms, rotary embeddings: what needs no winners of its own
        self._is_block = self._is_bound = False
        self._is_idle = False  # no product of the model's layers may win
        self._linears, self._overridden = Forwards(), set[ModuleType]()
        self._stack = ExitStack()

    def __enter__(self) -> None:
        # The patch lasts until the end of the block, and `unpatch` does not end it.
        self._is_block = True

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Undo the patch; does nothing if it has ended already."""
        with _Patches.lock:
            if self not in _Patches.open:
                return
            # Replacements form a stack: close all later patches, and open them again without this.
            at = _Patches.open.index(self)
            later = _Patches.open[at + 1 :]
            for active in reversed(_Patches.open[at:]):
                active._stack.close()
            del _Patches.open[at:]
            for active in later:
                active._open()
                _Patches.open.append(active)
        if self._report is not None:
            print(self._report.text(self._why_none), file=self._file or sys.stderr)

    def why_nothing(self, *, runs_kernels: bool) -> str:
        """Why nothing has been replaced; empty if something has. Products may run kernels."""
        if self._engine is None:
            return self._why_none
        if runs_kernels or (self._has_passes and kind_in_use() is not None):
            return ""
        return (
            "no product of the step has a winner that runs here; `gemmsmith run --tune -- COMMAND` "
            "tunes a program's products"
        )

    @property
    def _is_forgotten(self) -> bool:
        """Whether the model has been deleted, so that nothing will close the patch."""
        return self._reference is not None and self._model is None and not self._is_block

    @property
    def _model(self) -> torch.nn.Module | None:
        return None if self._reference is None else self._reference()

    def _open(self) -> None:
        model = self._model
        if self._reference is not None and model is None:
            return
        with ExitStack() as stack:
            stack.enter_context(demanded(self._numerics))
            self._engine, self._is_bound, self._is_idle = current(), False, False
            self._overridden.clear()
            self._why_none = why_none() if self._engine is None else ""
            if self._report is not None:
                stack.callback(watch, watch(self._report))
            has_binding = self._replace_below(stack)
            if model is None:
                stack.enter_context(muon_in_batches())
                stack.enter_context(iterations_in_use())
            if model is not None:
                forwards, functions = Forwards(), Functions()
                stack.callback(self._linears.undo)
                stack.callback(forwards.undo)
                stack.callback(functions.undo)
                self._take_over_linears(model, self._engine)
                self._within(model, forwards, functions)
            elif self._engine is not None and not has_binding:
                stack.enter_context(Everywhere())
            self._stack = stack.pop_all()

    def _replace_below(self, stack: ExitStack) -> bool:
        """Replace torch's operators below autograd. Returns whether the binding is used."""
        engine, model = self._engine, self._model
        if engine is None or engine.platform.kind is None:
            return False
        self._override(stack, engine)
        # The binding does not report products to a watcher.
        counts = engine.watcher is not None and not engine.is_invariant
        sizes = None if model is None else _sizes(_linears(model))
        self._is_idle = not counts and model is not None and not may_replace(engine, sizes)
        if self._is_idle:
            return False
        dispatch = None if counts else Dispatch.of(engine.platform.kind)
        if dispatch is None and engine.is_invariant:
            # Without it, torch would compute backward products and those of other threads.
            raise NotInvariant(
                "numerics='invariant' needs the compiled binding; the log says why it is missing"
            )
        if dispatch is None:
            return False
        if engine.is_invariant:
            compiling.install()
        stack.enter_context(dispatch.on(sizes))
        self._is_bound = True
        return True

    def _follow(self) -> None:
        """Replace what other winners need that came into use after the patch was opened."""
        engine = in_use()
        may_bind = engine is not None and (engine.is_invariant or self._is_idle)
        if self._engine is None or (may_bind and not self._is_bound):
            self._engine = engine
            self._why_none = why_none() if engine is None else ""
            self._replace_below(self._stack)
        # Nothing is given back: a checkpointed region may need it again.
        model = self._model
        if engine is not None:
            self._override(self._stack, engine)
        if model is not None:
            self._take_over_linears(model, engine)

    def _override(self, stack: ExitStack, engine: Engine) -> None:
        """Replace grouped and FP8 products where they may win: in Python, which costs all calls."""
        kind, model = engine.platform.kind, self._model
        weights = None if model is None else experts.weights_of(model)
        for replaced, may_win in ((experts, may_group), (scaling, may_scale)):
            if kind and replaced not in self._overridden and may_win(engine):
                self._overridden.add(replaced)
                stack.enter_context(replaced.on(kind, weights))

    def _within(self, model: torch.nn.Module, forwards: Forwards, functions: Functions) -> None:
        recognized = [*layers.recognized(model)]
        rotary = functions.take_over(model.modules())
        self._has_passes = bool(rotary) or any(
            layers.saves_passes(layer.recipe) for layer in recognized
        )
        layers.take_over(forwards, recognized)
        if self._report is not None:
            self._report.recognized(Counter([*map(str, recognized), *rotary]))

    def _take_over_linears(self, model: torch.nn.Module, engine: Engine | None) -> None:
        """Patch the linear layers whose products are not replaced below autograd, and may win."""
        linears = [] if engine is None else _linears(model)
        if engine is not None and (self._is_bound or self._is_idle):
            # The binding replaces the products of layers without a bias. With a bias, torch calls
            # addmm, which is replaced only if a winner adds a bias for such sizes. Otherwise a
            # forward of ours adds it to the product of a plain kernel.
            leaves_biases = self._is_bound and not may_add_biases(engine, _sizes(linears))
            linears = [layer for layer in linears if leaves_biases and layer.bias is not None]
        linears = [layer for layer in linears if not may_be_head(layer)]
        layers.take_over_linear(self._linears, linears, is_bound=self._is_bound)


class _Patches:
    """The open patches of this process, oldest first."""

    lock = threading.RLock()
    open: list[Patch] = []  # noqa: RUF012 - shared by the whole process
    warned = False


def _warn_once() -> None:
    if not _Patches.warned:
        _Patches.warned = True
        warnings.warn(
            f"gemmsmith.patch() replaces nothing: no winners are in use: {why_none()}. "
            "gemmsmith.use(...) takes a service's URL or a bundle's path",
            stacklevel=3,
        )


def _linears(model: torch.nn.Module) -> list[torch.nn.Linear]:
    return [module for module in model.modules() if type(module) is torch.nn.Linear]


def _sizes(linears: Iterable[torch.nn.Linear]) -> Weights:
    return frozenset((layer.out_features, layer.in_features) for layer in linears)


def _follow() -> None:
    with _Patches.lock:
        for active in _Patches.open:
            active._follow()


def _as_open_now() -> Again:
    # A recomputation of a checkpointed region needs the patches that were open at first.
    return partial(_open_again, tuple(_Patches.open))


@contextmanager
def _open_again(patches: tuple[Patch, ...]) -> Iterator[None]:
    """Open patches of models again that have been closed since, and those with `numerics`.

    Other patches without a model are not needed: they save the same tensors as torch.
    """
    with ExitStack() as stack:
        for earlier in patches:
            model, numerics = earlier._model, earlier._numerics
            if earlier in _Patches.open or earlier._is_forgotten:
                continue
            if model is not None or numerics is not None:
                stack.enter_context(open_patch(model, numerics=numerics))
        yield


on_install(_follow)
remember(_as_open_now)


@atexit.register
def _at_the_end() -> None:
    for active in list(_Patches.open):
        if active._report is not None and not active._is_block:
            active.close()
