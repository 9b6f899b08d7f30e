"""docs/integrations.md: its programs run, with a model and data, and without winners."""

from __future__ import annotations

import logging
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.docs import ROOT
from tests.unit.ops.test_callbacks import Data, Net

PAGE = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
PROGRAMS = {
    name.strip(): code
    for name, code in re.findall(
        r"^## ([^\n]+)\n(?:(?!^## ).)*?```python\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE
    )
}
FILE = '"winners.gspack"'


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    for name in ("lightning.pytorch", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def run(name: str, **given: Any) -> dict[str, Any]:
    """The program's names after it ran, with torch's own operators for the file of winners."""
    assert FILE in PROGRAMS[name]
    exec(PROGRAMS[name].replace(FILE, "None"), given)
    return given


def test_every_program_is_run_here() -> None:
    assert set(PROGRAMS) == {"transformers", "Lightning", "accelerate"}


@pytest.mark.long
def test_transformers(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, use_cpu=True, report_to=[], save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    found = run("transformers", model=Net(), arguments=arguments, data=Data())
    assert found["trainer"].train().global_step == 1


@pytest.mark.long
def test_lightning() -> None:
    trainer = run("Lightning")["trainer"]
    assert "GemmsmithLightningCallback" in {type(each).__name__ for each in trainer.callbacks}


@pytest.mark.long
def test_accelerate() -> None:
    model = Net()
    before = model.down.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run("accelerate", model=model, optimizer=optimizer, data=DataLoader(Data(), batch_size=8))
    assert not torch.equal(model.down.weight, before)
