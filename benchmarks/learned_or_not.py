"""What the learned part of the cost model is worth: regret with it and without it.

    python -m benchmarks.learned_or_not > benchmarks/results/2026-11-23-learned-or-not.json

Every recorded problem is searched as a tuning run searches it: by both efforts, from nothing
compiled, after `compile --base` and with every kernel built; ranked by the learned model, trained
on all other sizes, and by the analytic one. Regret is a share of the recorded optimum's time.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import mean, median

from gemmsmith.tuning import Effort
from service.cli.evaluate import base, load
from tuner.search.budget import BUDGETS
from tuner.search.cost_model import AnalyticModel
from tuner.search.evaluation import COUNTS, Recording, curve, planned
from tuner.search.held_out import HeldOut
from tuner.search.ranking import Ranker, by_time, predictions

SWEEPS = Path("configs/sweeps")


def first_choice(recordings: list[Recording], ranker: Ranker) -> dict[str, object]:
    """Regret of answering with what a model expects to be fastest, and seconds a prediction."""
    regrets, seconds = {}, []
    for recording in recordings:
        recording_order = recording.candidates
        ranker.predict(recording.problem, recording_order[:1], recording.model)
        started = time.perf_counter()
        times = predictions(recording.problem, recording_order, recording.model, ranker)
        seconds.append(time.perf_counter() - started)
        first = next(each for each in by_time(recording_order, times) if recording.knows(each))
        regrets[str(recording.problem)] = recording.regret(first.key)
    return {**summary(list(regrets.values())), "median_seconds": median(seconds)}


def summary(values: list[float]) -> dict[str, float]:
    """Three figures of a column."""
    return {"median": median(values), "mean": mean(values), "worst": max(values)}


def main() -> int:
    """Judge both models."""
    recordings = load(SWEEPS)
    built = base(recordings)
    held_out = HeldOut([recording.measured for recording in recordings])
    models: dict[str, Ranker] = {"learned": held_out, "analytic": AnalyticModel()}
    rows = []
    for effort in (Effort.QUICK, Effort.DEFAULT):
        budget = BUDGETS[effort]
        for state, kernels in (("cold", ()), ("base", built), ("all built", None)):
            for name, ranker in models.items():
                found = curve(name, planned(ranker, budget, kernels), recordings, budget, COUNTS)
                print(effort.value, state, name, file=sys.stderr)
                rows.append(
                    {
                        "effort": effort.value,
                        "state": state,
                        "model": name,
                        "trials": found.trials,
                        "kernels": found.kernels,
                        "after_trials": {
                            str(count): summary(list(column))
                            for count, column in zip(
                                COUNTS, zip(*found.regrets.values(), strict=True), strict=True
                            )
                        },
                        "over_1_percent": {
                            str(problem): regrets[-1]
                            for problem, regrets in found.regrets.items()
                            if regrets[-1] > 0.01
                        },
                    }
                )
    first = {name: first_choice(recordings, ranker) for name, ranker in models.items()}
    print(json.dumps({"problems": len(recordings), "first_choice": first, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
