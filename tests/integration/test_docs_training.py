"""docs/training.md: its commands run in their order, without a GPU, and say what it prints.

Left out: the first, which installs what is installed here, and compiling the one winner, which
takes a minute: its pack lies ready, with bytes that nobody runs.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from gemmsmith import Bundle
from gemmsmith.answers.answer import Ratio
from gemmsmith.core.problem import Problem
from tests.support import fake_nvcc, stand_in, unchanged
from tests.support.docs import ROOT
from tests.support.serving import H200, own_signer
from tuner.compile import ArtifactStore
from tuner.store import Store

PAGE = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
RECORDED = Problem(m=16, n=4096, k=4096)


def commands() -> list[tuple[list[str], list[str]]]:
    """Words of each command for a script of one's own, and the lines that it is said to print."""
    page = PAGE.partition("\n## Does your training step gain?")[0]
    blocks = re.findall(r"```\n\$ (.*?)\n(.*?)```", page, re.DOTALL)
    return [(shlex.split(line, comments=False), said.splitlines()) for line, said in blocks]


def alike(line: str) -> str:
    """Without what hangs on the processor or on the compiler."""
    return re.sub(r"(?<=loss )[\d.]+|[\d.]+(?= MB)", "#", line)


@pytest.mark.long
def test_the_commands(tmp_path: Path) -> None:
    (install, _), *following = commands()
    assert install[:4] == ["python3", "-m", "venv", ".venv"]
    names = ["run", "run", "capture", "tune", "bake", "examples/train.py"]
    assert [words[1] for words, _ in following] == names
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    script = tmp_path / "examples" / "train.py"
    environment = {
        **unchanged.environment(tmp_path / "site"),
        "XDG_DATA_HOME": str(tmp_path / "home"),
        "GEMMSMITH_DATABASE": f"sqlite:///{tmp_path / 'gemmsmith.db'}",
        "GEMMSMITH_PACKS": str(tmp_path / "packs"),
        "GEMMSMITH_SWEEPS": str(ROOT / "configs" / "sweeps"),
        "GEMMSMITH_DEVICE": "replay:nvidia-h200-132sm",
        "GEMMSMITH_CACHE_DIR": str(tmp_path / "cache"),
    }
    compile_winner(tmp_path, environment)
    for words, said in following:
        program = {
            ".venv/bin/gemmsmith": [sys.executable, "-m", "service.cli"],
            ".venv/bin/python": [sys.executable],
        }[words[0]]
        if program == [sys.executable]:
            edit(script)
        done = subprocess.run(
            [*program, *words[1:]], cwd=tmp_path, env=environment,
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, (words, done.stderr)
        printed = {alike(line) for line in (done.stdout + done.stderr).splitlines()}
        assert said, words
        for line in map(alike, said):
            start, cut, _ = line.partition("…")
            found = [one for one in printed if one == line or (cut and one.startswith(start))]
            assert found, (words, line, done.stdout, done.stderr)
    kept = tmp_path / "home" / "gemmsmith" / "winners" / f"{H200.slug}.gspack"
    for path in (kept, tmp_path / "winners.gspack"):
        assert [row.problem for row in Bundle.open(path).snapshot.rows] == [RECORDED]


def test_a_step_is_compared_as_the_page_says(tmp_path: Path) -> None:
    net, trained = torch.nn.Linear(16, 24, bias=False, dtype=torch.bfloat16), []
    program = "import contextlib\nimport gemmsmith\n" + PYTHON[1]
    given = {
        "model": net,
        "step": lambda: net(torch.ones(8, 16, dtype=torch.bfloat16)).sum().backward(),
        "train": lambda: trained.append("once"),
    }
    packs = stand_in.Packs(stand_in.build(tmp_path))
    with stand_in.installed(stand_in.ENGINE(stand_in.Chooser(), packs)):
        exec(compile(program, "docs/training.md", "exec"), given)
    assert isinstance(given["gain"], Ratio)
    assert trained == ["once"]


def edit(script: Path) -> None:
    """As the page says."""
    lines, *_ = PYTHON
    before = script.read_text(encoding="utf-8")
    assert before.endswith("    main()\n")
    script.write_text(before.removesuffix("    main()\n") + lines, encoding="utf-8")


def compile_winner(folder: Path, environment: Mapping[str, str]) -> None:
    """Put the winner's kernel in a pack, without the compiler; found in a database of its own."""
    database = f"sqlite:///{folder / 'other.db'}"
    sizes = (RECORDED.m, RECORDED.n, RECORDED.k)
    subprocess.run(
        [sys.executable, "-m", "service.cli", "tune", *map(str, sizes), "--database", database],
        env=environment, cwd=folder, capture_output=True, check=True,
    )  # fmt: skip
    with Store.open(database) as store:
        winner = store.winner(RECORDED, H200.slug)
    assert winner is not None
    assert winner.candidate is not None
    compiled = folder / "unit.so"
    compiled.write_bytes(b"\x7fELF nobody runs this")
    ArtifactStore(folder / "packs", signer=own_signer()).publish(
        compiled, [winner.candidate.kernel], fake_nvcc.toolchain(folder / "toolchain")
    )
