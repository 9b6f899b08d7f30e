"""`python -m service.cli` is `gemmsmith`."""

from service.cli.main import main

main()
