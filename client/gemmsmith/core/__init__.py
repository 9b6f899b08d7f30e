"""The library's types: problems, operations, kernels, launches, and the rules about them."""
