"""What a winner from elsewhere cannot claim: each forged figure is told by name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gemmsmith.core.config import Use
from gemmsmith.core.kernel import TileScheduler
from gemmsmith.core.problem import Problem
from tests.support.replacing import replace
from tests.support.serving import H200, winner
from tests.support.shipped import shipped_files
from tuner import claims
from tuner.claims import reason
from tuner.exchange import read_winners
from tuner.trial import Winner

HONEST = winner(Problem(m=4096, n=4096, k=4096))
LIBRARY = next(w for f in shipped_files() for w in read_winners(f) if w.use is Use.CUBLASLT)
REGIMES = next(w for f in shipped_files() for w in read_winners(f) if len(w.regimes) == 3)


def forged(real: Winner, path: str, value: object) -> Winner:
    """The winner with another value somewhere within."""
    document: Any = msgspec.to_builtins(real)
    *parents, last = path.split(".")
    inner = document
    for name in parents:
        inner = inner[int(name)] if name.isdecimal() else inner[name]
    inner[last] = value
    return msgspec.convert(document, Winner)


def test_what_was_measured_is_not_doubted() -> None:
    assert reason(HONEST) is None
    assert reason(replace(HONEST, use=Use.CUBLAS)) is None
    nothing = dict.fromkeys(("candidate", "statistics", "speedup", "correctness"))
    assert reason(replace(HONEST, use=Use.CUBLAS, **nothing)) is None
    for file in shipped_files():
        assert [reason(found) for found in read_winners(file) if reason(found)] == [], file


def test_fp8_outputs_may_be_off_by_a_step_of_theirs() -> None:
    figures = {"error": 0.03, "max_error": 0.05, "tolerance": 0.065, "repeatable": True}
    for dtype, doubted in (
        ("fp8_e4m3.out_e4m3.then_bias_gelu", False),
        ("fp8_e4m3.then_bias_gelu", True),
    ):
        real = winner(Problem(m=4096, n=4096, k=4096, dtype=dtype))
        reason = claims.error_is_within_tolerance(forged(real, "correctness", figures))
        assert (reason is not None) is doubted


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("speedup", {"median": 1e9, "ci_low": 1e9, "ci_high": 1e9}, "at most 1000"),
        ("speedup", {"median": 1.5, "ci_low": 1.4, "ci_high": 1.6}, "not what the times say"),
        ("speedup.ci_low", 1.2, "within its interval"),
        ("speedup", None, "a speed-up goes with"),
        ("statistics.median_us", -1.0, "-1.0 µs"),
        ("statistics.median_us", 0.0, "0.0 µs"),
        ("statistics.ci_high_us", 1e12, "at most"),
        ("statistics.samples", 0, "0 samples"),
        ("baseline.ci_low_us", 1e3, "within its interval"),
        ("correctness.error", 0.5, "not within the tolerance"),
        ("correctness", {"error": 9.0, "max_error": 9.0, "tolerance": 9.0, "repeatable": True},
         "a tolerance of 9"),
        ("correctness.max_error", -1.0, "the greatest error"),
        ("correctness", None, "no candidate's correctness"),
        ("candidate", None, "candidate's statistics"),
        ("use", "cublaslt", "is for cutlass"),
        ("problem.dtype", "fp16", "built for bf16"),
        ("problem.k", 4095, "not a multiple of"),
        ("candidate.kernel.tile", [0, 128, 64], "no kernel has such a tile"),
        ("candidate.kernel.tile", [64, 64, 64], "procedural name"),
        ("candidate.kernel.name", "fast", "procedural name"),
        ("candidate.kernel.arch", "sm100", "is for sm100"),
        ("candidate.kernel.stages", -1, "no kernel has such a tile"),
        ("candidate.launch.splits", -3, "-3 splits"),
        ("candidate.launch.splits", 2, "data_parallel does not take 2 splits"),
        ("candidate.launch.swizzle", 3, "a swizzle of 3"),
        ("candidate.launch.sm_budget", 133, "an SM budget"),
        ("candidate.launch.decomposition", "stream_k", "does not do stream_k"),
        ("candidate.launch.algorithm", {"library": 130100, "code": "00" * 64}, "an algorithm"),
        ("device.name", "NVIDIA\x00H200", "cannot be printed"),
        ("device.name", "../../etc", "no GPU is called"),
        ("device.name", "", "no GPU is called"),
        ("device.arch", "sm13", "architecture 'sm13'"),
        ("device.sm_count", 0, "sm_count is 0"),
        ("device.memory_bytes", 2**20, "memory_bytes is"),
        ("device.memory_bandwidth", -1, "memory_bandwidth is -1"),
        ("environment.driver", "x" * 2001, "2001 characters"),
        ("environment.driver", "580\x1b[31m", "cannot be printed"),
        ("ties", ["a"] * 65, "more than 64"),
        ("promoted_at", "yesterday", "no date"),
        ("job", "j" * 101, "101 characters"),
        ("power_penalty", -2.0, "a power penalty of -2.0"),
        ("conditions", {"sm_clock_mhz": -5.0, "power_w": 1.0, "temperature_c": 1.0}, "-5.0 MHz"),
    ],
)  # fmt: skip
def test_a_forged_figure_is_told(path: str, value: object, says: str) -> None:
    assert says in (reason(forged(HONEST, path, value)) or "")


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("candidate.kernel.alignment_a", 1, "the pack has another kernel"),
        ("candidate.kernel.name", "cublaslt_bf16_bf16_f32_bf16_tt.", "the pack has another kernel"),
        ("candidate.launch.algorithm.library", -1, "no cuBLASLt has"),
        ("candidate.launch.algorithm.workspace_bytes", 2**50, "no cuBLASLt has"),
    ],
)
def test_so_is_one_of_a_kernel_of_the_library(path: str, value: object, says: str) -> None:
    assert says in (reason(forged(LIBRARY, path, value)) or "")


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("regimes.0.median_us", 1e-3, "not what the times say"),
        ("regimes.1.default_us", -1.0, "-1.0 µs"),
        ("regimes.2.regime", "sustained", "there twice"),
        ("regimes.0.speedup", None, "goes with the default's time"),
    ],
)
def test_so_is_one_of_a_regime(path: str, value: object, says: str) -> None:
    assert says in (reason(forged(REGIMES, path, value)) or "")


def test_the_winners_speed_up_is_the_least_of_its_regimes() -> None:
    least = min(each.speedup.median for each in REGIMES.regimes if each.speedup)
    others = tuple(r for r in REGIMES.regimes if r.speedup and r.speedup.median > least)
    assert "the least of its regimes" in (reason(replace(REGIMES, regimes=others)) or "")


def test_a_default_that_may_be_faster_is_not_to_be_replaced() -> None:
    slow = replace(
        HONEST,
        baseline=HONEST.statistics,
        speedup=msgspec.convert(
            {"median": 1.0, "ci_low": 0.99, "ci_high": 1.01}, type(HONEST.speedup)
        ),
    )
    assert "may be 0.99" in (reason(slow) or "")
    assert reason(replace(slow, use=Use.CUBLAS)) is None


def test_a_problem_that_the_gpu_cannot_hold_was_not_measured_on_it() -> None:
    huge = replace(HONEST, problem=Problem(m=2**20, n=2**20, k=4096))
    assert f"does not fit into the memory of {H200.name}" in (reason(huge) or "")


def test_every_scheduler_has_its_ways_to_cut() -> None:
    assert set(claims._CUTS) == set(TileScheduler)


def test_an_order_of_sums_may_be_slower_and_is_never_the_defaults() -> None:
    slower = {"median": 1 / 1.1, "ci_low": 0.9, "ci_high": 0.92}
    claim = forged(forged(HONEST, "speedup", slower), "baseline", {
        **msgspec.to_builtins(HONEST.statistics), "median_us": 10 / 1.1, "ci_low_us": 9.0,
    })  # fmt: skip
    assert "may be" in str(reason(claim))
    ordered = forged(claim, "problem.dtype", "bf16.sum_sequential")
    assert reason(ordered) is None
    assert "no known order" in str(reason(replace(ordered, use=Use.CUBLAS)))
    other = forged(claim, "problem.dtype", "bf16.sum_split_2")
    assert "sums are sequential, not split_2" in str(reason(other))
