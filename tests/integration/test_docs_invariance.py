"""docs/invariance.md: its program prints what the page shows, and its tables are complete."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import gemmsmith
from tests.support.docs import ROOT, assert_like

PAGE = (ROOT / "docs" / "invariance.md").read_text(encoding="utf-8")


def test_the_program_prints_what_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    shown = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)[0]
    exec(compile(program, "docs/invariance.md", "exec"), {"__name__": "program"})
    assert_like(shown, capsys.readouterr().out, "docs/invariance.md")


def test_every_kind_of_batch_is_in_the_table() -> None:
    inputs = {"input": torch.ones(4, 2), "attention_mask": torch.ones(4, 2)}

    def model(input: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return nn.functional.relu(input * attention_mask)

    report = gemmsmith.check_invariance(model, inputs, sequence=1)
    assert tuple(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == report.batches
