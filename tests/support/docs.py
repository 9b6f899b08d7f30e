"""Runs the commands of a page of the docs in their order, and compares their output.

In a fence of `console`, a line that starts with `$ ` is a command (a `\\` at its end continues it),
and the following lines are its output. In a fence without a language, lines that start with `curl`
or `gemmsmith` are commands. A fence of `python` is a program. In the output of the page,

- `...` within a line matches any text, and a line of `...` matches any lines;
- numbers, times and identifiers are compared by their form only;
- of JSON, the members on the page must exist, with values of the same type.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_BARE = re.compile(r"(curl|gemmsmith) ")
_MOVING = (
    (re.compile(r"gsk_[A-Za-z0-9_-]+"), "gsk_KEY"),
    (re.compile(r"\b[0-9a-f]{32,64}\b"), "ID"),
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d([.]\d+)?([+-]\d\d:\d\d)?"), "TIME"),
    (re.compile(r"\d+([.,]\d+)*"), "0"),
)


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command or a program of a page, with its output on the page."""

    where: str
    language: str
    text: str
    shown: str


def steps(page: Path) -> list[Step]:
    """The commands and programs of a page, in their order."""
    return list(_steps(page))


def _steps(page: Path) -> Iterator[Step]:
    content = page.read_text(encoding="utf-8")
    for fence in _FENCE.finditer(content):
        language, block = fence[1], fence[2]
        where = f"{page.name}:{content[: fence.start()].count(chr(10)) + 1}"
        if language == "python":
            yield Step(where=where, language="python", text=block, shown="")
        elif language == "console":
            joined = block.replace("\\\n", "")
            for part in re.split(r"^\$ ", joined, flags=re.MULTILINE)[1:]:
                command, _, shown = part.partition("\n")
                yield Step(where=where, language="console", text=command, shown=shown)
        elif not language:
            for line in block.replace("\\\n", "").splitlines():
                if _BARE.match(line):
                    yield Step(where=where, language="console", text=line, shown="")


class Session:
    """A shell that keeps its folder and its variables from one command to the next.

    Args:
        folder: the first working folder.
        environment: variables in addition to those of this process.
        instead: replacements for texts in commands, such as an address.
    """

    def __init__(
        self, folder: Path, environment: Mapping[str, str], instead: Mapping[str, str]
    ) -> None:
        self.instead = dict(instead)
        self.environment = {**os.environ, **environment}
        self.folder = folder

    def run(self, step: Step, *, within_s: float = 120) -> str:
        """Run a step and compare its output with the page. Returns its standard output.

        Raises:
            AssertionError: the step failed, or its output differs from the page.
        """
        text = self.put(step.text)
        kept = 'status=$?; { pwd; env -0; } >"$KEPT"; exit $status'
        script = f"{text}\n{kept}"
        if step.language == "python":
            script = f"python -c {shlex.quote(text)}\n{kept}"
        state = self.folder / ".session"
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self.folder,
            env={**self.environment, "KEPT": str(state)},
            capture_output=True,
            text=True,
            timeout=within_s,
            check=False,
        )
        assert done.returncode == 0, f"{step.where}: {text}\n{done.stdout}\n{done.stderr}"
        folder, _, variables = state.read_text(encoding="utf-8").partition("\n")
        state.unlink()
        self.folder = Path(folder)
        self.environment = dict(item.split("=", 1) for item in variables.split("\0") if "=" in item)
        assert_like(step.shown, self.show(done.stdout), f"{step.where}: {text}")
        return done.stdout

    def ask(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run a command that is not on the page, and keep nothing of it."""
        return subprocess.run(
            ["bash", "-c", self.put(command)], cwd=self.folder, env=self.environment,
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    def put(self, text: str) -> str:
        """Replace texts of the page by those of this test."""
        for old, new in self.instead.items():
            text = text.replace(old, new)
        return text

    def show(self, text: str) -> str:
        """Replace texts of this test by those of the page."""
        for old, new in self.instead.items():
            text = text.replace(new, old)
        return text


def tools() -> dict[str, str]:
    """An environment in which `gemmsmith` and `python` are those of these tests."""
    return {"PATH": f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}"}


def strict_curl(folder: Path) -> dict[str, str]:
    """An environment in which curl fails if the service answers with an error status."""
    (folder / ".curlrc").write_text("silent\nshow-error\nfail-with-body\n")
    return {"CURL_HOME": str(folder)}


def assert_like(shown: str, printed: str, where: str) -> None:
    """Raise AssertionError if the output differs from the page."""
    if not shown.strip():
        return
    if shown.lstrip().startswith(("{", "[")):
        expected = json.loads(re.sub(r",\s*\.\.\.(?=\s*[}\]])", "", _quoted(shown)))
        _compare(expected, json.loads(printed), where)
        return
    pattern = "".join(
        r"(?:.*\n)*?" if line.strip() == "..." else _pattern(line) + r"[ ]*\n"
        for line in shown.rstrip().splitlines()
    )
    text = _shapes(printed.rstrip() + "\n")
    assert re.fullmatch(pattern, text), f"{where}\nshown:\n{shown}\nprinted:\n{printed}"


def _quoted(shown: str) -> str:
    """JSON with `...` values quoted, so that they match any value."""
    return re.sub(r":\s*\.\.\.(?=\s*[,}\]])", ': "..."', shown)


def _pattern(line: str) -> str:
    parts = (re.escape(_shapes(part).rstrip()) for part in line.split("..."))
    # The width of a column depends on its content.
    return re.sub(r"(\\ )+", r"[ ]+", ".*".join(parts))


def _shapes(text: str) -> str:
    for moving, shape in _MOVING:
        text = moving.sub(shape, text)
    return text


def _compare(shown: Any, printed: Any, where: str) -> None:
    if shown == "...":
        return
    if isinstance(shown, dict):
        assert isinstance(printed, dict), f"{where}: {printed!r:.200} is no object"
        for name, value in shown.items():
            assert name in printed, f"{where}: no {name!r} in {printed!r:.500}"
            _compare(value, printed[name], f"{where}: {name}")
    elif isinstance(shown, list):
        assert isinstance(printed, list), f"{where}: {printed!r:.200} is no list"
        assert len(printed) >= len(shown), f"{where}: {printed!r:.200} is shorter than shown"
        for one, other in zip(shown, printed, strict=False):
            _compare(one, other, where)
    elif isinstance(shown, str):
        assert isinstance(printed, str), f"{where}: {printed!r:.200} is no text"
        pattern = ".*".join(re.escape(_shapes(part)) for part in shown.split("..."))
        assert re.fullmatch(pattern, _shapes(printed), re.DOTALL), f"{where}: {printed!r:.500}"
    elif isinstance(shown, bool) or shown is None:
        assert printed is shown, f"{where}: {printed!r}"
    else:
        assert isinstance(printed, int | float), f"{where}: {printed!r} is no number"
