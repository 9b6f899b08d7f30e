"""What whole steps of programs gained, with and without winners in turn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.readme.shipped import RESULTS


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Runs that belong together: those of a file of results, of one precision if it has several.

    Attributes:
        only: programs or models of the file; empty: all of them.
    """

    title: str
    file: str
    precision: str | None = None
    only: Sequence[str] = ()

    def gains(self) -> list[tuple[float, Sequence[float]]]:
        """Of those that came to their end: the gain, and torch's over itself."""
        found: dict[str, Any] = json.loads((RESULTS / self.file).read_text(encoding="utf-8"))
        if "programs" in found:
            return [
                (one["gain"], one["torch_over_itself"])
                for one in found["programs"]
                if one.get("gain") is not None and self._holds(one["program"])
            ]
        if "steps" in found:  # decoding is no training
            return [
                (one["gain"], [one["torch_over_torch"]])
                for one in found["steps"]
                if "losses" in one
            ]
        return [
            (run["speedup"]["median"], [run["torch_over_itself"]["median"]])
            for run in found["runs"]
            if "speedup" in run
            and self.precision in (None, run.get("precision"))
            and self._holds(run["model"])
        ]

    def _holds(self, name: str) -> bool:
        return not self.only or name in self.only


PROGRAMS = "2026-11-25-h200-programs.json"

MEASURED = (
    Steps(
        title="transformers' Llama 3 8B (4 layers), eager, `GEMMSMITH=`",
        file="2026-11-24-h200-programs-norms.json",
    ),
    *(
        Steps(title=title, file=PROGRAMS, only=programs)
        for title, *programs in (
            ("the same with FSDP2 on two GPUs", "llama-fsdp2"),
            ("transformers' Qwen3 8B (4 layers), eager, `GEMMSMITH=`", "qwen3"),
            (
                "transformers' Qwen3-MoE (4 layers, 4,096 tokens), eager, `GEMMSMITH=`",
                "qwen3-moe",
            ),
            ("transformers' GPT-2 medium, eager, `gemmsmith run`", "gpt2"),
            ("transformers' ViT-L, eager, `gemmsmith run`", "vit"),
            (
                "decoding with transformers' Llama 3 8B (8 layers), 1 and 16 rows, eager (noisy)",
                "decode-1",
                "decode-16",
            ),
        )
    ),
    *(
        Steps(title=title, file="2026-11-25-h200-programs-conv1d.json", only=[program])
        for title, program in (
            ("GPT-2 medium with the shipped winners, eager and compiled, `GEMMSMITH=`", "gpt2"),
            ("ViT-L with the shipped winners, eager, `GEMMSMITH=`", "vit"),
        )
    ),
    Steps(
        title="ViT-L before neighbours were refused, decoding with 64 rows, eager (noisy)",
        file="2026-11-25-h200-programs-again.json",
    ),
    Steps(
        title="transformers' Llama 3 8B, Qwen3 8B, GPT-2 medium and ViT-L, compiled, `GEMMSMITH=`",
        file="2026-11-25-h200-programs-compiled.json",
    ),
    Steps(
        title="Qwen3-MoE (4 layers, 16,384 tokens) with `gemmsmith.experts`, compiled and eager",
        file="2026-11-25-h200-train-experts.json",
    ),
    Steps(
        title="the same with 2,048 tokens, before norms were fused",
        file="2026-11-23-h200-train-experts.json",
        only=("qwen3-2048-experts",),
    ),
    Steps(
        title="RMS norms alone: Llama 3 8B, Qwen3 8B, Qwen3-MoE (4 layers), eager",
        file="2026-11-24-h200-norms.json",
    ),
    Steps(
        title="GPT 350 M, Llama 3 8B and Qwen3 8B, bf16, with `patch(model)`",
        file="2026-11-23-h200-train-fused.json",
    ),
    Steps(
        title="Qwen3-MoE (4 layers) and a 1 B MoE, bf16",
        file="2026-11-23-h200-train-moe.json",
    ),
    Steps(
        title="GPT 350 M and Llama 8B blocks, FP8, plain products",
        file="2026-11-22-h200-train-equals.json",
        precision="fp8",
    ),
    Steps(
        title="GPT 350 M and Llama 8B blocks, bf16, plain products",
        file="2026-11-22-h200-train-clocks.json",
        precision="bf16",
    ),
)


def _range(values: Sequence[float]) -> str:
    least, most = f"{min(values):.3f}", f"{max(values):.3f}"
    return least if least == most else f"{least} … {most}"


def table() -> str:
    """One row for each set of runs: the least and the greatest gain, and torch against itself."""
    lines = [
        "| step, H200 | runs | gemmsmith over torch | torch over torch |",
        "|---|---|---|---|",
    ]
    for steps in MEASURED:
        found = steps.gains()
        gains = [gain for gain, _ in found]
        itself = [ratio for _, ratios in found for ratio in ratios]
        lines.append(f"| {steps.title} | {len(found)} | {_range(gains)} | {_range(itself)} |")
    return "\n".join(lines)
