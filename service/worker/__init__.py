"""The worker's process, its compiler and its GPU, and the supervisor that restarts it."""
