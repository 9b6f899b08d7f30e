"""Gains of whole steps of programs, measured with and without winners in turn."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.readme.shipped import RESULTS


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Runs of a file of results.

    Attributes:
        only: programs or models; empty for all.
        mode: eager, compiled or graph; None for all.
        precision: bf16 or fp8, in files of the examples; None for all.
    """

    file: str
    only: Sequence[str] = ()
    mode: str | None = None
    precision: str | None = None

    def gains(self) -> list[tuple[float, Sequence[float]]]:
        """Return the gain, and torch's ratios to itself, of each run that was completed."""
        result: dict[str, Any] = json.loads((RESULTS / self.file).read_text(encoding="utf-8"))
        if "programs" in result:
            return [
                (run["gain"], run["torch_over_itself"])
                for run in result["programs"]
                if run.get("gain") is not None and self._holds(run, run["program"])
            ]
        return [
            (run["speedup"]["median"], [run["torch_over_itself"]["median"]])
            for run in result["runs"]
            if "speedup" in run and self._holds(run, run["model"])
        ]

    def _holds(self, run: dict[str, Any], name: str) -> bool:
        return (
            (not self.only or name in self.only)
            and self.mode in (None, run.get("mode"))
            and self.precision in (None, run.get("precision"))
        )


@dataclass(frozen=True, kw_only=True)
class Step:
    """A row of the table: the runs on each GPU; empty if it was not measured there."""

    title: str
    h200: Sequence[Runs]
    h100: Sequence[Runs] = ()


SHIPPED = "2026-11-25-h200-programs-shipped.json"
COMPILED = "2026-11-25-h200-programs-compiled.json"
H100 = "2026-11-25-h100-programs-grouped.json"
EXPERTS = "2026-11-25-h200-train-experts.json"
H100_TRAIN = "2026-11-25-h100-train.json"

MEASURED = (
    *(
        Step(
            title=f"transformers' {title}, eager",
            h200=[Runs(file=SHIPPED, only=[program])],
            h100=[Runs(file=file, only=[program]) for file in h100],
        )
        for title, program, *h100 in (
            ("GPT-2 medium", "gpt2", H100),
            ("ViT-L", "vit"),
        )
    ),
    Step(
        title="Llama 3 8B (4 layers) with FSDP2 on two GPUs, eager",
        h200=[Runs(file="2026-11-25-h200-programs.json", only=["llama-fsdp2"])],
    ),
    Step(
        title="GPT-2 medium, compiled",
        h200=[Runs(file="2026-11-25-h200-programs-conv1d.json", only=["gpt2"], mode="compiled")],
    ),
    Step(
        title="Llama 3 8B, Qwen3 8B and ViT-L, compiled",
        h200=[Runs(file=COMPILED, only=["llama", "qwen3", "vit"])],
    ),
    *(
        Step(
            title=f"Qwen3-30B-A3B (4 layers, 16,384 tokens) with `gemmsmith.experts`, {mode}",
            h200=[Runs(file=EXPERTS, mode=mode)],
            h100=[Runs(file=H100_TRAIN, only=["qwen3-16384-experts"], mode=mode)],
        )
        for mode in ("eager", "compiled")
    ),
    *(
        Step(
            title=f"{title} (`examples/train_gpt.py`), eager",
            h200=[Runs(file="2026-11-25-h200-train-gpt.json", only=[model])],
            h100=[Runs(file=H100_TRAIN, only=[model], mode="eager")],
        )
        for title, model in (("Llama 8B blocks", "llama-8b-blocks"), ("GPT 350 M", "gpt-350m"))
    ),
    Step(
        title="the same, compiled",
        h200=[
            Runs(file="2026-11-23-h200-train-fused.json", only=["gpt-350m"], mode="compiled"),
        ],
        h100=[Runs(file=H100_TRAIN, only=["gpt-350m"], mode="compiled")],
    ),
    Step(
        title="GPT 350 M and Llama 8B blocks, plain products alone, bf16 and FP8",
        h200=[
            Runs(file="2026-11-22-h200-train-clocks.json", precision="bf16"),
            Runs(file="2026-11-22-h200-train-equals.json", precision="fp8"),
        ],
    ),
)


UNTUNED = (
    "2026-11-27-h200-models-last.json",
    "2026-11-28-h200-models.json",
    "2026-11-28-h200-models-compiled.json",
)
"""Files of `python -m benchmarks.models`: a file's rows replace those of the files before it."""
HOST_BOUND = ("BERT large", "Whisper large", "DINOv2 large", "SigLIP so400m")
KNOWN = (
    *("Llama 3 8B", "Qwen3 8B", "Phi-3 mini", "OLMo 2 7B"),
    *("Qwen3-30B-A3B", "GPT-2 XL", "ModernBERT large"),
)
"""Models in the short table."""


def _untuned() -> dict[bool, dict[str, dict[str, Any]]]:
    """The newest rows, by whether they are compiled and by model, with older gains of Liger."""
    rows: dict[bool, dict[str, dict[str, Any]]] = {False: {}, True: {}}
    for file in UNTUNED:
        for row in json.loads((RESULTS / file).read_text(encoding="utf-8"))["models"]:
            of_mode = rows[row["compiled"]]
            before = of_mode.get(row["model"], {})
            older = before.get("liger_gain") or before.get("older_liger_gain")
            of_mode[row["model"]] = {"older_liger_gain": older} | row
    return rows


def models() -> str:
    """Write a row for each known model: its gains, eager and compiled."""
    lines = ["| training step of | eager | compiled |", "|---|---|---|"]
    eager, compiled = _untuned().values()
    for name in KNOWN:
        of_compiled = [compiled[name]["gain"]] if name in compiled else []
        lines.append(f"| {name} | {_range([eager[name]['gain']])} | {_range(of_compiled)} |")
    return "\n".join(lines)


def all_models() -> str:
    """Write a row for each model, the largest gain first, and the geometric means."""
    lines = [
        "| model | torch, ms | gemmsmith | torch over torch | Liger | peak memory, GB | compiled |",
        "|---|---|---|---|---|---|---|",
    ]
    eager, compiled = _untuned().values()
    for name, row in sorted(eager.items(), key=lambda item: -float(item[1]["gain"])):
        peaks = (f"{row['peak_bytes'][side] / 1e9:.1f}" for side in ("torch", "ours"))
        liger = row.get("liger_gain") or row["older_liger_gain"]
        older = "" if "liger_gain" in row else "\\*"
        cells = (
            *(name, f"{row['ms']['torch']:.1f}", _gain(row), f"{row['torch_over_torch']:.3f}"),
            *(f"{liger:.3f}{older}" if liger else "–", " → ".join(peaks)),
            _gain(compiled[name]) if name in compiled else "–",
        )
        lines.append(f"| {' | '.join(cells)} |")
    means = [
        statistics.geometric_mean(row["gain"] for row in rows)
        for rows in (
            eager.values(),
            [row for name, row in eager.items() if name not in HOST_BOUND],
            compiled.values(),
        )
    ]
    return "\n".join(lines) + (
        f"\n\nThe geometric mean of all {len(eager)} is {means[0]:.3f}, and of the "
        f"{len(eager) - len(HOST_BOUND)} whose steps do not wait for the host {means[1]:.3f}. "
        f"Compiled, it is {means[2]:.3f}."
    )


def _gain(row: dict[str, Any]) -> str:
    low, high = row["gain_interval"]
    return f"{row['gain']:.3f} ({low:.3f} … {high:.3f})"


def _range(values: Sequence[float]) -> str:
    if not values:
        return "–"
    least, most = f"{min(values):.3f}", f"{max(values):.3f}"
    return least if least == most else f"{least} … {most}"


def table() -> str:
    """Write a row for each step: the least and the greatest gain, and torch against itself."""
    lines = [
        "| training step | H200 | H100 | torch over torch |",
        "|---|---|---|---|",
    ]
    for step in MEASURED:
        h200, h100 = (
            [gains for runs in of_gpu for gains in runs.gains()]
            for of_gpu in (step.h200, step.h100)
        )
        gains = (_range([gain for gain, _ in of_gpu]) for of_gpu in (h200, h100))
        itself = [ratio for _, ratios in (*h200, *h100) for ratio in ratios]
        lines.append(f"| {step.title} | {' | '.join(gains)} | {_range(itself)} |")
    return "\n".join(lines)
