"""Options that are records: each is written once, and a command has few parameters."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from gemmsmith.core.problem import Problem
from gemmsmith.errors import InvalidProblem
from service.cli.main import app
from service.cli.options import ProblemOptions, SizeOptions, SourceOptions, flattened
from service.cli.output import MisuseError
from service.cli.tasks import TaskOptions
from tests.unit.cli.test_cli_help import COMMANDS


@dataclass(frozen=True, kw_only=True)
class Common:
    """Options of several commands."""

    name: Annotated[str, typer.Argument(help="A name.")]
    size: Annotated[int, typer.Option("--size", help="A size.")] = 3


@dataclass(frozen=True, kw_only=True)
class Special(Common):
    """The same with another help, and more of them."""

    size: Annotated[int, typer.Option("--size", help="Its own size.")] = 4
    quick: Annotated[bool, typer.Option("--quick", help="Hurry.")] = False


SEEN: list[tuple[object, ...]] = []


def command(
    first: Annotated[int, typer.Option("--first")],
    special: Special,
    last: Annotated[str, typer.Option("--last")] = "z",
) -> None:
    """Keep what was typed."""
    SEEN.append((first, special, last))


def test_the_fields_of_a_record_are_options_at_its_place() -> None:
    parameters = inspect.signature(flattened(command)).parameters
    assert list(parameters) == ["first", "name", "size", "quick", "last"]
    defaults = [parameter.default for parameter in parameters.values()]
    assert defaults == [inspect.Parameter.empty, inspect.Parameter.empty, 4, False, "z"]


def test_a_command_gets_its_records() -> None:
    tool = typer.Typer()
    tool.command()(flattened(command))
    assert CliRunner().invoke(tool, ["n", "--first", "1", "--quick"]).exit_code == 0
    assert SEEN.pop() == (1, Special(name="n", size=4, quick=True), "z")
    text = CliRunner().invoke(tool, ["--help"]).stdout
    assert "Its own size." in text
    assert "A size." not in text
    assert "Keep what was typed." in text
    assert CliRunner().invoke(tool, ["--first", "1"]).exit_code == 2


@pytest.mark.parametrize("option", ["--json", "--database", "--packs", "--sweeps", "--layout"])
def test_an_option_says_the_same_in_every_command(option: str) -> None:
    texts = {
        (parameter.help, parameter.metavar)
        for name, command in COMMANDS.items()
        for parameter in command.params
        if option in parameter.opts and not name.startswith(("db ", "results"))
    }
    assert len(texts) == 1


def test_no_command_has_eight_parameters() -> None:
    groups = [app, *(group.typer_instance for group in app.registered_groups)]
    callbacks = [
        command.callback.__wrapped__  # type: ignore[union-attr]
        for group in groups
        for command in group.registered_commands  # type: ignore[union-attr]
    ]
    assert len(callbacks) == len(COMMANDS)
    for callback in callbacks:
        assert len(inspect.signature(callback).parameters) < 8, callback


def test_numerics_is_a_part_of_the_problem() -> None:
    sizes = {"m": 1, "n": 2, "k": 3}
    problem = ProblemOptions(**sizes, numerics="invariant").problem
    assert problem == Problem(1, 2, 3, dtype="bf16.sum_sequential")
    (task,) = TaskOptions(**sizes, dtype=["fp16.nt"], numerics="invariant").tasks(None)
    assert task.problem == Problem(1, 2, 3, dtype="fp16.sum_sequential", layout="nt")
    for wrong in ("x", ""):
        with pytest.raises(InvalidProblem, match="numerics must be one of invariant"):
            _ = ProblemOptions(**sizes, numerics=wrong).problem
    with pytest.raises(InvalidProblem, match="leave out numerics"):
        TaskOptions(**sizes, dtype=["bf16,int8"], numerics="invariant").tasks(None)


def test_records_say_what_they_are_for() -> None:
    problem = ProblemOptions(m=1, n=2, k=3, dtype="fp16.nt", batch=4).problem
    assert str(problem) == "4×1×2×3 fp16 nt"
    assert SizeOptions(m=1, n=2, k=3).three("") == (1, 2, 3)
    with pytest.raises(MisuseError, match="three sizes M N K are needed, got 2; or a suite"):
        SizeOptions(m=1, k=3).three("or a suite")
    assert SourceOptions().words == ()
    assert SourceOptions(database="sqlite:///a.db").words == ("--database", "sqlite:///a.db")
    assert SourceOptions(url="http://a", database="b").words == ("--url", "http://a")
