"""CUTLASS 3.x: `CollectiveBuilder` kernels, which load by TMA or cp.async."""
