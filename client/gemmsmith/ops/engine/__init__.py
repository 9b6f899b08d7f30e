"""Who computes a product, and the launch that does: from tensors to kernels."""
