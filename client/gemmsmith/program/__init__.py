"""What a program runs: its products, its modules, the files of a capture. Needs no torch."""
