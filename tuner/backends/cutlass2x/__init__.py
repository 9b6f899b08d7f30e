"""CUTLASS 2.x: multistage `mma.sync` kernels, which take any alignment."""
