"""`python -m gemmsmith trust`: trust the signing key of a service, or a key in a file."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence

from gemmsmith.errors import GemmsmithError
from gemmsmith.http.trusting import trust
from gemmsmith.signing import trusted_folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m gemmsmith", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("trust", help="trust a signing key")
    command.add_argument("source", metavar="URL|KEY.pub", help="a service, or its key in a file")
    command.add_argument("--id", help="the identifier that it must have; skips the confirmation")
    command.add_argument("--yes", action="store_true", help="trust any key without confirmation")
    options = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A path may have characters that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")

    def confirm(text: str) -> bool:
        sys.stderr.write(f"{text}\n")
        return options.yes or _agrees()

    try:
        path = trust(options.source, trusted_folder(), identifier=options.id, confirm=confirm)
    except (GemmsmithError, ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(f"{path}\n")
    return 0


def _agrees() -> bool:
    sys.stderr.write("Trust it? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


if __name__ == "__main__":
    raise SystemExit(main())
