"""Help is grouped, every command shows a call that its own parser takes, values complete."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer
from typer.testing import CliRunner

from service.cli import options
from service.cli.main import app, spread

PREFIX = "Example: gemmsmith "


def commands(group: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command that does something, with the words that call it."""
    for name, command in (group or typer.main.get_command(app)).commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


COMMANDS = dict(commands())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_that_it_takes(name: str) -> None:
    epilog = COMMANDS[name].epilog or ""
    assert epilog.startswith(PREFIX + name), epilog
    words = shlex.split(epilog.removeprefix(PREFIX + name))
    COMMANDS[name].make_context(name, words)  # raises what a user would be told
    assert epilog in " ".join(CliRunner().invoke(app, [*name.split(), "--help"]).stdout.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_lines_of_help_break_at_the_margin_alone(name: str) -> None:
    for width in (60, 100):
        runner = CliRunner(env={"COLUMNS": str(width)})
        text = runner.invoke(app, [*name.split(), "--help"]).stdout
        prose = text.partition("╭")[0].partition("Usage:")[2]
        _, *paragraphs = re.split(r"\n\s*\n", prose.strip())
        assert paragraphs
        for line, following in itertools.pairwise("\n\n".join(paragraphs).split("\n")):
            if line.strip() and following.strip():
                assert len(f"{line.strip()} {following.split()[0]}") > width - 2, line


def test_help_is_grouped_by_what_people_do() -> None:
    text = CliRunner().invoke(app, ["--help"]).stdout
    places = [
        text.index(title)
        for title in (
            "Look up and tune",
            "Use in your program",
            "Run a service",
            "Prepare and compare",
            "Maintain an installation",
        )
    ]
    assert places == sorted(places)
    assert "─ Commands ─" not in text  # none is left out of the groups
    assert places[0] < text.index("│ best ") < places[1] < text.index("│ capture ") < places[2]


def test_help_keeps_what_looks_like_markup() -> None:
    assert "[[problem]]" in CliRunner().invoke(app, ["tune", "--help"]).stdout


@pytest.mark.parametrize(
    ("word", "sizes", "options"),
    [
        ("4096x6144x1024", ["4096", "6144", "1024"], ""),
        ("4096×6144×1024", ["4096", "6144", "1024"], ""),
        ("8×256x256×64", ["256", "256", "64"], "--batch 8"),
        ("4×8×2×1 bf16.out_f32 nt", ["8", "2", "1"], "--batch 4 --dtype bf16.out_f32 --layout nt"),
        ("bf16.out_f32.nt", [], "--dtype bf16.out_f32 --layout nt"),
        ("NT", [], "--layout NT"),
        ("-1x2x3", ["-1x2x3"], ""),
        ("1x2", ["1x2"], ""),
        ("1x2x3x4x5", ["1x2x3x4x5"], ""),
        ("train-4x4x4.toml", ["train-4x4x4.toml"], ""),
    ],
)
def test_a_problem_in_one_word(word: str, sizes: list[str], options: str) -> None:
    words = iter(options.split())
    assert spread(word) == (sizes, dict(zip(words, words, strict=True)))


@pytest.mark.parametrize("given", [["16x32x48"], ["--json", "16x32x48"], ["4×16×32×48", "--json"]])
@pytest.mark.parametrize("name", ["best", "tune", "enumerate", "compile", "winners history"])
def test_problems_are_taken_in_one_word(name: str, given: list[str]) -> None:
    context = COMMANDS[name].make_context(name, list(given))
    assert [context.params[size] for size in "mnk"] == [16, 32, 48]
    assert context.params["batch"] == (4 if "4×" in given[0] else 1)


@pytest.mark.parametrize(
    ("complete", "incomplete", "found"),
    [
        (options.complete_dtypes, "fp8", ["fp8_e4m3", "fp8_e5m2"]),
        (options.complete_dtypes, "bf16,fp1", ["bf16,fp16"]),
        (options.complete_layouts, "t", ["tn", "tt"]),
        (options.complete_efforts, "q", ["quick"]),
        (options.complete_states, "r", ["running"]),
        (options.complete_levels, "", ["core", "full"]),
        (options.complete_scopes, "t", ["tune"]),
        (options.complete_formats, "c", ["csv"]),
        (options.complete_phases, "f", ["final"]),
        (options.complete_actions, "p", ["promoted", "pinned", "pack-removed"]),
        (options.complete_architectures, "sm1", ["sm100", "sm120"]),
        (options.complete_slugs, "nvidia-h1", ["nvidia-h100-80gb-hbm3-132sm"]),
        (options.complete_devices, "replay", ["replay:nvidia-h200-132sm"]),
    ],
)
def test_values_complete(complete: Any, incomplete: str, found: list[str]) -> None:
    assert complete(incomplete) == found


def test_suites_complete_with_shipped_ones_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llmine.toml").touch()
    assert options.complete_suites("ll") == ["llm", "llmine.toml"]


@pytest.mark.parametrize(
    ("name", "option"),
    [("best", "dtype"), ("best", "layout"), ("best", "device"), ("tune", "suite"),
     ("tune", "effort"), ("tune", "device"), ("jobs list", "state"), ("enumerate", "arch"),
     ("enumerate", "level"), ("compile", "suite"), ("bake", "suite"), ("run", "effort"),
     ("keys create", "scope"), ("audit", "action"), ("results", "phase"), ("results", "device"),
     ("export", "form"), ("export", "dtype"), ("report", "device"), ("sync", "device")],
)  # fmt: skip
def test_options_offer_their_values(name: str, option: str) -> None:
    (found,) = [each for each in COMMANDS[name].params if each.name == option]
    assert found.shell_complete(click.Context(click.Command(name)), ""), option
