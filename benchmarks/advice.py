"""How well padding advice predicts: sizes that are not aligned, and the same padded.

    python -m benchmarks.advice -o advice.json [--device cuda:N] [--seconds S]

Each size is tuned with the compiled kernels. Then the cost model's advice is written, before the
padded problem is tuned in the same way, and the measured gain is written beside it. Where no
padding is advised, a gain of nothing is predicted for the smallest one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gemmsmith.core.problem import Layout, Problem
from gemmsmith.files import publish
from service.cli.measuring import Tune, time_of, tuning
from service.cli.outcomes import TaskOutcome
from service.settings import Settings
from tuner.explain import explain
from tuner.explain.advice import AdviceKind
from tuner.explain.padding import paddings
from tuner.trial import Winner

SIZES = (
    Problem(2048, 50257, 1600),  # GPT-2's vocabulary
    Problem(2048, 32001, 4096),  # Llama's, with a token for padding
    Problem(1024, 151669, 1024),  # Qwen3's
    Problem(4096, 30522, 768),  # BERT's
    Problem(64, 32001, 4096),
    Problem(4096, 4096, 2050),
    Problem(2048, 4096, 11007),
    Problem(8192, 1024, 1023),
    Problem(50257, 1600, 2048, layout=Layout.NT),  # gradients of a head
    Problem(2048, 1600, 50257, layout=Layout.TT),
)
NEAR = 0.15
"""A predicted gain within this share of the measured one is right."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the sizes while the time allows. The status is 1 if none was measured."""
    options = _parse(arguments)
    until = time.monotonic() + options.seconds
    rows: list[dict[str, Any]] = []

    def write() -> None:
        measured = [row for row in rows if "off" in row]
        document = {
            "of": len(SIZES),
            "measured": len(measured),
            "near": sum(abs(row["off"]) <= NEAR for row in measured),
            "rows": rows,
        }
        publish(options.output, json.dumps(document, indent=1).encode() + b"\n", shared=True)

    with suppress(KeyboardInterrupt), tuning(Settings.load(device=options.device)) as tune:
        for problem in SIZES:
            if time.monotonic() > until:
                break
            row: dict[str, Any] = {"problem": str(problem)}
            rows.append(row)
            _measure(tune, problem, row, write)
            write()
            print(json.dumps(row), flush=True)
    return int(not any("off" in row for row in rows))


def _measure(tune: Tune, problem: Problem, row: dict[str, Any], write: Callable[[], None]) -> None:
    unpadded = tune([problem])[problem]
    if not isinstance(unpadded.result, Winner):
        row["error"] = unpadded.error
        return
    served_us = time_of(unpadded)
    assert served_us is not None
    row |= {"device": unpadded.result.device.slug, "us": served_us, **_runs(unpadded)}
    advice = [item for item in explain(unpadded.result).advice if item.kind is AdviceKind.PADDING]
    larger, predicted_us, predicted = next(paddings(problem)), served_us, 1.0
    if advice:
        larger, predicted_us, predicted = advice[0].problem, advice[0].us, advice[0].ratio
    row |= {
        "padded": str(larger),
        "is_advised": bool(advice),
        "predicted_us": round(predicted_us, 3),
        "predicted": round(predicted, 4),
    }
    write()  # the prediction, before anything of it is measured
    padded = tune([larger])[larger]
    us = time_of(padded)
    if us is None:
        row["error"] = padded.error
        return
    ratio = predicted * predicted_us / us
    row |= {"padded_us": us, "measured": round(ratio, 4), **_runs(padded, "padded_")}
    row["off"] = round(predicted / ratio - 1, 4)


def _runs(outcome: TaskOutcome, prefix: str = "") -> dict[str, Any]:
    """What is served, the best candidate's kernel, and seconds of tuning."""
    assert isinstance(outcome.result, Winner)
    candidate = outcome.result.candidate
    return {
        f"{prefix}use": outcome.result.use.value,
        f"{prefix}kernel": candidate.kernel.name if candidate else None,
        f"{prefix}seconds": round(outcome.seconds, 1),
    }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.advice",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda:0", help="cuda:N")
    parser.add_argument(
        "--seconds", type=float, default=200.0, help="begin no size after this time"
    )
    parser.add_argument("-o", "--output", type=Path, required=True)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
