"""From torch tensors to a launch: the process's one place that decides who computes a product.

`use` configures it; without it everything runs torch's own operators. A product is decided once
per form, types, sizes, strides and device, and remembered; the decision is forgotten when the
lookup takes a newer snapshot. Whatever goes wrong with a kernel ends in torch's operator for that
product from then on, with one line in the log `gemmsmith` per pack and reason: nothing here raises
into training.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from gemmsmith.core.operation import Epilogue, Operation
from gemmsmith.errors import GemmsmithError
from gemmsmith.ops.engine.beside import Beside
from gemmsmith.ops.engine.biases import ways
from gemmsmith.ops.engine.choosing import Chooser, PackSource, Watcher
from gemmsmith.ops.engine.forms import Form, Spec
from gemmsmith.ops.engine.plan import Plan
from gemmsmith.ops.engine.planning import Planner
from gemmsmith.ops.engine.platform import Cuda, Platform
from gemmsmith.ops.engine.recomputing import as_computed, saved_tensors_hooks
from gemmsmith.ops.engine.settings import PERMISSIONS

CAPACITY = 16_384
"""Products remembered, 3.4 kB each. Beyond that all are forgotten and decided again: a mixture of
experts that has another number of tokens at every step gets there."""


class Engine:
    """Decides and launches. Safe to share between threads.

    Args:
        chooser: which kernel to run.
        packs: where compiled kernels lie.
        deterministic: take only kernels that give the same bits for the same inputs; None: as
            `torch.use_deterministic_algorithms` says at each call.
        platform: the devices; CUDA unless a test plays it.
    """

    def __init__(
        self,
        chooser: Chooser,
        packs: PackSource,
        *,
        deterministic: bool | None = None,
        platform: Platform | None = None,
    ) -> None:
        self._chooser = chooser
        self._deterministic = deterministic
        self.platform = Cuda() if platform is None else platform
        self._planner = Planner(chooser, packs, deterministic, self.platform)
        self._planning = threading.RLock()
        # A pinned lookup never changes its mind, so it is not asked whether it did.
        refreshes = hasattr(chooser, "snapshot") and not getattr(chooser, "pinned", False)
        self._refreshing: Any = chooser if refreshes else None
        self._snapshot: object = getattr(chooser, "snapshot", None)
        # Never changed but by additions: an engine as it was (`engine.pinned`) keeps what it has.
        self._plans: dict[Any, Plan | None] = {}

    def product(
        self,
        form: Form,
        a: torch.Tensor,
        b: torch.Tensor,
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
        output: torch.dtype | None = None,
        offs: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """The product by a tuned kernel; None where torch is to compute it."""
        plan = self.plan(form, a, b, output, 0 if offs is None else offs.shape[0])
        return self.run(plan, form, a, b, scale_a, scale_b, offs=offs)

    def fused(
        self,
        form: Form,
        a: torch.Tensor,
        b: torch.Tensor,
        epilogue: Epilogue,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
        into: torch.Tensor | None = None,
        output: torch.dtype | None = None,
        scale_d: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
        column_scale: torch.Tensor | None = None,
        row_scale: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """The product and what follows it by one tuned kernel; None where torch computes them.

        Gives D, and aux where the epilogue stores it.

        Args:
            form: which product.
            a: left operand.
            b: right operand.
            epilogue: what follows.
            bias: [N], of D's type (bf16 where that is FP8), where the epilogue has one.
            residual: of D's size and type, likewise.
            scale_a: factor of FP8.
            scale_b: likewise.
            into: where to write D; None: a new tensor.
            output: element type of D; None: as torch gives it.
            scale_d: factor of an FP8 D; None: 1.
            amax: what the largest absolute value of an FP8 D, before its factor, is added to.
            column_scale: [N], of a bias's type, where the epilogue has factors of columns.
            row_scale: [...] of D's leading dimensions, FP32, where it has factors of rows.
        """
        plan = self.plan(form, a, b, output, epilogue=epilogue)
        if plan is None or not plan.suits(bias, residual, column_scale, row_scale):
            return None
        if not all(plan.accepts(one) for one in (residual, into) if one is not None):
            return None
        aux = plan.empty() if epilogue.stores_aux else None
        beside = Beside(
            bias,
            residual,
            aux,
            scale_d=scale_d,
            amax=amax,
            row_scale=row_scale,
            column_scale=column_scale,
        )
        out = self.run(plan, form, a, b, scale_a, scale_b, into, beside=beside)
        return None if out is None else (out, beside.aux)

    def written(
        self,
        form: Form,
        a: torch.Tensor,
        b: torch.Tensor,
        output: torch.dtype,
        *,
        into: torch.Tensor | None,
        added: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """The product in a tensor of the caller's; None where torch is to compute it.

        Args:
            form: which product; one that adds, adds `added`, by default what `into` holds.
            a: left operand.
            b: right operand.
            output: element type of the result.
            into: where to write; None: a new tensor.
            added: of the result's size and type; may be `into`.
        """
        plan = self.plan(form, a, b, output)
        if plan is not None and not all(
            plan.accepts(one) for one in (into, added) if one is not None
        ):
            plan = None
        return self.run(plan, form, a, b, into=into, added=added)

    def run(
        self,
        plan: Plan | None,
        form: Form,
        a: torch.Tensor,
        b: torch.Tensor,
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
        into: torch.Tensor | None = None,
        added: torch.Tensor | None = None,
        offs: torch.Tensor | None = None,
        beside: Beside | None = None,
    ) -> torch.Tensor | None:
        """The product by `plan`, which is this product's; None where torch is to compute it."""
        if _InUse.watcher is not None:
            _InUse.watcher.saw(form, a, b, plan, 0 if offs is None else offs.shape[0])
        if plan is None:
            return None
        try:
            return plan(a, b, scale_a, scale_b, into, added, offs, beside)
        except GemmsmithError as error:
            self.give_up(plan, error)
            return None

    def plan(
        self,
        form: Form,
        a: torch.Tensor | Spec,
        b: torch.Tensor | Spec,
        output: torch.dtype | None = None,
        groups: int = 0,
        epilogue: Epilogue = Epilogue.NONE,
    ) -> Plan | None:
        """How a product is launched; None where torch is to compute it.

        Tensors may be traced ones, if their sizes are numbers. What torch must permit
        (`settings`) is asked of it every time.

        Args:
            form: which product of the two.
            a: left operand, or what matters of it.
            b: right operand, likewise.
            output: the result's element type; None: as torch gives it.
            groups: how many there are of a grouped product.
            epilogue: what the kernel does with the product. A LINEAR_BIAS without one has either a
                kernel that adds the bias, or one whose product is worth a pass that does.
        """
        if self._refreshing is not None and self._refreshing.snapshot is not self._snapshot:
            self._forget()
        # One flat key: hashing is what a decision that was made before costs.
        key = (
            form.value,
            output,
            groups,
            epilogue,
            *((a.dtype, a.device, a.size(), a.stride()) if isinstance(a, torch.Tensor) else a),
            *((b.dtype, b.device, b.size(), b.stride()) if isinstance(b, torch.Tensor) else b),
        )
        try:
            plan = self._plans[key]
        except KeyError:
            plan = self._planned(key, form)
        return None if plan is not None and plan.needs and not self._permits(plan) else plan

    def _permits(self, plan: Plan) -> bool:
        """Whether torch permits at present what the plan needs."""
        return all(permission() for permission in plan.needs)

    def _planned(self, key: Any, form: Form) -> Plan | None:
        """Decide about a product that was not met before."""
        with self._planning:
            if key not in self._plans:
                a, b = Spec(*key[4:8]), Spec(*key[8:])
                plan, keep = self._planner.plan(ways(form, a, b, *key[1:4]), form, a)
                if not keep:
                    return None
                self._make_room()
                self._plans[key] = plan
            return self._plans[key]

    def _make_room(self) -> None:
        if len(self._plans) >= CAPACITY:
            self._plans = {}

    def _forget(self) -> None:
        """Decide everything anew: the lookup has newer winners."""
        with self._planning:
            self._snapshot = self._refreshing.snapshot
            self._planner.try_packs_again()
            self._plans = {}

    @property
    def watcher(self) -> Watcher | None:
        """What sees every product; see `watch`."""
        return _InUse.watcher

    @property
    def has_plans(self) -> bool:
        """Whether any product that was met since the last newer winners runs a tuned kernel."""
        return any(plan is not None for plan in list(self._plans.values()))

    @property
    def snapshot(self) -> object:
        """What the lookup chooses from at present. Returns None if the lookup does not say."""
        return getattr(self._chooser, "snapshot", None)

    @property
    def state(self) -> str | None:
        """What its decisions depend on, as a text; None where that cannot be told."""
        revision = getattr(self.snapshot, "revision", None)
        deterministic = self._deterministic or torch.are_deterministic_algorithms_enabled()
        return None if revision is None else f"{revision} {deterministic}"

    def may_run(self, wanted: Callable[[Operation], bool]) -> bool:
        """Whether there is a winner of such an operation, as far as the lookup tells."""
        rows = getattr(self.snapshot, "rows", None)
        return rows is None or any(wanted(row.problem.operation) for row in rows)

    @property
    def may_add_biases(self) -> bool:
        """Whether there is a winner that adds a bias: only then is torch's `addmm` replaced."""
        return self.may_run(lambda operation: operation.epilogue is Epilogue.BIAS)

    def on_swap(self, react: Callable[[], None]) -> None:
        """Have `react` called whenever the lookup takes newer winners, if it ever does."""
        if self._refreshing is not None and hasattr(self._refreshing, "on_swap"):
            self._refreshing.on_swap = react

    def give_up(self, plan: Plan, error: Exception) -> None:
        """Leave a plan's products to torch from now on, and say why."""
        self._planner.complain(plan.config, error)
        with self._planning:
            plan.has_failed = True
            self._plans = {
                key: None if known is plan else known for key, known in self._plans.items()
            }


class _Pinned(Engine):
    """An engine as it is now: its decisions stay, whatever becomes of winners, kernels and torch.

    Its kernels run only where the engine's own would run now. The caller computes a product that
    has none as it would after a kernel refused, and saves the same tensors.
    """

    def __init__(self, engine: Engine) -> None:
        vars(self).update(vars(engine))
        self._engine, self._refreshing = engine, None
        self._kept = engine.watcher, engine.snapshot
        self._permitted = {permission: permission() for permission in PERMISSIONS}

    @property
    def watcher(self) -> Watcher | None:
        """As it was."""
        return self._kept[0]

    @property
    def snapshot(self) -> object:
        """As it was."""
        return self._kept[1]

    def run(self, plan: Plan | None, *operands: Any, **named: Any) -> torch.Tensor | None:
        """By the engine itself."""
        may_run = (
            plan is not None
            and not plan.has_failed
            and self._engine is in_use()
            and self._engine._permits(plan)
        )
        return self._engine.run(plan if may_run else None, *operands, **named)

    def _permits(self, plan: Plan) -> bool:
        return all(self._permitted[permission] for permission in plan.needs)

    def _make_room(self) -> None:
        """What was decided must stay; regions of a model are few."""


class _InUse:
    """The process's engine, which is None until `use` is called, and who follows it."""

    engine: Engine | None = None
    last: Engine | None = None
    why_none = "call gemmsmith.use(...) first"
    watcher: Watcher | None = None
    reactions: list[Callable[[], None]] = []  # noqa: RUF012 - one a process


def in_use() -> Engine | None:
    """The process's engine, if it has one."""
    return _InUse.engine


def current() -> Engine | None:
    """The engine that decides here: the process's, in a checkpointed region as it was at first."""
    if torch.compiler.is_dynamo_compiling():
        return _InUse.last
    hooks = saved_tensors_hooks(True)  # in graphs that are traced, too
    return _InUse.engine if hooks is None else as_computed(hooks[0], _pinned, _InUse.engine)


def _pinned() -> Engine | None:
    engine = _InUse.engine
    return None if engine is None else _Pinned(engine)


def why_none() -> str:
    """Why the process has no engine, as a clause for people: what they did, or are to do."""
    return _InUse.why_none


def install(engine: Engine | None, why_none: str = _InUse.why_none) -> Engine | None:
    """Make `engine` the process's; None: everything runs torch, for this reason.

    Returns the engine before.
    """
    before, _InUse.engine, _InUse.why_none = _InUse.engine, engine, why_none
    _InUse.last = engine or _InUse.last
    for react in _InUse.reactions:
        react()
    return before


def on_install(react: Callable[[], None]) -> None:
    """Have `react` called whenever the process gets another engine, or none."""
    _InUse.reactions.append(react)


def watch(watcher: Watcher | None) -> Watcher | None:
    """Have `watcher` see every product of whatever engine is in use. Returns the one before."""
    before, _InUse.watcher = _InUse.watcher, watcher
    return before
