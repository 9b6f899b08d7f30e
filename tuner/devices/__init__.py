"""What a tuning run measures on: the local CUDA GPU, or a recorded one."""
