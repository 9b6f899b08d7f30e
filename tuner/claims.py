"""Checks whether the claims of a winner from elsewhere can be true.

A file may come from anywhere. Each rule takes a winner and returns the reason why it cannot be
true, or None; the first reason counts. Later rules may rely on earlier ones. A winner that passes
may still be false: whether it is answered depends on its signature.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from datetime import datetime

import msgspec

from gemmsmith.answers.answer import Ratio, Statistics
from gemmsmith.core.config import Use
from gemmsmith.core.kernel import AnyKernel, Backend, CutlassKernel, PluginKernel, TileScheduler
from gemmsmith.core.launch import Decomposition, Launch
from gemmsmith.core.legality import launch_refusal
from gemmsmith.core.problem import MAX_EXTENT, Problem
from tuner.arch import ARCHITECTURES
from tuner.backends import backend_of, refusal
from tuner.backends.cutlass.launches import SWIZZLES
from tuner.trial import Winner

LONGEST_TEXT = 2000
"""Characters of a text. cuBLAS's kernels have the longest names: 468 in the shipped winners."""
LONGEST_LIST = 64
"""Entries of ties and of the default's kernels; at most 16 in the shipped winners."""
_LONGEST = {"name": 300, "job": 100, "pack": 128, "promoted_at": 40}
"""Characters of texts whose columns in the database are shorter."""

LONGEST_US = 6e7
"""A launch of a minute: a hundred times as long as a product that fills the memory of any GPU."""
MOST_SPEEDUP = 1000.0
"""The largest in the shipped winners is 7.5."""
MARGIN = 1.25
"""A speed-up is paired round by round, so it differs from the ratio of the medians: it is 0.96 to
1.06 times that in the shipped winners."""

_LOOSEST, _LOOSEST_PER_K = 0.02, 2e-6
"""Bound of any workload's tolerance: the largest are 5e-3 and 1.25e-6 per K (FP8 that is summed in
the tensor core, `tuner.workloads.scaled`). The workloads themselves need torch."""

_LOOSEST_FP8 = 0.08
"""In place of the first if D is FP8: the largest is 6.5e-2 (`tuner.workloads.fp8_output`)."""

_MOST_SPLITS = 4096
_DEVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._+()-]{0,150}")

Claim = Callable[[Winner], str | None]


def texts_are_plain(winner: Winner) -> str | None:
    """Texts have no control characters and no lone surrogates, and fit into the database."""
    for name, text in _texts(msgspec.to_builtins(winner)):
        if len(text) > _LONGEST.get(name, LONGEST_TEXT):
            return f"{name} has {len(text)} characters"
        if not text.isprintable():
            return f"{name} has characters that cannot be printed: {text!a:.60}"
    for name in ("ties", "baseline_kernels", "regimes"):
        if len(getattr(winner, name)) > LONGEST_LIST:
            return f"{name} has more than {LONGEST_LIST} entries"
    return None


def date_is_one(winner: Winner) -> str | None:
    """`promoted_at` is RFC 3339, or empty."""
    try:
        datetime.fromisoformat(winner.promoted_at or "1970-01-01")
    except ValueError:
        return f"promoted_at is no date: {winner.promoted_at!r}"
    return None


def device_is_possible(winner: Winner) -> str | None:
    """A GPU of an architecture that is known, with sizes that GPUs have."""
    device = winner.device
    if not _DEVICE.fullmatch(device.name):
        return f"no GPU is called {device.name!r:.80}"
    if device.arch not in ARCHITECTURES:
        return f"architecture {device.arch!r:.40} is not one of {', '.join(ARCHITECTURES)}"
    for name, least, most in (
        ("sm_count", 1, 1024),
        ("memory_bytes", 2**28, 2**44),
        ("l2_bytes", 0, 2**34),
        ("max_clock_mhz", 0, 10_000),
        ("memory_bandwidth", 0, 10**15),
    ):
        value = getattr(device, name)
        if not least <= value <= most:
            return f"the device's {name} is {value}"
    if winner.problem.operand_bytes > device.memory_bytes:
        return f"{winner.problem} does not fit into the memory of {device.name}"
    return None


def parts_belong_together(winner: Winner) -> str | None:
    """A candidate was timed and verified; what is to be used is that candidate, or the default."""
    has_candidate = winner.candidate is not None
    for name in ("statistics", "correctness"):
        if (getattr(winner, name) is not None) is not has_candidate:
            return f"there is {'no' if has_candidate else 'a'} candidate's {name}"
    if (winner.speedup is not None) is not (has_candidate and winner.baseline is not None):
        return "a speed-up goes with the times of both, and with nothing less"
    order = winner.problem.operation.summation
    if order is not None and winner.use.is_default:
        return f"use is {winner.use}, which adds in no known order, not {order}"
    if not winner.use.is_default:
        if winner.candidate is None:
            return f"use is {winner.use}, and there is no candidate"
        if (use := Use.of(winner.candidate.kernel)) is not winner.use:
            return f"use is {winner.use}, and the candidate's kernel is for {use}"
    return None


def times_are_possible(winner: Winner) -> str | None:
    """Positive, each median within its interval."""
    for name, statistics in (("statistics", winner.statistics), ("baseline", winner.baseline)):
        if statistics is not None and (reason := _time_reason(statistics)):
            return f"{name}: {reason}"
    for measured in winner.regimes:
        for time in (measured.median_us, measured.default_us):
            if time is not None and not 0 < time <= LONGEST_US:
                return f"{measured.regime}: {time} µs"
    return None


def speedup_follows_from_times(winner: Winner) -> str | None:
    """Speed-ups are the ratios of the times; the winner's is the least of the regimes'.

    A candidate that replaces the default is faster in every regime, with its whole interval, unless
    the operation demands an order of sums, which the default does not have.
    """
    if winner.speedup is None or winner.statistics is None or winner.baseline is None:
        return None
    times = (winner.baseline.median_us, winner.statistics.median_us)
    speedups = [("the speed-up", winner.speedup, *times)]
    for measured in winner.regimes:
        regime, speedup, default_us = measured.regime, measured.speedup, measured.default_us
        if (speedup is None) is not (default_us is None):
            return f"{regime}: a speed-up goes with the default's time"
        if speedup is not None and default_us is not None:
            speedups.append((f"{regime}: ", speedup, default_us, measured.median_us))
    for name, ratio, default_us, own_us in speedups:
        if reason := _ratio_reason(ratio, default_us / own_us):
            return f"{name} {reason}"
        has_order = winner.problem.operation.summation is not None
        if not winner.use.is_default and not has_order and ratio.ci_low <= 1:
            return f"{name} may be {ratio.ci_low:.4g}, and yet the default is not to be used"
    medians = [ratio.median for _, ratio, _, _ in speedups[1:]]
    if medians and not math.isclose(winner.speedup.median, min(medians), rel_tol=1e-6):
        return f"the speed-up is {winner.speedup.median:.4g}, the least of its regimes' another"
    if len({measured.regime for measured in winner.regimes}) < len(winner.regimes):
        return "a regime is there twice"
    return None


def error_is_within_tolerance(winner: Winner) -> str | None:
    """It was verified, against a tolerance that products of this operation can have."""
    correctness = winner.correctness
    if correctness is None:
        return None
    operation = winner.problem.operation
    # Rounding errors of a sum grow with its length: so a part of the bound is proportional to K.
    loosest = _LOOSEST_FP8 if operation.stores_fp8 else _LOOSEST
    loosest += _LOOSEST_PER_K * winner.problem.k
    if operation.d.is_integer:
        loosest = 0.0
    error, tolerance = correctness.error, correctness.tolerance
    if not 0 <= tolerance <= loosest:
        return f"{operation} cannot have a tolerance of {tolerance:.4g}"
    if not 0 <= error <= tolerance:
        return f"the error, {error:.4g}, is not within the tolerance, {tolerance:.4g}"
    if not 0 <= correctness.max_error < math.inf:
        return f"the greatest error is {correctness.max_error}"
    return None


def conditions_are_possible(winner: Winner) -> str | None:
    """Clock, power and temperature are a GPU's; the power penalty a factor."""
    seen = winner.conditions
    if seen is not None and not (
        0 < seen.sm_clock_mhz <= 10_000
        and 0 <= seen.power_w <= 10_000
        and -50 <= seen.temperature_c <= 150
    ):
        return f"{seen.sm_clock_mhz} MHz, {seen.power_w} W, {seen.temperature_c} °C"
    penalty = winner.power_penalty
    if penalty is not None and not 0.1 <= penalty <= 10:
        return f"a power penalty of {penalty}"
    return None


def kernel_is_what_its_name_says(winner: Winner) -> str | None:
    """The description is the one that the backend has for the name; it takes the problem."""
    if winner.candidate is None:
        return None
    kernel = winner.candidate.kernel
    if kernel.arch != winner.device.arch:
        return f"{kernel.name} is for {kernel.arch}, {winner.device.name} is {winner.device.arch}"
    return kernel_reason(kernel, winner.problem)


def launch_is_legal(winner: Winner) -> str | None:
    """The backend can use this launch for the kernel and the problem."""
    if winner.candidate is None:
        return None
    kernel, launch = winner.candidate.kernel, winner.candidate.launch
    if launch.swizzle not in SWIZZLES:
        return f"a swizzle of {launch.swizzle}: it is one of {', '.join(map(str, SWIZZLES))}"
    if not 1 <= launch.splits <= _MOST_SPLITS:
        return f"{launch.splits} splits"
    if not 0 <= launch.sm_budget <= winner.device.sm_count:
        return f"an SM budget of {launch.sm_budget}: {winner.device.name} has fewer"
    has_algorithms = kernel.backend is Backend.CUBLASLT
    if has_algorithms is isinstance(launch.algorithm, msgspec.UnsetType):
        return f"an algorithm is what {Backend.CUBLASLT} launches, and nothing else does"
    if not isinstance(launch.algorithm, msgspec.UnsetType) and not (
        0 < launch.algorithm.library <= MAX_EXTENT
        and launch.algorithm.workspace_bytes <= winner.device.memory_bytes
    ):
        return "an algorithm that no cuBLASLt has"
    if isinstance(kernel, CutlassKernel) and (reason := _cut_reason(kernel, launch)):
        return reason
    return launch_refusal(kernel, launch, winner.problem)


CLAIMS: tuple[Claim, ...] = (
    texts_are_plain,
    date_is_one,
    device_is_possible,
    parts_belong_together,
    times_are_possible,
    speedup_follows_from_times,
    error_is_within_tolerance,
    conditions_are_possible,
    kernel_is_what_its_name_says,
    launch_is_legal,
)


def reason(winner: Winner) -> str | None:
    return next((reason for claim in CLAIMS if (reason := claim(winner))), None)


def kernel_reason(kernel: AnyKernel, problem: Problem | None = None) -> str | None:
    """Why no backend has such a kernel of that name, or why it does not take the problem."""
    if backend_of(kernel) is None:
        return f"{kernel.name}: no backend {kernel.source} is known here"
    numbers = [kernel.alignment_a, kernel.alignment_b, kernel.alignment_d]
    if isinstance(kernel, CutlassKernel):
        numbers += [*kernel.tile, *kernel.cluster, kernel.stages + 1]
    elif isinstance(kernel, PluginKernel):
        numbers += kernel.tile
    if not all(1 <= number <= 2**16 for number in numbers):
        return f"{kernel.name}: no kernel has such a tile, cluster, alignment or number of stages"
    try:
        reason = refusal(kernel, problem)
    # The rules are written for what enumerators make; another description may break them.
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        reason = f"{kernel.source} has no such kernel"
    return f"{kernel.name}: {reason}" if reason else None


_CUTS = {
    TileScheduler.GRID: {Decomposition.DATA_PARALLEL},
    TileScheduler.PERSISTENT: {Decomposition.DATA_PARALLEL},
    TileScheduler.STREAM_K: {*Decomposition},
    TileScheduler.SPLIT_K: {Decomposition.DATA_PARALLEL, Decomposition.SPLIT_K},
    TileScheduler.CLUSTER_SPLIT_K: {Decomposition.DATA_PARALLEL, Decomposition.SPLIT_K},
    TileScheduler.GROUPS: {Decomposition.DATA_PARALLEL},
}
"""How each scheduler can cut a problem into pieces."""


def _cut_reason(kernel: CutlassKernel, launch: Launch) -> str | None:
    cut = launch.decomposition
    if cut not in _CUTS[kernel.scheduler]:
        return f"the {kernel.scheduler} scheduler does not do {cut}"
    if launch.splits > 1 and cut not in (Decomposition.SPLIT_K, Decomposition.HEURISTIC):
        return f"{cut} does not take {launch.splits} splits"
    return None


def _time_reason(times: Statistics) -> str | None:
    if not 0 < times.ci_low_us <= times.median_us <= times.ci_high_us <= LONGEST_US:
        return (
            f"{times.median_us} µs in {times.ci_low_us} … {times.ci_high_us}: times are above 0, "
            f"at most {LONGEST_US:.0e}, and the median is within its interval"
        )
    return None if 1 <= times.samples <= MAX_EXTENT else f"{times.samples} samples"


def _ratio_reason(ratio: Ratio, of_times: float) -> str | None:
    if not 0 < ratio.ci_low <= ratio.median <= ratio.ci_high <= MOST_SPEEDUP:
        return (
            f"{ratio.median:.4g} in {ratio.ci_low:.4g} … {ratio.ci_high:.4g}: it is above 0, at "
            f"most {MOST_SPEEDUP:g}, and within its interval"
        )
    if not 1 / MARGIN <= ratio.median / of_times <= MARGIN:
        return f"{ratio.median:.4g} is not what the times say, which is {of_times:.4g}"
    return None


def _texts(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(item, key)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item, name)
