"""`gemmsmith.patch`: tuned kernels in code that calls torch's own operators.

All products of two matrices, or with a model those of its `nn.Linear` modules, run tuned kernels in
every thread, by a compiled binding below autograd that costs a call a fraction of a microsecond
(`gemmsmith.ops.below.dispatch`). Products into FP32 and added to FP32 sums, INT8 ones, and FP32
ones while torch may multiply them in TF32, are among them, and so are the grouped products of
experts and the FP8 ones of `torch._scaled_mm`, with or without the binding. `addmm` of a bias is
replaced, by Python, if there are winners that add one. A model's products are known by their sizes.

Some modules of a model get a forward of ours while the patch is open
(`gemmsmith.ops.models.forwards`): linear layers with a bias that no winner adds, at some ten
microseconds a call; layers that end in an activation, a gate or a residual, which run the product
and what follows it by one kernel where such a kernel wins (`gemmsmith.ops.models.layers`); and RMS
norms, which run torch's fused one (`gemmsmith.ops.models.norm_layers`). A product that a compiler
makes one `addmm` with a sum, as with a residual of two dimensions, stays torch's.

Without the binding, and for a report, all `nn.Linear` modules of a model get such a forward;
without a model a torch function mode catches the products in this thread
(`gemmsmith.ops.models.function_mode`). Autograd and `torch.compile` know all three: a forward is
guarded on, modes are traced, and compiled graphs are torch's own and call the products that the
binding replaces while a patch is open.

The operators' own rules hold: what no kernel is tuned for is torch's, and so is whatever a program
does that kernels know nothing of (docs/fusing.md).
"""

from __future__ import annotations

import atexit
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import TextIO

import torch

from gemmsmith.ops.below import experts, scaling
from gemmsmith.ops.below.dispatch import Dispatch
from gemmsmith.ops.engine.engine import Engine, current, in_use, on_install, watch, why_none
from gemmsmith.ops.engine.recomputing import Again, remember
from gemmsmith.ops.models import layers
from gemmsmith.ops.models.forwards import Forwards
from gemmsmith.ops.models.function_mode import Everywhere
from gemmsmith.ops.models.norm_layers import kind_in_use
from gemmsmith.ops.models.norms import NormRecipe
from gemmsmith.ops.models.reporting import ProductsReport
from gemmsmith.ops.products import recording


def patch(
    model: torch.nn.Module | None = None, *, report: bool = False, file: TextIO | None = None
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
    """
    if in_use() is None and not report and not recording.is_recording():
        _warn_once()
    return opened(model, report=report, file=file)


def opened(
    model: torch.nn.Module | None = None, *, report: bool = False, file: TextIO | None = None
) -> Patch:
    """As `patch`, without a word where nothing is in use."""
    made = Patch(model, file=file, report=report)
    with _Patches.lock:
        for forgotten in [one for one in _Patches.open if one._is_forgotten]:
            forgotten.close()
        made._open()
        _Patches.open.append(made)
    return made


def unpatch(model: torch.nn.Module | None = None) -> None:
    """Undo all calls of `patch(model)`; with None, all calls of `patch`.

    `with` blocks end by themselves. Without such a call, nothing happens.
    """
    for one in list(_Patches.open):
        if not one._is_block and (model is None or one._model is model):
            one.close()


class Patch(AbstractContextManager[None]):
    """An active patch; it lasts until `close`, `unpatch`, or the end of its `with` block."""

    def __init__(self, model: torch.nn.Module | None, *, report: bool, file: TextIO | None) -> None:
        # A model that its program has forgotten is not kept for us.
        self._of = None if model is None else weakref.ref(model)
        self._file = file
        self._report = ProductsReport() if report else None
        self._engine: Engine | None = None
        self._why_none = ""
        self._has_norms = False
        self._is_block = False
        self._stack = ExitStack()

    def __enter__(self) -> None:
        """Last until the end of this block, and no `unpatch`."""
        self._is_block = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End it."""
        self.close()

    def close(self) -> None:
        """Undo the patch; does nothing if it has ended already."""
        with _Patches.lock:
            if self not in _Patches.open:
                return
            # What is replaced is a stack: those that began later are taken off, and put on again.
            at = _Patches.open.index(self)
            later = _Patches.open[at + 1 :]
            for one in reversed(_Patches.open[at:]):
                one._stack.close()
            del _Patches.open[at:]
            for one in later:
                one._open()
                _Patches.open.append(one)
        if self._report is not None:
            print(self._report.text(self._why_none), file=self._file or sys.stderr)

    @property
    def why_nothing(self) -> str:
        """Why nothing that has run by now was replaced; empty if something was."""
        if self._engine is None:
            return self._why_none
        if self._engine.has_plans or (self._has_norms and kind_in_use() is not None):
            return ""
        return "no product of the step has a winner that runs here"

    @property
    def _is_forgotten(self) -> bool:
        """Whether its model is no more, and nobody will ask for its end."""
        return self._of is not None and self._of() is None and not self._is_block

    @property
    def _model(self) -> torch.nn.Module | None:
        return None if self._of is None else self._of()

    def _open(self) -> None:
        model = self._model
        if self._of is not None and model is None:
            return
        self._engine = current()
        self._why_none = why_none() if self._engine is None else ""
        with ExitStack() as stack:
            if self._report is not None:
                stack.callback(watch, watch(self._report))
            has_binding = self._replace_below(stack)
            if model is not None:
                forwards = Forwards()
                stack.callback(forwards.undo)
                self._within(model, forwards, has_binding=has_binding)
            elif self._engine is not None and not has_binding:
                stack.enter_context(Everywhere())
            self._stack = stack.pop_all()

    def _replace_below(self, stack: ExitStack) -> bool:
        """Replace torch's operators below autograd. Returns whether the binding replaces some."""
        engine, model = self._engine, self._model
        if engine is None or engine.platform.kind is None:
            return False
        weights = None if model is None else experts.weights_of(model)
        for replaced in (experts, scaling):
            stack.enter_context(replaced.on(engine.platform.kind, weights))
        # The binding tells no watcher of a product.
        dispatch = Dispatch.of(engine.platform.kind) if engine.watcher is None else None
        if dispatch is None:
            return False
        sizes = None
        if model is not None:
            sizes = frozenset((layer.out_features, layer.in_features) for layer in _linears(model))
        stack.enter_context(dispatch.on(sizes))
        return True

    def _follow(self) -> None:
        """Replace what there were no winners for when the patch was opened."""
        if self._engine is None:
            self._engine = in_use()
            self._why_none = why_none() if self._engine is None else ""
            self._replace_below(self._stack)

    def _within(self, model: torch.nn.Module, forwards: Forwards, *, has_binding: bool) -> None:
        found, linears = [*layers.recognized(model)], _linears(model)
        self._has_norms = any(isinstance(layer.recipe, NormRecipe) for layer in found)
        if has_binding and self._engine is not None:
            # Their products are below. A bias makes one torch's addmm, which is replaced only if a
            # winner adds it; else a class of ours adds it to the product of a plain kernel.
            biases = self._engine.may_add_biases
            linears = [layer for layer in linears if layer.bias is not None and not biases]
        layers.take_over_linear(forwards, linears)
        layers.take_over(forwards, found)
        if self._report is not None:
            self._report.recognized(layers.counts(found))


class _Patches:
    """Those that are open in this process, in the order in which they began."""

    lock = threading.RLock()
    open: list[Patch] = []  # noqa: RUF012 - one a process
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


def _follow() -> None:
    """Have open patches follow the engine in use."""
    with _Patches.lock:
        for active in _Patches.open:
            active._follow()


def _as_open_now() -> Again:
    """For a recomputation: what was open when the region was computed."""
    return partial(_open_again, tuple(_Patches.open))


@contextmanager
def _open_again(patches: tuple[Patch, ...]) -> Iterator[None]:
    """Patches of models that have ended since; others save what torch saves."""
    with ExitStack() as stack:
        for before in patches:
            if before not in _Patches.open and (model := before._model) is not None:
                stack.enter_context(opened(model))
        yield


on_install(_follow)
remember(_as_open_now)


@atexit.register
def _at_the_end() -> None:
    """Print the reports of what was never undone."""
    for one in list(_Patches.open):
        if one._report is not None and not one._is_block:
            one.close()
