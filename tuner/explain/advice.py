"""What would make a product faster: measured on a tuned neighbour, else predicted.

Each adviser turns facts about a winner into at most one piece of advice: `ADVISERS` lists them. A
neighbour is measured if it was tuned on the same device model. A prediction is the cost model's or
the roofline's, and says so. Tokens of grouped products are not changed: they differ from step to
step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import CutlassKernel
from gemmsmith.core.operation import DType, Operation, Scaling, layouts_of
from gemmsmith.core.problem import Problem
from gemmsmith.errors import InvalidProblem
from tuner.backends import is_legal
from tuner.explain.competitors import Bound, work_of
from tuner.explain.grid import Grid, of_candidate
from tuner.explain.padding import contains, paddings, unaligned
from tuner.explain.roofline import Roofline, regime_of, roofline_of
from tuner.search.cost_model import predicted_us
from tuner.search.predict import Prediction, predict
from tuner.trial import Winner

NEAR = 1.25
"""How many times as many rows, or as few, are near enough to be advised."""
WORTH = 1.05
"""Times as fast as what is served that advice must be."""

_TWINS: dict[str, str] = {DType.BF16: DType.FP16, DType.FP16: DType.BF16}
"""Types of the same rates and bytes: a tile that wins for one suits the other."""
_SMALLER = tuple(
    (dtype, scaling) for dtype in (DType.FP8_E4M3, DType.INT8) for scaling in (None, Scaling.ROW)
)
_COST_MODEL = "predicted by the cost model,"


class AdviceKind(StrEnum):
    """What is to be changed."""

    PADDING = "padding"  # M, N or K, with zeros
    LAYOUT = "layout"  # how A and B lie in memory
    TILE = "tile"  # of the kernel
    ROWS = "rows"  # tokens in a step
    TYPE = "type"  # of the operands


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """A problem that takes less time than this one, and does the same or as much.

    Attributes:
        problem: the neighbour; for a tile, the problem itself or its twin in another type.
        us: the neighbour's time.
        ratio: how many times as fast it is as what is served now; of rows, for each row.
        is_measured: whether `us` was measured; else it is predicted.
    """

    kind: AdviceKind
    problem: Problem
    us: float
    ratio: float
    is_measured: bool
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What advice follows from.

    Attributes:
        near: winners of other problems on the same device model.
        served_us: the time of what is served now.
        grid: of what is served; None if it is not on record.
        tried: names of kernels that were measured on the problem.
    """

    winner: Winner
    near: Sequence[Winner]
    served_us: float
    roofline: Roofline | None
    grid: Grid | None
    tried: Collection[str]

    @property
    def problem(self) -> Problem:
        return self.winner.problem

    def floor_us(self, problem: Problem) -> float:
        return work_of(problem, self.roofline).floor_us or 0.0

    def measured(self, problems: Callable[[Problem], bool]) -> Iterator[tuple[Winner, float]]:
        """Neighbours with such a problem, and the times of what is served for them."""
        for other in self.near:
            if problems(other.problem) and (us := served_us(other)) is not None:
                yield other, us


def advise(
    winner: Winner,
    near: Sequence[Winner],
    *,
    roofline: Roofline | None = None,
    grid: Grid | None = None,
    tried: Collection[str] = (),
) -> tuple[Advice, ...]:
    """All advice that is worth it. Attributes as in `Facts`."""
    us = served_us(winner)
    if us is None:
        return ()
    facts = Facts(winner=winner, near=near, served_us=us, roofline=roofline, grid=grid, tried=tried)
    pieces = (max(adviser(facts), key=_measured_first, default=None) for adviser in ADVISERS)
    return tuple(item for item in pieces if item is not None and item.ratio >= WORTH)


def _measured_first(item: Advice) -> tuple[bool, float]:
    return item.is_measured, item.ratio


def served_us(winner: Winner) -> float | None:
    """The time of what is served; None if the default was not timed."""
    if winner.baseline is None:
        return None
    if winner.use.is_default or winner.speedup is None:
        return winner.baseline.median_us
    return winner.baseline.median_us / winner.speedup.median


def alternatives(problem: Problem) -> list[Problem]:
    """The same product in other layouts and types, whose winners are neighbours for advice."""
    twin = _twin(problem)
    return [*_layouts(problem), *([twin] if twin else []), *_smaller(problem)]


def padding(facts: Facts) -> Iterator[Advice]:
    """Larger problems that contain this one: without a tuned one, those of aligned extents."""
    problem = facts.problem
    operands = " and ".join(unaligned(problem))
    reason = f" Rows of {operands} are not multiples of 16 bytes." if operands else ""

    def text(padded: Problem) -> str:
        return f"Pad {_changes(problem, padded)}: {{}}.{reason}"

    for other, us in facts.measured(lambda larger: contains(larger, problem)):
        yield _advice(facts, AdviceKind.PADDING, other.problem, us, text(other.problem))
    for padded in paddings(problem):
        if prediction := _predicted(padded, facts.winner.device):
            us = max(prediction.us, facts.floor_us(padded))
            yield _advice(facts, AdviceKind.PADDING, padded, us, text(padded), by=_COST_MODEL)


def layout(facts: Facts) -> Iterator[Advice]:
    """The same product with its operands in another order of memory, if that was tuned."""
    others = _layouts(facts.problem)
    for other, us in facts.measured(others.__contains__):
        text = f"Store A and B in layout {other.problem.layout}: {{}}."
        yield _advice(facts, AdviceKind.LAYOUT, other.problem, us, text)


def tile(facts: Facts) -> Iterator[Advice]:
    """A tile that another type's winner has, or that fills the waves better by the cost model."""
    problem, candidate = facts.problem, facts.winner.candidate
    if facts.grid is not None:
        twin, own = _twin(problem), facts.grid
        for other, us in facts.measured(lambda it: it == twin):
            grid = other.runs and of_candidate(other.runs, problem, other.device)
            if grid and grid.tile[:2] != own.tile[:2] and facts.served_us / us >= WORTH:
                yield _advice(facts, AdviceKind.TILE, other.problem, us, _tiles(own, grid))
    prediction = _predicted(problem, facts.winner.device)
    if (
        prediction is None
        or candidate is None
        or facts.winner.statistics is None
        or not isinstance(candidate.kernel, CutlassKernel)
        or prediction.candidate.kernel.name in facts.tried
    ):
        return
    ours = of_candidate(candidate, problem, facts.winner.device)
    better = of_candidate(prediction.candidate, problem, facts.winner.device)
    if ours is None or better is None or ours.tile[:2] == better.tile[:2]:
        return
    if better.waves is not None and better.lost_waves < ours.lost_waves:
        (now_us,) = predicted_us(problem, [candidate], facts.winner.device)
        us = facts.winner.statistics.median_us * prediction.us / now_us
        us = max(us, facts.floor_us(problem))
        yield _advice(facts, AdviceKind.TILE, problem, us, _tiles(ours, better), by=_COST_MODEL)


def rows(facts: Facts) -> Iterator[Advice]:
    """As many rows, or matrices, as fill their waves: a few more need a whole further wave."""
    problem, grid, candidate = facts.problem, facts.grid, facts.winner.runs
    operation, work = problem.operation, work_of(facts.problem, facts.roofline)
    if operation.is_grouped or work.bound is not Bound.COMPUTE:
        return
    if problem.batch == 1 and (operation.symmetric or operation.free_extent != "m"):
        return  # another size is another product

    def of_size(other: Problem, size: int) -> Problem:
        return replace(other, batch=size) if problem.batch > 1 else replace(other, m=size)

    def near(other: Problem) -> bool:
        size = _rows(other) / _rows(problem)
        own = problem.batch if problem.batch > 1 else problem.m
        return 1 / NEAR <= size <= NEAR and of_size(other, own) == problem != other

    def text(other: Problem, waves: str = "") -> str:
        return f"Change {_changes(problem, other)}{waves}: {{}}."

    for other, us in facts.measured(near):
        item = _advice(facts, AdviceKind.ROWS, other.problem, us, text(other.problem))
        if item.ratio >= WORTH:
            yield item
    if grid is None or candidate is None or not isinstance(candidate.kernel, CutlassKernel):
        return
    device = facts.winner.device
    for size in _edges(problem, grid):
        fuller = of_size(problem, size)
        if not near(fuller) or not is_legal(candidate, fuller):
            continue
        filled = of_candidate(candidate, fuller, device)
        if filled is not None and filled.waves is not None:
            (now_us,) = predicted_us(problem, [candidate], device)
            (then_us,) = predicted_us(fuller, [candidate], device)
            us = max(facts.served_us * then_us / now_us, facts.floor_us(fuller))
            waves = f" ({_waves(filled)} instead of {_waves(grid)})"
            yield _advice(facts, AdviceKind.ROWS, fuller, us, text(fuller, waves), by=_COST_MODEL)


def smaller_type(facts: Facts) -> Iterator[Advice]:
    """FP8 or INT8 as an upper bound; without a tuned one, by the roofline of FP8."""
    others = _smaller(facts.problem)

    def text(other: Problem) -> str:
        return f"Operands of 8 bits ({other.operation}), without the casts: {{}}, an upper bound."

    for other, us in facts.measured(others.__contains__):
        yield _advice(facts, AdviceKind.TYPE, other.problem, us, text(other.problem))
    for problem in others[:1]:
        roofline = roofline_of(problem, facts.winner.device, regime_of(facts.winner))
        if roofline is not None:
            least_us, by = max(roofline.least_us(problem)), "predicted by the roofline,"
            yield _advice(facts, AdviceKind.TYPE, problem, least_us, text(problem), by=by)


ADVISERS: tuple[Callable[[Facts], Iterator[Advice]], ...] = (
    padding,
    layout,
    tile,
    rows,
    smaller_type,
)
"""Of what each of them yields, the best counts; what was measured comes before predictions."""


def _edges(problem: Problem, grid: Grid) -> Iterator[int]:
    """The largest M (or batch) that needs a wave less, and the largest that needs none more."""
    if grid.waves is None or grid.shares_evenly:
        return
    size, step = problem.m, grid.tile[0] * grid.cluster[0]
    if problem.batch > 1:
        size, step = problem.batch, 1
    slots = grid.resident * grid.blocks_per_sm
    blocks = grid.tiles * grid.splits // -(-size // step)  # of one step
    for rounds in (grid.rounds - 1, grid.rounds):
        if steps := rounds * slots // blocks:
            yield steps * step


def _rows(problem: Problem) -> int:
    return problem.m * problem.batch


def _layouts(problem: Problem) -> list[Problem]:
    layouts = [layout for layout in layouts_of(problem.dtype) if layout is not problem.layout]
    return [replace(problem, layout=layout) for layout in layouts]


def _twin(problem: Problem) -> Problem | None:
    name, dot, parts = problem.dtype.partition(".")
    twin = _TWINS.get(name)
    return None if twin is None else replace(problem, dtype=f"{twin}{dot}{parts}")


def _smaller(problem: Problem) -> list[Problem]:
    """The same product of operands of 8 bits, as far as it exists."""
    own = problem.operation
    problems = []
    for dtype, scaling in _SMALLER if own.a.bits == 16 else ():
        with suppress(InvalidProblem):
            operation = Operation.of(
                dtype, out="bf16", scaling=scaling, grouping=own.grouping, epilogue=own.epilogue
            )
            if operation.d.bits == own.d.bits and not own.accumulate:
                problems.append(
                    Problem.of(operation, problem.m, problem.n, problem.k, problem.batch)
                )
    return problems


@lru_cache(maxsize=4096)
def _predicted(problem: Problem, device: DeviceModel) -> Prediction | None:
    return predict(problem, device)


def _changes(problem: Problem, other: Problem) -> str:
    return " and ".join(
        f"{label} from {own} to {size}"
        for label, name in (("batch", "batch"), ("M", "m"), ("N", "n"), ("K", "k"))
        if (own := getattr(problem, name)) != (size := getattr(other, name))
    )


def _tiles(now: Grid, other: Grid) -> str:
    return (
        f"Use tiles of {other.tile[0]}×{other.tile[1]} instead of {now.tile[0]}×{now.tile[1]} "
        f"({_waves(other)} instead of {_waves(now)}): {{}}."
    )


def _waves(grid: Grid) -> str:
    if grid.waves is None:
        return "split along K"
    return "shared evenly" if grid.shares_evenly else f"{grid.waves:.2f} waves"


def _advice(
    facts: Facts, kind: AdviceKind, problem: Problem, us: float, text: str, *, by: str = ""
) -> Advice:
    """Advice whose `text` has a place for the time; `by` says who predicts it, if it is not
    measured.
    """
    own = facts.problem
    ratio = facts.served_us / us
    if kind is AdviceKind.ROWS:
        ratio *= _rows(problem) / _rows(own)
    than = "for each row as now" if kind is AdviceKind.ROWS else "as now"
    how = by or f"measured, {problem} takes"
    return Advice(
        kind=kind,
        problem=problem,
        us=us,
        ratio=ratio,
        is_measured=not by,
        text=text.format(f"{how} {us:.2f} µs, {ratio:.2f} times as fast {than}"),
    )
