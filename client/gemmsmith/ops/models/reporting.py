"""What `gemmsmith.patch(report=True)` says at its end: who computed what, fused with what."""

from __future__ import annotations

from collections import Counter

import torch

from gemmsmith.ops.engine.forms import Form, Spec, present_shapes
from gemmsmith.ops.engine.plan import Plan


class ProductsReport:
    """Counts products by form, problem and who computes them; an engine's watcher."""

    def __init__(self) -> None:
        self._calls: Counter[tuple[str, str, str]] = Counter()
        self._saved: dict[tuple[str, str, str], float | None] = {}
        self._fused: dict[tuple[str, str, str], str] = {}
        self._recognized: Counter[str] = Counter()

    def recognized(self, what: Counter[str]) -> None:
        """Modules of the model that may run fused products, by their kind."""
        self._recognized = what

    def saw(
        self, form: Form, a: torch.Tensor, b: torch.Tensor, plan: Plan | None, groups: int
    ) -> None:
        """One product."""
        if plan is not None:
            problem = plan.shape.problem
            key = (str(problem), form.value, plan.config.kernel.name)
            self._saved[key] = plan.saving_us
            if problem.operation.is_fused:
                self._fused[key] = problem.operation.epilogue.value
        else:
            ways = present_shapes(form, Spec.of(a), Spec.of(b), groups=groups)
            what = f"{tuple(a.shape)} and {tuple(b.shape)} {a.dtype}".replace("torch.", "")
            key = (str(ways[0].problem) if ways else what, form.value, "torch")
        self._calls[key] += 1

    def text(self, why_none: str) -> str:
        """The report, most called first; `why_none` is why there was no engine, if so."""
        if why_none:
            return f"gemmsmith: nothing replaced: {why_none}"
        if not self._calls:
            return "gemmsmith: no matrix product ran"
        tuned = sum(count for key, count in self._calls.items() if key[2] != "torch")
        lines = [f"gemmsmith: {tuned} of {self._calls.total()} products ran tuned kernels"]
        lines += [f"  recognized: {count} × {what}" for what, count in self._recognized.items()]
        gain, unknown = 0.0, False
        for key, count in self._calls.most_common():
            problem, form, who = key
            line = f"  {count:6d} × {problem} ({form}): {who}"
            if who != "torch":
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
        """A line for each epilogue: how many products had it, and what that saves."""
        calls: Counter[str] = Counter()
        gain: Counter[str] = Counter()
        for key, epilogue in self._fused.items():
            calls[epilogue] += self._calls[key]
            gain[epilogue] += round(1000 * self._calls[key] * (self._saved[key] or 0.0))  # ns
        return [
            f"  fused: {count} × {epilogue}, {gain[epilogue] / 1e6:.3f} ms less in all"
            for epilogue, count in calls.most_common()
        ]
