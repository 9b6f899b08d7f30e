"""The report of `gemmsmith.patch(report=True)`: which kernels ran, and what was fused."""

from __future__ import annotations

from collections import Counter

import torch

from gemmsmith.ops.engine.forms import Form, Spec, present_shapes
from gemmsmith.ops.engine.plan import Plan


class ProductsReport:
    """Counts products by problem, form and kernel. It is a watcher of an engine."""

    def __init__(self) -> None:
        self._calls: Counter[tuple[str, str, str]] = Counter()
        self._saved: dict[tuple[str, str, str], float | None] = {}
        self._fused: dict[tuple[str, str, str], str] = {}
        self._recognized: Counter[str] = Counter()

    def recognized(self, counts: Counter[str]) -> None:
        self._recognized = counts

    def saw(
        self, form: Form, a: torch.Tensor, b: torch.Tensor, plan: Plan | None, groups: int
    ) -> None:
        if plan is not None:
            problem = plan.shape.problem
            key = (str(problem), form.value, plan.config.kernel.name)
            self._saved[key] = plan.saving_us
            if problem.operation.is_fused:
                self._fused[key] = problem.operation.epilogue.value
        else:
            ways = present_shapes(form, Spec.of(a), Spec.of(b), groups=groups)
            operands = f"{tuple(a.shape)} and {tuple(b.shape)} {a.dtype}".replace("torch.", "")
            key = (str(ways[0].problem) if ways else operands, form.value, "torch")
        self._calls[key] += 1

    def text(self, why_none: str) -> str:
        """The report, most frequent products first. `why_none`: why there was no engine, if so."""
        if why_none:
            return f"gemmsmith: nothing replaced: {why_none}"
        if not self._calls:
            return "gemmsmith: no matrix product ran"
        tuned = sum(count for key, count in self._calls.items() if key[2] != "torch")
        lines = [f"gemmsmith: {tuned} of {self._calls.total()} products ran tuned kernels"]
        lines += [f"  recognized: {count} × {kind}" for kind, count in self._recognized.items()]
        gain, unknown = 0.0, False
        for key, count in self._calls.most_common():
            problem, form, kernel = key
            line = f"  {count:6d} × {problem} ({form}): {kernel}"
            if kernel != "torch":
                saved = self._saved[key]
                unknown = unknown or saved is None
                gain += count * (saved or 0.0)
                line += "" if saved is None else f", {saved:.2f} µs less each"
            lines.append(line)
        lines += self._of_fused()
        known = f"  expected gain: {gain / 1000:.3f} ms in all"
        if tuned:
            lines.append(known + (" where it is known" if unknown else ""))
        return "\n".join(lines)

    def _of_fused(self) -> list[str]:
        """A line for each epilogue: the number of products, and the time that they save."""
        calls: Counter[str] = Counter()
        gain: Counter[str] = Counter()
        for key, epilogue in self._fused.items():
            calls[epilogue] += self._calls[key]
            gain[epilogue] += round(1000 * self._calls[key] * (self._saved[key] or 0.0))  # ns
        return [
            f"  fused: {count} × {epilogue}, {gain[epilogue] / 1e6:.3f} ms less in all"
            for epilogue, count in calls.most_common()
        ]
