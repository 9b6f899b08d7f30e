"""Trainers of others with our callbacks: kernels run while they train, and not before or after."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import gemmsmith
from gemmsmith.integrations.switching import Switch
from gemmsmith.ops.engine.engine import Engine
from tests.support.below import only_python
from tests.support.patched import is_patched
from tests.support.stand_in import Host

Runs = Callable[[], int]
WIDTH, ROWS, STEPS = 16, 8, 3


@pytest.fixture(autouse=True)
def _on_the_host(host: Host, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without the compiled binding; theirs warn of much that is not ours."""
    only_python(monkeypatch)
    for name in ("lightning.pytorch", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Net(nn.Module):
    fails = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.bfloat16)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        if self.fails:
            raise ZeroDivisionError
        out = self.down(self.up(x).relu())
        return {"loss": out.float().square().mean(), "logits": out}


class Data(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return STEPS * ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(WIDTH, generator=generator).to(torch.bfloat16)}


def is_torch(net: Net, runs: Runs) -> bool:
    """Whether a step outside runs no kernel."""
    runs()
    net(torch.ones(ROWS, WIDTH, dtype=torch.bfloat16))["loss"].backward()
    return runs() == 0 and type(net.up) is nn.Linear


@pytest.mark.parametrize("only_model", [False, True])
def test_a_switch_goes_on_and_off(engine: Engine, runs: Runs, only_model: bool) -> None:
    net, switch = Net(), Switch(only_model=only_model)
    assert is_torch(net, runs)
    for _ in range(2):
        switch.on(net)
        switch.on(net)  # not twice
        assert is_patched(net.up)
        beside = torch.ones(ROWS, WIDTH, dtype=torch.bfloat16)
        torch.mm(beside, torch.ones(WIDTH, 3 * WIDTH, dtype=torch.bfloat16))
        assert (runs() == 0) == only_model  # a product of another size than the model's
        net(torch.ones(ROWS, WIDTH, dtype=torch.bfloat16))["loss"].backward()
        assert runs() > 0
        switch.off()
        assert is_torch(net, runs)
    switch.off()


def test_a_switch_uses_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Any] = []
    monkeypatch.setattr("gemmsmith.integrations.switching.use", used.append)
    without = Switch()
    without.on(None)
    without.off()
    assert used == []
    switch = Switch("winners.gspack")
    switch.on(None)
    switch.off()
    assert used == ["winners.gspack"]


def hf(net: Net, folder: Path, *callbacks: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=ROWS, max_steps=STEPS, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    return Trainer(model=net, args=arguments, train_dataset=Data(), callbacks=list(callbacks)).train


def lit(net: Net, _: Path, *callbacks: Any) -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> Any:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=STEPS, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=list(callbacks),
    )  # fmt: skip
    return lambda: trainer.fit(Module(), DataLoader(Data(), batch_size=ROWS))


TRAINERS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "transformers": (hf, "trainer", "GemmsmithCallback"),
    "lightning": (lit, "lightning", "GemmsmithLightningCallback"),
}


def callback(trainer: str, *, only_model: bool) -> Any:
    _, module, name = TRAINERS[trainer]
    made = getattr(importlib.import_module(f"gemmsmith.integrations.{module}"), name)
    return made(only_model=only_model)


@pytest.mark.parametrize(
    ("trainer", "only_model"),
    [("transformers", False), ("transformers", True), ("lightning", True)],
)
@pytest.mark.long
def test_a_trainer(
    tmp_path: Path, engine: Engine, runs: Runs, trainer: str, only_model: bool
) -> None:
    fit, *_ = TRAINERS[trainer]
    plain, tuned = Net(), Net()
    fit(plain, tmp_path)()
    assert runs() == 0
    fit(tuned, tmp_path, callback(trainer, only_model=only_model))()
    assert runs() >= 4 * STEPS  # forwards of two layers, and their weights' gradients
    assert is_torch(tuned, runs)
    torch.testing.assert_close(tuned.down.weight, plain.down.weight, rtol=2e-2, atol=2e-3)
    assert not torch.equal(tuned.down.weight, Net().down.weight)


@pytest.mark.long
@pytest.mark.parametrize("trainer", TRAINERS)
def test_training_that_raises(tmp_path: Path, engine: Engine, runs: Runs, trainer: str) -> None:
    net, ours = Net(), callback(trainer, only_model=True)
    train = TRAINERS[trainer][0](net, tmp_path, ours)
    net.fails = True
    with pytest.raises(ZeroDivisionError):
        train()
    net.fails = False
    if trainer == "transformers":  # it does not report the end of a training that raises
        ours.close()
    assert is_torch(net, runs)


@pytest.mark.long
def test_accelerate(engine: Engine, runs: Runs) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net = Net()
    model, optimizer, data = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(Data(), batch_size=ROWS)
    )
    with gemmsmith.patch(model):
        for batch in data:
            optimizer.zero_grad()
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
    assert runs() >= 4 * STEPS
    assert is_torch(net, runs)
