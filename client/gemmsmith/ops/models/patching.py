"""`gemmsmith.patch`: tuned kernels in code that calls torch's own operators.

All products of two matrices, or with a model those of its `nn.Linear` modules, run tuned kernels in
every thread, by a compiled binding below autograd that costs a call a fraction of a microsecond
(`gemmsmith.ops.below.dispatch`). Products into FP32 and added to FP32 sums, INT8 ones, and FP32
ones while torch may multiply them in TF32, are among them, and so are the grouped products of
experts and the FP8 ones of `torch._scaled_mm`, with or without the binding. `addmm` of a bias does
so where there are winners that add one, by Python in its place. A model's products are known by
their sizes. Its modules with a bias change class for the while: parameters, hooks and `state_dict`
stay, and a call costs some ten microseconds more. A product that a compiler makes one `addmm` with
a sum, as with a residual of two dimensions, stays torch's.

A model's layers that end in an activation, a gate or a residual change class likewise, and run the
product and what follows it by one kernel where such a one wins (`gemmsmith.ops.models.layers`).
RMS norms that are written out run torch's fused one (`gemmsmith.ops.models.norm_layers`).

Where the binding cannot be had, or a report is wanted, all `nn.Linear` modules of a model change
class; without a model a torch function mode catches the products in this thread
(`gemmsmith.ops.models.function_mode`). Autograd and `torch.compile` know all three: a class is
guarded on, modes are traced, and compiled graphs are torch's own and call the products that the
binding replaces while a patch is open.

Either way the operators' own rules hold: what no kernel is tuned for is torch's.
"""

from __future__ import annotations

import atexit
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from types import TracebackType
from typing import Any, TextIO

import torch

from gemmsmith.ops.below import experts, scaling
from gemmsmith.ops.below.dispatch import Dispatch
from gemmsmith.ops.engine.engine import Engine, current, why_none
from gemmsmith.ops.models import layers
from gemmsmith.ops.models.function_mode import Everywhere
from gemmsmith.ops.models.norm_layers import kind_in_use
from gemmsmith.ops.models.norms import NormRecipe
from gemmsmith.ops.models.reporting import ProductsReport
from gemmsmith.ops.models.swapping import Swapped, Swaps, TunedLinear
from gemmsmith.ops.products import telling


def patch(
    model: torch.nn.Module | None = None, *, report: bool = False, file: TextIO | None = None
) -> Patch:
    """Run tuned kernels in `model`, or in the whole process.

    The patch lasts until `unpatch(model)`, or until the end of a `with` block:

        gemmsmith.patch(model)
        with gemmsmith.patch(model): ...

    Patches can be nested; each adds to what the outer ones replace. A block can be opened for every
    step, because decisions are kept for the same winners and model. A CUDA graph keeps the kernels
    that were captured. If no winners are in use (`gemmsmith.use`), a warning is logged once, and
    torch's own operators run.

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
    if current() is None and not report and not telling.is_told():
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
        self._engine = current()
        self._why_none = "" if self._engine is not None else why_none()
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
        engine, model = self._engine, self._model
        if self._of is not None and model is None:
            return
        with ExitStack() as stack:
            if engine is not None and self._report is not None:
                stack.callback(setattr, engine, "watcher", engine.watcher)
                engine.watcher = self._report
            if engine is not None and engine.platform.kind is not None:
                weights = None if model is None else experts.weights_of(model)
                for replaced in (experts, scaling):
                    stack.enter_context(replaced.on(engine, engine.platform.kind, weights))
            if model is None:
                stack.enter_context(_everywhere(engine))
            else:
                swaps = Swaps()
                stack.callback(swaps.undo)
                self._within(model, engine, stack, swaps)
            self._stack = stack.pop_all()

    def _within(
        self, model: torch.nn.Module, engine: Engine | None, stack: ExitStack, swaps: Swaps
    ) -> None:
        found = [*layers.recognized(model)]
        linears = [module for module in model.modules() if type(module) is torch.nn.Linear]
        self._has_norms = any(isinstance(layer.recipe, NormRecipe) for layer in found)
        switched_on = _binding(engine)
        if engine is not None and switched_on is not None:
            weights = frozenset((one.out_features, one.in_features) for one in linears)
            stack.enter_context(switched_on(only=weights))
            # Their products are below. A bias makes one torch's addmm, which is replaced only if a
            # winner adds it; else a class of ours adds it to the product of a plain kernel.
            linears = [one for one in linears if one.bias is not None and not engine.may_add_biases]
        swaps.make((one, TunedLinear) for one in linears)
        swaps.make((one.module, one.swapped_class) for one in found)
        for module in model.modules():
            if isinstance(module, Swapped) and not module.is_swapped:
                swaps.resume(module)
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


def _everywhere(engine: Engine | None) -> AbstractContextManager[Any]:
    if engine is None:
        return nullcontext()
    switched_on = _binding(engine)
    return Everywhere() if switched_on is None else switched_on()


def _binding(engine: Engine | None) -> Callable[..., AbstractContextManager[None]] | None:
    """`Dispatch.on` with this engine; None where it cannot be had, or a watcher is to be told."""
    if engine is None or engine.platform.kind is None or engine.watcher is not None:
        return None
    dispatch = Dispatch.of(engine.platform.kind)
    return None if dispatch is None else partial(dispatch.on, engine)


@atexit.register
def _at_the_end() -> None:
    """Print the reports of what was never undone."""
    for one in list(_Patches.open):
        if one._report is not None and not one._is_block:
            one.close()
