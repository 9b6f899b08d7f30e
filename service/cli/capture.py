"""`gemmsmith capture`: run a training script as it is, and write down its matrix products."""

from __future__ import annotations

import os
import re
import runpy
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from service.cli.output import MisuseError, note

_PYTHON = re.compile(r"python[0-9.]*")


def capture(
    command: Annotated[
        list[str],
        typer.Argument(help="The script and its arguments: -- python train.py --epochs 1"),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Suite file to write.")] = Path(
        "suite.toml"
    ),
) -> None:
    """Run a Python script, and write its matrix products with their counts to a suite file.

    Forward and backward products; compiled functions run uncompiled meanwhile. The exit status is
    the script's own; the file is written whether it succeeds or not. Then
    `gemmsmith tune --suite FILE` tunes what takes most time first.
    """
    arguments = command[1:] if _PYTHON.fullmatch(Path(command[0]).name) else list(command)
    as_module = arguments[:1] == ["-m"]
    if as_module:
        arguments = arguments[1:]
    if not arguments or arguments[0].startswith("-"):
        raise MisuseError(
            "the command must be `python SCRIPT …` or `python -m MODULE …` without other options "
            f"of Python, got {' '.join(command)!r}"
        )
    if not as_module and not Path(arguments[0]).exists():
        raise MisuseError(f"no script {arguments[0]}")
    if not output.parent.is_dir():
        raise MisuseError(f"no folder {output.parent} for the suite file")
    try:
        from gemmsmith import capture as recording
    except ModuleNotFoundError as error:
        raise MisuseError(f"this needs PyTorch in {sys.executable}: {error}") from None

    with recording() as shapes:
        status = _run(arguments, as_module)
    shapes.save(output)
    note(
        f"{output}: {len(shapes.problems)} problems, {shapes.problems.total()} products, and "
        f"{shapes.skipped.total()} that no kernel is for"
    )
    raise typer.Exit(status)


def _run(arguments: list[str], as_module: bool) -> int:
    """The exit status that Python would end with."""
    sys.argv = list(arguments)
    # What Python itself puts there: the script's folder, or the current one for a module.
    folder = Path.cwd() if as_module else Path(arguments[0]).resolve().parent
    sys.path.insert(0, os.fspath(folder))
    try:
        if as_module:
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        note(str(end.code))
        return 1
    except KeyboardInterrupt:
        return 130
    except BaseException:  # noqa: BLE001 - the script's own: shown as Python shows it
        traceback.print_exc()
        return 1
    return 0
