"""The worker's process: what it builds and measures with, and who restarts it."""
