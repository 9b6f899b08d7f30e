"""From torch tensors to a launch: decides for each product whether a kernel or torch computes it.

`use` configures the process's engine. Without one, everything runs torch's own operators. A product
is decided once for its form, types, sizes, strides and device. A newer snapshot of the lookup drops
all decisions. If anything goes wrong with a kernel, torch computes its products from then on, and
the log `gemmsmith` gets one line for each pack and reason: nothing here raises into training.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from gemmsmith.core.numerics import Numerics, demands_order
from gemmsmith.core.operation import Epilogue
from gemmsmith.core.problem import Problem
from gemmsmith.errors import GemmsmithError, NotInvariant
from gemmsmith.ops.engine import copying
from gemmsmith.ops.engine.forms import Form, Shape, Spec
from gemmsmith.ops.engine.numerics import in_order, is_demanded, refusal
from gemmsmith.ops.engine.operands import NO_OPERANDS, Operands
from gemmsmith.ops.engine.plan import Plan
from gemmsmith.ops.engine.planning import Chooser, PackSource, Planner, ways
from gemmsmith.ops.engine.platform import Cuda, Platform
from gemmsmith.ops.engine.watching import Watcher, Watching
from gemmsmith.program.calls import recording

CAPACITY = 16_384
"""Decisions kept, 3.4 kB each. Beyond that all are dropped and made again: a mixture of experts
whose number of tokens changes at every step gets there."""


class Engine:
    """Decides and launches. Safe to share between threads.

    Args:
        chooser: says which kernel to run.
        packs: holds compiled kernels.
        deterministic: take only kernels that give the same bits for the same inputs; None: as
            `torch.use_deterministic_algorithms` says at each call.
        platform: the devices; CUDA except in tests.
        numerics: "invariant": run only kernels of one order of sums, and raise NotInvariant where
            torch would have to compute a product (`gemmsmith.ops.engine.numerics`).
    """

    def __init__(
        self,
        chooser: Chooser,
        packs: PackSource,
        *,
        deterministic: bool | None = None,
        platform: Platform | None = None,
        numerics: str | None = None,
    ) -> None:
        self.is_invariant = demands_order(numerics)
        self._chooser, self._packs = chooser, packs
        self._deterministic = deterministic
        self.platform = Cuda() if platform is None else platform
        self._planner = Planner(chooser, packs, deterministic, self.platform, self.is_invariant)
        self._planning = threading.RLock()
        # A pinned lookup never takes newer winners, so no call checks for them.
        refreshes = hasattr(chooser, "snapshot") and not getattr(chooser, "pinned", False)
        self._refreshing: Any = chooser if refreshes else None
        self._snapshot: object = getattr(chooser, "snapshot", None)
        # Only added to, never changed: `_Pinned` shares the dictionary and keeps its decisions.
        self._plans: dict[Any, Plan | None] = {}
        self._left: tuple[object, set[Any]] = self._plans, set()  # of these decisions

    @cached_property
    def invariant(self) -> Engine:
        """The same winners under `numerics="invariant"`. Keeps decisions of its own."""
        if self.is_invariant:
            return self
        return Engine(
            self._chooser,
            self._packs,
            deterministic=self._deterministic,
            platform=self.platform,
            numerics=Numerics.INVARIANT,
        )

    def product(
        self,
        form: Form,
        a: torch.Tensor,
        b: torch.Tensor,
        operands: Operands = NO_OPERANDS,
        output: torch.dtype | None = None,
        epilogue: Epilogue = Epilogue.NONE,
    ) -> torch.Tensor | None:
        """The product by a tuned kernel. Returns None where torch must compute it.

        `output` is the result's element type; by default torch's for such a product.
        """
        plan = self.plan(form, a, b, output, _groups(operands), epilogue)
        if plan is not None and operands and not plan.suits(operands):
            if self.is_invariant:
                return self._apart(plan, form, a, b, operands)
            plan = None
        return self.run(plan, form, a, b, operands)

    def run(
        self,
        plan: Plan | None,
        form: Form,
        a: torch.Tensor,
        b: torch.Tensor,
        operands: Operands = NO_OPERANDS,
    ) -> torch.Tensor | None:
        """The product by its plan. Returns None where torch must compute it.

        Raises:
            NotInvariant: torch would have to, and must not.
        """
        if Watching.watcher is not None:
            Watching.watcher.saw(form, a, b, plan, _groups(operands))
        if plan is None:
            if self.is_invariant:
                self.refuse(form, Spec.of(a), Spec.of(b), reason="its operands do not suit kernels")
            return None
        try:
            d = plan(a, b, operands)
            if d is None and self.is_invariant:
                d = self._moved(plan, form, a, b, operands)
        except NotInvariant:
            raise
        except GemmsmithError as error:
            if self.is_invariant:
                raise NotInvariant(f"numerics='invariant': {error}") from error
            self.give_up(plan, error)
            return None
        return d

    def _apart(
        self, plan: Plan, form: Form, a: torch.Tensor, b: torch.Tensor, operands: Operands
    ) -> torch.Tensor | None:
        """The product with other operands than the plan suits: they are copied without gaps.

        Raises:
            NotInvariant: they have another size or type.
        """
        into, rest = operands.get("d"), copying.beside(operands)
        if into is not None and form.adds:
            rest.setdefault("c", into.contiguous())
        if "up" in operands:
            rest["up"] = operands["up"]
        d = self.run(plan if plan.suits(rest) else None, form, a, b, rest)
        if d is None or into is None:
            return d
        if (into.shape, into.dtype) != (d.shape, d.dtype):
            self.refuse(form, Spec.of(a), Spec.of(b), reason="its output has another size or type")
        return into.copy_(d)

    def _moved(
        self, plan: Plan, form: Form, a: torch.Tensor, b: torch.Tensor, operands: Operands
    ) -> torch.Tensor | None:
        """The product of copies, because an address is not aligned."""
        if self.platform.capturing():
            self.refuse(form, Spec.of(a), Spec.of(b))
        into, rest = operands.get("d"), copying.beside(operands, moves=True)
        if into is not None and form.adds:
            rest.setdefault("c", into.clone())
        a, b, up = copying.moved(a), copying.moved(b), operands.get("up")
        if up is not None:  # both lie alike, before and after
            b, rest["up"] = copying.copied(b), copying.copied(up)
        if form is Form.LINEAR_BIAS and plan.epilogue is Epilogue.NONE:
            form = Form.LINEAR  # the caller adds the bias
        again = self.plan(form, a, b, plan.dtype, _groups(operands), plan.epilogue)
        d = None if again is None else again(a, b, rest)
        if d is None:
            self.refuse(form, Spec.of(a), Spec.of(b), reason="its operands are not aligned")
        return d if d is None or into is None else into.copy_(d)

    def plan(
        self,
        form: Form,
        a: torch.Tensor | Spec,
        b: torch.Tensor | Spec,
        output: torch.dtype | None = None,
        groups: int = 0,
        epilogue: Epilogue = Epilogue.NONE,
    ) -> Plan | None:
        """How a product is launched. Returns None if torch must compute it.

        Tensors may be traced ones, if their sizes are numbers. torch's settings that forbid a
        kernel (`settings`) are read every time.

        Args:
            form: which product of the two.
            a: left operand, or its description.
            b: right operand, or its description.
            output: the result's element type; by default torch's for such a product.
            groups: how many groups a grouped product has.
            epilogue: what the kernel does with the product. The plan of a LINEAR_BIAS without one
                either adds the bias, or gains enough for a pass that adds it.

        Raises:
            NotInvariant: a product without an epilogue must be invariant, and no kernel runs it.
        """
        if self._refreshing is not None and self._refreshing.snapshot is not self._snapshot:
            self._forget()
        key = _key(form, a, b, output, groups, epilogue)
        try:
            plan = self._plans[key]
        except KeyError:
            plan = self._planned(key, form)
        if plan is None and self.is_invariant and epilogue is Epilogue.NONE:
            self.refuse(form, Spec(*key[4:8]), Spec(*key[8:]), output, groups)
        return None if plan is not None and plan.needs and not self._permits(plan) else plan

    def lacks(
        self,
        form: Form,
        a: torch.Tensor | Spec,
        b: torch.Tensor | Spec,
        groups: int = 0,
        epilogue: Epilogue = Epilogue.NONE,
    ) -> bool:
        """Whether it is decided that no kernel runs a product, whatever torch's settings are."""
        key = _key(form, a, b, None, groups, epilogue)
        return self._plans.get(key, _UNDECIDED) is None

    @property
    def left(self) -> set[Any]:
        """Layers whose own forward runs for some operands, until winners or decisions change.

        A new set while products are recorded or reported: then each call must decide.
        """
        if self._refreshing is not None and self._refreshing.snapshot is not self._snapshot:
            self._forget()
        if Watching.watcher is not None or _recorders:
            return set()
        if self._left[0] is not self._plans:
            self._left = self._plans, set()
        return self._left[1]

    def refuse(
        self,
        form: Form,
        a: Spec,
        b: Spec,
        output: torch.dtype | None = None,
        groups: int = 0,
        reason: str = "",
    ) -> None:
        """Raise NotInvariant, if the product is one that torch must not compute."""
        if not self._demands(a, b):
            return
        if self.platform.capturing():
            reason = "it is new within a capture; run the model once before"
        sizes = f"{form.value} of {'×'.join(map(str, a.size))} and {'×'.join(map(str, b.size))}"
        shapes = ways(form, a, b, output, groups, Epilogue.NONE)
        raise refusal(form, shapes, sizes, reason)

    def _demands(self, a: Spec, b: Spec) -> bool:
        """Whether torch must not compute a product of these."""
        is_here = self.platform.index(a.device) is not None
        return is_here and is_demanded(a.dtype) and 0 not in (*a.size, *b.size)

    def _permits(self, plan: Plan) -> bool:
        return all(permission() for permission in plan.needs)

    def _planned(self, key: Any, form: Form) -> Plan | None:
        """Decide a new product."""
        with self._planning:
            if key not in self._plans:
                a, b = Spec(*key[4:8]), Spec(*key[8:])
                if self.is_invariant and self._demands(a, b):
                    plan, keep = copying.planned(self._planner, form, a, b, *key[1:4])
                else:
                    plan, keep = self._planner.plan(self._ways(key, a, b), form, a)
                if not keep:
                    if self.is_invariant:  # a fused product must not become one that is not
                        self.refuse(form, a, b)
                    return None
                self._make_room()
                self._plans[key] = plan
            return self._plans[key]

    def _ways(self, key: Any, a: Spec, b: Spec) -> tuple[Shape, ...]:
        """The ways to run the product of a decision, in the order of sums that is demanded."""
        form = Form(key[0])
        shapes = ways(form, a, b, *key[1:4])
        return in_order(form, shapes) if self.is_invariant else shapes

    def _make_room(self) -> None:
        if len(self._plans) >= CAPACITY:
            self._plans = {}

    def _forget(self) -> None:
        """Drop all decisions: the lookup has newer winners."""
        with self._planning:
            self._snapshot = self._refreshing.snapshot
            self._planner.try_packs_again()
            self._plans = {}

    @property
    def watcher(self) -> Watcher | None:
        return Watching.watcher

    def outcomes(self) -> dict[Problem, Plan | str]:
        """How each problem that was decided runs, or why torch computes it.

        A problem whose operands lie differently from call to call counts as run by a kernel if any
        of them is. Looks up each problem again, and must not be called within a capture.
        """
        outcomes: dict[Problem, Plan | str] = {}
        for key, plan in list(self._plans.items()):
            form, a, b = Form(key[0]), Spec(*key[4:8]), Spec(*key[8:])
            shapes = self._ways(key, a, b)
            if plan is None:
                reasons = self._planner.why_not(shapes, form, a)
                outcomes = {**reasons, **outcomes}
                continue
            problems = [shape.problem for shape in shapes]
            outcomes |= {
                problem: plan
                for problem in (plan.shape.problem, *problems)
                if problem.operation.epilogue is plan.epilogue
            }
        return outcomes

    @property
    def snapshot(self) -> object:
        """The winners that the lookup has at present. Returns None if it does not say."""
        return getattr(self._chooser, "snapshot", None)

    @property
    def state(self) -> str | None:
        """A text that differs if decisions may differ. Returns None if that is not known."""
        revision = getattr(self.snapshot, "revision", None)
        deterministic = self._deterministic or torch.are_deterministic_algorithms_enabled()
        numerics = f" {Numerics.INVARIANT}" if self.is_invariant else ""
        return None if revision is None else f"{revision} {deterministic}{numerics}"

    @property
    def refreshes(self) -> bool:
        """Whether the lookup may have newer winners at any time."""
        return self._refreshing is not None

    def on_swap(self, react: Callable[[], None]) -> None:
        if self._refreshing is not None and hasattr(self._refreshing, "on_swap"):
            self._refreshing.on_swap = react

    def give_up(self, plan: Plan, error: Exception) -> None:
        """Leave a plan's products to torch from now on, and log why."""
        self._planner.complain(plan.config, error)
        with self._planning:
            plan.has_failed = True
            self._plans = {
                key: None if known is plan else known for key, known in self._plans.items()
            }


_UNDECIDED = object()
_recorders = recording()  # the list itself, which changes


def _key(
    form: Form,
    a: torch.Tensor | Spec,
    b: torch.Tensor | Spec,
    output: torch.dtype | None,
    groups: int,
    epilogue: Epilogue,
) -> tuple[Any, ...]:
    # One flat key: hashing it is most of what a known decision costs.
    return (
        form._value_,  # `value` is a property in Python
        output,
        groups,
        epilogue,
        *((a.dtype, a.device, a.size(), a.stride()) if isinstance(a, torch.Tensor) else a),
        *((b.dtype, b.device, b.size(), b.stride()) if isinstance(b, torch.Tensor) else b),
    )


def _groups(operands: Operands) -> int:
    offsets = operands.get("offsets")
    return 0 if offsets is None else int(offsets.shape[0])
