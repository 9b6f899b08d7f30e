"""Our own kernels around CUTLASS's mainloop: a cluster shares a tile along K."""
