"""The README's examples, run as they stand against a served checkout without a GPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from service.cli.main import app
from tests.support.docs import ROOT
from tests.support.processes import SHIPPED, address, serving

README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return [text for name, text in fences if name == language]


def test_the_client_example_works_as_printed(tmp_path: Path) -> None:
    example = next(block for block in blocks("python") if "client.tune(" in block)
    with serving(tmp_path, "worker", **SHIPPED) as (_, banner):
        url = address(banner)
        code = example.replace("http://127.0.0.1:8000", url) + "\nprint(answer.match, answer.use)"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1].startswith("exact ")
        line = next(line for block in blocks("") for line in block.splitlines() if "/best?" in line)
        curl = line.removeprefix("curl ").strip("'").replace("http://127.0.0.1:8000", url)
        answer = subprocess.check_output(["curl", "-s", curl], text=True)
        assert '"match":"exact"' in answer


def test_every_command_the_readme_names_exists() -> None:
    listed = CliRunner().invoke(app, ["--help"]).output
    typed = "\n".join([*blocks(""), *re.findall(r"`([^`\n]+)`", README)])
    named = set(re.findall(r"^gemmsmith ([a-z]+)", typed, re.MULTILINE))
    assert named >= {"best", "run"}
    for command in named:
        assert f" {command} " in listed, command


def test_every_make_target_the_readme_names_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"make ([a-z-]+)", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
