"""What a program runs: its matrix products, its modules, and the files of a capture."""
