"""Fused products in the graphs that `torch.compile` makes."""
