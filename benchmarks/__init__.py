"""What is measured about gemmsmith itself, and the one script for a GPU host."""
