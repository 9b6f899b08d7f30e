"""Where kernels come from, one folder each."""
