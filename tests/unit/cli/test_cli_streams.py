"""What commands write to stdout, to pipes and to devices, and on terminals of other encodings."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from gemmsmith.core.problem import Problem
from gemmsmith.winners.bundle import Bundle
from service.cli.main import main
from service.settings import Settings
from tests.support.commands import use
from tests.support.docs import ROOT
from tests.support.replacing import replace
from tests.support.serving import H200, new_settings, promote, trial, winner
from tuner.exchange import read_winners
from tuner.store import Store, current

KNOWN = Problem(m=4096, n=4096, k=4096)


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    made = use(new_settings(tmp_path, sweeps=ROOT / "configs" / "sweeps"), monkeypatch)
    promote(made, winner(KNOWN, us=190.0), replace(winner(Problem(m=8, n=8, k=8)), candidate=None))
    with Store.open(made.database) as store:
        store.add_trials([trial(KNOWN, i) for i in range(4)])
    return made


@dataclass
class Ended:
    """What a command printed, as bytes, and its status."""

    status: int
    out: bytes
    err: bytes


def run(
    *words: object, encoding: str = "utf-8", monkeypatch: pytest.MonkeyPatch, tty: bool = False
) -> Ended:
    """The whole command in this process, with streams of this encoding."""
    streams = {}
    for name in ("stdout", "stderr"):
        streams[name] = io.BytesIO()
        stream = io.TextIOWrapper(streams[name], encoding=encoding)
        if tty:
            stream.isatty = lambda: True  # type: ignore[method-assign]
        monkeypatch.setattr(sys, name, stream)
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    for name in streams:
        getattr(sys, name).flush()
    out, err = (stream.getvalue() for stream in streams.values())
    return Ended(int(ended.value.code or 0), out, err)


COMMANDS = [
    "--help",
    "--version",
    "best --help",
    "best 4096 4096 4096",
    "best 4096 4096 4096 --json",
    "best 1 2",
    "best 0 2 3",
    "enumerate 4096 4096 4096 --limit 2",
    "enumerate 4096 4096 4096 --limit 2 --arch sm90",
    "results",
    "results --winners",
    "results --winners --json",
    "results --format csv",
    "winners history 4096 4096 4096",
    "jobs list",
    "keys create é…× --scope read",
    "keys list --json",
    "audit",
    "signing show",
    "signing list",
    "doctor",
    "db current",
    "demo",
    "demo --json",
    "export {folder}/w×é.jsonl",
    "export {folder}/w×é.jsonl --json",
    "export /nowhere…/x/w.jsonl",
    "import {folder}/none….jsonl",
    "report -o {folder}/…",
    "compile 64 64 64 --dtype …",
    "capture -o {folder}/…/… -- true",
    "no…such",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_prints_on_a_terminal_that_has_ascii_only(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = command.format(folder=tmp_path).split()
    ended = run(*words, encoding="ascii", monkeypatch=monkeypatch)
    assert ended.status in (0, 1, 2)
    for text in (ended.out, ended.err):
        assert text.isascii()
        assert b"Traceback" not in text
    if "--json" in words and ended.status == 0:
        lines = ended.out.splitlines() if words[0] == "results" else [ended.out]
        assert all(json.loads(line) for line in lines)


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [
        ("ascii", b"4096x4096x4096"),
        ("latin-1", "4096×4096×4096".encode("latin-1")),
        ("cp1252", "4096×4096×4096".encode("cp1252")),
        ("utf-8", "4096×4096×4096".encode()),
    ],
)
def test_a_character_that_the_terminal_lacks_is_printed_plainly(
    encoding: str, expected: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = run("best", 4096, 4096, 4096, encoding=encoding, monkeypatch=monkeypatch)
    assert expected in ended.out


def test_a_path_that_is_no_text_is_printed_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/w\xff.csv")
    assert os.fsencode(path) in run("export", path, monkeypatch=monkeypatch).out
    ended = run("export", path, "--json", monkeypatch=monkeypatch)
    assert json.loads(ended.out)["file"] == path


FILES = [
    "export {}",
    "export {} --format csv",
    "results --format jsonl -o {}",
    "bake --winners --device " + H200.slug + " -o {}",
    "db backup {}",
    "eval -o {}",
]
"""Each command that writes a file, and not a folder; `capture` and `run` have their own tests."""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Baking and evaluating take no compiler and no minute."""
    from service.cli import bake, evaluate

    class Judged:
        curves: Sequence[object] = ()

        @classmethod
        def of(cls, *_: object) -> Judged:
            return cls()

        def print(self) -> None:
            from service.cli.output import say, table

            say("judged")
            table("", ("a",), [("b",)])

        def summary(self) -> dict[str, str]:
            return {"judged": "all"}

    monkeypatch.setattr(evaluate, "Judged", Judged)
    monkeypatch.setattr(evaluate, "load", lambda _: [])
    monkeypatch.setattr("service.charts.regret.chart", lambda _: "<svg/>")
    monkeypatch.setattr(bake, "_packs", lambda *_: {})


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("command", FILES)
@pytest.mark.parametrize("json_too", [False, True])
def test_a_file_on_stdout_is_alone_there(
    command: str, json_too: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = command.split()
    if json_too and words[0] != "results":  # its plain columns are never documents
        words.append("--json")
    suffix = ".svg" if words[0] == "eval" else ""
    path = tmp_path / f"file{suffix}"
    said = run(*[word.format(path) for word in words], monkeypatch=monkeypatch)
    assert said.status == 0, said.err
    for stdout in ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"):
        ended = run(*[word.format(stdout) for word in words], monkeypatch=monkeypatch)
        assert ended.status == 0, ended.err
        if words[:2] == ["db", "backup"]:
            assert ended.out.startswith(b"SQLite format 3\0")
        else:
            assert ended.out == path.read_bytes()
        # All that is said else is on stderr, and as much as before.
        assert len(ended.err.splitlines()) >= len(said.out.splitlines())


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("bake --winners -o -", "not for a terminal"),
        ("db backup -", "not for a terminal"),
        ("export - --format parquet", "not for a terminal"),
        ("db backup /dev/stderr --packs", "name a file"),
        ("export {folder}", "Is a directory"),
        ("export /dev/fd/987", "Bad file descriptor"),
        ("report -o -", ""),
        ("record 64 64 64 -o -", "must be called NAME.jsonl.zst"),
        ("export {folder}/loop", "Too many levels of symbolic links"),
        ("export {folder}/loop/x", "Too many levels of symbolic links"),
        ("report -o {folder}/gemmsmith.db", "gemmsmith.db is a file, not a folder"),
    ],
)
def test_what_cannot_be_written_is_said_before_the_work(
    command: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    words = command.format(folder=tmp_path).split()
    ended = run(*words, monkeypatch=monkeypatch, tty=True)
    if not says:  # a folder of that name
        assert (tmp_path / "-" / "report.html").exists()
        return
    assert ended.status == 2
    assert says in ended.err.decode()
    assert ended.err.count(b"\n") == 1


def test_stdout_of_one_command_is_not_taken_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("export", "-", monkeypatch=monkeypatch)
    assert b"2 winners" in run("export", tmp_path / "w.jsonl", monkeypatch=monkeypatch).out


SHELL = [
    # (what the shell is given, what must be in /tmp-like folder afterwards)
    ("export - | head -c 20 > out", b'{"format":"gemmsmith'),
    ("export >(cat > out); while ! grep -q schema out; do sleep 0.1; done", b'"count":2'),
    ("echo first > out; export - >> out", b'first\n{"format"'),
    ("export /dev/fd/3 3> out > said", b'{"format"'),
    ("ln -s real out; export out; test -L out && cat real > seen; mv seen out", b'{"format"'),
    ("export - | import - > out", b"0 winners added, 2 known already"),
]


@pytest.mark.parametrize(("script", "expected"), SHELL)
def test_as_a_shell_has_it(script: str, expected: bytes, tmp_path: Path) -> None:
    for word in ("export", "import"):
        command = f"{sys.executable} -m service.cli {word} "
        script = script.replace(f"{word} ", command)
    ended = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'client'}"},
        capture_output=True,
        check=False,
        timeout=120,
    )
    assert b"Traceback" not in ended.stderr + ended.stdout
    content = (tmp_path / "out").read_bytes()
    assert expected in content


@pytest.mark.parametrize("closed", [">&- 2>&-", "> /dev/full"])
def test_a_stdout_that_takes_nothing_harms_nothing(
    closed: str, settings: Settings, tmp_path: Path
) -> None:
    """A descriptor that is closed becomes the next file's: what is printed would go into it."""
    before = current(settings.database)
    command = f"{sys.executable} -m service.cli best 4096 4096 4096 {closed}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, check=False, cwd=ROOT)
    assert ended.returncode == (1 if "full" in closed else 0)
    assert b"Traceback" not in ended.stderr
    assert b"Exception" not in ended.stderr
    assert current(settings.database) == before


@pytest.mark.usefixtures("quick")
def test_what_went_to_stdout_reads_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, winners = tmp_path / "w.gspack", tmp_path / "w.jsonl"
    words = ("bake", "--winners", "--device", H200.slug, "-o", "-")
    bundle.write_bytes(run(*words, monkeypatch=monkeypatch).out)
    assert Bundle.open(bundle).snapshot.rows
    winners.write_bytes(run("export", "-", monkeypatch=monkeypatch).out)
    assert len(read_winners(winners)) == 2
