"""The words of the library: problems, operations, kernels, launches, and the rules about them."""
