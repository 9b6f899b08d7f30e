"""Gains of whole steps of programs, measured with and without winners in turn."""

from __future__ import annotations

import json
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
            ("Llama 3 8B (4 layers)", "llama"),
            ("Qwen3 8B (4 layers)", "qwen3", "2026-11-25-h100-programs.json"),
            ("Qwen3-30B-A3B (4 layers)", "qwen3-moe", H100),
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


@dataclass(frozen=True, kw_only=True)
class Model:
    """A row of the short table: a model's runs on both GPUs."""

    title: str
    eager: Sequence[Runs]
    compiled: Sequence[Runs]


KNOWN = (
    Model(
        title="Llama 3 8B",
        eager=[Runs(file=SHIPPED, only=["llama"])],
        compiled=[Runs(file=COMPILED, only=["llama"])],
    ),
    Model(
        title="Qwen3 8B",
        eager=[
            Runs(file=SHIPPED, only=["qwen3"]),
            Runs(file="2026-11-25-h100-programs.json", only=["qwen3"]),
        ],
        compiled=[Runs(file=COMPILED, only=["qwen3"])],
    ),
    Model(
        title="Qwen3-30B-A3B (compiled: with `gemmsmith.experts`)",
        eager=[Runs(file=SHIPPED, only=["qwen3-moe"]), Runs(file=H100, only=["qwen3-moe"])],
        compiled=[
            Runs(file=EXPERTS, mode="compiled"),
            Runs(file=H100_TRAIN, only=["qwen3-16384-experts"], mode="compiled"),
        ],
    ),
    Model(
        title="GPT-2 medium",
        eager=[Runs(file=SHIPPED, only=["gpt2"]), Runs(file=H100, only=["gpt2"])],
        compiled=[
            Runs(file="2026-11-25-h200-programs-conv1d.json", only=["gpt2"], mode="compiled")
        ],
    ),
)
"""Models that people know. All have 4 layers but GPT-2, which is whole."""


def models() -> str:
    """Write a row for each known model: its gains, eager and compiled, on both GPUs."""
    lines = ["| training step of | eager | compiled |", "|---|---|---|"]
    for model in KNOWN:
        eager, compiled = (
            _range([gain for runs in of_mode for gain, _ in runs.gains()])
            for of_mode in (model.eager, model.compiled)
        )
        lines.append(f"| {model.title} | {eager} | {compiled} |")
    return "\n".join(lines)


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
