"""Which kernel ran each recorded product, or why torch did.

The recording counts calls and the engine knows its decisions. So nothing is added to a call, and
nothing waits for a GPU: times are those of the winners' measurements. A recorded operator may have
run one of several products: a linear layer with a bias runs one kernel for both, or one for the
product. `_ran` says which, by what the engine decided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TypeAlias

from gemmsmith.answers.snapshot import Snapshot
from gemmsmith.core.numerics import Numerics, with_numerics
from gemmsmith.core.operation import Epilogue
from gemmsmith.core.problem import Problem
from gemmsmith.errors import InvalidProblem
from gemmsmith.ops.capturing import problems_of
from gemmsmith.ops.engine.in_use import in_use, why_none
from gemmsmith.ops.engine.plan import Plan
from gemmsmith.program.calls import Call, Fusion
from gemmsmith.program.ran import Ran, RanProduct

_Outcomes: TypeAlias = Mapping[Problem, Plan | str]

NO_KERNELS = "no kernels exist for these types"
NOT_DECIDED = "no patch replaces it"


def account(total: Counter[Call | Fusion], steps: int) -> Ran:
    """What ran the recorded calls of this process, in which `steps` were recorded."""
    engine = in_use()
    outcomes: _Outcomes = {} if engine is None else engine.outcomes()
    is_invariant = engine is not None and engine.is_invariant
    ran, fusions, skipped = Counter[Problem](), Counter[Problem](), Counter[str]()
    for call, calls in total.items():
        problems: list[Problem] = []
        for problem, types in problems_of(call):
            if problem is None:
                skipped[types] += calls
            else:
                problems.append(_demanded(problem) if is_invariant else problem)
        if isinstance(call, Fusion):
            # If a kernel ran it, its operator is recorded as well.
            fusions.update({p: calls for p in problems if not isinstance(outcomes.get(p), Plan)})
            continue
        for problem in _ran(problems, outcomes):
            ran[problem] += calls
    why = NOT_DECIDED if engine is not None else f"no winners are in use: {why_none()}"
    products = [
        _product(problem, calls, outcomes.get(problem, why), getattr(engine, "snapshot", None))
        for problem, calls in (ran | fusions).most_common()
    ]
    products += [
        RanProduct(types=types, calls=calls, reason=NO_KERNELS)
        for types, calls in skipped.most_common()
    ]
    return Ran(steps=steps, processes=1, products=products)


def _demanded(problem: Problem) -> Problem:
    try:
        return with_numerics(problem, Numerics.INVARIANT)
    except InvalidProblem:
        return problem


def _ran(problems: list[Problem], outcomes: _Outcomes) -> Iterator[Problem]:
    """The products of one operator that ran, and those that a kernel could have fused."""
    fused = [problem for problem in problems if problem.operation.is_fused]
    plain = [problem for problem in problems if not problem.operation.is_fused]
    for problem in fused:
        covered = [other for other in plain if _covers(problem, other)]
        has_kernel = isinstance(outcomes.get(problem), Plan)
        is_torchs = problem.operation.epilogue.is_torchs
        is_added = is_torchs and any(isinstance(outcomes.get(other), Plan) for other in covered)
        if is_added and not has_kernel:
            continue  # a kernel ran the product, and a pass added the bias
        if has_kernel or is_torchs:
            plain = [other for other in plain if other not in covered]
        yield problem
    has_bias = any(problem.operation.epilogue.has_bias for problem in fused)
    for problem in plain:
        biased = _with_bias(problem) if has_bias else problem
        yield biased if isinstance(outcomes.get(biased), Plan) else problem


def _with_bias(plain: Problem) -> Problem:
    """What a kernel runs if it adds the bias, and torch's steps do what follows."""
    try:
        operation = replace(plain.operation, epilogue=Epilogue.BIAS)
    except InvalidProblem:
        return plain
    return replace(plain, dtype=operation.dtype)


def _covers(fused: Problem, plain: Problem) -> bool:
    """Whether a fused product computes a plain one, or gate and up, which are two."""
    columns = {fused.n, fused.n // 2} if fused.operation.epilogue.is_gated else {fused.n}
    ours, other = fused.operation, plain.operation
    return (
        (ours.types, ours.layout, ours.grouping) == (other.types, other.layout, other.grouping)
        and (fused.m, fused.k, fused.batch) == (plain.m, plain.k, plain.batch)
        and plain.n in columns
    )


def _product(problem: Problem, calls: int, outcome: Plan | str, winners: object) -> RanProduct:
    if isinstance(outcome, str):
        torch_us = _torch_us(problem, winners)
        return RanProduct(problem=problem, calls=calls, reason=outcome, time_us=torch_us)
    return RanProduct(
        problem=problem,
        calls=calls,
        kernel=outcome.config.kernel.name,
        time_us=outcome.time_us,
        saving_us=outcome.saving_us,
    )


def _torch_us(problem: Problem, winners: object) -> float | None:
    """Microseconds by torch, if the winner of this very problem was measured against it."""
    row = winners.row_for(problem) if isinstance(winners, Snapshot) else None
    if row is None or row.problem != problem or row.time_us is None or row.saving_us is None:
        return None
    return row.time_us + row.saving_us
