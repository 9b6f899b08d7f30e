"""From torch tensors to a launch: the process's one place that decides who computes a product.

`use` configures it; without it everything runs torch's own operators. A product is decided once
per form, types, sizes, strides and device, and remembered; the decision is forgotten when the
lookup takes a newer snapshot. Whatever goes wrong with a kernel ends in torch's operator for that
product from then on, with one line in the log `gemmsmith` per pack and reason: nothing here raises
into training.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gemmsmith.answers.answer import Config
from gemmsmith.errors import GemmsmithError
from gemmsmith.operation import Epilogue, Operation
from gemmsmith.ops.engine.beside import Beside
from gemmsmith.ops.engine.biases import adds_bias_afterwards, pays, ways
from gemmsmith.ops.engine.choosing import Chooser, PackSource, Watcher
from gemmsmith.ops.engine.forms import Form, Shape, Spec, allows_tf32
from gemmsmith.ops.engine.plan import Plan, misalignment
from gemmsmith.ops.engine.platform import Cuda, Platform
from gemmsmith.runtime.abi import NO_ALGORITHM
from gemmsmith.runtime.pack import LoadedPack

log = logging.getLogger("gemmsmith")

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
        self._chooser, self._packs = chooser, packs
        self._deterministic = deterministic
        self.platform = Cuda() if platform is None else platform
        self._preparing = threading.RLock()
        self._broken: set[str] = set()
        self._complaints: set[tuple[str, str]] = set()
        self.watcher: Watcher | None = None
        # A pinned lookup never changes its mind, so it is not asked whether it did.
        refreshes = hasattr(chooser, "snapshot") and not getattr(chooser, "pinned", False)
        self._refreshing: Any = chooser if refreshes else None
        self._snapshot: object = getattr(chooser, "snapshot", None)
        # By whether only deterministic kernels count.
        self._plans: tuple[dict[Any, Plan | None], dict[Any, Plan | None]] = ({}, {})

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
        if self.watcher is not None:
            self.watcher.saw(form, a, b, plan, 0 if offs is None else offs.shape[0])
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

        Tensors may be traced ones, if their sizes are numbers. What may run in TF32 is asked of
        torch every time.

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
        deterministic = self._deterministic
        if deterministic is None:
            deterministic = torch.are_deterministic_algorithms_enabled()
        plans = self._plans[deterministic]
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
            plan = plans[key]
        except KeyError:
            plan = self._planned(plans, key, form, deterministic)
        return None if plan is not None and plan.is_tf32 and not allows_tf32() else plan

    def _planned(
        self, plans: dict[Any, Plan | None], key: Any, form: Form, deterministic: bool
    ) -> Plan | None:
        """Decide about a product that was not met before."""
        with self._preparing:
            if key not in plans:
                a, b = Spec(*key[4:8]), Spec(*key[8:])
                plan, keep = self._prepare(ways(form, a, b, *key[1:4]), form, a, deterministic)
                if not keep:
                    return None
                if len(plans) >= CAPACITY:
                    plans.clear()
                plans[key] = plan
            found: Plan | None = plans[key]
            return found

    def _prepare(
        self, shapes: Sequence[Shape], form: Form, a: Spec, deterministic: bool
    ) -> tuple[Plan | None, bool]:
        """The plan, and whether that answer holds for good."""
        index = self.platform.index(a.device)
        if index is None:
            return None, True
        for shape in shapes:
            problem = shape.problem
            try:
                chosen = self._chooser.lookup(
                    problem.dtype, problem.layout, problem.m, problem.n, problem.k, problem.batch
                )
            except Exception as error:  # noqa: BLE001 - a lookup's fault must not end a training run
                self._complain(None, error)
                return None, True
            if chosen is None or (deterministic and not chosen.deterministic):
                continue
            config = chosen.config
            saving = getattr(chosen, "saving_us", None)
            if (
                config.pack is None
                or config.pack in self._broken
                or config.kernel.arch != self.platform.arch(index)
                or misalignment(config, shape)
                or (adds_bias_afterwards(form, shape) and not pays(saving, shape))
                or (form.is_precise and config.kernel.keeps_short_sums)
            ):
                continue
            if self.platform.capturing():
                return None, False  # loading a pack would break the capture; the next call may
            plan = self._load(config, shape, a.device, index, saving)
            if plan is not None:
                plan.time_us = getattr(chosen, "time_us", None)
                return plan, True
        return None, True

    def _load(
        self,
        config: Config,
        shape: Shape,
        device: torch.device,
        index: int,
        saving: float | None,
    ) -> Plan | None:
        pack = str(config.pack)
        try:
            kernel = LoadedPack.open(self._packs.path(pack)).kernel(config.kernel.name)
        except Exception as error:  # noqa: BLE001 - whatever keeps a pack away, torch computes it
            self._broken.add(pack)
            self._complain(config, error)
            return None
        try:
            return Plan(config, shape, kernel, self.platform, device, index, saving)
        except GemmsmithError as error:
            if getattr(error, "status", None) != NO_ALGORITHM:
                self._complain(config, error)
            return None

    def _forget(self) -> None:
        """Decide everything anew: the lookup has newer winners."""
        with self._preparing:
            self._snapshot = self._refreshing.snapshot
            self._broken.clear()
            self._plans = ({}, {})

    @property
    def has_plans(self) -> bool:
        """Whether any product that was met since the last newer winners runs a tuned kernel."""
        return any(plan is not None for plans in self._plans for plan in list(plans.values()))

    @property
    def snapshot(self) -> object:
        """What the lookup chooses from at present; None where that never changes."""
        return None if self._refreshing is None else self._refreshing.snapshot

    @property
    def state(self) -> str | None:
        """What its decisions depend on, as a text; None where that cannot be told."""
        revision = getattr(getattr(self._chooser, "snapshot", None), "revision", None)
        deterministic = self._deterministic or torch.are_deterministic_algorithms_enabled()
        return None if revision is None else f"{revision} {deterministic}"

    def may_run(self, wanted: Callable[[Operation], bool]) -> bool:
        """Whether there is a winner of such an operation, as far as the lookup tells."""
        rows = getattr(getattr(self._chooser, "snapshot", None), "rows", None)
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
        self._complain(plan.config, error)
        with self._preparing:
            for plans in self._plans:
                for key in [key for key, known in plans.items() if known is plan]:
                    plans[key] = None

    def _complain(self, config: Config | None, error: Exception) -> None:
        pack = "" if config is None else str(config.pack)
        # The text names the problem; the kind of fault and its status make the reason.
        reason = f"{type(error).__name__} {getattr(error, 'status', '')}"
        if (pack, reason) not in self._complaints:
            self._complaints.add((pack, reason))
            what = f"kernel pack {pack[:16]}" if pack else "the lookup"
            log.warning("torch's own operators run instead of %s: %s", what, error)


class _Current:
    """The process's engine; None until `use` is called."""

    engine: Engine | None = None
    why_none = "call gemmsmith.use(...) first"


def current() -> Engine | None:
    """The process's engine, if there is one."""
    return _Current.engine


def why_none() -> str:
    """Why the process has no engine, as a clause for people: what they did, or are to do."""
    return _Current.why_none


def install(engine: Engine | None, why_none: str = _Current.why_none) -> Engine | None:
    """Make `engine` the process's; None: everything runs torch, for this reason.

    Returns the engine before.
    """
    before, _Current.engine, _Current.why_none = _Current.engine, engine, why_none
    return before
