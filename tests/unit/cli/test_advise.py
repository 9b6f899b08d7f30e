"""`gemmsmith advise`: a program of a user's own, from its command to the advice."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from gemmsmith.answers.answer import Ratio
from service.cli.advising import AdviceLine, Advised
from tests.support import unchanged
from tests.support.docs import ROOT


def advise(
    folder: Path, program: str, *options: str, words: tuple[str, ...] = ("python", "train.py")
) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(program)
    command = ["python", "-m", "service.cli", "advise", *options, "--", *words]
    environment = unchanged.environment(folder / "site", OMP_NUM_THREADS="1")
    return unchanged.run(command, folder, environment)


def test_everything_that_a_program_leaves(tmp_path: Path) -> None:
    program = (ROOT / "examples" / "plain_gpt.py").read_text(encoding="utf-8")
    done = advise(tmp_path, program, "--steps", "5", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["device"], document["steps"]) == ("cpu", 3)
    lines = [*document["advised"], *document["not_advised"]]
    # The other parts may be less than 1% of a step of a busy machine.
    by_rule = {line["rule"]: line for line in lines}
    assert {"activation", "attention"} <= set(by_rule)
    activation = by_rule["activation"]
    assert activation["what"] == "gelu of [2, 256, 1024] in 8 operators"
    assert activation["change"] == 'F.gelu(x, approximate="tanh")'
    assert re.fullmatch(r"train.py:\d+ NewGELU.forward", activation["place"])
    for line in lines:
        assert line["ms"] >= max(0.1, 0.01 * document["step_ms"])
        assert line["share"] == pytest.approx(line["ms"] / document["step_ms"])
        assert not line["why_not"].startswith(("it cannot be run", "its result"))
        assert (line["why_not"] == "") == (line in document["advised"])
        assert line["gain"]["ci_low"] <= line["gain"]["median"] <= line["gain"]["ci_high"]
    assert document["compiled"].startswith("torch.compile was not tried")
    # What the program prints, bit for bit, is beside the document.
    environment = unchanged.environment(tmp_path / "site", OMP_NUM_THREADS="1")
    alone = unchanged.run(["python", "train.py", "--steps", "4"], tmp_path, environment)
    assert done.stderr.splitlines() == alone.stdout.splitlines()


NO_STEP = "import torch; torch.ones(8, 8) @ torch.ones(8, 8)"
SLOW = """
import torch
weight = torch.ones(4, requires_grad=True)
optimizer = torch.optim.SGD([weight])
for _ in range({steps}):
    weight.sum().backward()
    optimizer.step()
{end}
"""


@pytest.mark.parametrize(
    ("program", "status", "says"),
    [
        (NO_STEP, 1, "error: no step was observed: it took fewer than two steps of an optimizer"),
        (SLOW.format(steps=1, end=""), 1, "error: no step was observed: it took fewer than two"),
        ("print(1)", 1, "error: no step was observed: none of the 1 Python processes"),
        (SLOW.format(steps=3, end="raise SystemExit(7)"), 7, "the program ended with status 7"),
    ],
)
def test_what_cannot_be_advised(tmp_path: Path, program: str, status: int, says: str) -> None:
    done = advise(tmp_path, program)
    assert done.returncode == status, done.stderr
    assert says in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_a_program_without_anything_to_change(tmp_path: Path) -> None:
    program = SLOW.replace("[weight])", "[weight], fused=True)").format(steps=20, end="")
    done = advise(tmp_path, program, "--steps", "3")
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    assert re.fullmatch(r"A step takes \d+\.\d\d ms on cpu \(median of 1\)\.", first)
    assert second == "Nothing was measured to be faster."
    assert third.startswith("torch.compile was not tried")


def test_wrong_words(tmp_path: Path) -> None:
    missing = advise(tmp_path, "", words=("no-such-program",))
    assert (missing.returncode, missing.stdout) == (2, "")
    assert "error: no program no-such-program" in missing.stderr
    few = advise(tmp_path, "", "--steps", "2")
    assert (few.returncode, few.stdout) == (2, "")


def line(what: str, ms: float, after_ms: float | None, why_not: str = "") -> AdviceLine:
    return AdviceLine(
        rule="x",
        what=what,
        change="the code",
        place="train.py:3 main" if why_not else "",
        ms=ms,
        share=ms / 100,
        after_ms=after_ms,
        gain=None if after_ms is None else Ratio(median=2.0, ci_low=1.9, ci_high=2.1),
        why_not=why_not,
    )


def test_the_text() -> None:
    text = Advised(
        step_ms=100.0,
        steps=6,
        device="cpu",
        advised=[line("A", 25.1, 12.0), line("B", 4.0, 2.0)],
        not_advised=[line("C", 3.0, 3.0, "it is only 1.001 × as fast")],
        saved_ms=15.1,
        compiled="Not tried.",
    ).text
    assert text == [
        "A step takes 100.00 ms on cpu (median of 6).",
        "Change this; run alone, these parts then take 15.10 ms less:",
        "  25.10 ms (25.1%) → 12.00 ms: A",
        "    the code",
        "  4.00 ms (4.0%) → 2.00 ms: B",
        "    the code",
        "Leave this as it is:",
        "  3.00 ms (3.0%): C, train.py:3 main",
        "    the code: it is only 1.001 × as fast",
        "Not tried.",
    ]
