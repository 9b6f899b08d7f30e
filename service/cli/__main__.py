"""The command `gemmsmith`, also as `python -m service.cli`.

Ctrl-C is one line and status 130 from the first import to the last exit handler. Imports at the top
of this file come before `main` can catch it: they would print a traceback.
"""

import signal
import sys


def main() -> None:
    """Run the command that this process was started with."""
    try:
        from service.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        sys.exit(130)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
