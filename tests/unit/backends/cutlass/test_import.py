"""What importing CUTLASS's library does to a program."""

from __future__ import annotations

import subprocess
import sys


def test_its_options_are_not_those_of_the_program() -> None:
    """cutlass_library parses the command line when it is imported."""
    program = "import sys, tuner.backends; print(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", program, "--help"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "['--help']\n"
