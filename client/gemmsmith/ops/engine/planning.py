"""From a product's shapes to a loaded kernel that takes it, and the interfaces that this needs.

A layer's bias is added by the kernel, or by a pass after a kernel without a bias.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from gemmsmith.core.config import Config
from gemmsmith.core.legality import sums_are_in_order
from gemmsmith.core.operation import Epilogue, Layout
from gemmsmith.core.problem import Problem
from gemmsmith.errors import GemmsmithError
from gemmsmith.ops.engine.forms import Form, Shape, Spec, shapes
from gemmsmith.ops.engine.plan import Plan
from gemmsmith.ops.engine.platform import Platform
from gemmsmith.ops.engine.settings import needed
from gemmsmith.ops.engine.untuned import Untuned
from gemmsmith.runtime.abi import NO_ALGORITHM
from gemmsmith.runtime.pack import LoadedPack

log = logging.getLogger("gemmsmith")

NO_WINNER = "no winner"
DEFAULT_FASTER = "torch's default is faster"

BIAS_US = 2.0
"""Fixed cost of the pass that adds a bias: one more launch. An estimate, not measured yet."""
BIAS_BYTES_PER_US = 3e6
"""Device memory moved in a microsecond by that pass, 3 TB/s: below an H200's 4.8 TB/s peak."""


class Chosen(Protocol):
    """A lookup's answer."""

    @property
    def config(self) -> Config:
        """Kernel, launch, and the hash of the pack that holds the kernel."""

    @property
    def deterministic(self) -> bool:
        """Whether the order of every sum is fixed."""


class Chooser(Protocol):
    """Says which kernel runs a product, as `gemmsmith.winners.lookup.Lookup` does."""

    def lookup(
        self, dtype: str, layout: Layout, m: int, n: int, k: int, batch: int = 1
    ) -> Chosen | None:
        """Returns None if torch's own operator must run."""


@runtime_checkable
class PackSource(Protocol):
    """Holds kernel packs as local files."""

    def path(self, pack_hash: str) -> Path:
        """The checked pack of that hash, which may be fetched first."""


class Planner:
    """Makes plans. Each fault is logged once per pack and reason, and torch computes the product.

    Args:
        chooser: says which kernel to run.
        packs: holds compiled kernels.
        deterministic: as of `Engine`.
        platform: the devices.
        is_invariant: as of `Engine`.
    """

    def __init__(
        self,
        chooser: Chooser,
        packs: PackSource,
        deterministic: bool | None,
        platform: Platform,
        is_invariant: bool = False,
    ) -> None:
        self._chooser, self._packs = chooser, packs
        self._is_invariant = is_invariant
        self._deterministic, self._platform = deterministic, platform
        self._broken: dict[str, str] = {}  # packs, with the reason
        self._untuned = Untuned(chooser)
        self._complaints: set[tuple[str, str]] = set()

    def plan(self, shapes: Sequence[Shape], form: Form, a: Spec) -> tuple[Plan | None, bool]:
        """The plan, and whether that answer may be kept.

        Args:
            shapes: the ways in which kernels could run the product, the best first.
            form: which product.
            a: its left operand.
        """
        index = self._platform.index(a.device)
        if index is None:
            return None, True
        outcome: Plan | str | None = NO_WINNER
        reasons = set()
        for shape in shapes:
            outcome = self._outcome(shape, form, a.device, index)
            if outcome is None:
                return None, False
            if isinstance(outcome, Plan):
                break
            reasons.add(outcome)
        plan = outcome if isinstance(outcome, Plan) else None
        of = shapes[0].problem.operation if shapes else None
        if of is not None and of.epilogue.is_torchs and not of.symmetric:
            is_untuned = plan is None and reasons == {NO_WINNER}
            self._untuned.decided(shapes[0].problem, has_winner=not is_untuned)
        return plan, True

    def why_not(self, shapes: Sequence[Shape], form: Form, a: Spec) -> dict[Problem, str]:
        """Why torch computes the product, for every way in which a kernel could. As `plan`."""
        index = self._platform.index(a.device)
        if index is None:
            return {}
        reasons = {}
        for shape in shapes:
            outcome = self._outcome(shape, form, a.device, index)
            if outcome is not None:
                reason = outcome if isinstance(outcome, str) else "a launch of its winner failed"
                reasons[shape.problem] = reason
        return reasons

    def _outcome(
        self, shape: Shape, form: Form, device: torch.device, index: int
    ) -> Plan | str | None:
        """The plan, or why a kernel does not run. Returns None if a capture is in the way."""
        problem = shape.problem
        try:
            chosen = self._chooser.lookup(
                problem.dtype, problem.layout, problem.m, problem.n, problem.k, problem.batch
            )
        except Exception as error:  # noqa: BLE001 - a lookup's fault must not end a training run
            self.complain(None, error)
            return f"the lookup failed: {error}"
        if chosen is None:
            return self._why_nothing(problem)
        config, saving = chosen.config, getattr(chosen, "saving_us", None)
        if refusal := self._refusal(chosen, shape, form, index):
            return refusal
        if self._platform.capturing():
            return None  # loading a pack would break the capture; the next call may
        plan = self._load(config, shape, device, index)
        if isinstance(plan, Plan):
            plan.saving_us = saving
            plan.time_us = getattr(chosen, "time_us", None)
            fixed_order = chosen.deterministic or self._deterministic is False
            plan.needs = needed(config, fixed_order=fixed_order)
        return plan

    def _why_nothing(self, problem: Problem) -> str:
        """Why the lookup has no kernel to run."""
        row_for = getattr(getattr(self._chooser, "snapshot", None), "row_for", None)
        row = None if row_for is None else row_for(problem)
        if row is None:
            return NO_WINNER
        return DEFAULT_FASTER if row.use.is_default else "its winner is not compiled"

    def _refusal(self, chosen: Chosen, shape: Shape, form: Form, index: int) -> str | None:
        """Why the chosen kernel may not run. Returns None if it may."""
        config = chosen.config
        kernel, saving = config.kernel, getattr(chosen, "saving_us", None)
        if self._deterministic and not chosen.deterministic:
            return "its winner adds up in no fixed order"
        if config.pack is None:
            return "its winner is not compiled"
        if config.pack in self._broken:
            return self._broken[config.pack]
        if kernel.arch != self._platform.arch(index):
            return f"its winner is for {kernel.arch}"
        if misalignment(config, shape):
            return "its rows do not begin where its winner can load or store them (alignment)"
        if adds_bias_afterwards(form, shape) and not self._pays(saving, shape):
            return "a pass that adds the bias costs more than its winner saves"
        if form.is_precise and kernel.keeps_short_sums:
            return "its winner keeps short sums, and use_fast_accum is off"
        return sums_are_in_order(kernel, config.launch, shape.problem)

    def _pays(self, saving: float | None, shape: Shape) -> bool:
        return self._is_invariant or pays(saving, shape)

    def _load(self, config: Config, shape: Shape, device: torch.device, index: int) -> Plan | str:
        """The plan, or why it cannot be made."""
        pack = str(config.pack)
        try:
            kernel = LoadedPack.open(self._packs.path(pack)).kernel(config.kernel.name)
        except Exception as error:  # noqa: BLE001 - without a pack torch computes the product
            self._broken[pack] = f"its kernel pack is not used: {error}"
            self.complain(config, error)
            return self._broken[pack]
        try:
            return Plan(config, shape, kernel, self._platform, device, index)
        except GemmsmithError as error:
            if getattr(error, "status", None) != NO_ALGORITHM:
                self.complain(config, error)
                return f"its winner refused: {error}"
            return "its winner is an algorithm of another cuBLASLt"

    def try_packs_again(self) -> None:
        self._broken.clear()

    def complain(self, config: Config | None, error: Exception) -> None:
        """Log why torch computes what a kernel, or any kernel, should have computed."""
        pack = "" if config is None else str(config.pack)
        # The text names the problem; the kind of fault and its status make the reason.
        reason = f"{type(error).__name__} {getattr(error, 'status', '')}"
        if (pack, reason) not in self._complaints:
            self._complaints.add((pack, reason))
            source = f"kernel pack {pack[:16]}" if pack else "the lookup"
            log.warning("torch's own operators run instead of %s: %s", source, error)


def misalignment(config: Config, shape: Shape) -> bool:
    """Whether rows or batch entries do not start where the kernel's loads and stores must.

    `can_implement` would refuse it too, but with a line in the log. This is no fault of the pack.
    """
    kernel, problem = config.kernel, shape.problem
    batched = problem.batch > 1
    checks = (
        (kernel.alignment_a, shape.lda, shape.stride_a),
        (kernel.alignment_b, shape.ldb, shape.stride_b),
        (kernel.alignment_d, problem.columns, shape.stride_d),
    )
    return any(
        leading % alignment or (batched and stride % alignment)
        for alignment, leading, stride in checks
    )


def ways(
    form: Form, a: Spec, b: Spec, output: torch.dtype | None, groups: int, epilogue: Epilogue
) -> tuple[Shape, ...]:
    """How kernels could run the product; those that add a bias themselves come first."""
    plain = shapes(form, a, b, output, groups, epilogue)
    if form is not Form.LINEAR_BIAS or epilogue is not Epilogue.NONE:
        return plain
    return (*shapes(form, a, b, output, groups, Epilogue.BIAS), *plain)


def adds_bias_afterwards(form: Form, shape: Shape) -> bool:
    return form is Form.LINEAR_BIAS and not shape.problem.operation.is_fused


def pays(saving_us: float | None, shape: Shape) -> bool:
    """Whether a product is faster than torch's although a pass of its own adds the bias.

    torch adds the bias within the product, as kernels with a bias do. A pass reads and writes the
    output once more. If the kernel's saving was not measured, torch computes the product.
    """
    if saving_us is None:
        return False
    problem = shape.problem
    moved = 2 * problem.m * problem.n * problem.operation.d.bytes
    return saving_us > BIAS_US + moved / BIAS_BYTES_PER_US
