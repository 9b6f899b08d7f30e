"""The command `gemmsmith`: one file per command group, heavy imports inside the commands."""
