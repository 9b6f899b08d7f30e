"""Layers of all models of a process, without a call of `patch(model)`: stand-in kernels in C."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import gemmsmith
from gemmsmith.core.problem import Problem
from gemmsmith.ops import autouse
from gemmsmith.ops.capturing import capture
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.models.automatic import every_model
from gemmsmith.program import built
from gemmsmith.program.built import remember
from tests.gpu.support.choosing import Ground
from tests.gpu.support.counting import launches
from tests.support import stand_in, unchanged
from tests.support.patched import is_patched
from tests.support.stand_in import Chooser
from tests.unit.ops.test_unchanged import baked
from tuner.suites import load

BF16 = torch.bfloat16
WIDTH, INNER = 16, 32


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER)
        self.act = nn.GELU(approximate="tanh")
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Mlp() for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.fixture(autouse=True)
def _remembering() -> Iterator[None]:
    remember()
    yield
    assert built._Built.listeners == []


def swapped(model: nn.Module) -> int:
    return sum(map(is_patched, model.modules()))


def made() -> Model:
    return Model().to(BF16)


def operand() -> torch.Tensor:
    return torch.randn(8, WIDTH, dtype=BF16).requires_grad_()


def test_models_built_before_and_within_a_block_until_its_end(engine: Engine) -> None:
    before = made()
    copied = nn.ModuleList([copy.deepcopy(before)])  # torch tells of the outermost part alone
    with every_model():
        later = made()
        assert [swapped(one) for one in (before, copied, later)] == [2, 2, 2]
        assert swapped(copy.deepcopy(later)) == 0
    assert [swapped(one) for one in (before, copied, later)] == [0, 0, 0]
    assert swapped(made()) == 0


def test_the_last_of_overlapping_blocks_ends_it(engine: Engine) -> None:
    model, first, second = made(), every_model(), every_model()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert swapped(model) == 2
    second.__exit__(None, None, None)
    assert swapped(model) == 0


def test_a_forgotten_model_is_not_kept_alive() -> None:
    with every_model():
        before = len(built._Built.modules)
        made()
        assert len(built._Built.modules) == before


def test_layers_run_fused_kernels(
    engine: Engine, chooser: Chooser, runs: Callable[[], int]
) -> None:
    chooser.answers = lambda problem: problem.operation.epilogue.activation is not None
    model, x = made(), operand()
    expected = model(x)
    assert runs() == 0
    with every_model():
        found = model(x)
    assert runs() == 2
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_a_capture_lists_what_could_be_fused() -> None:
    model, x = made(), operand()
    with capture() as found, every_model():
        model(x).float().sum().backward()
    kinds = {str(one.operation.epilogue) for one in found.problems}
    assert {"bias_gelu_tanh_aux", "dgelu_tanh_bgrad"} <= {kind.split(".")[-1] for kind in kinds}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_programs_written_down_for_others_hold_torchs_operators_alone(
    engine: Engine, chooser: Chooser
) -> None:
    """Whoever loads them may have no gemmsmith."""
    chooser.answers = lambda problem: problem.operation.epilogue.activation is not None
    model, x = made().eval(), operand().detach()
    with every_model(), torch.no_grad():
        expected = model(x)
        exported = torch.export.export(model, (x,))
        traced = torch.jit.trace(model, (x,), check_trace=False)
        assert swapped(model) == 2
        scripted = torch.jit.script(model)
    texts = (str(exported.graph), str(traced.inlined_graph), str(scripted.inlined_graph))
    for text in texts:
        operators = re.sub("#.*", "", text)  # behind it are the files, and in which folder they lie
        assert "linear" in operators
        assert "gemmsmith" not in operators
    for program in (exported.module(), traced, scripted):
        torch.testing.assert_close(program(x), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", ["bf16.then_bias_gelu_tanh_aux", "bf16.then_bias", "bf16"])
def test_a_variable_is_enough(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: str
) -> None:
    """As `GEMMSMITH=winners.gspack` does it, until the program chooses for itself.

    Layers are left alone where they could run nothing that their products cannot run by themselves.
    Norms need no winners of theirs.
    """
    monkeypatch.setattr(autouse, "Engine", stand_in.ENGINE)
    model, x = made(), operand()
    norms = nn.ModuleList([LlamaRMSNorm(WIDTH)])
    problem = Problem(m=8, n=INNER, k=WIDTH, dtype=dtype)
    autouse.start(str(baked(ground, tmp_path / "winners.gspack", [problem])))
    try:
        assert swapped(model) == (2 if "gelu" in dtype else 0)
        assert swapped(norms) == 1
        with launches() as found:
            model(x)
        assert [one.shape.problem for one in found].count(problem) == 2
    finally:
        gemmsmith.use(None)
    assert swapped(model) == swapped(norms) == 0


SCRIPT = """
import torch
from torch import nn

class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.act = nn.GELU(approximate="tanh")

    def forward(self, x):
        return self.down(self.act(self.up(x)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x):
        return x + self.mlp(x)

model = Model().bfloat16()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(8, 16).bfloat16()).float().square().mean().backward()
    optimizer.step()
"""


@pytest.mark.long
def test_a_program_is_captured_and_runs_fused_kernels(ground: Ground, tmp_path: Path) -> None:
    """Through the variables alone, in processes of its own."""
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = unchanged.environment(tmp_path / "site", OMP_NUM_THREADS="1")
    command = ["python", "-m", "service.cli", "capture", "-o", "s.toml", "--", "python", "train.py"]
    assert unchanged.run(command, tmp_path, environment).returncode == 0
    forward = Problem(m=8, n=INNER, k=WIDTH, dtype="bf16.then_bias_gelu_tanh_aux")
    assert forward.operation.epilogue in {one.epilogue for one in load(tmp_path / "s.toml").entries}

    bundle = baked(ground, tmp_path / "winners.gspack", [forward])
    given = unchanged.environment(tmp_path / "site", stand_in=True, GEMMSMITH=str(bundle))
    done = unchanged.run([sys.executable, "train.py"], tmp_path, given)
    assert done.returncode == 0, done.stderr
    ran = [line.rpartition(" ")[0] for line in unchanged.launched(tmp_path / "site", 0)]
    assert ran.count(str(forward)) == 2
